"""The shuffle is a permutation for any length, always the same, and equal to a scalar reference."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.data.permutation import MAX_SHUFFLED, MAX_TABLE, Permutation
from elasticlib.errors import ConfigError

lengths = st.one_of(
    st.integers(1, MAX_SHUFFLED),
    st.integers(0, 62).map(lambda bits: 2**bits),
    st.integers(2, 61).map(lambda bits: 2**bits + 1),
    st.integers(1, 62).map(lambda bits: 2**bits - 1),
)
integers = st.integers(-(2**70), 2**70)


def whole(length, **keys):
    return Permutation(length, **keys)[torch.arange(length)].tolist()


def reference(order, number):
    """Compute one index with Python's integers, which do not overflow."""
    while True:
        high, low = divmod(number, 2**order.low_bits)
        for i, (factor, summand) in enumerate(order.rounds):
            product = (high if i % 2 else low) * factor + summand
            assert product < 2**63
            mixed = product ^ (product >> 31)
            if i % 2:
                low ^= mixed % 2**order.low_bits
            else:
                high = (high + (mixed % 2**31 * order.high_size >> 31)) % order.high_size
        number = high * 2**order.low_bits + low
        if number < len(order):
            return number


@given(st.integers(0, 3000), integers, integers)
def test_each_number_stands_at_one_position(length, seed, epoch):
    assert sorted(whole(length, seed=seed, epoch=epoch)) == list(range(length))


@pytest.mark.parametrize(
    "length", [*range(10), MAX_TABLE - 1, MAX_TABLE, MAX_TABLE + 1, 511, 512, 513, 1025]
)
def test_each_number_stands_at_one_position_also_at_the_edges_of_the_network(length):
    order = Permutation(length, seed=1)
    one_by_one = [order[torch.tensor([position])].item() for position in range(length)]
    assert sorted(one_by_one) == list(range(length))
    assert whole(length, seed=1) == one_by_one


@given(lengths, integers, integers, st.lists(st.floats(0, 1, exclude_max=True), max_size=30))
def test_scalar_reference_agrees_up_to_2_to_the_62(length, seed, epoch, fractions):
    order = Permutation(length, seed=seed, epoch=epoch)
    ends = {0, length - 1, length // 2, max(0, length - 2)}
    positions = sorted({min(length - 1, int(part * length)) for part in fractions} | ends)
    found = order[torch.tensor(positions)].tolist()
    assert len(set(found)) == len(positions)
    assert all(0 <= number < length for number in found)
    if length > MAX_TABLE:
        assert found == [reference(order, position) for position in positions]


def test_widest_products_stay_within_int64():
    for length in (MAX_TABLE + 1, 2**20 + 1, 2**61 + 1, MAX_SHUFFLED):
        for seed in range(200):
            order = Permutation(length, seed=seed)
            low, high = 2**order.low_bits - 1, order.high_size - 1
            for i, (factor, summand) in enumerate(order.rounds):
                assert (high if i % 2 else low) * factor + summand < 2**63
                assert factor % 2 == 1
            assert order.high_size <= 2**31
            assert length <= order.high_size << order.low_bits < length + 2**order.low_bits


def test_order_never_changes():
    """A job that resumes with a later version must find the order with which it began."""
    assert whole(10, seed=0, epoch=0) == GOLDEN_10
    for (length, seed, epoch), numbers in GOLDEN.items():
        order = Permutation(length, seed=seed, epoch=epoch)
        assert order[torch.arange(len(numbers))].tolist() == numbers


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
                n for pair in Permutation(1000, seed=seed, epoch=epoch).rounds for n in pair
            )
    assert max(keys.values()) == 1


@pytest.mark.parametrize("length", [-1, MAX_SHUFFLED + 1])
def test_a_length_that_cannot_be_shuffled_is_refused(length):
    with pytest.raises(ConfigError, match=f"length.*got {length}"):
        Permutation(length, seed=0)
