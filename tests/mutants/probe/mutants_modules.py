"""Leaves in MUTANTS_MODULES the modules that the tests import from elsewhere than the checkout."""

import os
import sys


def pytest_collection_finish():
    here = os.getcwd() + os.sep
    names = [
        name
        for name, module in list(sys.modules.items())
        if (path := getattr(module, "__file__", None)) and not path.startswith(here)
    ]
    with open(os.environ["MUTANTS_MODULES"], "w") as file:
        file.write("\n".join(names))
