"""Read a state that is not sharded once on each node, into memory that its ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from .node_memory import NodeMemory, allocate_node_memory, map_offer, read_offer
from .state_search import RestorePlan, StateSearch


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
            self._memory = allocate_node_memory(source.size_of(ref))
        if self._memory is None:
            pack = source.view(ref)
            source.check(ref)
        else:
            source.read_into(ref, self._memory.buffer)
            pack = self._memory.seal()
        self.pack = pack
        return self._fingerprint(pack), self._memory and attrs.astuple(self._memory.offer)

    def _map_or_read(self, digest: str, offer: Any) -> tuple[str, Any]:
        """Map the memory that another rank has offered, or read the pack; see `_read_pack`."""
        self.pack = None if offer is None else map_offer(read_offer(offer))
        return (digest, None) if self.pack is not None else self._read_pack(is_shared=False)
