"""Memory that the ranks of a node share during a restore: one rank fills it, the others map it.

It is an anonymous file (memfd), which lives as long as a process has it open or mapped, so that a
process that is killed leaves nothing behind. It is sealed: once it is filled, neither its size nor
its bytes can change, and reading it cannot end in SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence

import attrs

from ..untrusted import open_regular_file

_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE


@attrs.frozen
class MemoryOffer:
    """What another process of this node needs to map the memory."""

    pid: int
    descriptor: int  # in the process `pid`
    name: str  # random, because elsewhere the other two may mean another file
    size: int  # in bytes


class NodeMemory:
    """Memory of some size, which this process fills before it offers it to others.

    Not thread-safe. `close` must be called; views of the memory stay valid afterwards.
    """

    def __init__(self, size: int) -> None:
        """Allocate the memory.

        Raises:
            OSError: There is no room for it.
        """
        name = f"elasticlib-restore-{secrets.token_hex(16)}"
        self._handle = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # The pages are allocated here: a lack of memory must not show when they are accessed.
            os.posix_fallocate(self._handle, 0, size)
            fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._filled = mmap.mmap(self._handle, size, mmap.MAP_SHARED, _ACCESS)
        except BaseException:
            os.close(self._handle)
            raise
        self.buffer = memoryview(self._filled)  # to be filled, until `seal` is called
        self.offer = MemoryOffer(os.getpid(), self._handle, name, size)

    def seal(self) -> memoryview:
        """Make the bytes final, and return a view of them as `map_offer` does."""
        self._unmap()
        fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        return _map_private(self._handle, self.offer.size)

    def close(self) -> None:
        """Withdraw the offer. The memory is freed with the last view of it, in any process."""
        os.close(self._handle)
        # It is still mapped if it was not filled. The traceback of that error may refer to slices.
        with contextlib.suppress(BufferError):
            self._unmap()

    def _unmap(self) -> None:
        self.buffer.release()
        self._filled.close()


def allocate_node_memory(size: int) -> NodeMemory | None:
    """Return new memory, or None if there is no room for it or this system has none."""
    with contextlib.suppress(OSError, OverflowError, ValueError):
        return NodeMemory(size)
    return None


def map_offer(offer: MemoryOffer) -> memoryview | None:
    """Return the memory that a process has offered and sealed, or None if this one cannot reach it.

    The view is writable. What is written changes neither the memory nor any other view.
    """
    with (
        contextlib.suppress(OSError, ValueError),
        open_regular_file(f"/proc/{offer.pid}/fd/{offer.descriptor}", follow_link=True) as handle,
    ):
        # In a container with processes of its own, or on another host of the same name, the number
        # of the process may be that of another one.
        target = os.readlink(f"/proc/self/fd/{handle}")
        is_sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        if target.startswith(f"/memfd:{offer.name}") and is_sealed:
            return _map_private(handle, offer.size)
    return None


def read_offer(row: Sequence[int | str]) -> MemoryOffer:
    """Return the offer whose fields another rank has sent."""
    return MemoryOffer(int(row[0]), int(row[1]), str(row[2]), int(row[3]))


def _map_private(handle: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(handle, size, mmap.MAP_PRIVATE, _ACCESS))
