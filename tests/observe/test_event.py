"""The encoding of an event as one line of JSON, and the errors of lines that are no event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_events import make_event

from elasticlib.observe.event import (
    COMMON_KEYS,
    Event,
    decode,
    encode,
)
from elasticlib.observe.event_kinds import (
    KINDS,
    MAX_DEPTH,
    MAX_EVENT_BYTES,
    MAX_INTEGER_BITS,
    body_of,
)

times = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
values = sorted({name for cls in KINDS.values() for name in cls().data})
names = st.text(min_size=1, max_size=9) | st.sampled_from([*COMMON_KEYS, *values])
event_data = st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4)
events = st.builds(
    Event,
    body=st.builds(body_of, st.sampled_from([*KINDS, "my.kind"]), event_data),
    run=st.text(max_size=9),
    node=st.text(max_size=9),
    generation=st.integers(0, 10**9),
    timestamp=times,
    monotonic=times,
    rank=st.none() | st.integers(0, 10**6),
)


@given(events)
def test_decoding_returns_the_encoded_event(event: Event) -> None:
    text = event.to_json()
    assert "\n" not in text
    assert encode(event) == text.encode() + b"\n"
    assert decode(text) == event
    assert set(json.loads(text)) == set(COMMON_KEYS) - ({"rank"} if event.rank is None else set())


@pytest.mark.parametrize(
    "value",
    [
        *("x" * 10**6, ["y" * 10**5] * 50, {str(n): "z" * 999 for n in range(999)}),
        *([[0.5] * 1000] * 1000, {"n" * 10**6: 1}, 2 ** (MAX_INTEGER_BITS - 1)),
    ],
)
def test_long_data_is_truncated_to_the_maximum_length_of_a_line(value: Any) -> None:
    for data in ({"reason": value}, {f"{number}": value for number in range(3)}):
        line = encode(
            make_event("\N{GRINNING FACE}" * 1024, "j" * 1024, "n", 1, 0.0, 0.0, None, data)
        )
        assert len(line) <= MAX_EVENT_BYTES
        assert len(decode(line).kind) == 1024


def test_event_with_many_values_is_truncated_to_the_maximum_length_of_a_line() -> None:
    data = dict.fromkeys(map(str, range(10**5)), 2**1000)
    line = encode(make_event("my.kind", "j", "n", 1, 0.0, 0.0, None, data))
    assert len(line) <= MAX_EVENT_BYTES
    assert decode(line).data["0"] == 2**1000


def test_lists_that_share_items_are_cut_before_they_are_expanded() -> None:
    value: list[Any] = [1]
    for _ in range(MAX_DEPTH - 1):
        value = [value] * 999
    assert len(encode(make_event("my.kind", "j", "n", 1, 0.0, 0.0, None, {"a": value}))) < 10**5


def test_value_without_a_json_type_is_encoded_as_text() -> None:
    event = decode(encode(make_event("my.kind", "j", "n", 1, 0.0, 0.0, None, {"my": {1, 2}})))
    assert event.data["my"] == "{1, 2}"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_number_that_is_not_finite_is_encoded_as_text(loss: float) -> None:
    line = encode(make_event("progress", "j", "n", 1, 0.0, 0.0, None, {"loss": loss}))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(line, parse_constant=refuse)["data"]["loss"] == str(loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "an event must have version 3, got 2"),
        ({"kind": 3}, "kind of an event must be a str, got 3"),
        ({"generation": True}, "generation of an event must be an integer"),
        ({"rank": "0"}, "rank of an event must be an integer"),
        ({"monotonic": None}, "monotonic of an event must be a float"),
        ({"data": [1]}, "data of an event must be an object, got \\[1\\]"),
        (
            {"timestamp": 10**400},
            "timestamp of an event must be a float, got a number of 1329 bits",
        ),
    ],
)
def test_event_with_an_invalid_field_is_rejected_by_name(
    change: dict[str, Any], message: str
) -> None:
    line = json.loads(encode(make_event("failure", "j", "n", 1, 0.0, 0.0)))
    with pytest.raises(ValueError, match=message):
        decode(json.dumps({**line, **change}))


@pytest.mark.parametrize("line", ["", "{", "[]", "null", b"\xff\xfe", "1", "[" * 9999])
def test_malformed_events_are_rejected(line: str | bytes) -> None:
    with pytest.raises(ValueError, match="an event must be a"):
        decode(line)
