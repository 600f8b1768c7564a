"""A StatefulDataLoader of torchdata continues after the batches that it returned."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler
from elasticlib.errors import StateMismatchError

pytestmark = [
    # The loader forks its workers from a process with threads, which Python 3.12 warns about.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    # torchdata 0.11 calls functions that torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
N, BATCH = 83, 4


def create_sampler_loader(world, rank, workers=0, every=1, **options):
    """Return the loader of a rank with local batches of BATCH samples, and its sampler."""
    sampler = ElasticDistributedSampler(range(N), world, rank, tail="exact", **options)
    common = {"num_workers": workers, "snapshot_every_n_steps": every}
    return StatefulDataLoader(range(N), BATCH, sampler=sampler, **common), sampler


def create_batch_sampler_loader(world, rank, workers=0, every=1, **options):
    """Return the loader of a rank with its part of global batches of 2 * BATCH, and its sampler."""
    sampler = ElasticDistributedSampler(range(N), world, rank, tail="exact", **options)
    batches = ElasticBatchSampler(sampler, 2 * BATCH)
    common = {"num_workers": workers, "snapshot_every_n_steps": every, "collate_fn": list}
    return StatefulDataLoader(range(N), batch_sampler=batches, **common), sampler


def draw(loader, steps=None):
    """Return the indices of each of the next `steps` batches, and the state of the loader."""
    batches = [[int(index) for index in batch] for batch in itertools.islice(loader, steps)]
    return batches, loader.state_dict()


def resume(state, make=create_sampler_loader, *args):
    """Return a loader that continues from a state, and its sampler."""
    loader, sampler = make(*(args or (1, 0)))
    loader.load_state_dict(state)
    return loader, sampler


def read_order(epoch=0):
    sampler = ElasticDistributedSampler(range(N), 1, 0)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(
    ("make", "workers", "every"),
    [(create_sampler_loader, 0, 1), (create_batch_sampler_loader, 2, 3)],
)
def test_a_loader_continues_after_the_batches_that_it_returned(make, workers, every):
    all_batches, _ = draw(make(2, 0)[0])
    loader, sampler = make(2, 0, workers, every)
    before, state = draw(loader, 4)
    assert sampler.position.consumed == 0  # The script has not counted.
    resumed, _ = resume(state, make, 2, 0, workers, every)
    again, later = draw(resumed, 3)
    third, _ = resume(later, make, 2, 0, workers, every)
    assert before + again + draw(third)[0] == all_batches


@pytest.mark.parametrize(
    ("make", "workers", "every"),
    [
        (create_sampler_loader, 2, 1),
        (create_batch_sampler_loader, 0, 1),
        (create_batch_sampler_loader, 2, 3),
    ],
)
def test_any_world_size_continues_from_the_state_of_any_rank(make, workers, every):
    used, state = Counter(), None
    for world, steps, saver in ((3, 2, 1), (1, 4, 0), (2, None, 1)):
        states = []
        for rank in range(world):
            loader, _ = make(world, rank, workers, every)
            if state:
                loader.load_state_dict(state)
            batches, loader_state = draw(loader, steps)
            used.update(index for batch in batches for index in batch)
            states.append(loader_state)
        state = states[saver]
    assert used == Counter(range(N))


@pytest.mark.parametrize("steps", [3, 21, None])
@pytest.mark.parametrize(
    ("make", "workers"), [(create_sampler_loader, 0), (create_batch_sampler_loader, 2)]
)
def test_later_epochs_are_complete_after_a_resume_at_any_step(make, workers, steps):
    """A script sets the saved epoch again, which is empty if all of its samples were used."""
    loader, sampler = make(1, 0, workers)
    sampler.set_epoch(0)
    first, state = draw(loader, steps)
    resumed, sampler = resume(state, make, 1, 0, workers)
    used = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches, state = draw(resumed)
        used.append([index for batch in batches for index in batch])
    assert [index for batch in first for index in batch] + used[0] == read_order(0)
    assert used[1:] == [read_order(1), read_order(2)]


@pytest.mark.parametrize(
    ("make", "workers", "steps"),
    [
        (create_sampler_loader, 0, 3),
        (create_batch_sampler_loader, 0, None),
        (create_sampler_loader, 2, None),
    ],
)
def test_a_missing_set_epoch_starts_the_next_epoch_after_a_resume(make, workers, steps):
    loader, sampler = make(1, 0, workers)
    sampler.set_epoch(0)
    _, state = draw(loader, steps)
    resumed, sampler = resume(state, make, 1, 0, workers)
    with pytest.warns(UserWarning, match=r"epoch 0 is complete, and set_epoch was not called"):
        epochs = [draw(resumed)[0], draw(resumed)[0]]
    used = [[index for batch in batches for index in batch] for batches in epochs]
    expected = [read_order(1), read_order(2)] if steps is None else [read_order(0), read_order(1)]
    assert used == [expected[0][-len(used[0]) :], expected[1]]


@pytest.mark.parametrize("steps", [None, 21])
def test_the_epoch_after_a_finished_loaded_one_starts_at_its_first_sample(steps):
    """The epoch has 21 batches. The loader may or may not know that it is at the end."""
    loader, _ = create_sampler_loader(1, 0)
    _, state = draw(loader, steps)
    resumed, sampler = resume(state)
    sampler.set_epoch(1)
    assert [index for batch in draw(resumed)[0] for index in batch] == read_order(1)


def test_setting_another_epoch_within_a_loaded_one_is_rejected():
    loader, _ = create_sampler_loader(1, 0)
    _, state = draw(loader, 3)
    resumed, sampler = resume(state)
    sampler.set_epoch(1)
    with pytest.raises(StateMismatchError, match="12 of 83"):
        next(iter(resumed))
    resumed, sampler = resume(state)
    sampler.set_epoch(0)
    assert [index for batch in draw(resumed)[0] for index in batch] == read_order(0)[12:]


@pytest.mark.parametrize("epoch", [0, 3])
def test_setting_an_epoch_that_does_not_follow_a_loaded_one_is_rejected(epoch):
    """The job would repeat epoch 0 or omit epoch 2."""
    loader, sampler = create_sampler_loader(1, 0)
    sampler.set_epoch(1)
    _, state = draw(loader)
    resumed, sampler = resume(state)
    sampler.set_epoch(epoch)
    message = rf"epoch is 1 .* 83 of 83 .* set_epoch was called with {epoch}: call set_epoch\(2\)"
    with pytest.raises(StateMismatchError, match=message):
        next(iter(resumed))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_loader_overrides_other_counts(workers):
    """The state of the sampler in it is older, because the loader prefetches batches."""
    loader, sampler = create_sampler_loader(1, 0, workers)
    for step, _ in enumerate(loader):
        sampler.advance(BATCH)
        if step == 2:
            break
    state = loader.state_dict()
    resumed, sampler = resume(state, create_sampler_loader, 1, 0, workers)
    batch = next(iter(resumed))
    assert batch.tolist() == read_order()[12:16]
    assert sampler.position.consumed == 12
    sampler.advance(BATCH)
    assert sampler.position.consumed == 16


def test_the_state_of_a_loader_of_other_data_is_rejected():
    _, state = draw(create_sampler_loader(1, 0)[0], 3)
    other, _ = create_sampler_loader(1, 0, seed=1)
    other.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"seed is 0.*1"):
        next(iter(other))


def test_only_a_running_iterator_can_load_a_state():
    sampler = ElasticDistributedSampler(range(N), 2, 1)
    running = iter(sampler)
    next(running)
    state = running.state_dict()
    assert state["consumed"] == 2
    ahead = list(itertools.islice(running, 5))
    running.load_state_dict(state)
    assert list(itertools.islice(running, 5)) == ahead
    list(running)
    with pytest.raises(StateMismatchError, match="is finished"):
        running.load_state_dict(state)
