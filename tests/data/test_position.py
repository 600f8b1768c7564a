"""How positions are dealt."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import attrs
import pytest
from dealing import in_turn
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.data.position import (
    SamplerPosition,
    advance,
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


def dealt(position, world, tail):
    """All ranks' positions, round by round: the order in which the job uses them."""
    return in_turn(
        positions_of_rank(position, rank=r, world_size=world, tail=tail) for r in range(world)
    )


@given(positions(), worlds)
def test_exact_deals_each_position_left_once_and_in_order(position, world):
    left = list(range(position.consumed, position.length))
    assert dealt(position, world, "exact") == left


@given(positions(), worlds)
def test_exact_leaves_no_rank_more_than_one_behind(position, world):
    counts = [
        len(positions_of_rank(position, rank=r, world_size=world, tail="exact"))
        for r in range(world)
    ]
    assert max(counts) - min(counts) <= 1


@given(positions(), worlds)
def test_pad_adds_fewer_than_a_world_at_the_very_end_from_the_start_of_the_order(position, world):
    left = list(range(position.consumed, position.length))
    places = dealt(position, world, "pad")
    repeats = places[len(left) :]
    assert places[: len(left)] == left
    assert repeats == list(range(position.length, position.length + len(repeats)))
    assert len(repeats) <= world - 1
    assert len(places) % world == 0


@given(positions(), worlds)
def test_drop_leaves_out_fewer_than_a_world_at_the_very_end(position, world):
    left = list(range(position.consumed, position.length))
    places = dealt(position, world, "drop")
    assert places == left[: len(places)]
    assert len(left) - len(places) <= world - 1
    assert len(places) % world == 0


@given(positions(), st.lists(st.tuples(worlds, st.integers(0, 4), st.integers(1, 5))))
def test_any_worlds_one_after_another_use_the_order_of_an_undisturbed_job(start, segments):
    position, used = start, []
    for world, steps, batch in segments:
        count = steps * batch * world
        used += dealt(position, world, "exact")[:count]
        position = advance(position, count)
        assert used == list(range(start.consumed, position.consumed))


def test_a_thousand_samples_resumed_at_400_are_used_once_whatever_the_worlds():
    """Row A7: torch's elastic sampler repeats 228 of them and never uses 228 others."""
    position, used = SamplerPosition(0, 0, 0, 1000), Counter()
    for world, until in ((4, 400), (3, 700), (7, 993), (5, 1000)):
        count = until - position.consumed
        used.update(dealt(position, world, "exact")[:count])
        position = advance(position, count)
    assert used == Counter(range(1000))
    assert dealt(position, 5, "pad") == []


def test_an_epoch_of_2_to_the_62_is_dealt_without_a_list():
    places = positions_of_rank(
        SamplerPosition(0, 0, 2**61, 2**62), rank=1, world_size=3, tail="pad"
    )
    assert places[0] == 2**61 + 1
    assert len(places) == (2**61 + 2) // 3


@given(positions(), st.integers(0, 100))
def test_advance_stops_at_the_end_of_the_epoch(position, count):
    ahead = advance(position, count)
    assert ahead.consumed == min(position.consumed + count, position.length)
    assert attrs.evolve(ahead, consumed=position.consumed) == position


def test_samples_are_not_given_back():
    with pytest.raises(ConfigError, match=r"count.*got -1"):
        advance(SamplerPosition(0, 0, 5, 10), -1)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank, world):
    with pytest.raises(ConfigError, match=f"rank.*got {rank} and {world}"):
        positions_of_rank(SamplerPosition(0, 0, 0, 10), rank=rank, world_size=world, tail="pad")


def test_an_unknown_tail_is_refused_also_where_there_is_none():
    with pytest.raises(ConfigError, match=r"tail is 'cut'.*pad, drop, exact"):
        positions_of_rank(SamplerPosition(0, 0, 0, 10), rank=0, world_size=2, tail="cut")


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
