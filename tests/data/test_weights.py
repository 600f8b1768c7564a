"""Weighted draws without replacement: frequencies, exactly once, and the same at any world size."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from dealing import in_turn
from hypothesis import given
from hypothesis import strategies as st

from elasticlib import ElasticBatchSampler, ElasticDistributedSampler, permutation
from elasticlib.data.permutation import LARGEST, WeightedOrder, minus_log
from elasticlib.errors import ConfigError, StateMismatch

LIMIT = 4.5
"""Standard deviations that a frequency may be off by; see test_shuffle.py."""

weights = st.lists(
    st.sampled_from((0.0, 0.001, 1.0, 1.0, 2.5, 1e6)) | st.floats(1e-3, 1e3),
    min_size=1,
    max_size=40,
).filter(any)


def draws(of, size=None, *, epoch=0, world=1, rank=0, **options):
    sampler = ElasticDistributedSampler(
        range(len(of)), world, rank, weights=of, epoch_size=size, tail="exact", **options
    )
    sampler.set_epoch(epoch)
    return list(sampler)


@given(weights, st.integers(0, 99), st.data())
def test_each_sample_is_drawn_once_at_most_and_none_of_weight_0(of, seed, data):
    positive = {index for index, weight in enumerate(of) if weight}
    drawn = draws(of, seed=seed)
    assert sorted(drawn) == sorted(positive)
    size = data.draw(st.integers(1, len(positive)))
    assert draws(of, size, seed=seed) == drawn[:size]


@pytest.mark.filterwarnings("ignore:an epoch was drawn to its end:UserWarning")
@given(
    weights,
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=4),
    st.integers(1, 5),
)
def test_resumed_at_other_world_sizes_the_union_is_the_same(of, segments, last):
    whole, used, state = draws(of), [], None
    for world, steps in [*segments, (last, len(of))]:
        samplers = [
            ElasticDistributedSampler(range(len(of)), world, rank, weights=of, tail="exact")
            for rank in range(world)
        ]
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
            sampler.set_epoch(0)
        used += in_turn(list(sampler)[:steps] for sampler in samplers)
        for sampler in samplers:
            sampler.advance(steps * world)
        state = samplers[-1].state_dict()
        assert used == whole[: state["consumed"]]
    assert used == whole


def test_global_batches_are_of_the_same_draws_at_any_world_size():
    of = [1.0 + k % 7 for k in range(50)]
    for world in (1, 3):
        steps = zip(
            *(
                ElasticBatchSampler(
                    ElasticDistributedSampler(range(50), world, rank, weights=of, tail="exact"), 8
                )
                for rank in range(world)
            ),
            strict=True,
        )
        assert [index for shares in steps for index in in_turn(shares)] == draws(of)


def successive(of, count):
    """The exact chance of each ordered draw of `count` of the samples."""
    total = sum(of)
    for chosen in itertools.permutations(range(len(of)), count):
        chance, left = Fraction(1), Fraction(total)
        for index in chosen:
            chance *= Fraction(of[index]) / left
            left -= Fraction(of[index])
        yield chosen, float(chance)


@pytest.mark.parametrize(
    ("key", "of"), [("seed", [1, 2, 3, 4]), ("seed", [1, 1, 10, 100]), ("epoch", [1, 2, 3, 4])]
)
def test_over_seeds_and_epochs_draws_are_as_often_as_the_weights_say(of, key):
    """All ordered pairs, so each sample's inclusion among two, and what follows what."""
    rounds = 2000
    orders = (WeightedOrder(torch.tensor(of).double(), 2, **{"seed": 0, "epoch": 0, key: k})
              for k in range(rounds))  # fmt: skip
    found = Counter(tuple(order(torch.arange(2)).tolist()) for order in orders)
    for pair, chance in successive(of, 2):
        off = found[pair] - rounds * chance
        assert abs(off) < LIMIT * math.sqrt(rounds * chance * (1 - chance)) + 1, pair


