"""The sampler: each sample is used once at any sequence of world sizes."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from round_robin import interleave
from torch.utils.data import DistributedSampler

from elasticlib import CheckpointManager, ElasticDistributedSampler
from elasticlib.data.permutation import Permutation
from elasticlib.errors import ConfigError, StateMismatchError

worlds = st.integers(1, 7)
lengths = st.integers(0, 80)


def randperm(seed, epoch):
    """Return a random order of `randperm.length` samples, as a function of the user does."""
    return torch.randperm(randperm.length, generator=torch.Generator().manual_seed(seed + epoch))


def create_ranks(n, world, **options):
    return [ElasticDistributedSampler(range(n), world, rank, **options) for rank in range(world)]


def read_steps(samplers, batch):
    """Yield the samples that all ranks use in each step, in the order of the epoch."""
    left = [list(sampler) for sampler in samplers]
    for k in range(0, max(len(indices) for indices in left), batch):
        yield interleave(indices[k : k + batch] for indices in left)


@given(
    lengths,
    st.integers(0, 99),
    st.sampled_from(({}, {"order": randperm}, {"shuffle": False})),
    st.lists(st.tuples(worlds, st.integers(0, 4), st.integers(1, 5)), max_size=5),
    worlds,
)
def test_every_sample_is_used_once_through_resizes(n, seed, shuffle, segments, last):
    options = {"seed": seed, "tail": "exact", **shuffle}
    randperm.length = n
    undisturbed = list(ElasticDistributedSampler(range(n), 1, 0, **options))
    used, state = [], ElasticDistributedSampler(range(n), 1, 0, **options).state_dict()
    for world, steps, batch in [*segments, (last, n + 1, 3)]:
        samplers = create_ranks(n, world, **options)
        for sampler in samplers:
            sampler.load_state_dict(state)
            sampler.set_epoch(0)
        for _, indices in zip(range(steps), read_steps(samplers, batch), strict=False):
            used += indices
            for sampler in samplers:
                sampler.advance(batch * world)
        state = samplers[-1].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
        assert used == undisturbed[: state["consumed"]]
    assert Counter(used) == Counter(range(n))
    assert state["consumed"] == n


@given(lengths, worlds, st.integers(0, 9), st.sampled_from(("pad", "drop", "exact")))
def test_an_epochs_order_is_one_permutation_at_any_world_size(n, world, epoch, tail):
    order = ElasticDistributedSampler(range(n), 1, 0, tail="exact")
    order.set_epoch(epoch)
    order = list(order)
    assert sorted(order) == list(range(n))
    ranks = []
    for sampler in create_ranks(n, world, tail=tail):
        sampler.set_epoch(epoch)
        left = sampler.samples_left
        num_remaining = len(range(sampler.rank, left, world))
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1]) >= num_remaining
        assert ranks[-1][:num_remaining] == order[sampler.rank : left : world]
    rounds = interleave(ranks)
    assert left == {"pad": n, "exact": n, "drop": n - n % world}[tail]
    assert rounds[:left] == order[:left]
    assert rounds[left:] == (order * world)[: len(rounds) - left]


@given(st.integers(1, 80), worlds, st.integers(0, 80), st.sampled_from(("pad", "drop", "exact")))
def test_a_tail_after_a_resume_has_fewer_samples_than_ranks(n, world, start, tail):
    start = min(start, n)
    samplers = create_ranks(n, world, start_index=start, tail=tail)
    for sampler in samplers:
        sampler.set_epoch(0)
    order = list(ElasticDistributedSampler(range(n), 1, 0))
    left = order[start:]
    used = interleave([list(sampler) for sampler in samplers])
    repeats = used[len(left) :]
    assert used[: len(left)] == left[: len(used)]
    assert repeats == (order * world)[: len(repeats)]
    if tail == "exact":
        assert len(used) == len(left)
    else:
        assert len(used) % world == 0
        assert abs(len(used) - len(left)) < world
        assert bool(repeats) <= (tail == "pad")


def test_each_sample_is_used_once_after_resumes_at_other_world_sizes():
    """The ElasticDistributedSampler of torch repeats 228 samples here and omits 228 others."""
    used, state = Counter(), None
    for world, steps, batch in ((4, 10, 10), (3, 17, 11), (7, 1000, 5)):
        samplers = create_ranks(1000, world, tail="exact")
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
def test_fewer_samples_than_ranks_are_padded_dropped_or_used_once(n, shuffle):
    counts = {
        tail: [len(list(s)) for s in create_ranks(n, 3, shuffle=shuffle, tail=tail)]
        for tail in ("pad", "drop", "exact")
    }
    assert counts["pad"] == ([1, 1, 1] if n else [0, 0, 0])
    assert counts["drop"] == [0, 0, 0]
    assert sorted(counts["exact"], reverse=True) == [int(rank < n) for rank in range(3)]


def test_a_long_epoch_is_the_same_in_chunks_and_at_once():
    """The sampler draws chunks of 32 to 16384 positions. The end of each rank is padding."""
    n = 100_001
    order = Permutation(n, seed=2)[torch.arange(n)].tolist()
    ranks = [list(sampler) for sampler in create_ranks(n, 2, seed=2)]
    assert ranks == [order[0::2], [*order[1::2], order[0]]]


def test_iterating_does_not_move_the_position():
    sampler = ElasticDistributedSampler(range(10), 1, 0, shuffle=False)
    running = iter(sampler)
    assert [next(running), next(running)] == [0, 1]
    assert sampler.state_dict()["consumed"] == 0
    sampler.advance(4)
    assert next(running) == 2
    assert list(sampler) == [4, 5, 6, 7, 8, 9]
    assert len(sampler) == 6


def test_a_resume_followed_by_set_epoch_keeps_the_position():
    before = ElasticDistributedSampler(range(20), 2, 1, seed=5)
    before.set_epoch(3)
    before.advance(8)
    after = ElasticDistributedSampler(range(20), 2, 1, seed=5)
    after.load_state_dict(before.state_dict())
    after.set_epoch(after.epoch)
    assert after.epoch == 3
    assert list(after) == list(before)


def test_advance_stops_at_the_end_and_rejects_negative_counts():
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    sampler.set_epoch(0)
    sampler.advance(8)
    sampler.advance(8)
    assert sampler.state_dict()["consumed"] == 10
    with pytest.raises(ConfigError, match=r"count.*got -2"):
        sampler.advance(-2)


def test_integers_of_any_type_are_accepted_and_other_numbers_are_rejected():
    sampler = ElasticDistributedSampler(range(10), 2, 0, seed=torch.tensor(1), start_index=True)
    sampler.set_epoch(torch.tensor([3]))
    sampler.advance(torch.tensor(4))
    state = sampler.state_dict()
    assert state == {**state, "seed": 1, "epoch": 3, "consumed": 5}
    ElasticDistributedSampler(range(10), 2, 0, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"count is 2\.0"):
        sampler.advance(2.0)
    with pytest.raises(ConfigError, match=r"epoch is 4\.0"):
        sampler.set_epoch(4.0)
    assert sampler.state_dict() == state


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": 11}, "length is 11.*10"),
        ({"consumed": 12}, "consumed.*got 12 and 10"),
    ],
)
def test_a_state_that_does_not_match_is_rejected_without_a_change(change, named):
    sampler = ElasticDistributedSampler(range(10), 2, 0, start_index=2)
    before = sampler.state_dict()
    with pytest.raises(StateMismatchError, match=named):
        sampler.load_state_dict({**before, "epoch": 7, **change})
    assert sampler.state_dict() == before


def test_a_larger_dataset_restarts_its_epoch_or_keeps_the_count():
    state = {**ElasticDistributedSampler(range(10), 2, 0, start_index=6).state_dict(), "epoch": 2}
    grown = ElasticDistributedSampler(range(14), 2, 0)
    grown.load_state_dict(state, on_mismatch="restart")
    assert (grown.epoch, len(grown)) == (2, 7)
    grown.load_state_dict(state, on_mismatch="keep")
    assert (grown.epoch, len(grown)) == (2, 4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"order": lambda _seed, _epoch: [], "shuffle": False}, "leave shuffle out"),
        ({"start_index": 11}, "start_index.*10.*got 11"),
        ({"start_index": -1}, "start_index.*got -1"),
        ({"start_index": 1.0}, "start_index is 1.0"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"tail": "cut"}, "tail is 'cut'"),
        ({"tail": ""}, "tail is ''"),
        ({"tail": "pad", "drop_last": True}, "drop_last=True.*tail='pad'"),
    ],
)
def test_invalid_arguments_are_rejected(options, named):
    with pytest.raises(ConfigError, match=named):
        ElasticDistributedSampler(range(10), 2, 0, **options)


def test_positional_arguments_are_those_of_torch():
    sampler = ElasticDistributedSampler(range(10), 4, 1, False, 7, True)
    assert isinstance(sampler, DistributedSampler)
    assert sampler.state_dict()["seed"] == 7
    assert list(sampler) == [1, 5]
    with pytest.raises(ValueError, match="Invalid rank 4"):
        ElasticDistributedSampler(range(10), 4, 4)


class LargeDataset:
    def __init__(self, length=2**62):
        self.length = length

    def __len__(self):
        return self.length


def test_too_many_samples_are_rejected_only_if_they_are_shuffled():
    with pytest.raises(ConfigError, match=f"2..62.*got {2**62 + 1}"):
        ElasticDistributedSampler(LargeDataset(2**62 + 1), 1, 0)
    sampler = ElasticDistributedSampler(LargeDataset(2**62 + 1), 1, 0, shuffle=False)
    assert next(iter(sampler)) == 0


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_of_2_to_the_62_samples_needs_no_list(shuffle):
    """A list of all samples would exceed the memory, and a loop the timeout of the test."""
    sampler = ElasticDistributedSampler(LargeDataset(), 8, 7, shuffle=shuffle, start_index=2**61)
    next(iter(sampler))  # The first call may initialize parts of torch.
    tracemalloc.start()
    try:
        drawn = iter(sampler)
        next(drawn)
        first = tracemalloc.get_traced_memory()[1]
        assert sum(1 for _ in itertools.islice(drawn, 50_000)) == 50_000
        later = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first < 50_000
    assert later < 500_000
    assert len(sampler) == 2**58
    assert drawn.state_dict()["consumed"] == 2**61 + 8 * 50_001


def read_peak_memory():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def test_drawing_more_samples_takes_no_more_memory():
    """The test measures the process, because tracemalloc does not see the memory of tensors."""
    drawn = iter(ElasticDistributedSampler(LargeDataset(), 1, 0))
    next(drawn)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = read_peak_memory()
    assert sum(1 for _ in itertools.islice(drawn, 2_000_000)) == 2_000_000
    assert read_peak_memory() - before < 8_000_000


def test_world_size_and_rank_are_required_without_a_process_group():
    with pytest.raises(
        ValueError, match=r"process group has not been initialized.*or pass num_replicas=1, rank=0"
    ):
        ElasticDistributedSampler(range(10))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sampler = ElasticDistributedSampler(range(10), shuffle=False)
    finally:
        dist.destroy_process_group()
    assert list(sampler) == list(range(10))


def test_a_checkpoint_of_a_changed_dataset_is_restored_without_the_sampler(tmp_path):
    """docs/guide/checkpoints.md describes this for a sampler that rejects its state."""
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.advance(4)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(2), "sampler": sampler})
    grown = ElasticDistributedSampler(range(12), 1, 0)
    rest = {"weight": torch.zeros(2)}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(StateMismatchError, match=r"length is 10.*12"):
            manager.restore({"before": {}, "sampler": grown}, strict=False)
        with pytest.raises(StateMismatchError, match="the state has no 'sampler'"):
            manager.restore(rest)
        assert rest["weight"].tolist() == [0, 0]
        step = manager.restore(rest, strict=False).step
        grown.load_state_dict(manager.load(step)["sampler"], on_mismatch="keep")
    assert rest["weight"].tolist() == [1, 1]
    assert grown.position.consumed == 4


@pytest.mark.parametrize("start_index", [0, 1200, None, "True"])
def test_start_index_as_the_fourth_argument_is_rejected(start_index):
    with pytest.raises(ConfigError, match=r"shuffle is .* True or False: .* start_index=\.\.\."):
        ElasticDistributedSampler(range(2000), 2, 0, start_index)
