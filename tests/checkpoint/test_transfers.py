"""Transfers of elements between ranks: an error on one rank is raised on all, and none waits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from managers import capture_errors
from ranks import Ranks

from elasticlib.checkpoint.collectives import PeerGroup, Transfer

NUM_ELEMENTS = 1000


def send_what_cannot_be_read(failing: int) -> list[str]:
    """Exchange tensors with the other rank, of which one cannot be read on one rank."""
    rank, group = dist.get_rank(), PeerGroup(dist.group.WORLD)
    tensors = [torch.full((NUM_ELEMENTS,), float(rank)) for _ in range(20)]

    def find(number: int) -> torch.Tensor:
        if number == 3 and rank == failing:
            raise ValueError("the part cannot be read")
        return tensors[number]

    transfers = (
        Transfer(1 - rank, rank == n % 2, NUM_ELEMENTS, torch.float32, lambda n=n: find(n))
        for n in range(20)
    )
    with capture_errors() as errors:
        group.exchange(7, transfers)
    return errors


def test_an_error_while_a_transfer_is_prepared_is_raised_on_all_ranks(ranks: Ranks) -> None:
    for failing in (0, 1):
        for errors in ranks.run(send_what_cannot_be_read, 2, failing):
            assert errors == [
                f"rank {failing} failed to restore step 7: ValueError: the part cannot be read"
            ]
