"""Samples in tar files are read exactly once through resizes and kills.

The tests write the files to the disk and to the memory file system of fsspec. The loaders are the
DataLoader of torch and the StatefulDataLoader of torchdata, with worker processes.
"""

from __future__ import annotations

import io
import itertools
import tarfile
import uuid
from collections import Counter

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler, ShardDataset
from elasticlib.data.batch_sampler import EmptyBatchCollator
from elasticlib.data.position import even_share
from elasticlib.errors import ConfigError, StateMismatchError

pytestmark = [
    # The loader forks its workers from a process with threads, which Python 3.12 warns about.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    # torchdata 0.11 calls functions that torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
SIZES = (5, 9, 0, 14, 7, 20)
TOTAL = sum(SIZES)


@pytest.fixture(params=["memory", "file"])
def urls(request, tmp_path):
    """Write tar files of SIZES samples. The content of a sample is its index in the dataset."""
    root = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}"
    numbers, shards = itertools.count(), []
    for shard, size in enumerate(SIZES):
        shards.append(f"{root}/shard-{shard}.tar")
        with fsspec.open(shards[-1], "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for _ in range(size):
                sample = str(next(numbers)).encode("ascii")
                member = tarfile.TarInfo(f"{sample.decode('ascii')}.txt")
                member.size = len(sample)
                tar.addfile(member, io.BytesIO(sample))
    return shards


def read(url, start, stop):
    with fsspec.open(url) as file, tarfile.open(fileobj=file) as tar:
        for member in itertools.islice(tar, start, stop):
            yield int(tar.extractfile(member).read())


def create_batches(dataset, world, rank, *, global_batch=8, seed=0):
    sampler = ElasticDistributedSampler(
        dataset, world, rank, order=dataset.shuffle_shards, seed=seed, tail="exact"
    )
    return ElasticBatchSampler(sampler, global_batch, contiguous=True)


def read_order(epoch):
    """Return the indices of all samples in the order of an epoch."""
    dataset = ShardDataset(SIZES, SIZES, read)
    sampler = ElasticDistributedSampler(dataset, 1, 0, order=dataset.shuffle_shards)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_continues_at_any_world_size_from_the_state_of_any_rank(urls, workers):
    """Each generation is killed one step after its last save, and the next one repeats the step."""
    dataset, used, state = ShardDataset(urls, SIZES, read), [], None
    for world, steps, saver in ((2, 2, 1), (3, 2, 0), (1, None, 0)):
        states, batches_of_ranks = [], []
        for rank in range(world):
            loader = StatefulDataLoader(
                dataset,
                batch_sampler=create_batches(dataset, world, rank),
                collate_fn=list,
                num_workers=workers,
            )
            if state:
                loader.load_state_dict(state)
            batches = iter(loader)
            batches_of_ranks.append(list(itertools.islice(batches, steps)))
            states.append(loader.state_dict())
            next(batches, None)
        used += [
            sample
            for step in zip(*batches_of_ranks, strict=True)
            for part in step
            for sample in part
        ]
        state = states[saver]
    assert used == read_order(0)
    assert Counter(used) == Counter(range(TOTAL))


@pytest.mark.parametrize("urls", ["memory"], indirect=True)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_follows_the_position_over_several_epochs(urls, persistent):
    dataset, state = ShardDataset(urls, SIZES, read), None
    used = {epoch: [] for epoch in range(3)}
    for world, steps in ((3, 5), (2, 6), (1, 99)):
        ranks = [create_batches(dataset, world, rank) for rank in range(world)]
        loaders = [
            DataLoader(
                dataset,
                batch_sampler=batches,
                collate_fn=EmptyBatchCollator(dataset),
                num_workers=1,
                persistent_workers=persistent,
            )
            for batches in ranks
        ]
        if state:
            for batches in ranks:
                batches.load_state_dict(state)
        num_steps = 0
        for epoch in range(ranks[0].position.epoch, 3):
            for batches in ranks:
                batches.set_epoch(epoch)
            for parts in zip(*loaders, strict=True):
                if num_steps == steps:
                    break
                used[epoch] += torch.cat(parts).tolist()
                num_steps += 1
                for batches in ranks:
                    batches.advance()
                state = ranks[-1].state_dict()
            if num_steps == steps:
                break
    assert used == {epoch: read_order(epoch) for epoch in range(3)}
    assert used[0] != used[1]


@pytest.mark.parametrize("order", [None, "shuffle_shards"])
def test_a_state_is_rejected_if_the_shards_have_another_order_and_not_if_they_were_moved(order):
    def create_sampler(paths):
        dataset = ShardDataset(paths, [10] * len(paths), read)
        chosen = order and getattr(dataset, order)
        return ElasticDistributedSampler(dataset, 1, 0, order=chosen, tail="exact")

    paths = ["/scratch/job7/c.tar", "/scratch/job7/a.tar", "/scratch/job7/b.tar"]
    saved = create_sampler(paths)
    saved.advance(10)
    for others in (sorted(paths), [*paths[:2], "/scratch/job7/d.tar"]):
        resumed = create_sampler(others)
        with pytest.raises(StateMismatchError, match=r"shards.*another order.*on_mismatch"):
            resumed.load_state_dict(saved.state_dict())
        assert resumed.position.consumed == 0
        resumed.load_state_dict(saved.state_dict(), on_mismatch="keep")
        assert resumed.position.consumed == 10
    moved = create_sampler([f"https://host/{path[-5:]}?token=x" for path in paths])
    moved.load_state_dict(saved.state_dict())
    assert moved.position == saved.position


def test_a_batch_opens_each_shard_once_and_reads_it_in_order():
    reads = []

    def read_recorded(shard, start, stop):
        reads.append((shard, start, stop))
        return range(stop - start)

    dataset = ShardDataset("abc", (4, 3, 5), read_recorded)
    sampler = ElasticDistributedSampler(dataset, 2, 1, shuffle=False, tail="exact")
    for indices in ElasticBatchSampler(sampler, 8, contiguous=True):
        dataset.__getitems__(indices)
    assert reads == [("b", 0, 3), ("c", 0, 1), ("c", 3, 5)]
    assert dataset[-1] == 0
    assert reads[-1] == ("c", 4, 5)
    with pytest.raises(IndexError):
        dataset[12]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.integers(0, 99))
