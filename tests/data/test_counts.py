"""A sampler warns if `advance` counts other samples than were drawn, and not otherwise."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import ConfigError

# The loader forks its workers from a process with threads, which Python 3.12 warns about.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def create_sampler(n: int = 96, world: int = 2, **options: Any) -> ElasticDistributedSampler:
    return ElasticDistributedSampler(range(n), world, 0, **options)


def prefetch(items: Any, batch: int, lead: int) -> Iterator[list[int]]:
    """Yield batches as a loader does that draws `lead` batches ahead."""
    drawn: Iterator[list[int]] = iter(lambda: list(itertools.islice(source, batch)), [])
    source, queue = iter(items), deque[list[int]]()
    for indices in drawn:
        queue.append(indices)
        if len(queue) > lead:
            yield queue.popleft()
    yield from queue


@forks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("names_epochs", [True, False])
def test_a_count_without_the_world_size_is_reported_at_the_end_of_the_epoch(
    workers: int, names_epochs: bool
) -> None:
    sampler = create_sampler()
    loader = DataLoader(range(96), 2, sampler=sampler, num_workers=workers)
    if names_epochs:
        sampler.set_epoch(0)
    for _ in loader:
        sampler.advance(2)
    message = (
        r"advance\(\) counted 48 of the 96 samples of epoch 0 that all ranks drew together.*"
        r"advance\(batch_size \* world_size\)"
    )
    error = contextlib.nullcontext() if names_epochs else pytest.raises(ConfigError)
    with error, pytest.warns(UserWarning, match=message) as caught:
        sampler.set_epoch(1) if names_epochs else iter(sampler)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("batched", [False, True])
def test_a_count_that_is_twice_too_large_is_reported_when_it_exceeds_the_epoch(
    batched: bool,
) -> None:
    sampler = create_sampler()
    batches = ElasticBatchSampler(sampler, 8)
    sampler.set_epoch(0)

    def train() -> None:
        for _ in range(12):
            if batched:
                batches.advance()
                batches.advance()
            else:
                sampler.advance(16)

    with pytest.warns(UserWarning, match=r"counted \d+ samples of epoch 0, which has 96"):
        train()
    assert sampler.position.consumed == 96


RUNS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 60),
    "world": st.integers(1, 4),
    "batch": st.integers(1, 5),
    "lead": st.integers(0, 6),
    "stop": st.integers(1, 70),
    "tail": st.sampled_from(["pad", "drop", "exact"]),
}


@given(**RUNS, accumulate=st.integers(1, 3), drop_last=st.booleans())
def test_correct_counts_are_never_reported(
    *,
    n: int,
    world: int,
    batch: int,
    lead: int,
    accumulate: int,
    stop: int,
    tail: Any,
    drop_last: bool,
) -> None:
    """The number of prefetched batches and the step at which a rank stops are random."""
    sampler = create_sampler(n, world, tail=tail)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        uncounted = 0
        for step, indices in enumerate(prefetch(sampler, batch, lead)):
            if step == stop or (drop_last and len(indices) < batch):
                break
            uncounted += batch * world
            if (step + 1) % accumulate == 0:
                sampler.advance(uncounted)
                uncounted = 0


@given(**RUNS)
def test_correct_counts_of_a_batch_sampler_are_never_reported(
    *, n: int, world: int, batch: int, lead: int, stop: int, tail: Any
) -> None:
    batches = ElasticBatchSampler(create_sampler(n, world, tail=tail), batch)
    for epoch in range(2):
        batches.set_epoch(epoch)
        for step, _ in enumerate(prefetch(batches, 1, lead)):
            batches.advance()
            if step == stop:
                break


@forks
@torchdata
@pytest.mark.parametrize(
    ("make", "counts", "stop", "workers"),
    [
        (DataLoader, True, 22, 0),
        (DataLoader, True, None, 2),
        (DataLoader, False, 3, 0),
        (StatefulDataLoader, True, 3, 2),
        (StatefulDataLoader, True, None, 0),
        (StatefulDataLoader, False, 22, 2),
    ],
)
def test_correct_counts_of_loaders_are_not_reported(
    make: Callable[..., Any], counts: bool, stop: int | None, workers: int
) -> None:
    sampler = create_sampler()
    loader = make(range(96), 2, sampler=sampler, num_workers=workers)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in itertools.islice(loader, stop):
            if counts:
                sampler.advance(4)


@torchdata
def test_a_loader_that_resumes_from_its_state_is_not_reported() -> None:
    state, trained = None, 0
    for steps in (9, 20):
        sampler = create_sampler()
        loader = StatefulDataLoader(range(96), 2, sampler=sampler)
        if state is not None:
            loader.load_state_dict(state)
        for _ in itertools.islice(loader, steps):
            sampler.advance(4)
            trained += 1
        state = loader.state_dict()
    sampler.set_epoch(1)
    assert trained == 24


def test_an_epoch_that_is_resumed_at_its_end_is_not_reported() -> None:
    saved = create_sampler()
    saved.set_epoch(0)
    saved.advance(96)
    resumed = create_sampler()
    resumed.load_state_dict(saved.state_dict())
    lengths = []
    for epoch in range(resumed.epoch, 2):
        resumed.set_epoch(epoch)
        lengths.append(len(list(resumed)))
    assert lengths == [0, 48]


def test_an_order_that_is_read_before_training_is_not_reported() -> None:
    sampler = create_sampler()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for _ in range(0, len(order), 4):
            sampler.advance(8)


@pytest.mark.parametrize("sets_epochs", [True, False])
def test_a_script_that_never_counts_gets_one_warning_at_a_later_save(sets_epochs: bool) -> None:
    sampler = create_sampler()
    batches = iter(sampler) if not sets_epochs else None
    message = (
        r"samples were drawn .* between two saves, but advance\(\) was not called: .*advance\("
    )
    for save in range(4):
        if batches is None:
            sampler.set_epoch(save)
            assert len(list(sampler)) == 48
        else:
            assert len(list(itertools.islice(batches, 10))) == 10
        if save == 1:
            with pytest.warns(UserWarning, match=message) as caught:
                assert sampler.state_dict()["consumed"] == 0
            assert [warning.filename for warning in caught] == [__file__]
        else:
            sampler.state_dict()


def test_a_script_that_counts_or_saves_the_iterator_gets_no_warning() -> None:
    counted, kept, unused = create_sampler(), create_sampler(), create_sampler()
    counting, keeping = iter(counted), iter(kept)
    for _ in range(3):
        assert len(list(itertools.islice(counting, 5))) == 5
        counted.advance(10)
        assert len(list(itertools.islice(keeping, 5))) == 5
        keeping.state_dict()
        for sampler in (counted, kept, unused):
            sampler.state_dict()


def test_samples_that_a_loader_reads_before_an_early_save_are_not_reported() -> None:
    sampler = create_sampler()
    batches = iter(sampler)
    sampler.state_dict()
    assert len(list(itertools.islice(batches, 8))) == 8
    assert sampler.state_dict()["consumed"] == 0


def test_a_sampler_that_is_being_iterated_can_be_copied() -> None:
    sampler = create_sampler()
    sampler.set_epoch(0)
    for _ in itertools.islice(sampler, 3):
        sampler.advance(2)
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert list(other) == list(sampler)
