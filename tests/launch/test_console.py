"""A console that is not read: its lines are dropped and counted, and the job is not delayed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.faults

RUN = (sys.executable, "-m", "elasticlib.launch", "--standalone", "--nproc-per-node=1")
F_SETPIPE_SZ = 1031


def test_launch_whose_stderr_is_not_read_still_finishes() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    os.write(write, b"x" * 4096)
    command = (*RUN, "--no-python", "true")
    try:
        node = subprocess.Popen(command, stderr=write, stdout=subprocess.DEVNULL)
        try:
            assert node.wait(100) == 0
        finally:
            node.kill()
            node.wait()
    finally:
        os.close(read)
        os.close(write)


def test_console_that_is_read_late_shows_complete_lines_and_counts_the_dropped_ones() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, 8192)
    code = (
        "import logging, sys; from elasticlib.launch.console import start_logging\n"
        "start_logging(logging.INFO, '%(message)s'); log = logging.getLogger('elasticlib')\n"
        "for n in range(400): log.info('line %d %s', n, 'x' * 40)\n"
        "print('full', flush=True); sys.stdin.readline(); log.info('the last')\n"
    )
    process = subprocess.Popen(
        (sys.executable, "-c", code),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=write,
        text=True,
    )
    os.close(write)
    with process, os.fdopen(read) as console:
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        shown = os.read(read, 65536).decode().splitlines()
        process.communicate("go on\n", timeout=60)
        rest = console.read().splitlines()
    (report,) = (line for line in rest if "lines were dropped" in line)
    assert rest[-2:] == [report, "the last"]
    printed = [*shown, *rest[:-2]]
    assert printed == [f"line {n} {'x' * 40}" for n in range(len(printed))]
    assert report.startswith(f"[{400 - len(printed)} log lines were dropped because stderr ")
