"""When one epoch gives way to the next, by itself and by name, and within torch's DataLoader."""

from __future__ import annotations

import warnings

import pytest
from torch.utils.data import BatchSampler, DataLoader

from elasticlib import ElasticDistributedSampler
from elasticlib.errors import ConfigError

# The loader wants workers forked from a process that has threads: python 3.12 warns of that.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_another_epoch_starts_anew_and_the_same_one_goes_on():
    sampler = ElasticDistributedSampler(range(10), 2, 0, seed=3, start_index=4)
    first = list(ElasticDistributedSampler(range(10), 2, 0, seed=3))
    sampler.set_epoch(0)
    assert list(sampler) == list(sampler) == first[2:]
    sampler.set_epoch(1)
    with pytest.warns(UserWarning, match=r"advance\(\) was not called"):
        assert sampler.state_dict()["consumed"] == 0
    assert len(sampler) == 5
    assert list(sampler) != first
    with pytest.raises(ConfigError, match=r"epoch.*got -1"):
        sampler.set_epoch(-1)


def test_a_program_that_saves_in_an_epoch_and_counts_nothing_is_told_so_once():
    sampler = ElasticDistributedSampler(range(10_000), 1, 0)
    drawn = iter(sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.state_dict()
        [next(drawn) for _ in range(8)]  # a loader draws ahead of the first step
        sampler.state_dict()
    [next(drawn) for _ in range(2000)]
    with pytest.warns(UserWarning, match=r"samples were drawn.*advance\(\) was not called"):
        assert sampler.state_dict()["consumed"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [next(drawn) for _ in range(2000)]
        sampler.state_dict()
        counts = ElasticDistributedSampler(range(10_000), 1, 0)
        for index, _ in enumerate(counts):
            counts.advance(1)
            if index % 500 == 0:
                assert counts.state_dict()["consumed"] == index + 1


def test_start_index_is_a_place_in_the_epoch_that_is_named_first():
    fresh = ElasticDistributedSampler(range(10), 1, 0)
    fresh.set_epoch(5)
    order = list(fresh)
    sampler = ElasticDistributedSampler(range(10), 1, 0, start_index=4)
    sampler.set_epoch(5)
    assert list(sampler) == order[4:]
    sampler.set_epoch(6)
    assert sampler.position.consumed == 0
    drawn = ElasticDistributedSampler(range(10), 1, 0, start_index=4)
    iter(drawn)
    drawn.set_epoch(5)
    assert list(drawn) == order


def orders(n, epochs, **options):
    found = []
    for epoch in range(epochs):
        sampler = ElasticDistributedSampler(range(n), 1, 0, **options)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def test_the_epoch_moves_on_when_its_last_sample_is_counted():
    sampler, used = ElasticDistributedSampler(range(10), 1, 0), []
    for _ in range(3):
        for index in sampler:
            used.append(index)
            sampler.advance(1)
        assert sampler.state_dict()["consumed"] == 10
        assert len(sampler) == 10
        assert sampler.samples_left == 10
    assert used == [index for order in orders(10, 3) for index in order]
    assert sampler.epoch == 2


def test_the_epoch_moves_on_when_nobody_counts_and_its_last_sample_is_drawn():
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    next(iter(sampler))
    assert [list(sampler) for _ in range(3)] == orders(10, 3)
    late = ElasticDistributedSampler(range(10), 1, 0, start_index=6)
    assert [list(late) for _ in range(2)] == [orders(10, 1)[0][6:], orders(10, 2)[1]]


def test_where_epochs_are_named_none_begins_by_itself():
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.set_epoch(0)
    assert list(sampler) == list(sampler)
    sampler.advance(10)
    with pytest.warns(UserWarning, match="epoch 0 is empty"):
        assert list(sampler) == []
    assert len(sampler) == 0
    assert sampler.epoch == 0


def test_drawing_ends_no_epoch_for_who_counts():
    """A loader that prefetches the whole epoch, of which one batch is trained on before a stop."""
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    drawn = list(sampler)
    sampler.advance(4)
    assert list(sampler) == drawn[4:]
    assert list(sampler) == drawn[4:]


def test_who_draws_an_epoch_to_its_end_and_then_counts_in_the_next_is_told():
    """Else one rank that looks at the order would be an epoch ahead of the others."""
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    list(sampler)
    next(iter(sampler))
    with pytest.raises(ConfigError, match="epoch 1 began by itself"):
        sampler.advance(1)
    sampler.set_epoch(0)
    sampler.advance(1)
    assert sampler.position.consumed == 1


def test_a_loaded_state_forgets_what_was_drawn_and_counted_before_it():
    fresh = ElasticDistributedSampler(range(10), 1, 0)
    state = fresh.state_dict()
    drawn, guessed, counted = (ElasticDistributedSampler(range(10), 1, 0) for _ in range(3))
    list(drawn)
    drawn.load_state_dict(state)
    assert [list(drawn) for _ in range(2)] == orders(10, 2)
    list(guessed), next(iter(guessed))
    guessed.load_state_dict(state)
    guessed.advance(2)
    assert guessed.position.consumed == 2
    counted.advance(2)
    counted.load_state_dict(state)
    assert [list(counted) for _ in range(2)] == orders(10, 2)


def test_a_tail_that_is_dropped_ends_the_epoch():
    sampler = ElasticDistributedSampler(range(11), 3, 0, tail="drop")
    for _ in iter(sampler):
        sampler.advance(3)
    assert sampler.position.consumed == 9
    assert len(list(sampler)) == 3
    assert sampler.epoch == 1


def test_the_epoch_may_be_assigned_as_torchs():
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.epoch = 3
    assert sampler.state_dict()["epoch"] == 3
    assert list(sampler) == orders(10, 4)[3]


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_prefetches_does_not_move_the_state(workers):
    sampler = ElasticDistributedSampler(range(64), 2, 0, seed=1)
    sampler.set_epoch(0)
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
    sampler.set_epoch(0)
    loader = DataLoader(range(20), batch_sampler=BatchSampler(sampler, 3, drop_last=False))
    assert [index for batch in loader for index in batch.tolist()] == list(sampler)
    assert len(loader) == 3
