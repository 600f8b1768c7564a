"""Ranks complete the tree together: each for one slice of the gradient, from everyone's sums.

As in a reduce-scatter and an all-gather, but each slice is added up in the tree's order, by one
rank, from the sums that the ranks have of it, and nothing is added on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from .tree import TreeSum, pieces

BUCKET_BYTES = 32 << 20
"""How much of a gradient is under way at once; the next bucket is sent while one is added up."""


@attrs.frozen
class _Bucket:
    """One part of a flat gradient, on its way: what comes in, by rank and node."""

    start: int
    size: int
    """Of each rank's slice, in elements."""
    received: dict[int, list[Tensor]]
    works: list[dist.Work]

    def slice_of(self, rank: int) -> slice:
        return slice(self.start + rank * self.size, self.start + (rank + 1) * self.size)


class Exchange:
    """Adds up what the ranks of a process group have; the group may be None for one process.

    Args:
        count: the number of logical workers.
        group: whose ranks share them; None is the default one.
        bucket_bytes: how much of a flat tensor is exchanged at once.
    """

    def __init__(
        self, count: int, group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._count, self._group, self._bucket_bytes = count, group, bucket_bytes
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._nodes = [pieces(count, self.world_size, rank) for rank in range(self.world_size)]

    @torch.no_grad()
    def complete(self, mine: list[Tensor]) -> None:
        """Put the sum of all logical workers into `mine[0]`, on every rank.

        Args:
            mine: the sums of this rank's `pieces`, from left to right: flat, of one length, which
                is a multiple of the world size. All of them are overwritten.
        """
        coming: _Bucket | None = None
        going: list[dist.Work] = []
        for at in self._buckets(len(mine[0]), mine[0].element_size()):
            following = self._begin(at, mine)
            if coming:
                _wait(going)
                going = self._finish(coming, mine)
            coming = following
        if coming:
            _wait(going)
            _wait(self._finish(coming, mine))

    def _buckets(self, length: int, element_size: int) -> Iterator[range]:
        """Runs of a flat tensor, each a multiple of the world size; none for a rank alone."""
        step = max(1, self._bucket_bytes // element_size // self.world_size) * self.world_size
        for start in range(0, length if self.world_size > 1 else 0, step):
            yield range(start, min(start + step, length))

    def _begin(self, at: range, mine: list[Tensor]) -> _Bucket:
        """Ask for this rank's slice of everyone's sums, and send everyone theirs of its own."""
        bucket, ops = _Bucket(at.start, len(at) // self.world_size, {}, []), []
        for rank in self._others:
            bucket.received[rank] = [mine[0].new_empty(bucket.size) for _ in self._nodes[rank]]
            ops += [self._op(dist.irecv, part, rank) for part in bucket.received[rank]]
            ops += [self._op(dist.isend, flat[bucket.slice_of(rank)], rank) for flat in mine]
        bucket.works.extend(dist.batch_isend_irecv(ops))
        return bucket

    def _finish(self, bucket: _Bucket, mine: list[Tensor]) -> list[dist.Work]:
        """Add up this rank's slice, and begin to give it to everyone and to get theirs."""
        _wait(bucket.works)
        total = TreeSum[Tensor](self._count, lambda left, right: left.add_(right))
        own = [flat[bucket.slice_of(self.rank)] for flat in mine]
        for rank, nodes in enumerate(self._nodes):
            values = own if rank == self.rank else bucket.received[rank]
            for node, value in zip(nodes, values, strict=True):
                total.push(node, value)
        ((_, whole),) = total.waiting
        own[0].copy_(whole)  # on rank 0 they are one
        ops = [
            op
            for rank in self._others
            for op in (
                self._op(dist.irecv, mine[0][bucket.slice_of(rank)], rank),
                self._op(dist.isend, own[0], rank),
            )
        ]
        return list(dist.batch_isend_irecv(ops))

    def _op(self, what: object, part: Tensor, rank: int) -> dist.P2POp:
        # As bytes, so that it does not matter which dtypes a backend knows. Messages between two
        # ranks arrive in the order in which they are sent and asked for, so they need no tags.
        peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
        return dist.P2POp(what, part.view(torch.uint8), peer, self._group)  # type: ignore[arg-type]


def gather_plain(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank says, by rank; called by all. (torch's all_gather_object needs NumPy.)

    Args:
        value: what JSON can hold.
    """
    group = dist.group.WORLD if group is None else group
    on_cpu = group is not None and "cpu:" in dist.get_backend_config(group)
    place = None if on_cpu else torch.accelerator.current_accelerator()
    said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(place)
    size = torch.tensor([len(said)], device=place)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8, device=place)
    mine[: len(said)] = said
    every = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(every, mine, group=group)
    texts = zip(every, lengths, strict=True)
    return [json.loads(bytes(text[:length].tolist())) for text, length in texts]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
