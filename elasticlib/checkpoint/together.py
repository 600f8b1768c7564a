"""A save that all ranks make: each has written its part, or none counts.

Ranks speak over a gloo group of their own, so that what goes on behind a training step never
mixes with the step's collectives. Only small tensors of numbers are exchanged.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class Together:
    """All ranks of a process group; each method is called by all of them, in the same order."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, backend="gloo")
        self._first = 0 if ranks is None else ranks[0]
        self.rank = dist.get_rank(self._group)
        self.count = dist.get_world_size(self._group)

    def one_says(self, words: bytes) -> bytes:
        """What the first rank says, of as many bytes as everybody's."""
        told = torch.tensor(list(words), dtype=torch.uint8)
        dist.broadcast(told, src=self._first, group=self._group)
        return bytes(told.tolist())

    def all_say(self, numbers: list[int]) -> list[list[int]]:
        """What each rank says, in the order of ranks; as many numbers each."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(rows, mine, group=self._group)
        return [row.tolist() for row in rows]

    def close(self) -> None:
        """Give the group back, if the process group is still there."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
