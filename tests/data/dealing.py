"""How a job uses what its ranks are dealt, and a stream that reads what it is told."""

from __future__ import annotations

from itertools import zip_longest

from torch.utils.data import IterableDataset, get_worker_info

from elasticlib import deal_ranges


def in_turn(ranks):
    """What all ranks are dealt, round by round, as the job uses it."""
    return [one for turn in zip_longest(*ranks) for one in turn if one is not None]


class Stream(IterableDataset):
    """As docs/guide/data.md has it: for a reader that is to be told which ranges come next."""

    def __init__(self, dataset, sampler, batch):
        self.dataset, self.sampler, self.batch = dataset, sampler, batch

    def __iter__(self):
        info = get_worker_info()
        worker = {"worker": info.id, "workers": info.num_workers} if info else {}
        rank = {"rank": self.sampler.rank, "world_size": self.sampler.num_replicas}
        for places in deal_ranges(self.sampler.position, batch=self.batch, **rank, **worker):
            yield from self.dataset.samples(places)
