"""What is left of a worker's session, and its end.

Each worker leads a session of its own, so whatever it started and did not move out of there is
known by that session's number; nothing outside it is ever signalled. Standard library only: the
guardian runs this without site-packages.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Iterable

ROUNDS = 5
LOOK_SECONDS = 0.1
THREADS, BEGAN = 17, 19
"""Where their number stands, and when the process began, of the fields behind the command."""


def members(session: int) -> list[int]:
    """The living processes of a session, its leader included."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and _session_of(int(name)) == session:
            found.append(int(name))
    return found


def _session_of(pid: int) -> int | None:
    """The session of a process that is not a zombie."""
    try:
        fields = _fields_of(pid)
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[3])


def _fields_of(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The command may hold spaces and brackets; the fields begin after the last bracket.
        return file.read().rpartition(b")")[2].split()


def began_at(pid: int) -> int:
    """When a process did, in the kernel's own ticks, which no later one of its number has; 0 where
    there is none."""
    try:
        return int(_fields_of(pid)[BEGAN])
    except OSError:
        return 0


def holds(session: int, pid: int) -> bool:
    """Whether this process is of that session, and no zombie."""
    return _session_of(pid) == session


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the process group that a worker leads, if it still has any process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def signal_member(session: int, pid: int, number: int) -> bool:
    """Send a signal to one process of a session, and to no other; whether it was there."""
    handle = None
    try:
        handle = _handle(pid)
        # Looked at through the handle's eyes: the number may have a new owner since.
        if _session_of(pid) != session:
            return False
        if handle is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except (OSError, OverflowError):
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def _handle(pid: int) -> int | None:
    """One that stays this process's; None where none is to be had: kernels before 5.3 have none,
    a container may forbid them, and this process may have too many files open."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def ends_within(pid: int, seconds: float | None) -> bool:
    """Whether a process, which nobody reaps meanwhile, ends in time; None waits until it does.

    It is not reaped here: the zombie keeps the pid, and with it the session's number.
    """
    left = math.inf if seconds is None else seconds
    while True:
        try:
            handle = _handle(pid)
        except ProcessLookupError:
            # Its template ended, and the worker with it.
            return True
        if handle is not None:
            return _readable(handle, left)
        if _is_over(pid):
            return True
        if left <= 0:
            return False
        # Without a handle it can only be looked at, now and again.
        pause = min(LOOK_SECONDS, left)
        select.select((), (), (), pause)
        left -= pause


def _readable(handle: int, seconds: float) -> bool:
    try:
        look = select.poll()
        look.register(handle, select.POLLIN)
        return bool(look.poll(None if seconds == math.inf else seconds * 1000))
    finally:
        os.close(handle)


def _is_over(pid: int) -> bool:
    """Whether all threads of a process have ended; what cannot be looked at now may still run."""
    try:
        fields = _fields_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return fields[0] in (b"Z", b"X") and int(fields[THREADS]) <= 1


def end(session: int, seconds: float = 2.0, *, began: int = 0) -> list[int]:
    """Kill all of a session and wait until it is gone; returns those that are not.

    The caller makes sure that the number is still that session's, as its leader is unreaped or a
    member is known to live; or says when its leader began.
    """
    if began and began_at(session) not in (0, began):
        return []  # all of it have ended, and the number is another's
    signal_group(session, signal.SIGKILL)
    for _ in range(ROUNDS):
        # A process may fork while it is looked for: look until none is found.
        left = members(session)
        if not left:
            return []
        _kill_and_wait(left, session, seconds)
    return members(session)


def _kill_and_wait(pids: Iterable[int], session: int, seconds: float) -> None:
    killed = [pid for pid in pids if signal_member(session, pid, signal.SIGKILL)]
    for pid in killed:
        ends_within(pid, seconds)
