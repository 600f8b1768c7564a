"""An epoch starts when set_epoch is called, also within a DataLoader of torch."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from torch.utils.data import BatchSampler, DataLoader

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler
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


def expect_next_epoch(epoch):
    message = rf"epoch {epoch - 1} is complete, and set_epoch was not called: .* epoch {epoch}\."
    return pytest.warns(UserWarning, match=message)


@pytest.mark.parametrize("sets_first_epoch", [True, False])
@pytest.mark.parametrize("counts", [True, False])
def test_a_second_iterator_without_set_epoch_starts_the_next_epoch(sets_first_epoch, counts):
    """torch's sampler repeats the order of the first epoch. A warning is issued once."""
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    if sets_first_epoch:
        sampler.set_epoch(0)

    def train():
        used = []
        for index in sampler:
            used.append(index)
            if counts:
                sampler.advance(2)
        return used

    first = train()
    if sets_first_epoch and not counts:
        assert train() == first  # An epoch that was set is drawn as often as the script likes.
        return
    with expect_next_epoch(1) as caught:
        second = train()
    assert [warning.filename for warning in caught] == [__file__]
    assert [first, second, train()] == [order[0::2] for order in orders(10, 3)]


@forks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("counts", [True, False])
def test_a_loader_without_set_epoch_starts_the_next_epoch(workers, drop_last, counts):
    sampler = ElasticDistributedSampler(range(14), 2, 0)
    loader = DataLoader(range(14), 2, sampler=sampler, num_workers=workers, drop_last=drop_last)
    epochs = []
    for expected in (contextlib.nullcontext(), expect_next_epoch(1), contextlib.nullcontext()):
        with expected:
            epochs.append([])
            for batch in loader:
                epochs[-1] += batch.tolist()
                if counts:
                    sampler.advance(4)
    last = 6 if drop_last else 7
    assert epochs == [order[0::2][:last] for order in orders(14, 3)]


@forks
def test_the_next_epoch_does_not_leave_out_samples_that_were_drawn_and_not_counted():
    """A loader with workers reads the whole epoch, and the script leaves the loop early."""
    sampler = ElasticDistributedSampler(range(16), 2, 0)
    loader = DataLoader(range(16), 2, sampler=sampler, num_workers=2)
    for _ in itertools.islice(loader, 2):
        sampler.advance(4)
    message = r"epoch 0 were drawn, but 8 of them were not counted.*set_epoch\(0\).*set_epoch\(1\)"
    with pytest.raises(ConfigError, match=message):
        list(loader)
    sampler.set_epoch(0)
    assert [index for batch in loader for index in batch.tolist()] == orders(16, 1)[0][8::2]


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


def test_a_state_at_the_end_of_an_epoch_continues_with_the_next_one():
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.set_epoch(2)
    sampler.advance(10)
    resumed, explicit = (ElasticDistributedSampler(range(10), 1, 0) for _ in range(2))
    resumed.load_state_dict(sampler.state_dict())
    with expect_next_epoch(3):
        assert list(resumed) == orders(10, 4)[3]
    explicit.load_state_dict(sampler.state_dict())
    lengths = []
    for epoch in range(explicit.epoch, 4):
        explicit.set_epoch(epoch)
        lengths.append(len(list(explicit)))
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
    with expect_next_epoch(1):
        assert len(list(sampler)) == 3


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


def test_the_length_of_an_epoch_does_not_depend_on_the_position():
    """The lengths of the sampler and of its loader are what is left of a resumed epoch."""
    for world, left, whole in ((1, 14, 20), (3, 5, 7)):
        sampler = ElasticDistributedSampler(range(20), world, 0)
        batches = ElasticBatchSampler(sampler, 8)
        loader = DataLoader(range(20), 2, sampler=sampler)
        sampler.advance(6)
        assert (len(sampler), len(loader)) == (left, -(-left // 2))
        assert sampler.epoch_length == whole
        assert (len(batches), batches.epoch_length) == (2, 3)
    with pytest.raises(ConfigError, match=r"need count >= 0, got -1"):
        sampler.epochs(-1, loader)
