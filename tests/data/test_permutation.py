"""The shuffle is a permutation of any length, and equal to a reference in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.data.permutation import MAX_SHUFFLED, MAX_SORTED, LookupTable, Permutation
from elasticlib.errors import ConfigError

lengths = st.one_of(
    st.integers(1, MAX_SHUFFLED),
    st.integers(0, 62).map(lambda bits: 2**bits),
    st.integers(2, 61).map(lambda bits: 2**bits + 1),
    st.integers(1, 62).map(lambda bits: 2**bits - 1),
)
integers = st.integers(-(2**70), 2**70)


def read_all_indices(length: int, *, seed: int, epoch: int = 0) -> list[int]:
    indices: list[int] = Permutation(length, seed=seed, epoch=epoch)[torch.arange(length)].tolist()
    return indices


def look_up(table: LookupTable, number: int) -> int:
    if table.mask is not None:
        number = number >> table.shift & table.mask
    return int(table.values[number])


def compute_reference(order: Permutation, number: int) -> int:
    """Compute one index with integers of Python, which cannot overflow."""
    while True:
        high, low = divmod(number, 2**order.low_bits)
        for tables_of_low, tables_of_high in order.rounds:
            for table in tables_of_low:
                high = (high + look_up(table, low)) % order.high_size
            for table in tables_of_high:
                low ^= look_up(table, high)
        number = high * 2**order.low_bits + low
        if number < len(order):
            return number


@given(st.integers(0, 3000), integers, integers)
def test_each_index_is_at_one_position(length: int, seed: int, epoch: int) -> None:
    assert sorted(read_all_indices(length, seed=seed, epoch=epoch)) == list(range(length))


@pytest.mark.parametrize(
    "length", [*range(10), MAX_SORTED - 1, MAX_SORTED, MAX_SORTED + 1, 2047, 2048, 2049]
)
def test_single_positions_have_the_same_indices(length: int) -> None:
    order = Permutation(length, seed=1)
    one_by_one = [order[torch.tensor([position])].item() for position in range(length)]
    assert sorted(one_by_one) == list(range(length))
    assert read_all_indices(length, seed=1) == one_by_one


@given(lengths, integers, integers, st.lists(st.floats(0, 1, exclude_max=True), max_size=30))
def test_reference_agrees_up_to_2_to_the_62(
    length: int, seed: int, epoch: int, fractions: list[float]
) -> None:
    order = Permutation(length, seed=seed, epoch=epoch)
    ends = {0, length - 1, length // 2, max(0, length - 2)}
    positions = sorted({min(length - 1, int(part * length)) for part in fractions} | ends)
    indices = order[torch.tensor(positions)]
    assert indices.dtype == torch.int64
    assert len(set(indices.tolist())) == len(positions)
    assert all(0 <= index < length for index in indices.tolist())
    if length > MAX_SORTED:
        assert indices.tolist() == [compute_reference(order, position) for position in positions]


@pytest.mark.parametrize("bits", [11, 12, 29, 30, 31, 32, 33, 45, 60, 61, 62])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_numbers_fit_their_integer_type(bits: int, offset: int) -> None:
    length = min(2**bits + offset, MAX_SHUFFLED)
    order = Permutation(length, seed=3)
    for functions in order.rounds:
        for tables, size in zip(functions, (order.high_size, 2**order.low_bits), strict=True):
            for table in tables:
                assert 0 <= int(table.values.min()) <= int(table.values.max()) < size
                assert order.high_size << order.low_bits <= torch.iinfo(table.values.dtype).max + 1
    assert length <= order.high_size << order.low_bits < length + 2**order.low_bits


def test_order_does_not_depend_on_machine_or_torch() -> None:
    """A job that resumes elsewhere with the same version must find the order with which it started.

    If these numbers change, raise position.STATE_FORMAT.
    """
    for (length, seed, epoch), indices in KNOWN_ORDERS.items():
        order = Permutation(length, seed=seed, epoch=epoch)
        assert order[torch.arange(len(indices))].tolist() == indices


KNOWN_ORDERS = {
    (10, 0, 0): [1, 0, 5, 4, 8, 9, 3, 2, 7, 6],
    (300, 0, 0): [17, 270, 286, 52, 277],
    (1000, -1, 2): [139, 256, 242, 414, 455],
    (2000, 1, 0): [762, 187, 759, 24, 1522],
    (1000000, 42, 7): [19513, 637765, 928723, 216172, 328387],
    (1000000007, 9223372036854775808, 3): [622505037, 494678363, 788328492, 247408555, 300165790],
    (1099511627777, 5, 5): [1027941542651, 175208399021, 333459931382, 1045179523576, 596678202049],
    (4611686018427387904, 0, 0): [
        2459529833872675137,
        1813215390338966042,
        620974820793340603,
        3962678781906500454,
        812378284888739689,
    ],
}


def test_other_seeds_and_epochs_have_other_tables() -> None:
    keys = [(seed, epoch) for seed in range(-3, 3) for epoch in range(5)]
    orders = {tuple(read_all_indices(2000, seed=seed, epoch=epoch)[:8]) for seed, epoch in keys}
    assert len(orders) == len(keys)


@pytest.mark.parametrize("length", [-1, MAX_SHUFFLED + 1])
def test_a_length_that_cannot_be_shuffled_is_rejected(length: int) -> None:
    with pytest.raises(ConfigError, match=f"length.*got {length}"):
        Permutation(length, seed=0)
