"""Messages between an agent, its supervisor process and the fork servers, over Unix sockets.

A message is a JSON object in one packet of a SOCK_SEQPACKET socket. A request to start a process
also carries five descriptors: a file in memory with the job, the working directory, and stdin,
stdout and stderr. A job has these fields:

    command      the program and its arguments, if the process is to execute a program
    program      the arguments of `run_program`, if a fork server can fork the process instead
    environment  all variables of the process
    cpu_set      the processors that the process may use
    ignored      the signals that the process ignores

This module is imported by the supervisor process, so it uses only the standard library.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

NUM_DESCRIPTORS = 5
MAX_MESSAGE_BYTES = 65536
MAX_REASON_CHARS = 2000
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

Message = dict[str, Any]


class Connection:
    """A connection over a socket. `send` and `receive` never block."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        # Messages that wait for space in the socket's buffer, with duplicates of the descriptors.
        self._unsent: deque[tuple[bytes, list[int]]] = deque()

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, or queue it until the next `send` or `flush`; a lost peer is ignored."""
        data = json.dumps(message).encode()
        if self._unsent or not self._try_send(data, descriptors):
            self._unsent.append((data, [os.dup(number) for number in descriptors]))
            self.flush()

    def flush(self) -> None:
        """Send as many of the queued messages as the socket accepts."""
        while self._unsent and self._try_send(*self._unsent[0]):
            for number in self._unsent.popleft()[1]:
                os.close(number)

    def _try_send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._link.sendmsg([data], rights if descriptors else ())
        except BlockingIOError:
            return False
        except OSError:
            pass  # The peer has exited, which `receive` reports.
        return True

    def receive(self) -> tuple[Message, list[int]] | None:
        """Return a message with its descriptors, or None if there is none.

        Raises:
            ConnectionError: the peer has exited.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._link, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the peer has exited")
        return json.loads(data), descriptors

    def close(self) -> None:
        while self._unsent:
            for number in self._unsent.popleft()[1]:
                os.close(number)
        self._link.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two sockets of a connection."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def as_reason(error: BaseException) -> str:
    """Return the type and the text of an exception, limited in length."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]


def read_job(descriptor: int) -> Message:
    """Read the job of a request. The position of the file is shared, so it is not used."""
    job: Message = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return job


def write_job(job: Mapping[str, Any]) -> int:
    """Return the descriptor of a file in memory that contains a job. Raises OSError."""
    descriptor = os.memfd_create("elasticlib-job")
    try:
        with open(descriptor, "w", closefd=False) as file:
            json.dump(job, file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def set_parent_death_signal(parent: int) -> None:
    """Ask the kernel to kill this process when its parent exits.

    If the parent has exited already, this process exits with code 1.
    """
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have exited before this call.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Have the kernel make orphaned descendants of this process its children from now on."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enter_session(parent: int, descriptors: Sequence[int]) -> Message:
    """Make this forked process the leader of a session, and return the job that it is to run.

    A job is the description of one process (see the module). The process gets the standard streams,
    the working directory and the processors that the job names. The kernel kills it when its parent
    exits. Raises OSError or ValueError if the job cannot be read or applied.
    """
    os.setsid()
    set_parent_death_signal(parent)
    request, directory, *streams = descriptors
    # The directory is given by its descriptor because it may have been removed.
    os.fchdir(directory)
    for target, stream in enumerate(streams):
        os.dup2(stream, target, inheritable=True)
    job = read_job(request)
    if set(job["cpu_set"]) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, job["cpu_set"])
    return job
