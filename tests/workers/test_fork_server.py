"""The process that workers are forked from, by its parts."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import WITHOUT_TORCH

from elasticlib.workers import fork_server
from elasticlib.workers.fork_server import ForkServer, ForkServerUnfit
from elasticlib.workers.loop import Loop


def test_a_fork_that_fails_leaves_the_server_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "as if at a limit of processes")

    monkeypatch.setattr(os, "fork", full)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(BlockingIOError):
            fork_server._fork(theirs, [], {signal.SIGUSR1: signal.SIG_DFL})
        assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_that_cannot_take_over_ends_and_the_server_alone_says_why() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start = Path(fork_server.__file__).with_name("bootstrap.py")
    command = [sys.executable, "-u", str(start), "", "fork_server", str(theirs.fileno()), ""]
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as process:
        theirs.close()
        ours.settimeout(60)
        assert ours.recv(4096) == b"ready"
        # What is to be a file is a pipe, in which nobody can go back to the beginning.
        reading, writing = os.pipe()
        listed = os.memfd_create("listed")
        for _ in range(3):
            socket.send_fds(ours, [b"fork"], [reading, listed, 0, 1, 2])
            assert b"!the worker's process did not begin: " in ours.recv(4096)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            assert children.read_text() == ""
        for descriptor in (reading, writing, listed):
            os.close(descriptor)
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(60) == 0


def test_a_fork_server_whose_agent_has_ended_says_nothing() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start = Path(fork_server.__file__).with_name("bootstrap.py")
    command = [sys.executable, "-u", str(start), "", "fork_server", str(theirs.fileno()), ""]
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    ours.close()
    with theirs:
        done = subprocess.run(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_fork_server_in_which_threads_were_started_later_forks_no_more(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "_dynamo.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    start = str(Path(fork_server.__file__).with_name("bootstrap.py"))
    command = [sys.executable, "-u", start, "", "fork_server", "{link}", ""]
    loop = Loop()
    loop.start()
    listed = os.memfd_create("listed")
    found = ForkServer(command, {**os.environ, "PYTHONPATH": str(tmp_path)}, listed, loop)
    try:
        assert found.wait(60)
        assert found.ready
        with pytest.raises(ForkServerUnfit, match="has started threads"):
            _fork_again_and_again(found, listed, 60)
        assert not found.ready
        assert found.complaint
    finally:
        found.close()
        loop.close(lambda: None)
        os.close(listed)


def _fork_again_and_again(found: ForkServer, listed: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        worker = found.fork(["", "script", os.devnull], os.environ, listed, [None, None])
        assert worker.wait() == 0
        # It imports once nobody has asked for a worker for so long.
        time.sleep(2 * fork_server.IDLE_SECONDS)
