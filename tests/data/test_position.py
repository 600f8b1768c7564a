"""How positions are dealt."""

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
from elasticlib.errors import ConfigError, StateMismatch

worlds = st.integers(1, 9)


@st.composite
def positions(draw):
    length = draw(st.integers(0, 60))
    consumed = draw(st.integers(0, length))
    return SamplerPosition(draw(st.integers(-9, 9)), draw(st.integers(0, 9)), consumed, length)


@given(positions(), worlds)
def test_exact_leaves_no_rank_more_than_one_behind(position, world):
    counts = [
        len(positions_of_rank(position, rank=r, world_size=world, tail="exact"))
        for r in range(world)
    ]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank, world):
    with pytest.raises(ConfigError, match=f"rank.*got {rank} and {world}"):
        positions_of_rank(SamplerPosition(0, 0, 0, 10), rank=rank, world_size=world, tail="pad")


@given(positions())
def test_the_saved_state_is_integers_and_a_name_and_is_read_back(position):
    state = encode(position)
    assert state.pop("order") == position.order
    assert set(state) == {"format", "seed", "epoch", "consumed", "length"}
    assert all(type(value) is int for value in state.values())
    assert decode(encode(position)) == position


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 3}, "format is 3 .*format 4 only"),
        ({"format": [4]}, r"format is \[4\] .*format 4 only"),
        ({"format": 4.0}, "format is 4.0.*int"),
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
def test_a_state_that_is_not_whole_is_refused_with_field_value_and_rule(change, named):
    state = {**encode(SamplerPosition(0, 0, 4, 10)), **change}
    for on_mismatch in ("refuse", "keep", "restart"):
        with pytest.raises(StateMismatch, match=named):
            resume(state, SamplerPosition(0, 0, 0, 10), on_mismatch)


@pytest.mark.parametrize("name", encode(SamplerPosition(0, 0, 4, 10)))
def test_a_state_that_lacks_a_field_is_refused(name):
    state = encode(SamplerPosition(0, 0, 4, 10))
    del state[name]
    with pytest.raises(StateMismatch, match=f"{name} is missing"):
        decode(state)


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        (SamplerPosition(0, 2, 8, 12), "length is 12.*10"),
        (SamplerPosition(5, 2, 8, 10), "seed is 5.*0"),
        (SamplerPosition(0, 2, 8, 10, "sequential"), "order is 'sequential'.*'shuffled'"),
    ],
)
def test_who_changed_the_data_says_what_is_meant(saved, named):
    mine = SamplerPosition(0, 0, 0, 10)
    with pytest.raises(StateMismatch, match=named):
        resume(encode(saved), mine)
    assert resume(encode(saved), mine, "restart") == SamplerPosition(0, 2, 0, 10)
    assert resume(encode(saved), mine, "keep") == SamplerPosition(0, 2, 8, 10)
    same = SamplerPosition(0, 2, 8, 10)
    assert resume(encode(same), mine, "restart") == same
    assert resume(encode(SamplerPosition(0, 2, 12, 12)), mine, "keep") == SamplerPosition(
        0, 2, 10, 10
    )
    with pytest.raises(ConfigError, match=r"on_mismatch is 'yes'.*refuse, restart"):
        resume(encode(same), mine, "yes")


def test_dealing_needs_no_torch():
    check = "import sys; from elasticlib.data import position; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=100).returncode == 0
