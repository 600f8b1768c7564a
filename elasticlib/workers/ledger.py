"""Ledger of an agent: its processes and temporary directories, for the guardian process.

The ledger is a file in memory, which outlives the agent as long as another process has it open. A
process that the agent starts enters itself into the slot that its job names, before it runs any
code of the user. So whenever the agent is killed, each process that can have started others is in
the ledger. The agent frees the slot when nothing is left of the session of that process.

The first slots are for helper processes, which fork others; the other slots are for workers. The
paths of the directories follow the slots. The file is sealed, so no process can shorten it. The
guardian and all children import this module, so it uses only the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterable

from .cleanup import process_start_ticks

HELPERS = range(64)
WORKERS = range(64, 4096)
_SLOT = struct.Struct("=qq")  # pid and start ticks; zeros in a free slot
_DIRECTORIES = WORKERS.stop * _SLOT.size  # offset of the first path
_LENGTH = struct.Struct("=q")  # of a path, in front of it; 0 if there is none
MAX_DIRECTORIES, _PATH_BYTES = 16, 4096
_TOTAL_BYTES = _DIRECTORIES + MAX_DIRECTORIES * _PATH_BYTES


def enter(ledger: int, slot: int) -> None:
    """Enter the calling process into a slot of the ledger with this descriptor."""
    pid = os.getpid()
    os.pwrite(ledger, _SLOT.pack(pid, process_start_ticks(pid)), slot * _SLOT.size)


def read_sessions(ledger: int, slots: Iterable[int]) -> dict[int, int]:
    """Return the processes in these slots, as {pid: start ticks}."""
    entries = (_SLOT.unpack(os.pread(ledger, _SLOT.size, slot * _SLOT.size)) for slot in slots)
    return {pid: ticks for pid, ticks in entries if pid}


def read_directories(ledger: int) -> list[str]:
    """Return the absolute paths of the directories."""
    found = []
    for number in range(MAX_DIRECTORIES):
        entry = os.pread(ledger, _PATH_BYTES, _DIRECTORIES + number * _PATH_BYTES)
        (length,) = _LENGTH.unpack_from(entry)
        if length:
            found.append(os.fsdecode(entry[_LENGTH.size : _LENGTH.size + length]))
    return found


class Ledger:
    """The agent's end of its ledger. Thread-safe. The file is created when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._fd = -1  # the file, once it has been created
        self._taken: set[int] = set()  # slots
        self._directories: dict[str, int] = {}  # the number of each path

    @property
    def fd(self) -> int:
        """The descriptor of the file. Raises OSError if it cannot be created."""
        with self._lock:
            if self._fd < 0:
                fd = os.memfd_create("elasticlib-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                try:
                    os.posix_fallocate(fd, 0, _TOTAL_BYTES)
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                except BaseException:
                    os.close(fd)
                    raise
                self._fd = fd
            return self._fd

    def take(self, slots: range = WORKERS) -> int:
        """Return a free slot, for a process that is about to start. Raises OSError if none is."""
        with self._lock:
            slot = next((slot for slot in slots if slot not in self._taken), None)
            if slot is None:
                raise OSError(errno.EAGAIN, "too many processes of workers have not ended")
            self._taken.add(slot)
            return slot

    def free(self, slot: int) -> None:
        """Free a slot, because no process was started, or nothing of its session is left."""
        with self._lock:
            if self._fd >= 0:
                os.pwrite(self._fd, bytes(_SLOT.size), slot * _SLOT.size)
            self._taken.discard(slot)

    def session(self, slot: int) -> dict[int, int]:
        """Return the process in a slot as {pid: start ticks}; empty if there is none."""
        return read_sessions(self.fd, [slot])

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to clean up."""
        with self._lock:
            return not self._taken and not self._directories

    def add_directory(self, path: str) -> None:
        """Let the guardian remove a directory when the agent exits.

        Args:
            path: the absolute path of the directory.

        Raises:
            OSError: the file cannot be created, or has no place for the path.
        """
        fd, encoded = self.fd, os.fsencode(path)
        with self._lock:
            used = self._directories.values()
            number = next((n for n in range(MAX_DIRECTORIES) if n not in used), None)
            if number is None or len(encoded) > _PATH_BYTES - _LENGTH.size:
                raise OSError(errno.ENAMETOOLONG, "no place for this directory", path)
            offset = _DIRECTORIES + number * _PATH_BYTES
            # The agent may be killed in between; without its length, the path does not count.
            os.pwrite(fd, encoded, offset + _LENGTH.size)
            os.pwrite(fd, _LENGTH.pack(len(encoded)), offset)
            self._directories[path] = number

    def remove_directory(self, path: str) -> None:
        """Undo `add_directory`: the directory was removed, or belongs to another user."""
        with self._lock:
            number = self._directories.pop(path, None)
            if number is not None:
                os.pwrite(self._fd, bytes(_LENGTH.size), _DIRECTORIES + number * _PATH_BYTES)

    def close(self) -> None:
        """Close the file. A ledger that was closed can be used again, and is then empty."""
        with self._lock:
            fd, self._fd = self._fd, -1
            self._taken.clear()
            self._directories.clear()
        if fd >= 0:
            os.close(fd)
