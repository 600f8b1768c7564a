"""Read a state that is not sharded once on each node, into memory that its ranks share.

The memory is an anonymous file (memfd), which lives as long as a process has it open or mapped, so
that a process that is killed leaves nothing behind. It is sealed: once it is filled, neither its
size nor its bytes can change, and reading it cannot end in SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any

from ..untrusted import open_regular_file
from .state_search import RestorePlan, StateSearch

_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE


class NodeReading:
    """The reading of a state by all ranks. Of the ranks that find the same bytes, one reads them.

    The other ranks map its memory. A rank that cannot do this reads for itself, as all ranks do if
    there is no room for such memory.

    `close` must be called. The pack stays valid afterwards.

    Args:
        search: the search of all ranks.
        plan: the state.
        fingerprint: returns a digest of a pack.
    """

    def __init__(
        self, search: StateSearch, plan: RestorePlan, fingerprint: Callable[[memoryview], str]
    ) -> None:
        self.pack: memoryview | None = None  # of this rank, if it can read the state
        self._search, self._plan, self._fingerprint = search, plan, fingerprint
        self._memory: NodeMemory | None = None  # which this rank offers to others

    def read(self) -> dict[int, str] | None:
        """Read the pack, or map what another rank has read. Every rank must call this.

        Returns:
            The fingerprint of the pack of each rank that can read it; or None, on all ranks, if a
            rank has failed and another copy or state has to be chosen.
        """
        search, holders, rank = self._search, self._plan.holders[0], self._search.group.rank
        place = search.source(holders[rank]).place if rank in holders else ""
        readers = search.find_readers(holders, search.group.all_gather_json(place))
        followers = {one for one, reader in readers.items() if one != reader}
        has_followers = any(readers[one] == rank for one in followers)
        results = search.try_parts(
            self._plan,
            [0] if readers.get(rank) == rank else [],
            lambda _: self._read_pack(is_shared=has_followers),
            readers,
        )
        if results is None:
            return None
        rows = {one: results[reader][0] for one, reader in readers.items()}
        if followers:
            mapped = search.try_parts(
                self._plan,
                [0] if rank in followers else [],
                lambda _: self._map_or_read(*rows[rank]),
            )
            if mapped is None:
                return None
            rows |= {one: mapped[one][0] for one in followers}
        return {one: digest for one, (digest, _) in rows.items()}

    def close(self) -> None:
        """Withdraw the memory that this rank has offered, once all ranks have mapped it."""
        if self._memory is not None:
            self._memory.close()

    def _read_pack(self, *, is_shared: bool) -> tuple[str, Any]:
        """Read and verify the pack. Return its fingerprint, and the offer of its memory or None."""
        ref = self._plan.holders[0][self._search.group.rank]
        source = self._search.source(ref)
        if is_shared:
            size = source.size_of(ref)
            # Without it, each rank reads for itself: there is no room, or this system has none.
            with contextlib.suppress(OSError, OverflowError, ValueError):
                self._memory = NodeMemory(size)
        if self._memory is None:
            pack = source.view(ref)
            source.check(ref)
        else:
            source.read_into(ref, self._memory.buffer)
            pack = self._memory.seal()
        self.pack = pack
        return self._fingerprint(pack), self._memory and self._memory.offer

    def _map_or_read(self, digest: str, offer: Any) -> tuple[str, Any]:
        """Map the memory that another rank has offered, or read the pack; see `_read_pack`."""
        self.pack = None if offer is None else map_offer(*offer)
        return (digest, None) if self.pack is not None else self._read_pack(is_shared=False)


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
        # What another process of this node needs to map the memory, see `map_offer`.
        self.offer = (os.getpid(), self._handle, name, size)

    def seal(self) -> memoryview:
        """Make the bytes final, and return a view of them as `map_offer` does."""
        self._unmap()
        fcntl.fcntl(self._handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        return _map_private(self._handle, self.offer[-1])

    def close(self) -> None:
        """Withdraw the offer. The memory is freed with the last view of it, in any process."""
        os.close(self._handle)
        # It is still mapped if it was not filled. The traceback of that error may refer to slices.
        with contextlib.suppress(BufferError):
            self._unmap()

    def _unmap(self) -> None:
        self.buffer.release()
        self._filled.close()


def map_offer(pid: int, descriptor: int, name: str, size: int) -> memoryview | None:
    """Return the memory that a process has offered and sealed, or None if this one cannot reach it.

    The view is writable. What is written changes neither the memory nor any other view.

    Args:
        pid: the process.
        descriptor: of the memory, in that process.
        name: the random name of the memory, because elsewhere the other two may mean another file.
        size: in bytes.
    """
    with (
        contextlib.suppress(OSError, ValueError),
        open_regular_file(f"/proc/{pid}/fd/{descriptor}", follow_link=True) as handle,
    ):
        # In a container with processes of its own, or on another host of the same name, the number
        # of the process may be that of another one.
        target = os.readlink(f"/proc/self/fd/{handle}")
        is_sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        if target.startswith(f"/memfd:{name}") and is_sealed:
            return _map_private(handle, size)
    return None


def _map_private(handle: int, size: int) -> memoryview:
    return memoryview(mmap.mmap(handle, size, mmap.MAP_PRIVATE, _ACCESS))
