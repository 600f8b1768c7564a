"""When silence is a hang, and which rank the others wait for."""

from __future__ import annotations

import attrs
import pytest

from elasticlib.agent.hang import (
    HangLimits,
    Pulse,
    decode_pulses,
    describe_hang,
    encode_pulses,
    longest_silence,
    slowest,
)
from elasticlib.errors import ConfigError
from elasticlib.workers.beat import Beat

AUTO = HangLimits(times=20.0, floor=60.0, first=900.0)


def beat(at: float, *durations: float, steps: int = 5) -> Beat:
    return Beat(step=4, steps=steps, at=at, alive=at, durations=durations, attached=True)


@pytest.mark.parametrize(
    ("limits", "told", "allowed"),
    [
        (AUTO, Beat(), 900.0),
        (AUTO, beat(0.0), 60.0),
        (AUTO, beat(0.0, 0.1, 0.2, 0.1), 60.0),
        (AUTO, beat(0.0, 4.0, 5.0, 100.0), 100.0),
        (HangLimits(seconds=5.0), Beat(), 900.0),
        (HangLimits(seconds=5.0), beat(0.0, 9.0, 9.0), 5.0),
        (HangLimits(seconds=2000.0), Beat(), 2000.0),
    ],
)
def test_how_long_a_worker_may_be_silent(limits: HangLimits, told: Beat, allowed: float) -> None:
    assert limits.of(told) == allowed


def test_the_worker_nearest_to_its_limit_counts() -> None:
    beats = {0: beat(100.0, 0.1), 1: beat(90.0, 10.0), 2: Beat(attached=True)}
    found = longest_silence(130.0, 50.0, beats, AUTO)
    assert found is not None
    assert (found.local_rank, found.seconds, found.limit) == (0, 30.0, 60.0)
    assert longest_silence(130.0, 50.0, {}, AUTO) is None
    late = longest_silence(951.0, 50.0, {0: Beat(attached=True)}, AUTO)
    assert late is not None
    assert late.share > 1


def test_who_never_asked_for_its_context_or_leaves_it_to_others_is_not_held_to_it() -> None:
    assert longest_silence(1e6, 0.0, {0: Beat()}, AUTO) is None
    beats = {0: beat(9e5, 0.1), 1: Beat(attached=True)}
    found = longest_silence(9e5 + 1, 0.0, beats, AUTO)
    assert found is not None
    assert (found.local_rank, found.seconds) == (0, 1.0)


def test_who_saves_or_asks_is_alive() -> None:
    saving = attrs.evolve(beat(0.0, 0.1), alive=99.0)
    found = longest_silence(100.0, 0.0, {0: saving}, AUTO)
    assert found is not None
    assert found.seconds == 1.0


def test_who_is_furthest_behind_is_the_slowest_and_of_several_the_first_to_fall_silent() -> None:
    pulses = [Pulse(0, "a", 7, 9.0), Pulse(1, "a", 6, 3.0), Pulse(2, "b", 6, 4.0)]
    assert slowest(pulses) == pulses[2]
    assert slowest([]) is None
    assert describe_hang(pulses, 2.0) == (
        "hung: rank 2 on b is at step 6, silent for 4.0 s; the others are at step 6 to 7; "
        "allowed are 2.0 s (--hang-timeout)"
    )
    assert "has made no step" in describe_hang([Pulse(0, "a", -1, 9.0)], 2.0)


@pytest.mark.parametrize("data", [b"", b"x", b"{}", b"[1]", b'[{"rank": "x"}]', b'[{"rank": 1}]'])
def test_what_cannot_be_read_says_nothing(data: bytes) -> None:
    assert decode_pulses(data) == []
    pulses = [Pulse(0, "a", 7, 9.0)]
    assert decode_pulses(encode_pulses(pulses)) == pulses


@pytest.mark.parametrize("bad", [{"seconds": 0.0}, {"floor": 0.0}, {"times": -1.0}, {"first": 0.0}])
def test_a_limit_that_is_none_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        HangLimits(**bad)
