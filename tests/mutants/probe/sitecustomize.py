"""Imported by each interpreter that a test starts: notes the lines that run as that test's."""

import atexit
import os

TEST = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]

if TEST and "MUTANTS_RC" in os.environ:
    import coverage

    measured = coverage.Coverage(
        config_file=os.environ["MUTANTS_RC"],
        data_file=os.environ["COVERAGE_FILE"],
        data_suffix=True,
        context=TEST,
    )
    measured.start()

    def save():
        measured.stop()
        measured.save()

    atexit.register(save)
