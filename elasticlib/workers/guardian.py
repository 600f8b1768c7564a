"""A small process that outlives its agent by one act: clearing up what the agent could not.

It reads which sessions of workers there are, and which temporary folders, from a pipe that only
the agent holds; when the pipe ends, be it that the agent finished or was killed, whatever is
still listed goes with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from typing import IO

from . import session
from .held_back import held_back

# Run with -S: neither site-packages nor their start-up cost.
_BOOT = "import sys; sys.path.insert(0, {root!r}); from elasticlib.workers.guardian import watch; "
_CALL = "watch(sys.stdin)"
# Slurm sends a signal to every process of a step, whichever it was meant for.
_IGNORED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}


class Guardian:
    """The agent's end of the pipe; `patience` is how many seconds its end may take."""

    def __init__(self, patience: float = 5.0) -> None:
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._listed: set[str] = set()

    def add(self, pid: int) -> None:
        """From now on the session of this leader ends with the agent."""
        self._list(str(pid))

    def remove(self, pid: int) -> None:
        """The session has been dealt with."""
        self._strike(str(pid))

    def add_folder(self, path: str) -> None:
        """This folder (an absolute path) goes with the agent."""
        self._list(path)

    def remove_folder(self, path: str) -> None:
        """The folder is gone already."""
        self._strike(path)

    def _list(self, name: str) -> None:
        self._listed.add(name)
        self._say(f"+{name}\n")

    def _strike(self, name: str) -> None:
        self._listed.discard(name)
        self._say(f"-{name}\n")

    def open(self) -> None:
        """Be there, so that what is started next can be listed. Raises OSError."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _spawn()
            for name in self._listed:
                self._write(f"+{name}\n")

    def close(self) -> None:
        """The agent is done. A guardian that does not end by itself in time is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(self._patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _say(self, line: str) -> None:
        self.open()
        self._write(line)

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # A guardian that was killed is replaced when there is next something to say; until then
        # the workers' own death signal holds.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


def _spawn() -> subprocess.Popen[bytes]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with held_back(_IGNORED):
        return subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _BOOT.format(root=root) + _CALL],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )


def watch(lines: IO[str]) -> None:
    """The guardian's whole life."""
    for number in _IGNORED:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    listed: set[str] = set()
    for line in lines:
        name = line[1:].rstrip("\n")
        if line.startswith("+"):
            listed.add(name)
        else:
            listed.discard(name)
    # Sessions first: their processes may still write into the folders.
    for name in sorted(listed, key=str.isdigit, reverse=True):
        if name.isdigit():
            session.end(int(name))
        else:
            shutil.rmtree(name, ignore_errors=True)
