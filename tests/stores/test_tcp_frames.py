"""Frames are assembled from any pieces, and an invalid frame is rejected with the rule."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import StoreRejectedError
from elasticlib.stores.tcp_protocol import (
    CARRIES_VALUE,
    PROTOCOL,
    SCHEMA,
    Frame,
    FrameReader,
    encode,
)

WHOLE = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, 1e9)
TEXT = st.text(max_size=30)
DIGITS = st.binary(min_size=32, max_size=32).map(bytes.hex)
BY_RULE = {
    "an integer from 0 to 2**63 - 1": WHOLE,
    "null or an integer >= 0": st.none() | WHOLE,
    "null or a number of seconds": st.none() | SECONDS,
    "text": TEXT,
    "64 hexadecimal digits": DIGITS,
    "null or 64 hexadecimal digits": st.none() | DIGITS,
    "true or false": st.booleans(),
    "a list of [key, version, size]": st.lists(st.tuples(TEXT, WHOLE, WHOLE).map(list), max_size=4),
}


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    op = draw(st.sampled_from(sorted(SCHEMA)))
    fields = {name: draw(BY_RULE[field.rule]) for name, field in SCHEMA[op].items()}
    value = draw(st.binary(max_size=50)) if op in CARRIES_VALUE else b""
    if op == "hello":
        fields["protocol"] = PROTOCOL
    return Frame(op, draw(WHOLE), fields, value)


def encode_raw(header: object, value: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", 4 + len(text) + len(value), len(text)) + text + value


@given(st.lists(frames(), max_size=5), st.data())
def test_frames_are_assembled_from_any_pieces(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = FrameReader()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == sent


@given(frames())
def test_a_frame_is_complete_with_its_last_byte(frame: Frame) -> None:
    stream = encode(frame)
    for end in range(len(stream)):
        assert FrameReader().feed(stream[:end]) == []
    reader = FrameReader()
    got = [frame for byte in stream for frame in reader.feed(bytes([byte]))]
    assert got == [frame]


@given(st.binary(max_size=200))
def test_garbage_is_rejected_or_incomplete(data: bytes) -> None:
    with contextlib.suppress(StoreRejectedError):
        FrameReader(1000).feed(data)


@given(frames(), st.data())
def test_a_frame_with_a_changed_byte_is_rejected_or_another_valid_frame(
    frame: Frame, data: st.DataObject
) -> None:
    stream = bytearray(encode(frame))
    where = data.draw(st.integers(0, len(stream) - 1))
    stream[where] ^= data.draw(st.integers(1, 255))
    try:
        for got in FrameReader().feed(bytes(stream)):
            assert FrameReader().feed(encode(got)) == [got]
    except StoreRejectedError:
        pass


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        ([], "JSON object"),
        (b"{", "is JSON"),
        (b"\xff\xfe", "is JSON"),
        (b"[" * 100_000, "is JSON"),
        (b'{"op":"write","id":1,"key":"a","expected":null,"ttl":NaN}', "not a JSON number"),
        ({"op": "steal", "id": 1}, "op is one of"),
        ({"op": ["get"], "id": 1}, "op is one of"),
        ({"id": 1, "key": "a"}, "op is one of"),
        ({"op": "get", "key": "a"}, "id is an integer"),
        ({"op": "get", "id": True, "key": "a"}, "id is an integer"),
        ({"op": "get", "id": 2**63, "key": "a"}, "id is an integer"),
        ({"op": "get", "id": 1}, "has the fields"),
        ({"op": "get", "id": 1, "key": "a", "more": 1}, "has the fields"),
        ({"op": "get", "id": 1, "key": 7}, "key is text, got 7"),
        ({"op": "write", "id": 1, "key": "a", "expected": 1, "ttl": -1}, "ttl is null or a"),
        ({"op": "write", "id": 1, "key": "a", "expected": 1, "ttl": True}, "ttl is null or a"),
        (
            {"op": "watch", "id": 1, "prefix": "", "after": 1.5, "listing": True},
            "after is an int",
        ),
        ({"op": "listing", "id": 1, "version": 1, "rows": [[1]]}, "rows is a list"),
    ],
)
def test_a_header_that_violates_the_schema_is_rejected_with_the_rule(
    header: object, rule: str
) -> None:
    with pytest.raises(StoreRejectedError, match=rule):
        FrameReader().feed(encode_raw(header))


def test_a_value_in_a_frame_without_values_is_rejected() -> None:
    with pytest.raises(StoreRejectedError, match="get carries no value, got 3 bytes"):
        FrameReader().feed(encode_raw({"op": "get", "id": 1, "key": "a"}, b"abc"))


def test_a_header_longer_than_its_frame_is_rejected() -> None:
    with pytest.raises(StoreRejectedError, match="a header of 99 bytes does not fit"):
        FrameReader().feed(struct.pack(">II", 6, 99) + b"{}")


def test_a_frame_too_short_for_a_header_is_rejected() -> None:
    with pytest.raises(StoreRejectedError, match="at least 4 bytes, got 2"):
        FrameReader().feed(struct.pack(">I", 2) + b"{}")


def test_a_frame_that_is_too_long_is_rejected_by_its_length() -> None:
    with pytest.raises(StoreRejectedError, match="at most 1000 bytes, got 1001"):
        FrameReader(1000).feed(struct.pack(">I", 1001))
