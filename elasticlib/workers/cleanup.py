"""What goes with an agent, however that ends: the sessions of its workers, and its folders.

Each worker leads a session of its own, so whatever it started and did not move out of there is
known by that session's number; nothing outside it is ever signalled. The guardian is a small
process that outlives its agent by one act: once that has finished, or was killed, it reads a list
of the sessions of workers and of the temporary folders that there are, which go with the agent.
Workers enter themselves into it, before they start anything
(`process_entry.register_session`). A guardian that ends before its agent is replaced. It
runs without site-packages: what is imported here is the standard library's.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ..clock import monotonic
from ..errors import describe
from ..threads import helper
from .process_entry import process_start_ticks, stat_fields

log = logging.getLogger("elasticlib.workers")

ROUNDS = 5
KILL_TIMEOUT_S = 2.0  # limit for the end of all processes of the sessions that are killed
LOOK_SECONDS = 0.1
THREADS = 17
"""Where their number stands, of the fields behind the command."""


def session_processes(sessions: Collection[int]) -> list[tuple[int, int]]:
    """Return the pid and the session of each living process of some sessions, leaders included.

    All processes of the machine are listed once. Only for those of these sessions a file is read,
    as that takes twenty times as long as to ask for a process's session.
    """
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            session = _session_asked(int(name))
            if session is not None and session in sessions and session == _session_of(int(name)):
                found.append((int(name), session))
    return found


def _session_asked(pid: int) -> int | None:
    """Return the session of a process or a zombie, or None if there is none of this pid."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
    except OSError:
        # Security modules may forbid that call, and show the file.
        return _session_of(pid)


def _session_of(pid: int) -> int | None:
    """Return the session of a process, or None if the process has ended or cannot be looked at."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if _all_have_ended(fields) else int(fields[3])


def _all_have_ended(fields: list[bytes]) -> bool:
    """Whether all threads of a process have ended. Its first thread may end before the others."""
    return fields[0] in (b"Z", b"X") and int(fields[THREADS]) <= 1


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the process group that a worker leads, if it still has any process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def signal_member(session: int, pid: int, number: int) -> bool:
    """Send a signal to one process of a session, and to no other; whether it was there."""
    with contextlib.ExitStack() as stack:
        try:
            handle = open_pidfd(pid)
            if handle is not None:
                stack.callback(os.close, handle)
            # Looked at through the handle's eyes: the number may have a new owner since.
            if _session_of(pid) != session:
                return False
            if handle is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
        except (OSError, OverflowError):
            return False
    return True


def open_pidfd(pid: int) -> int | None:
    """One that stays this process's; None where none is to be had: kernels before 5.3 have none,
    a container may forbid them, and this process may have too many files open."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def wait_for_exit(pid: int, seconds: float) -> bool:
    """Whether a process, which must not be reaped meanwhile, ends in time.

    It is not reaped here: the zombie keeps the pid, and with it the session's number.
    """
    try:
        handle = open_pidfd(pid)
    except ProcessLookupError:
        # Its fork server ended, and the worker with it.
        return True
    if handle is not None:
        try:
            look = select.poll()
            look.register(handle, select.POLLIN)
            return bool(look.poll(seconds * 1000))
        finally:
            os.close(handle)
    while not has_exited(pid):
        if seconds <= 0:
            return False
        # Without a handle it can only be looked at, now and again.
        pause = min(LOOK_SECONDS, seconds)
        select.select((), (), (), pause)
        seconds -= pause
    return True


def has_exited(pid: int) -> bool:
    """Whether all threads of a process have ended; what cannot be looked at now may still run."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return _all_have_ended(fields)


def kill_sessions(sessions: Mapping[int, int]) -> list[int]:
    """Kill all processes of some sessions, and wait until they are gone.

    Args:
        sessions: the number of each session, with its leader's `process_start_ticks`. A
            session whose number has passed to another is left alone. 0 stands for a leader that is
            known to be unreaped.

    Returns:
        The pids of the processes that are not gone.
    """
    deadline = monotonic() + KILL_TIMEOUT_S
    ours = {n for n, began in sessions.items() if not began or process_start_ticks(n) in (0, began)}
    for leader in ours:
        signal_group(leader, signal.SIGKILL)
    for _ in range(ROUNDS):
        # A process may fork while it is looked for: look until none is found.
        left = session_processes(ours)
        if not left:
            return []
        for pid in [pid for pid, n in left if signal_member(n, pid, signal.SIGKILL)]:
            wait_for_exit(pid, max(0.0, deadline - monotonic()))
    return [pid for pid, _ in session_processes(ours)]


class SessionCleaner:
    """Kills what exited workers have left in their sessions, in a thread that ends when it is done.

    Sessions that are added while others are dealt with are dealt with together, so that many
    workers that exit at once cost few looks at all processes. For any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Callable[[], object]]] = []
        self._is_running = False

    def clean(self, leader: int, began: int, then: Callable[[], object]) -> None:
        """Kill all of this leader's session, and call `then` once it is gone or 2 s have passed.

        The leader has exited and is unreaped, or began at this time: see `kill_sessions`.
        """
        with self._lock:
            self._waiting.append((leader, began, then))
            if self._is_running:
                return
            self._is_running = True
        try:
            helper(self._run, "workers-cleaner").start()
        except RuntimeError:
            log.warning(
                "cannot start a thread to end what workers have left: their agent waits for it"
            )
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                sessions, self._waiting = self._waiting, []
                if not sessions:
                    self._is_running = False
                    return
            try:
                kill_sessions({leader: began for leader, began, _ in sessions})
            except Exception as error:
                log.error("ending what workers have left failed: %s", error, exc_info=error)
            for _, _, then in sessions:
                try:
                    then()
                except Exception as error:
                    log.error("what follows a worker's end failed: %s", error, exc_info=error)


