"""The job helpers of fault tests: a launcher that crashes fails the test."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest
from jobs import Job

ABORTS = "import os, threading; threading.Thread(target=os.abort, name='a-thread').start()"


def test_a_launcher_that_crashes_fails_the_test_with_its_stack(
    tmp_path: Path,
) -> None:
    with contextlib.closing(Job(tmp_path)) as job:
        node = job.start("a", sys.executable, "-c", ABORTS)
        with pytest.raises(AssertionError, match="a crashed with SIGABRT") as failure:
            node.exit_code()
        assert "Fatal Python error: Aborted" in str(failure.value)
        assert 'threading.py", line' in str(failure.value)


def test_a_signal_that_the_test_sent_is_not_a_crash(tmp_path: Path) -> None:
    with contextlib.closing(Job(tmp_path)) as job:
        node = job.start("a", "sleep", "60")
        node.signal(signal.SIGABRT)
        assert node.exit_code() == -signal.SIGABRT
