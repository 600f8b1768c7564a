"""Iterable data: ranges of shards, dealt by the sampler's rule to ranks and loader workers."""

from __future__ import annotations

import itertools

import pytest
from dealing import Stream, in_turn
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elasticlib import ElasticDistributedSampler, Position, ShardDataset, deal_ranges
from elasticlib.data.deal import advance
from elasticlib.errors import ConfigError

worlds, few = st.integers(1, 5), st.integers(1, 4)


def ranges_of_rank(position, batch, workers, **rank):
    """What the loader hands out: its workers' ranges in turn."""
    readers = [
        deal_ranges(position, batch=batch, worker=worker, workers=workers, **rank)
        for worker in range(workers)
    ]
    return in_turn(readers)


def steps_of(position, world, batch, workers, tail):
    """The places that each step of the whole job uses."""
    ranks = [
        ranges_of_rank(position, batch, workers, rank=rank, world_size=world, tail=tail)
        for rank in range(world)
    ]
    turns = itertools.zip_longest(*ranks, fillvalue=range(0))
    return [[place for part in turn for place in part] for turn in turns]


@given(
    st.integers(0, 60), st.lists(st.tuples(worlds, few, few, st.integers(0, 5)), max_size=5), worlds
)
def test_every_place_is_read_once_and_in_order_whatever_worlds_and_workers(n, segments, last):
    position, used = Position(0, 0, 0, n, "none"), []
    for world, batch, workers, count in [*segments, (last, 3, 2, n)]:
        for places in steps_of(position, world, batch, workers, "exact")[:count]:
            used += places
            position = advance(position, batch * world)
            assert used == list(range(position.consumed))
    assert used == list(range(n))


@given(st.integers(0, 60), st.integers(0, 60), worlds, few, few)
def test_a_padded_end_repeats_less_than_a_step_and_a_dropped_one_lacks_less(
    n, consumed, world, batch, workers
):
    position = Position(0, 0, min(consumed, n), n, "none")
    left, step = list(range(position.consumed, n)), world * batch
    padded = sum(steps_of(position, world, batch, workers, "pad"), [])  # noqa: RUF017 - short
    dropped = sum(steps_of(position, world, batch, workers, "drop"), [])  # noqa: RUF017 - short
    assert padded[: len(left)] == left
    assert dropped == left[: len(dropped)]
    assert len(padded) % step == len(dropped) % step == 0
    assert max(len(padded) - len(left), len(left) - len(dropped)) < step


def pairs_of(shards, sizes):
    """A dataset of (shard, sample) pairs."""

    def read(shard, start, stop):
        return [(shard, sample) for sample in range(start, stop)]

    return ShardDataset(shards, sizes, read)


def spans_of(sizes, places):
    """What a range of the row is made of: the number of a shard, and samples of it."""
    asked = []

    def read(*span):
        asked.append(span)
        return range(*span[1:])

    list(ShardDataset(range(len(sizes)), sizes, read).samples(places))
    return asked


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_a_range_is_read_as_the_samples_of_the_row_in_its_order(sizes, data):
    row = [(shard, sample) for shard, size in enumerate(sizes) for sample in range(size)]
    dataset = pairs_of(range(len(sizes)), sizes)
    assert len(dataset) == len(row)
    start = data.draw(st.integers(0, len(row)))
    stop = data.draw(st.integers(start, 2 * len(row)))
    assert list(dataset.samples(range(start, stop))) == (row * 2)[start:stop]
    assert all(first < last for _, first, last in spans_of(sizes, range(start, stop)))


def test_a_shard_is_read_at_one_go():
    assert spans_of([3, 0, 4], range(1, 5)) == [(0, 1, 3), (2, 0, 2)]
    assert spans_of([4, 3], range(3, 8)) == [(0, 3, 4), (1, 0, 3), (0, 0, 1)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_read_an_epoch_from_where_they_were_started_so_they_must_not_persist():
    """As deal_ranges warns of: workers that live on know nothing of the job's later positions."""
    text, read = pairs_of(range(5), (5, 9, 2, 14, 7)), {}
    for persistent in (False, True):
        sampler = ElasticDistributedSampler(text, 1, 0, start_index=20)
        loader = DataLoader(
            Stream(text, sampler, 4), 4, num_workers=1, persistent_workers=persistent, timeout=60
        )
        read[persistent] = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            read[persistent].append(sum(len(shard) for shard, _ in loader))
    assert read == {False: [17, 37], True: [17, 17]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 2}, "rank.*got 2 and 2"),
        ({"batch": 0}, "batch.*got 0, 0 and 1"),
        ({"worker": 1}, "worker.*got 1, 1 and 1"),
        ({"tail": "cut"}, "tail is 'cut'"),
    ],
)
def test_a_reader_that_cannot_be_is_refused_at_once(change, named):
    with pytest.raises(ConfigError, match=named):
        deal_ranges(Position(0, 0, 0, 9), **{"rank": 0, "world_size": 2, "batch": 1, **change})


def test_a_shard_of_less_than_no_samples_is_refused():
    with pytest.raises(ConfigError, match=r"sizes.*got -2"):
        pairs_of("ab", [1, -2])


@pytest.mark.parametrize("places", [range(0, 9, 2), range(-1, 2)])
def test_places_outside_the_row_are_refused(places):
    with pytest.raises(ConfigError, match="3 samples"):
        list(pairs_of("a", [3]).samples(places))
    with pytest.raises(ConfigError, match="0 samples"):
        list(pairs_of("", []).samples(range(1)))