def test_in_a_long_order_the_first_part_has_its_share_of_each_weight():
    """A third of the samples has 1, 2 or 8 each; how many of them ring until a time is binomial."""
    n, kinds = 300_000, torch.tensor([1.0, 2.0, 8.0])
    drawn = torch.tensor(draws(kinds.repeat(n // 3), n // 10))
    found = torch.bincount(drawn % 3, minlength=3).double()
    time = 0.0
    for _ in range(60):  # when a tenth of all has been drawn, by Newton's method
        gone = (1 - torch.exp(-kinds.double() * time)).sum() / 3 - 0.1
        time -= float(gone / ((kinds.double() * torch.exp(-kinds.double() * time)).sum() / 3))
    chance = 1 - torch.exp(-kinds.double() * time)
    assert ((found - n / 3 * chance).abs() < LIMIT * (n / 3 * chance).sqrt()).all()


@given(weights, st.integers(0, 9), st.integers(1, 9), st.data())
def test_sorted_part_by_part_it_is_the_order_of_all_keys(of, seed, at_least, data):
    tensor = torch.tensor(of).double()
    positive = int((tensor > 0).sum())
    order = WeightedOrder(tensor, positive, seed=seed, epoch=1, at_least=at_least)
    keys = order.keys(0, len(of)).tolist()
    expected = sorted(range(len(of)), key=lambda index: (keys[index], index))[:positive]
    start = data.draw(st.integers(0, positive - 1))
    places = torch.arange(start, positive + start) % positive  # an end repeats the order's start
    assert order(places).tolist() == (expected * 2)[start : positive + start]


@given(st.integers(0, LARGEST - 1))
def test_the_logarithm_is_one_and_it_has_the_bits_of_pythons_own_arithmetic(number):
    u = (float(number) + 0.5) * 2.0**-62
    fraction, exponent = math.frexp(u)
    if fraction < math.sqrt(0.5):
        fraction, exponent = 2 * fraction, exponent - 1
    part = (fraction - 1) / (fraction + 1)
    series = 1 / 21
    for divisor in range(19, 0, -2):
        series = series * (part * part) + 1 / divisor
    found = minus_log(torch.tensor([u], dtype=torch.float64)).item()
    assert found == abs(exponent * math.log(2) + 2 * part * series)
    assert found == pytest.approx(-math.log(u), rel=1e-14, abs=1e-16)


def test_the_order_of_a_key_is_the_same_for_ever():
    """What a job that is resumed by a later version goes on in."""
    of = [1.0, 2.0, 4.0, 0.0, 8.0, 0.5, 1.0, 3.0, 3.0, 0.25]
    assert draws(of, seed=5, epoch=2) == FOR_EVER
    sampler = ElasticDistributedSampler(range(10), 1, 0, weights=of, epoch_size=6, seed=5)
    assert sampler.state_dict() == {
        **{"format": 3, "seed": 5, "epoch": 0, "consumed": 0, "length": 6},
        **{"shuffle": "weighted", "digest": DIGEST},
    }
    number = permutation(LARGEST, seed=5, epoch=2).at(7)
    key = WeightedOrder(torch.tensor(of), 9, seed=5, epoch=2).keys(7, 8).item()
    assert key == pytest.approx(-math.log((number + 0.5) / LARGEST) / 3)


FOR_EVER = [4, 7, 8, 2, 6, 0, 1, 5, 9]
DIGEST = "073d229d0bb8af8f"


def test_a_state_of_other_weights_is_refused_and_one_of_the_same_is_not():
    def sampler(of, **options):
        return ElasticDistributedSampler(range(4), 1, 0, weights=of, **options)

    state = sampler([1.0, 2.0, 3.0, 4.0]).state_dict()
    sampler(torch.tensor([1, 2, 3, 4])).load_state_dict(state)
    sampler(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float32)).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"the weights have the digest '\w+' in the state"):
        sampler([1.0, 2.0, 4.0, 3.0]).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"length is 4 .* has 3"):
        sampler([1.0, 2.0, 3.0, 4.0], epoch_size=3).load_state_dict(state)
    with pytest.raises(StateMismatch, match="shuffle is 'weighted'"):
        ElasticDistributedSampler(range(4), 1, 0).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": [1.0] * 3}, r"one weight for each of 4 samples, got \[3\]"),
        ({"weights": [[1.0] * 4]}, r"one weight for each of 4 samples, got \[1, 4\]"),
        ({"weights": [1.0, 1.0, -2.0, 1.0]}, r"got -2\.0 for sample 2"),
        ({"weights": [1.0, math.nan, 1.0, 1.0]}, "got nan for sample 1"),
        ({"weights": [1.0, 1e31, 1.0, 1.0]}, r"got 1e\+31 for sample 1"),
        ({"weights": "1234"}, "a list or a tensor of numbers, got str"),
        ({"weights": [1.0, "2", 1.0, 1.0]}, "a list or a tensor of numbers, got list"),
        ({"weights": [0.0] * 4}, "epoch_size <= 0.*got 0"),
        ({"weights": [1.0, 0.0, 1.0, 0.0], "epoch_size": 3}, "epoch_size <= 2.*got 3"),
        ({"weights": [1.0] * 4, "epoch_size": 1.5}, "epoch_size is 1.5"),
        ({"weights": [1.0] * 4, "shuffle": False}, "an order of their own"),
        ({"weights": [1.0] * 4, "shuffle_algorithm": "randperm"}, "an order of their own"),
        ({"epoch_size": 3}, "epoch_size is for weights"),
    ],
)
def test_weights_that_cannot_be_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        ElasticDistributedSampler(range(4), 2, 0, **options)
