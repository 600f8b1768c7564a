"""One event is one line, whatever is told; and a line that is none is refused by what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.observe.event import COMMON_KEYS, KINDS, MAX_EVENT_BYTES, Event, decode, encode

seconds = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
names = st.text(min_size=1, max_size=9).filter(lambda name: name not in COMMON_KEYS)
facts = st.dictionaries(names, plain | st.lists(plain, max_size=3), max_size=4)
events = st.builds(
    Event,
    kind=st.sampled_from(sorted(KINDS)),
    run=st.text(max_size=9),
    node=st.text(max_size=9),
    generation=st.integers(0, 10**9),
    timestamp=seconds,
    monotonic=seconds,
    rank=st.none() | st.integers(0, 10**6),
    data=facts,
)


@given(events)
def test_what_is_written_is_what_is_read(event: Event) -> None:
    line = encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == event


@pytest.mark.parametrize(
    "value", ["x" * 10**6, ["y" * 10**5] * 50, {str(n): "z" * 999 for n in range(999)}]
)
def test_a_line_stays_within_bounds_and_is_still_one(value: Any) -> None:
    line = encode(Event("failure", "j", "n", 1, 0.0, 0.0, None, {"reason": value}))
    assert len(line) <= MAX_EVENT_BYTES
    assert decode(line).kind == "failure"


def test_what_json_cannot_hold_is_told_in_words() -> None:
    event = decode(encode(Event("failure", "j", "n", 1, 0.0, 0.0, None, {"reason": {1, 2}})))
    assert event.data["reason"] == "{1, 2}"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_know_is_told_in_words(loss: float) -> None:
    line = encode(Event("progress", "j", "n", 1, 0.0, 0.0, None, {"loss": loss}))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(line, parse_constant=refuse)["loss"] == str(loss)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 3}, "an event must have version 2, got 3"),
        ({"kind": 3}, "kind of an event must be a str, got 3"),
        ({"generation": True}, "generation of an event must be a int"),
        ({"rank": "0"}, "rank of an event must be an integer"),
        ({"monotonic": None}, "monotonic of an event must be a float"),
        (
            {"timestamp": 10**400},
            "timestamp of an event must be a float, got a number of 1329 bits",
        ),
    ],
)
def test_a_line_that_is_no_event_is_refused(change: dict[str, Any], sentence: str) -> None:
    line = json.loads(encode(Event("failure", "j", "n", 1, 0.0, 0.0)))
    with pytest.raises(ValueError, match=sentence):
        decode(json.dumps({**line, **change}))


@pytest.mark.parametrize("line", ["", "{", "[]", "null", b"\xff\xfe", "1", "[" * 9999])
def test_malformed_events_are_rejected(line: str | bytes) -> None:
    with pytest.raises(ValueError, match="an event must be a"):
        decode(line)