# -- the guardian --------------------------------------------------------------------------------


@contextlib.contextmanager
def signals_blocked(signals: Iterable[int]) -> Iterator[None]:
    """What is started here begins with these blocked, and so lives to ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Run with -S: neither site-packages nor their start-up cost.
_BOOT = "import sys; sys.path.insert(0, {root!r}); import elasticlib.workers.cleanup as cleanup; "
_CALL = "cleanup.run_cleanup_process({agent}, {registry_fd})"
# Slurm sends a signal to every process of a step, whichever it was meant for.
_IGNORED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
GUARD_SECONDS = 1.0
"""Between two looks at whether the agent is still there."""


class CleanupProcess:
    """The agent's end; for any thread. What is listed is written to a file in memory, line by line,
    which each guardian inherits and reads once its agent is over: so one that stands still holds
    up nobody, and one that takes the place of another has to be told nothing.

    patience: seconds that its end may take. began: told of the process of each one that is started,
    to have `replace` called once that has ended; without, that is looked at now and again.
    """

    def __init__(
        self, patience: float = 5.0, began: Callable[[int], object] = lambda _: None
    ) -> None:
        self._patience = patience
        self._began = began
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._file = -1

    def add(self, what: int | str) -> None:
        """From now on this ends with the agent: the session of this leader, which is unreaped, or
        the folder of this absolute path. Raises OSError."""
        # The number of a session may pass to a stranger once all of it have ended.
        began = process_start_ticks(what) if isinstance(what, int) else 0
        with self._lock:
            self._write("+", what, began)
            self._ensure_running()

    def remove(self, what: int | str) -> None:
        """It has been dealt with."""
        with self._lock:
            if self._file >= 0:
                self._write("-", what, 0)

    def open(self) -> int:
        """Be there; the descriptor of the list, into which who is started next enters itself.
        Raises OSError."""
        with self._lock:
            self._ensure_running()
            return self._file

    def replace(self) -> None:
        """Have another where the one that there was has ended, and not by us."""
        with self._lock:
            if self._process is None or self._process.poll() is None:
                return
            log.info("the guardian that clears up after this process has ended: starting another")
            try:
                self._ensure_running()
            except OSError as error:
                log.warning(
                    "cannot start a guardian, so nothing clears up if this process is killed: %s",
                    describe(error),
                )

    def close(self) -> None:
        """The agent is done. A guardian that does not end by itself in time is killed."""
        with self._lock:
            if self._file < 0:
                return
            if _listed_in(self._file):
                self._ensure_running()
            self._end()
            file, self._file = self._file, -1
            os.close(file)

    def _write(self, sign: str, what: int | str, began: int) -> None:
        os.write(self._list(), json.dumps([sign, str(what), began]).encode() + b"\n")

    def _list(self) -> int:
        if self._file < 0:
            self._file = os.memfd_create("listed")
        return self._file

    def _ensure_running(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _spawn(self._list())
            self._began(self._process.pid)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError), process.stdin:
            # Said in words: a process that was forked from this one may hold the pipe open.
            process.stdin.write(b"end")
        process.send_signal(signal.SIGCONT)  # it may have been stopped
        try:
            process.wait(self._patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _spawn(registry_fd: int) -> subprocess.Popen[bytes]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    call = _BOOT.format(root=root) + _CALL.format(agent=os.getpid(), registry_fd=registry_fd)
    with signals_blocked(_IGNORED):
        return subprocess.Popen(
            [*(sys.executable, "-S", "-E", "-c"), call],
            pass_fds=[registry_fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )


def run_cleanup_process(agent: int, registry_fd: int) -> None:
    """The guardian's whole life, beginning as a child of this process; listed: the descriptor of
    its list."""
    for number in _IGNORED:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    news = select.poll()
    news.register(0, select.POLLIN)
    with contextlib.suppress(OSError):  # without one, its child's parent is asked now and again
        news.register(os.pidfd_open(agent), select.POLLIN)
    while os.getppid() == agent and not news.poll(GUARD_SECONDS * 1000):
        pass
    ended: set[tuple[str, int]] = set()
    # Until nothing is new: a worker may have been forked, and entered itself, a moment ago.
    while left := _listed_in(registry_fd).items() - ended:
        # Sessions first: their processes may still write into the folders.
        kill_sessions({int(name): began for name, began in left if name.isdigit()})
        for name, _ in left:
            if not name.isdigit():
                shutil.rmtree(name, ignore_errors=True)
        ended |= left


def _listed_in(file: int) -> dict[str, int]:
    """What was added and not removed: a folder, or a session with when its leader began."""
    found: dict[str, int] = {}
    # Opened anew, as a place in the file is shared by all who inherited it.
    with open(f"/proc/self/fd/{file}", "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break  # the agent was killed as it wrote this
            sign, name, began = json.loads(line)
            if sign == "+":
                found[name] = began
            else:
                found.pop(name, None)
    return found
