"""Members of a generation exchange texts with few requests to the generation's store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from elasticlib.in_place.group_backend import GroupMembership


class CountingStore:
    """A store for all ranks of this process, which counts the requests to it by rank."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.requests: Counter[str] = Counter()

    def of_rank(self, rank: int) -> RankStore:
        return RankStore(self, rank)


class RankStore:
    """The store as one rank sees it."""

    def __init__(self, shared: CountingStore, rank: int) -> None:
        self._shared, self._rank = shared, str(rank)

    def set(self, key: str, value: str) -> None:
        self._shared.requests[self._rank] += 1
        self._shared.store.set(key, value)

    def get(self, key: str) -> bytes:
        self._shared.requests[self._rank] += 1
        return bytes(self._shared.store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._shared.requests[self._rank] += 1
        return [bytes(self._shared.store.get(key)) for key in keys]


def test_number_of_requests_of_a_rank_does_not_grow_with_the_number_of_ranks() -> None:
    size, store = 24, CountingStore()

    def exchange(rank: int) -> list[str]:
        membership = GroupMembership(1, rank, size, 7, store.of_rank(rank))
        return membership.all_gather("status", f'text "{rank}" ä')

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(exchange, range(size)))
    assert results == [[f'text "{rank}" ä' for rank in range(size)]] * size
    assert len(store.requests) == size
    assert max(store.requests.values()) <= 4
