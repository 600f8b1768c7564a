"""A console that takes nothing loses lines, and holds up no job."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.faults

RUN = (sys.executable, "-m", "elasticlib.launch", "--standalone", "--nproc-per-node=1")
F_SETPIPE_SZ = 1031


def test_a_launch_whose_stderr_nobody_reads_goes_on_to_its_end() -> None:
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


def test_what_is_read_late_is_whole_but_for_what_is_said_to_be_missing() -> None:
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
    assert shown[:2] == [f"line {n} {'x' * 40}" for n in range(2)]
    assert [line for line in rest if "lines were dropped" in line]
    assert rest[-1] == "the last"
