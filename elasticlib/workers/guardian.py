"""A small process that outlives its agent by one act: clearing up what the agent could not.

It reads which sessions of workers there are, and which temporary folders, from a pipe; when the
agent has finished, or was killed, whatever is still listed goes with it. One that ends before its
agent is replaced, and the next is told all that it was to guard.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading

from ..errors import describe
from ..threads import helper
from . import session
from .held_back import held_back

log = logging.getLogger("elasticlib.workers")

# Run with -S: neither site-packages nor their start-up cost.
_BOOT = "import sys; sys.path.insert(0, {root!r}); from elasticlib.workers.guardian import watch; "
_CALL = "watch({agent})"
# Slurm sends a signal to every process of a step, whichever it was meant for.
_IGNORED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
REPLACE_SECONDS = 0.2
"""Between two of them, so that where each is killed at once that costs little."""
LOOK_SECONDS = 1.0
WRITE_SECONDS = 1.0
"""For one that does not read, before it is replaced."""
CHUNK = 1 << 16


class Guardian:
    """The agent's end of the pipe; `patience` is how many seconds its end may take."""

    def __init__(self, patience: float = 5.0) -> None:
        self._patience = patience
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        # Of a session also when its leader began: its number may pass to a stranger once all of
        # it have ended.
        self._listed: dict[str, int] = {}
        self._over = threading.Event()

    def add(self, pid: int) -> None:
        """From now on the session of this leader, which is unreaped, ends with the agent."""
        self._list(str(pid), session.began_at(pid))

    def remove(self, pid: int) -> None:
        """The session has been dealt with."""
        self._strike(str(pid))

    def add_folder(self, path: str) -> None:
        """This folder (an absolute path) goes with the agent."""
        self._list(path, 0)

    def remove_folder(self, path: str) -> None:
        """The folder is gone already."""
        self._strike(path)

    def _list(self, name: str, began: int) -> None:
        with self._lock:
            self._listed[name] = began
            self._say(["+", name, began])

    def _strike(self, name: str) -> None:
        with self._lock:
            self._listed.pop(name, None)
            self._say(["-", name, 0])

    def open(self) -> None:
        """Be there, so that what is started next can be listed. Raises OSError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._begin()

    def _begin(self) -> None:
        self._end()
        self._over = over = threading.Event()
        self._process = process = _spawn()
        for name, began in self._listed.items():
            self._write(process, ["+", name, began])
        with contextlib.suppress(RuntimeError):  # without a thread it is looked at now and again
            helper(lambda: self._watch(process, over), "agent-guardian").start()

    def _watch(self, process: subprocess.Popen[bytes], over: threading.Event) -> None:
        """Replace it when it has ended, and not by us."""
        session.ends_within(process.pid, None)
        if over.wait(REPLACE_SECONDS):
            return
        with self._lock:
            if over.is_set() or self._process is not process:
                return
            log.info("the process that clears up after this one has ended, and is replaced")
            try:
                self._begin()
            except OSError as error:
                log.warning("nobody clears up after this process: %s", describe(error))

    def close(self) -> None:
        """The agent is done. A guardian that does not end by itself in time is killed."""
        with self._lock:
            if self._process is not None and self._listed:
                self.open()
            self._end()

    def _end(self) -> None:
        self._over.set()
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        # Said in words: a process that was forked from this one may hold the pipe open.
        self._write(process, ["end", "", 0])
        process.stdin.close()
        try:
            process.wait(self._patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _say(self, said: list[object]) -> None:
        self.open()
        if self._process is not None:
            self._write(self._process, said)

    def _write(self, process: subprocess.Popen[bytes], said: list[object]) -> None:
        if process.stdin is None:
            return
        line, pipe = json.dumps(said).encode() + b"\n", process.stdin.fileno()
        for _ in range(2):
            try:
                # Less than a pipe takes at once: all of it is written, or nothing.
                os.write(pipe, line)
                return
            except BlockingIOError:
                room = select.poll()
                room.register(pipe, select.POLLOUT)
                room.poll(WRITE_SECONDS * 1000)
            except BrokenPipeError:
                return  # it has ended, and is about to be replaced
        # It stands still: its successor is told all of it.
        process.kill()
        process.wait()


def _spawn() -> subprocess.Popen[bytes]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with held_back(_IGNORED):
        process = subprocess.Popen(
            [
                *(sys.executable, "-S", "-E", "-c"),
                _BOOT.format(root=root) + _CALL.format(agent=os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
    if process.stdin is not None:
        # One that stands still must not hold up who writes to it.
        os.set_blocking(process.stdin.fileno(), False)
    return process


def watch(agent: int) -> None:
    """The guardian's whole life, beginning as a child of this process."""
    for number in _IGNORED:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    listed = _heard(agent)
    # Sessions first: their processes may still write into the folders.
    for name in sorted(listed, key=str.isdigit, reverse=True):
        if name.isdigit():
            session.end(int(name), began=listed[name])
        else:
            shutil.rmtree(name, ignore_errors=True)


def _heard(agent: int) -> dict[str, int]:
    """What is listed when the agent has said that it ends, or has ended."""
    listed: dict[str, int] = {}
    news, rest = select.poll(), b""
    news.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # without one, its child's parent is asked now and again
        news.register(os.pidfd_open(agent), select.POLLIN)
    os.set_blocking(0, False)
    over = False
    while not over:
        news.poll(LOOK_SECONDS * 1000)
        # Before what it wrote is read: nothing more comes after that.
        over = os.getppid() != agent
        while said := _read():
            *lines, rest = (rest + said).split(b"\n")
            for line in lines:
                sign, name, began = json.loads(line)
                if sign == "+":
                    listed[name] = began
                elif sign == "-":
                    listed.pop(name, None)
                over = over or sign == "end"
        over = over or said is None
    return listed


def _read() -> bytes | None:
    """What has been written; nothing for now, or None for ever."""
    try:
        return os.read(0, CHUNK) or None
    except BlockingIOError:
        return b""
