"""A small process that outlives its agent by one act: ending the sessions of its workers.

It reads which sessions there are from a pipe that only the agent holds; when the pipe ends, be
it that the agent finished or was killed, whatever sessions are still listed end with it.
"""

from __future__ import annotations

import contextlib
import os
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
        self._sessions: set[int] = set()

    def add(self, pid: int) -> None:
        """From now on the session of this leader ends with the agent."""
        self._sessions.add(pid)
        self._say(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """The session has been dealt with."""
        self._sessions.discard(pid)
        self._say(f"-{pid}\n")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _say(self, line: str) -> None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _spawn()
            line = "".join(f"+{pid}\n" for pid in self._sessions)
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
    sessions: set[int] = set()
    for line in lines:
        pid = int(line[1:])
        if line.startswith("+"):
            sessions.add(pid)
        else:
            sessions.discard(pid)
    for leader in sessions:
        session.end(leader)
