"""The sampler on torch: torch's own order, a state of what was trained on, any world size."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from elasticlib import ElasticDistributedSampler
from elasticlib.errors import ConfigError, StateMismatch

worlds = st.integers(1, 7)
lengths = st.integers(0, 80)
# The loader wants workers forked from a process that has threads: python 3.12 warns of that.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def world_of(n, world, **options):
    return [ElasticDistributedSampler(range(n), world, rank, **options) for rank in range(world)]


def steps_of(samplers, batch):
    """What each step of the world uses, over all ranks, in the order of the epoch."""
    left = [list(sampler) for sampler in samplers]
    for k in range(0, max(len(indices) for indices in left), batch):
        rounds = zip_longest(*(indices[k : k + batch] for indices in left))
        yield [index for one_round in rounds for index in one_round if index is not None]


@given(
    st.integers(1, 80),
    worlds,
    st.integers(0, 9),
    st.fixed_dictionaries(
        {"shuffle": st.booleans(), "seed": st.integers(0, 99), "drop_last": st.booleans()}
    ),
)
@settings(deadline=None)
def test_an_undisturbed_epoch_is_torchs_own(n, world, epoch, options):
    for rank in range(world):
        ours = ElasticDistributedSampler(range(n), world, rank, **options)
        torchs = DistributedSampler(range(n), world, rank, **options)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)


@given(
    lengths,
    st.integers(0, 99),
    st.booleans(),
    st.lists(st.tuples(worlds, st.integers(0, 4), st.integers(1, 5)), max_size=5),
    worlds,
)
@settings(deadline=None)
def test_every_sample_is_dealt_once_whatever_the_resizes(n, seed, shuffle, segments, last):
    options = {"seed": seed, "shuffle": shuffle, "tail": "exact"}
    undisturbed = list(ElasticDistributedSampler(range(n), 1, 0, **options))
    used, state = [], ElasticDistributedSampler(range(n), 1, 0, **options).state_dict()
    for world, steps, batch in [*segments, (last, n + 1, 3)]:
        samplers = world_of(n, world, **options)
        for sampler in samplers:
            sampler.load_state_dict(state)
        for _, indices in zip(range(steps), steps_of(samplers, batch), strict=False):
            used += indices
            for sampler in samplers:
                sampler.advance(batch * world)
        state = samplers[-1].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
        assert used == undisturbed[: state["consumed"]]
    assert Counter(used) == Counter(range(n))
    assert state["consumed"] == n


@given(st.integers(1, 80), worlds, st.integers(0, 80))
@settings(deadline=None)
def test_padding_after_a_resume_repeats_less_than_a_world_and_leaves_nothing_out(n, world, start):
    start = min(start, n)
    samplers = world_of(n, world, start_index=start)
    order = list(ElasticDistributedSampler(range(n), 1, 0))
    ranks = [list(sampler) for sampler in samplers]
    dealt = [index for one_round in zip(*ranks, strict=True) for index in one_round]
    repeats = dealt[n - start :]
    assert dealt[: n - start] == order[start:]
    assert len(repeats) < world
    assert repeats == (order * world)[: len(repeats)]


def test_a_thousand_samples_resumed_at_400_at_other_world_sizes():
    """Row A7: torch's elastic sampler repeats 228 of them and never uses 228 others."""
    used, state = Counter(), None
    for world, steps, batch in ((4, 10, 10), (3, 17, 11), (7, 1000, 5)):
        samplers = world_of(1000, world, tail="exact")
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
        ranks = [list(sampler)[: steps * batch] for sampler in samplers]
        for indices in ranks:
            used.update(indices)
        samplers[0].advance(steps * batch * world)
        state = samplers[0].state_dict()
        assert sum(used.values()) == state["consumed"]
    assert used == Counter(range(1000))


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_samples_than_ranks(n, shuffle):
    counts = {
        tail: [len(list(s)) for s in world_of(n, 3, shuffle=shuffle, tail=tail)]
        for tail in ("pad", "drop", "exact")
    }
    assert counts["pad"] == ([1, 1, 1] if n else [0, 0, 0])
    assert counts["drop"] == [0, 0, 0]
    assert sorted(counts["exact"], reverse=True) == [int(rank < n) for rank in range(3)]


def test_iterating_moves_nothing_and_a_running_iterator_keeps_its_start():
    sampler = ElasticDistributedSampler(range(10), 1, 0, shuffle=False)
    running = iter(sampler)
    assert [next(running), next(running)] == [0, 1]
    assert sampler.state_dict()["consumed"] == 0
    sampler.advance(4)
    assert next(running) == 2
    assert list(sampler) == [4, 5, 6, 7, 8, 9]
    assert len(sampler) == 6


