"""On PYTHONPATH, it makes Python behave as if prometheus-client were not installed."""

import sys

ABSENT = {"prometheus_client"}


class AbsentFinder:
    @staticmethod
    def find_spec(name, *_):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, AbsentFinder)
