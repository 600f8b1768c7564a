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

# Run with -S: neither site-packages nor their start-up cost.
_BOOT = "import sys; sys.path.insert(0, {root!r}); from elasticlib.workers.guardian import watch; "
_CALL = "watch(sys.stdin)"


class Guardian:
    """The agent's end of the pipe."""

    def __init__(self) -> None:
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

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _say(self, line: str) -> None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _spawn()
            line = "".join(f"+{name}\n" for name in self._listed)
        pipe = self._process.stdin
        assert pipe is not None
        # A guardian that was killed is replaced when there is next something to say; until then
        # the workers' own death signal holds.
        with contextlib.suppress(BrokenPipeError):
            pipe.write(line.encode())


def _spawn() -> subprocess.Popen[bytes]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
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
