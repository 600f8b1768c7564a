"""The encoding of an event as one line of JSON, and the errors of lines that are no event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.observe.event import COMMON_KEYS, KINDS, MAX_EVENT_BYTES, Event, decode, encode

times = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
names = st.text(min_size=1, max_size=9).filter(lambda name: name not in COMMON_KEYS)
event_data = st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4)
events = st.builds(
    Event,
    kind=st.sampled_from(sorted(KINDS)),
    run=st.text(max_size=9),
    node=st.text(max_size=9),
    generation=st.integers(0, 10**9),
    timestamp=times,
    monotonic=times,
    rank=st.none() | st.integers(0, 10**6),
    data=event_data,
)


@given(events)
def test_decoding_returns_the_encoded_event(event: Event) -> None:
    line = encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == event


@pytest.mark.parametrize(
    "value", ["x" * 10**6, ["y" * 10**5] * 50, {str(n): "z" * 999 for n in range(999)}]
)
def test_long_data_is_truncated_to_the_maximum_length_of_a_line(value: Any) -> None:
    line = encode(Event("failure", "j", "n", 1, 0.0, 0.0, None, {"reason": value}))
    assert len(line) <= MAX_EVENT_BYTES
    assert decode(line).kind == "failure"


def test_value_without_a_json_type_is_encoded_as_text() -> None:
    event = decode(encode(Event("failure", "j", "n", 1, 0.0, 0.0, None, {"reason": {1, 2}})))
    assert event.data["reason"] == "{1, 2}"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_number_that_is_not_finite_is_encoded_as_text(loss: float) -> None:
    line = encode(Event("progress", "j", "n", 1, 0.0, 0.0, None, {"loss": loss}))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(line, parse_constant=refuse)["loss"] == str(loss)


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_event_with_an_invalid_field_is_rejected_by_name(
    change: dict[str, Any], message: str
) -> None:
    line = json.loads(encode(Event("failure", "j", "n", 1, 0.0, 0.0)))
    with pytest.raises(ValueError, match=message):
        decode(json.dumps({**line, **change}))


@pytest.mark.parametrize("line", ["", "{", "[]", "null", b"\xff\xfe", "1", "[" * 9999])
def test_malformed_events_are_rejected(line: str | bytes) -> None:
    with pytest.raises(ValueError, match="an event must be a"):
        decode(line)
