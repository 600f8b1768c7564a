"""The helper of fault tests: a launcher that crashes is no exit code like another."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest
from jobs import Job

ABORTS = "import os, threading; threading.Thread(target=os.abort, name='a-thread').start()"


def test_a_process_that_ends_by_its_own_fault_fails_the_test_with_where_that_was(
    tmp_path: Path,
) -> None:
    with contextlib.closing(Job(tmp_path)) as job:
        node = job.start("a", sys.executable, "-c", ABORTS)
        with pytest.raises(AssertionError, match="a ended by SIGABRT, which nobody sent") as told:
            node.exit_code()
        assert "Fatal Python error: Aborted" in str(told.value)
        assert 'threading.py", line' in str(told.value)


def test_a_process_that_the_test_ends_so_has_that_exit_code(tmp_path: Path) -> None:
    with contextlib.closing(Job(tmp_path)) as job:
        node = job.start("a", "sleep", "60")
        node.signal(signal.SIGABRT)
        assert node.exit_code() == -signal.SIGABRT
