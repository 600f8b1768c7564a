"""How many files of elasticlib an index passes, from the epoch's integer to the DataLoader.

Counted as in tests/walks: the distinct files in which a function ran, without `__init__.py`.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import elasticlib
from elasticlib import ElasticBatchSampler, ElasticDistributedSampler, ShardDataset

PACKAGE = Path(elasticlib.__file__).parent
GOAL = 4


def files_passed(call):
    """The files of elasticlib in which a function ran during a call."""
    found = set()

    def record(frame, event, _argument):
        inside = frame.f_code.co_filename.startswith(f"{PACKAGE}/")
        if event == "call" and inside and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {name for name in found if not name.endswith("__init__.py")}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("order", ["feistel", "randperm", "none", "weighted", "shards"])
def test_an_index_passes_four_files_at_most(order, batched):
    data = ShardDataset([0, 1], [500, 500], lambda _shard, start, stop: range(start, stop))
    how = {"shuffle": False} if order == "none" else {"shuffle_algorithm": order}
    if order == "weighted":
        how = {"weights": [1.0, 2.0] * 500}
    sampler = ElasticDistributedSampler(data, 2, 1, **how)
    batches = ElasticBatchSampler(sampler, 8)
    plain = range(1000)  # what the dataset runs is on the other side
    drawn_by = {"batch_sampler": batches} if batched else {"batch_size": 4, "sampler": sampler}
    loader = DataLoader(plain, **drawn_by)

    def epoch():
        sampler.set_epoch(3)
        assert sum(len(batch) for batch in loader) == 500

    passed = files_passed(epoch)
    expected = {"data/deal.py", "data/permutation.py", "data/sampler.py"}
    assert passed == expected | ({"data/batches.py"} if batched else set())
    assert len(passed) <= GOAL