def test_the_order_has_shard_after_shard_and_each_shard_from_its_start(sizes, seed):
    dataset = ShardDataset(sizes, sizes, read)
    sampler = ElasticDistributedSampler(dataset, 1, 0, order=dataset.shuffle_shards, seed=seed)
    drawn = list(sampler)
    first = [sum(sizes[:shard]) for shard in range(len(sizes))]
    rows = [list(range(at, at + size)) for at, size in zip(first, sizes, strict=True) if size]
    shards = []
    while drawn:
        (row,) = (row for row in rows if row[0] == drawn[0])
        assert drawn[: len(row)] == row
        shards.append(row)
        del drawn[: len(row)]
    assert sorted(shards) == rows


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 5))
def test_contiguous_shares_have_the_same_batches_and_sizes(n, batch, world):
    samplers = [ElasticDistributedSampler(range(n), world, rank) for rank in range(world)]
    order = list(ElasticDistributedSampler(range(n), 1, 0))
    ranks = [ElasticBatchSampler(s, batch, tail="exact", contiguous=True) for s in samplers]
    for step, shares in enumerate(zip(*ranks, strict=True)):
        sizes = [len(share) for share in shares]
        assert sizes == [
            len(even_share(sum(sizes), rank=r, world_size=world)) for r in range(world)
        ]
        assert sum(shares, []) == order[step * batch : (step + 1) * batch]  # noqa: RUF017 - short
        for batches in ranks:
            batches.advance()


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_a_range_of_samples_is_read_in_order_and_each_shard_once(sizes, data):
    reads = []

    def read_recorded(shard, start, stop):
        reads.append((shard, start, stop))
        return [(shard, sample) for sample in range(start, stop)]

    row = [(shard, sample) for shard, size in enumerate(sizes) for sample in range(size)]
    dataset = ShardDataset(range(len(sizes)), sizes, read_recorded)
    assert len(dataset) == len(row)
    start = data.draw(st.integers(0, len(row)))
    stop = data.draw(st.integers(start, len(row)))
    assert list(dataset.samples(start, stop)) == row[start:stop]
    assert len({shard for shard, _, _ in reads}) == len(reads)
    assert all(first < last for _, first, last in reads)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4)])
def test_samples_outside_the_dataset_are_rejected(start, stop):
    with pytest.raises(ConfigError, match=f"3 samples, got {start} and {stop}"):
        list(ShardDataset(["a"], [3], read).samples(start, stop))


@pytest.mark.parametrize("gives", [2, 4])
def test_a_shard_with_another_number_of_samples_is_an_error(gives):
    dataset = ShardDataset(["a.tar"], [9], lambda _shard, _start, _stop: range(gives))
    with pytest.raises(
        ConfigError, match=rf"'a.tar', 2, 5\) returned {gives} .* of 3: .* has 9 samples"
    ):
        dataset.__getitems__([2, 3, 4])


def test_invalid_shards_are_rejected():
    with pytest.raises(ConfigError, match="a size for each shard, got 1 for 2"):
        ShardDataset(["a", "b"], [1], read)
    with pytest.raises(ConfigError, match=r"a shard's size is 1\.5"):
        ShardDataset(["a"], [1.5], read)
    with pytest.raises(ConfigError, match=r"sizes.*got -2"):
        ShardDataset("ab", [1, -2], read)


def test_a_state_of_shards_of_other_sizes_is_rejected():
    state = create_batches(ShardDataset("abcde", (4, 3, 2, 5, 1), read), 2, 0).state_dict()
    create_batches(ShardDataset("abcde", (4, 3, 2, 5, 1), read), 3, 1).load_state_dict(state)
    with pytest.raises(
        StateMismatchError,
        match=r"order is 'custom \w+' in the state, this sampler has 'custom \w+'",
    ):
        create_batches(ShardDataset("abcde", (3, 4, 2, 5, 1), read), 2, 0).load_state_dict(state)
