"""Leaves in MUTANTS_DURATIONS how long each test took and how it ended."""

import json
import os

taken = {}


def pytest_runtest_logreport(report):
    test = taken.setdefault(report.nodeid, [0.0, "passed"])
    test[0] += report.duration
    if report.outcome != "passed":
        test[1] = report.outcome


def pytest_sessionfinish():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["MUTANTS_DURATIONS"], "w") as file:
            json.dump(taken, file)
