"""An epoch starts when set_epoch is called, also within a DataLoader of torch."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, DataLoader

from elasticlib import ElasticDistributedSampler
from elasticlib.errors import ConfigError

# The loader forks its workers from a process with threads, which Python 3.12 warns about.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_another_epoch_starts_at_its_first_sample_and_the_same_one_continues():
    sampler = ElasticDistributedSampler(range(10), 2, 0, seed=3, start_index=4)
    first = list(ElasticDistributedSampler(range(10), 2, 0, seed=3))
    sampler.set_epoch(0)
    assert list(sampler) == list(sampler) == first[2:]
    sampler.set_epoch(1)
    assert sampler.state_dict()["consumed"] == 0
    assert len(sampler) == 5
    assert list(sampler) != first
    with pytest.raises(ConfigError, match=r"epoch.*got -1"):
        sampler.set_epoch(-1)


def test_start_index_refers_to_the_first_epoch_that_is_set():
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
    orders_of_epochs = []
    for epoch in range(epochs):
        sampler = ElasticDistributedSampler(range(n), 1, 0, **options)
        sampler.set_epoch(epoch)
        orders_of_epochs.append(list(sampler))
    return orders_of_epochs


@pytest.mark.parametrize("sets_first_epoch", [True, False])
def test_a_script_that_counts_and_does_not_set_the_next_epoch_gets_an_error(sets_first_epoch):
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    if sets_first_epoch:
        sampler.set_epoch(0)
    for _ in sampler:
        sampler.advance(2)
    assert len(sampler) == sampler.samples_left == 0
    message = (
        r"epoch 0 is complete, because all of its 10 samples were counted.*call set_epoch\(1\)"
        if sets_first_epoch
        else r"epoch 0 is complete, because an iterator has yielded all of its.*call set_epoch\(1\)"
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            iter(sampler)
    sampler.set_epoch(1)
    assert len(list(sampler)) == 5


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_that_does_not_count_gets_the_same_error(workers):
    """The DistributedSampler of torch would silently repeat the order of the first epoch."""
    sampler = ElasticDistributedSampler(range(12), 2, 0)
    loader = DataLoader(range(12), 2, sampler=sampler, num_workers=workers)
    assert len(list(loader)) == 3
    with pytest.raises(ConfigError, match=r"epoch 0 is complete.* call set_epoch\(1\)"):
        list(loader)


def test_evaluation_in_the_order_of_the_dataset_needs_no_epochs():
    sampler = ElasticDistributedSampler(range(10), 2, 0, shuffle=False)
    assert [list(sampler) for _ in range(3)] == [[0, 2, 4, 6, 8]] * 3


def test_an_epoch_that_was_set_can_be_drawn_again():
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.set_epoch(1)
    order = list(sampler)
    assert order == orders(10, 2)[1]
    sampler.advance(4)
    assert list(sampler) == order[4:]  # A loader may have drawn the epoch before the job stopped.


def test_an_epoch_that_is_set_again_at_its_end_is_empty():
    """The step loop of in-place recovery sets the epoch in each group, also at its end."""
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.set_epoch(0)
    for _ in sampler:
        sampler.advance(1)
    sampler.set_epoch(0)
    assert list(sampler) == []


def test_a_state_at_the_end_of_an_epoch_needs_set_epoch():
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.set_epoch(2)
    sampler.advance(10)
    resumed = ElasticDistributedSampler(range(10), 1, 0)
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(ConfigError, match=r"epoch 2 is complete.* call set_epoch\(3\)"):
        iter(resumed)
    lengths = []
    for epoch in range(resumed.epoch, 4):
        resumed.set_epoch(epoch)
        lengths.append(len(list(resumed)))
    assert lengths == [0, 10]


def test_loading_a_state_resets_what_was_drawn_and_counted():
    state = ElasticDistributedSampler(range(10), 1, 0).state_dict()
    drawn, counted = (ElasticDistributedSampler(range(10), 1, 0) for _ in range(2))
    assert len(list(drawn)) == 10
    counted.advance(10)
    for sampler in (drawn, counted):
        sampler.load_state_dict(state)
        assert list(sampler) == orders(10, 1)[0]


def test_a_dropped_tail_completes_the_epoch():
    sampler = ElasticDistributedSampler(range(11), 3, 0, tail="drop")
    sampler.set_epoch(0)
    for _ in iter(sampler):
        sampler.advance(3)
    assert sampler.position.consumed == 9
    with pytest.raises(ConfigError, match="epoch 0 is complete"):
        iter(sampler)


def test_the_epoch_can_be_assigned_as_in_torch():
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
def test_persistent_workers_receive_the_remaining_samples_of_each_epoch():
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


def test_a_batch_sampler_of_torch_has_the_same_samples_and_length():
    sampler = ElasticDistributedSampler(range(20), 2, 1, seed=1, start_index=6)
    sampler.set_epoch(0)
    loader = DataLoader(range(20), batch_sampler=BatchSampler(sampler, 3, drop_last=False))
    assert [index for batch in loader for index in batch.tolist()] == list(sampler)
    assert len(loader) == 3