def test_another_epoch_starts_anew_and_the_same_one_goes_on():
    sampler = ElasticDistributedSampler(range(10), 2, 0, seed=3, start_index=4)
    first = list(ElasticDistributedSampler(range(10), 2, 0, seed=3))
    sampler.set_epoch(0)
    assert list(sampler) == first[2:]
    sampler.set_epoch(1)
    assert sampler.state_dict()["consumed"] == 0
    assert len(sampler) == 5
    assert list(sampler) != first
    with pytest.raises(ConfigError, match="need epoch >= 0, got -1"):
        sampler.set_epoch(-1)


def test_a_resume_followed_by_set_epoch_keeps_its_place():
    before = ElasticDistributedSampler(range(20), 2, 1, seed=5)
    before.set_epoch(3)
    before.advance(8)
    after = ElasticDistributedSampler(range(20), 2, 1, seed=5)
    after.load_state_dict(before.state_dict())
    after.set_epoch(after.epoch)
    assert after.epoch == 3
    assert list(after) == list(before)


def test_advance_stops_at_the_end_and_never_goes_back():
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    sampler.advance(8)
    sampler.advance(8)
    assert sampler.state_dict()["consumed"] == 10
    assert list(sampler) == []
    with pytest.raises(ConfigError, match="need count >= 0, got -2"):
        sampler.advance(-2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"length": 11}, "length is 11 in the state, this dataset has 10 samples"),
        ({"seed": 1}, "seed is 1 in the state, this sampler has 0"),
        ({"format": 9}, "format is 9, this version reads 1"),
        ({"consumed": 12}, "need 0 <= consumed <= length, got 12 and 10"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change, sentence):
    sampler = ElasticDistributedSampler(range(10), 2, 0, start_index=2)
    before = sampler.state_dict()
    with pytest.raises(StateMismatch, match=sentence):
        sampler.load_state_dict({**before, "epoch": 7, **change})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"start_index": 11}, "need 0 <= start_index <= 10 samples, got 11"),
        ({"start_index": -1}, "need 0 <= start_index <= 10 samples, got -1"),
        ({"tail": "cut"}, "tail is 'cut'"),
        ({"tail": ""}, "tail is ''"),
        ({"tail": "pad", "drop_last": True}, "drop_last=True means tail='drop', got tail='pad'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ElasticDistributedSampler(range(10), 2, 0, **options)


def test_torchs_positional_arguments_and_its_refusal_of_a_bad_rank():
    sampler = ElasticDistributedSampler(range(10), 4, 1, False, 7, True)
    assert isinstance(sampler, DistributedSampler)
    assert list(sampler) == [1, 5]
    assert sampler.state_dict()["seed"] == 7
    with pytest.raises(ValueError, match="Invalid rank 4"):
        ElasticDistributedSampler(range(10), 4, 4)


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_prefetches_does_not_move_the_state(workers):
    sampler = ElasticDistributedSampler(range(64), 2, 0, seed=1)
    loader = DataLoader(range(64), 4, sampler=sampler, num_workers=workers)
    order, trained = list(sampler), []
    for _, batch in zip(range(3), loader, strict=False):
        trained += batch.tolist()
        sampler.advance(4 * 2)
    assert trained == order[:12]
    assert sampler.state_dict()["consumed"] == 24
    resumed = ElasticDistributedSampler(range(64), 2, 0, seed=1)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == order[12:]


@forks
def test_persistent_workers_see_each_epoch_and_what_is_left_of_it():
    sampler = ElasticDistributedSampler(range(20), 1, 0, seed=1)
    loader = DataLoader(range(20), 4, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert len(loader) == 5
        first = next(iter(loader))
        sampler.advance(4)
        rest = [index for batch in loader for index in batch.tolist()]
        assert [*first.tolist(), *rest] == order


def test_inside_a_batch_sampler():
    sampler = ElasticDistributedSampler(range(20), 2, 1, seed=1, start_index=6)
    loader = DataLoader(range(20), batch_sampler=BatchSampler(sampler, 3, drop_last=False))
    assert [index for batch in loader for index in batch.tolist()] == list(sampler)
    assert len(loader) == 3


def test_world_and_rank_come_from_the_process_group():
    with pytest.raises(ValueError, match="process group has not been initialized"):
        ElasticDistributedSampler(range(10))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sampler = ElasticDistributedSampler(range(10), shuffle=False)
    finally:
        dist.destroy_process_group()
    assert list(sampler) == list(range(10))
