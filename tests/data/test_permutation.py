"""The keyed shuffle: a permutation for any length, the same for ever, one by one and in torch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib import permutation
from elasticlib.data.permutation import LARGEST, SMALL
from elasticlib.errors import ConfigError

lengths = st.one_of(
    st.integers(1, LARGEST),
    st.integers(0, 62).map(lambda bits: 2**bits),
    st.integers(2, 61).map(lambda bits: 2**bits + 1),
    st.integers(1, 62).map(lambda bits: 2**bits - 1),
)
integers = st.integers(-(2**70), 2**70)


def whole(length, **keys):
    return permutation(length, **keys).many(torch.arange(length)).tolist()


@given(st.integers(0, 3000), integers, integers)
def test_each_number_stands_at_one_place(length, seed, epoch):
    assert sorted(whole(length, seed=seed, epoch=epoch)) == list(range(length))


@pytest.mark.parametrize("length", [*range(10), SMALL - 1, SMALL, SMALL + 1, 511, 512, 513, 1025])
def test_each_number_stands_at_one_place_also_at_the_edges_of_the_network(length):
    one_by_one = [permutation(length, seed=1).at(place) for place in range(length)]
    assert sorted(one_by_one) == list(range(length))
    assert whole(length, seed=1) == one_by_one


@given(lengths, integers, integers, st.lists(st.floats(0, 1, exclude_max=True), max_size=30))
def test_torch_and_python_agree_up_to_2_to_the_62(length, seed, epoch, fractions):
    order = permutation(length, seed=seed, epoch=epoch)
    ends = {0, length - 1, length // 2, max(0, length - 2)}
    places = sorted({min(length - 1, int(part * length)) for part in fractions} | ends)
    one_by_one = [order.at(place) for place in places]
    assert order.many(torch.tensor(places)).tolist() == one_by_one
    assert len(set(one_by_one)) == len(places)
    assert all(0 <= number < length for number in one_by_one)


@pytest.mark.parametrize("length", [257, 1000, 2**20 + 1, 10**9, 2**30, 2**30 + 1])
def test_many_at_once_are_looked_up_and_are_the_same_as_a_few(length):
    order = permutation(length, seed=3)
    places = torch.cat([torch.arange(20_000) % length, length - 1 - torch.arange(20_000) % length])
    few = torch.cat([order.many(part) for part in torch.split(places, 1000)])
    assert torch.equal(order.many(places), few)
    fewer = torch.cat([order.many(part) for part in torch.split(places[:1000], 7)])
    assert torch.equal(fewer, few[:1000])
    assert few[:5].tolist() == [order.at(place) for place in range(5)]


def test_the_widest_products_stay_within_int64():
    """Every factor and summand is at most what the docstring says, whatever the digest."""
    for length in (SMALL + 1, 2**20 + 1, 2**61 + 1, LARGEST):
        for seed in range(200):
            order = permutation(length, seed=seed)
            low, high = 2**order.low_bits - 1, order.high_size - 1
            for turn, (factor, summand) in enumerate(order.rounds):
                assert (high if turn % 2 else low) * factor + summand < 2**63
                assert factor % 2 == 1
            assert order.high_size <= 2**31
            assert length <= order.high_size << order.low_bits < length + 2**order.low_bits


def test_the_order_is_fixed_for_ever():
    """A job that resumes with a later version must find the order it began with."""
    assert whole(10, seed=0, epoch=0) == GOLDEN_10
    for (length, seed, epoch), numbers in GOLDEN.items():
        order = permutation(length, seed=seed, epoch=epoch)
        assert [order.at(place) for place in range(len(numbers))] == numbers


GOLDEN_10 = [7, 6, 2, 1, 8, 4, 5, 9, 3, 0]
GOLDEN = {
    (300, 0, 0): [268, 298, 284, 124, 49],
    (300, 0, 1): [158, 230, 53, 234, 62],
    (300, 1, 0): [2, 54, 227, 280, 217],
    (1000, -1, 2): [943, 253, 303, 811, 94],
    (1000000, 42, 7): [872924, 552545, 615620, 192406, 98304],
    (1000000007, 9223372036854775808, 3): [956579256, 383655062, 439694340, 107730329, 882250656],
    (4611686018427387904, 0, 0): [
        3835338864011059097,
        3006036912351495608,
        129163517846796270,
        4560990726770831604,
        2389723683390441306,
    ],
}


def test_neighbouring_seeds_and_epochs_have_no_key_in_common():
    keys = Counter()
    for seed in range(-10, 10):
        for epoch in range(20):
            keys.update(
                n for pair in permutation(1000, seed=seed, epoch=epoch).rounds for n in pair
            )
    assert max(keys.values()) == 1


@pytest.mark.parametrize("place", [-1, 5])
def test_a_place_outside_is_refused(place):
    with pytest.raises(IndexError, match=f"place.*5.*got {place}"):
        permutation(5, seed=0).at(place)


@pytest.mark.parametrize("length", [-1, LARGEST + 1])
def test_a_length_that_cannot_be_shuffled_is_refused(length):
    with pytest.raises(ConfigError, match=f"length.*got {length}"):
        permutation(length, seed=0)
