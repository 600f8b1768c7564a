"""The process that workers are forked from, by its parts."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from elasticlib.workers import template
from elasticlib.workers.warm import Template


def test_a_fork_that_fails_leaves_the_template_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "as if at a limit of processes")

    monkeypatch.setattr(os, "fork", full)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(BlockingIOError):
            template._fork(theirs, [], {signal.SIGUSR1: signal.SIG_DFL})
        assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_template_that_nobody_would_listen_to_is_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = len(os.listdir("/proc/self/fd")), children.read_text()
    with pytest.raises(OSError, match="nobody would listen to it: can't start new thread"):
        Template(["sleep", "600"], os.environ)
    assert (len(os.listdir("/proc/self/fd")), children.read_text()) == before
