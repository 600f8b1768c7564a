"""Leaves in MUTANTS_COLLECTED the tests, and the modules that they import from outside."""

import json
import os
import sys


def pytest_collection_finish(session):
    here = os.getcwd() + os.sep
    names = [
        name
        for name, module in list(sys.modules.items())
        if (path := getattr(module, "__file__", None)) and not path.startswith(here)
    ]
    tests = [item.nodeid for item in session.items]
    with open(os.environ["MUTANTS_COLLECTED"], "w") as file:
        json.dump({"modules": names, "tests": tests}, file)
