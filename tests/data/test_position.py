"""The positions that each rank uses, and the saved state."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.data.position import (
    SamplerPosition,
    decode,
    encode,
    positions_of_rank,
    resume,
)
from elasticlib.errors import ConfigError, StateMismatchError

worlds = st.integers(1, 9)


@st.composite
def positions(draw):
    length = draw(st.integers(0, 60))
    consumed = draw(st.integers(0, length))
    return SamplerPosition(draw(st.integers(-9, 9)), draw(st.integers(0, 9)), consumed, length)


@given(positions(), worlds)
def test_exact_counts_of_ranks_differ_by_at_most_one(position, world):
    counts = [
        len(positions_of_rank(position, rank=r, world_size=world, tail="exact"))
        for r in range(world)
    ]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_out_of_range_is_rejected(rank, world):
    with pytest.raises(ConfigError, match=f"rank.*got {rank} and {world}"):
        positions_of_rank(SamplerPosition(0, 0, 0, 10), rank=rank, world_size=world, tail="pad")


@given(positions())
def test_the_saved_state_has_integers_and_two_names_and_can_be_decoded(position):
    state = encode(position)
    assert (state.pop("order"), state.pop("dataset")) == (position.order, position.dataset)
    assert set(state) == {"format", "seed", "epoch", "consumed", "length"}
    assert all(type(value) is int for value in state.values())
    assert decode(encode(position)) == position


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 3}, "format is 3 .*only format 7"),
        ({"format": [6]}, r"format is \[6\] .*only format 7"),
        ({"format": 7.0}, "format is 7.0.*int"),
        ({"consumed": 11}, "consumed.*got 11 and 10"),
        ({"consumed": -1}, "consumed.*got -1 and 10"),
        ({"epoch": -1}, "epoch.*got -1"),
        ({"length": -1, "consumed": 0}, "length.*got 0 and -1"),
        ({"seed": "0"}, "seed is '0'.*int"),
        ({"epoch": True}, "epoch is True.*int"),
        ({"consumed": 4.0}, "consumed is 4.0.*int"),
        ({"order": 1}, "order is 1.*str"),
        ({"world": 4}, "'world' is not a field"),
    ],
)
def test_an_invalid_state_is_rejected_with_field_value_and_rule(change, named):
    state = {**encode(SamplerPosition(0, 0, 4, 10)), **change}
    for on_mismatch in ("raise", "keep", "restart"):
        with pytest.raises(StateMismatchError, match=named):
            resume(state, SamplerPosition(0, 0, 0, 10), on_mismatch)


@pytest.mark.parametrize("name", encode(SamplerPosition(0, 0, 4, 10)))
def test_a_state_without_a_field_is_rejected(name):
    state = encode(SamplerPosition(0, 0, 4, 10))
    del state[name]
    with pytest.raises(StateMismatchError, match=f"{name} is missing"):
        decode(state)


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        (SamplerPosition(0, 2, 8, 12), "length is 12.*10"),
        (SamplerPosition(5, 2, 8, 10), "seed is 5.*0"),
        (SamplerPosition(0, 2, 8, 10, "sequential"), "order is 'sequential'.*'shuffled'"),
        (SamplerPosition(0, 2, 8, 10, dataset="ab"), "dataset is 'ab' in the state.*''"),
    ],
)
def test_a_mismatch_is_rejected_unless_the_caller_allows_it(saved, named):
    current = SamplerPosition(0, 0, 0, 10)
    with pytest.raises(StateMismatchError, match=named):
        resume(encode(saved), current)
    assert resume(encode(saved), current, "restart") == SamplerPosition(0, 2, 0, 10)
    assert resume(encode(saved), current, "keep") == SamplerPosition(0, 2, 8, 10)
    same = SamplerPosition(0, 2, 8, 10)
    assert resume(encode(same), current, "restart") == same
    assert resume(encode(SamplerPosition(0, 2, 12, 12)), current, "keep") == SamplerPosition(
        0, 2, 10, 10
    )
    with pytest.raises(ConfigError, match=r"on_mismatch is 'yes'.*raise, restart"):
        resume(encode(same), current, "yes")


def test_the_module_does_not_import_torch():
    check = "import sys; from elasticlib.data import position; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=100).returncode == 0
