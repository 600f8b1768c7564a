"""States that an earlier version saved are read, and its orders go on where it stood.

`saved/by_2147ac4.json` was written by commit 2147ac4. A sampler's entry has its options, its state
and that of an iterator over it, and what the whole job draws after either; a loader's entry has the
state of torchdata's StatefulDataLoader over 1000 samples on rank 1 of 2 after 6 batches.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler

SAVED = json.loads((Path(__file__).parent / "saved" / "by_2147ac4.json").read_text())


@pytest.mark.parametrize("saved", SAVED["samplers"], ids=lambda saved: saved["what"])
def test_a_samplers_state_of_an_earlier_version_goes_on_in_the_same_order(saved):
    for state, then in (("state", "then"), ("iterator", "then_iterator")):
        sampler = ElasticDistributedSampler(
            range(saved["n"]), 1, 0, tail="exact", **saved["options"]
        )
        sampler.load_state_dict(saved[state])
        assert sampler.state_dict() == saved[state]
        assert list(itertools.islice(sampler, 40)) == saved[then]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("saved", SAVED["loaders"])
def test_a_loaders_state_of_an_earlier_version_goes_on_at_another_world_size(saved):
    sampler = ElasticDistributedSampler(range(1000), 1, 0, tail="exact", seed=7)
    if saved["batched"]:
        how = {"batch_sampler": ElasticBatchSampler(sampler, 8), "collate_fn": list}
    else:
        how = {"batch_size": 8, "sampler": sampler}
    loader = StatefulDataLoader(range(1000), num_workers=saved["workers"], **how)
    loader.load_state_dict(saved["state"])
    found = [int(index) for batch in itertools.islice(loader, 5) for index in batch]
    assert found == saved["then"]
