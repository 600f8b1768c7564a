"""Sessions: find and kill the processes that a worker has started.

Each worker leads a session of its own. A process that the worker starts belongs to that session,
unless the process calls setsid. No process outside the session is ever signalled. The guardian
process imports this module, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Mapping

from ..clock import monotonic, sleep

KILL_TIMEOUT_S = 2.0  # limit for the end of all processes of the sessions that are killed
MAX_ROUNDS = 5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.0005, 0.02  # between looks at a process that was killed
# Positions in /proc/PID/stat, counted from the first field after the command.
_SESSION, _NUM_THREADS, _START_TICKS = 3, 17, 19


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat that follow the command. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The command may contain spaces and brackets; the fields begin after the last bracket.
        return file.read().rpartition(b")")[2].split()


def process_name(pid: int) -> str:
    """Return the name of a process, or "exited" if there is no process of this pid any more."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "exited"


def process_start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot, or 0 if there is no process.

    Together with the pid, this identifies a process: a later one of the same pid has another time.
    """
    try:
        return int(stat_fields(pid)[_START_TICKS])
    except OSError:
        return 0


def session_processes(sessions: Collection[int]) -> list[tuple[int, int]]:
    """Return the pid and the session of each living process of some sessions, leaders included.

    All processes of the machine are listed once. Files in /proc are read only for the processes of
    these sessions, because reading one takes twenty times as long as getsid.
    """
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            session = _getsid(int(name))
            if session is not None and session in sessions and session == _session_of(int(name)):
                found.append((int(name), session))
    return found


def _getsid(pid: int) -> int | None:
    """Return the session of a process or a zombie, or None if there is none of this pid."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
    except OSError:
        # Security modules may forbid the call but not the file.
        return _session_of(pid)


def _session_of(pid: int) -> int | None:
    """Return the session of a process, or None if the process has exited or cannot be read."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if _has_no_running_thread(fields) else int(fields[_SESSION])


def _has_no_running_thread(fields: list[bytes]) -> bool:
    """Return whether the process with these `stat_fields` has exited.

    A process whose main thread has exited is still running if it has other threads.
    """
    return fields[0] in (b"Z", b"X") and int(fields[_NUM_THREADS]) <= 1


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the process group that a worker leads, if it still has any process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def signal_worker(pid: int, number: int) -> None:
    """Send a signal to the process group of a worker that has not been reaped.

    A worker that was forked a moment ago may not lead a group yet. Then the worker alone receives
    the signal.
    """
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    except PermissionError:
        pass


def signal_member(session: int, pid: int, number: int) -> bool:
    """Send a signal to a process if it belongs to the session; return whether it was sent."""
    if _session_of(pid) != session:
        return False
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def wait_for_exit(pid: int, seconds: float) -> bool:
    """Wait for the end of a process; return whether it exited in time. It is not reaped here."""
    deadline, pause = monotonic() + seconds, FIRST_PAUSE_S
    while not has_exited(pid):
        if monotonic() >= deadline:
            return False
        sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_S)
    return True


def has_exited(pid: int) -> bool:
    """Return whether a process has exited. Return False if that cannot be read."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return _has_no_running_thread(fields)


def kill_sessions(sessions: Mapping[int, int]) -> list[int]:
    """Kill all processes of some sessions, and wait for their end.

    Args:
        sessions: `process_start_ticks` of each session's leader by the number of the session. A
            session whose number has been reused is skipped. 0 means that the leader is known
            not to have been reaped.

    Returns:
        The pids of the processes that still exist.
    """
    deadline = monotonic() + KILL_TIMEOUT_S
    existing = {
        session
        for session, ticks in sessions.items()
        if not ticks or process_start_ticks(session) in (0, ticks)
    }
    for leader in existing:
        signal_group(leader, signal.SIGKILL)
    for _ in range(MAX_ROUNDS):
        # A process may fork while processes are listed, so list them until none is found.
        left = session_processes(existing)
        if not left:
            return []
        for pid in [pid for pid, n in left if signal_member(n, pid, signal.SIGKILL)]:
            wait_for_exit(pid, max(0.0, deadline - monotonic()))
    return [pid for pid, _ in session_processes(existing)]
