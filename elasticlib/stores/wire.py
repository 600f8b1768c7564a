"""What goes over the connection between a TCP store and its server, and nothing else does.

A frame is a length, a header length, a JSON header of a fixed schema and the raw value; a frame
that is too long, or differs from its schema in any field, is refused before anything acts on it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from ..errors import StoreRefused
from .secret import DIGITS, is_digits

PROTOCOL = 4
MAX_FRAME_BYTES = 8 * 1024 * 1024

_LENGTHS = struct.Struct(">II")
_LENGTH = struct.Struct(">I")


@attrs.frozen
class Frame:
    """One message: an operation or its answer, and the number that ties the two together."""

    op: str
    id: int
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    value: bytes = b""


@attrs.frozen
class _Field:
    rule: str
    accepts: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e9


def _is_row(row: Any) -> bool:
    return (
        type(row) is list
        and len(row) == 3
        and type(row[0]) is str
        and _is_whole(row[1])
        and _is_whole(row[2])
    )


WHOLE = _Field("a whole number from 0 to 2**63 - 1", _is_whole)
MAYBE_WHOLE = _Field("null or a whole number", lambda v: v is None or _is_whole(v))
SECONDS = _Field("a number of seconds from 0 to 1e9", _is_seconds)
MAYBE_SECONDS = _Field("null or a number of seconds", lambda v: v is None or _is_seconds(v))
TEXT = _Field("text", lambda v: type(v) is str)
TRUTH = _Field("true or false", lambda v: type(v) is bool)
ROWS = _Field("a list of [key, version, size]", lambda v: type(v) is list and all(map(_is_row, v)))

HEXADECIMAL = _Field(f"{DIGITS} hexadecimal digits", is_digits)

# hello stays as it is in every protocol, so that one of another protocol is refused by number.
SCHEMA: Mapping[str, Mapping[str, _Field]] = {
    "hello": {"protocol": WHOLE, "job": TEXT, "client": TEXT},
    "nonce": {"nonce": HEXADECIMAL},
    "response": {"proof": HEXADECIMAL},
    "get": {"key": TEXT},
    "set": {"key": TEXT, "ttl": MAYBE_SECONDS},
    "compare_set": {"key": TEXT, "ttl": MAYBE_SECONDS, "expected": WHOLE},
    "delete": {"key": TEXT, "expected": MAYBE_WHOLE},
    "refresh": {"key": TEXT, "version": WHOLE},
    "list": {"prefix": TEXT},
    "rest": {"number": WHOLE},
    "wait": {"prefix": TEXT, "after": WHOLE, "timeout": SECONDS},
    "watch": {"prefix": TEXT, "after": WHOLE, "listing": TRUTH},
    "challenge": {"nonce": HEXADECIMAL},
    "proof": {"proof": HEXADECIMAL},
    "welcome": {"protocol": WHOLE, "job": TEXT},
    "entry": {"version": WHOLE},
    "absent": {},
    "written": {"version": WHOLE},
    "lost": {"version": WHOLE},
    "answer": {"yes": TRUTH},
    "listing": {"version": WHOLE, "rows": ROWS, "rest": MAYBE_WHOLE},
    "error": {"kind": TEXT, "message": TEXT},
}
"""Each operation and each answer, with exactly the fields that it has."""

CARRIES_VALUE = frozenset({"set", "compare_set", "entry", "lost", "listing"})

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


_from_json = json.JSONDecoder(parse_constant=_no_constant).decode


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. The caller keeps to the schema; `decode` checks it."""
    header = _to_json({"op": frame.op, "id": frame.id, **frame.fields}).encode()
    total = _LENGTH.size + len(header) + len(frame.value)
    return b"".join((_LENGTHS.pack(total, len(header)), header, frame.value))


def decode(body: bytes) -> Frame:
    """The frame whose bytes, after the total length, these are. Raises StoreRefused."""
    if len(body) < _LENGTH.size:
        raise StoreRefused(f"a frame is at least {_LENGTH.size} bytes, got {len(body)}")
    (size,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + size
    if end > len(body):
        raise StoreRefused(f"a header of {size} bytes does not fit a frame of {len(body)}")
    try:
        return _checked(_header(body[_LENGTH.size : end]), body[end:])
    except RecursionError:  # be it in reading the header, or in showing a part of it
        raise StoreRefused("a frame's header is JSON of a few levels, got too many") from None


def check_fields(op: str, fields: Mapping[str, Any]) -> None:
    """StoreRefused unless these are the fields of the operation, each as the schema has it."""
    schema = SCHEMA[op]
    if fields.keys() != schema.keys():
        raise StoreRefused(f"{op} has the fields {sorted(schema)}, got {sorted(fields)!s:.200}")
    for name, field in schema.items():
        if not field.accepts(fields[name]):
            raise StoreRefused(f"{op}: {name} is {field.rule}, got {fields[name]!r:.80}")


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = _from_json(text.decode())
    except ValueError as error:
        raise StoreRefused(f"a frame's header is JSON, got {text[:80]!r}: {error}") from None
    if type(header) is not dict:
        raise StoreRefused(f"a frame's header is a JSON object, got {text[:80]!r}")
    return header


def _checked(header: dict[str, Any], value: bytes) -> Frame:
    op, number = header.pop("op", None), header.pop("id", None)
    if type(op) is not str or op not in SCHEMA:
        raise StoreRefused(f"a frame's op is one of {', '.join(SCHEMA)}, got {op!r:.80}")
    if not _is_whole(number):
        raise StoreRefused(f"{op}: id is {WHOLE.rule}, got {number!r:.80}")
    check_fields(op, header)
    if value and op not in CARRIES_VALUE:
        raise StoreRefused(f"{op} carries no value, got {len(value)} bytes")
    return Frame(op, number, header, value)


class FrameReader:
    """Puts frames together from the pieces in which they arrive.

    max_bytes: the longest frame that is taken; it may be changed between two frames.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived and were not asked for yet, as a frame or as a part of one."""
        return len(self._buffer)

    @property
    def unread(self) -> bytes:
        """What was fed and is no whole frame yet."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now; StoreRefused for bytes that are none of ours."""
        return list(self.frames(data))

    def frames(self, data: bytes) -> Iterator[Frame]:
        """The same one by one, each looked at when it is asked for."""
        self.add(data)
        while (frame := self.take()) is not None:
            yield frame

    def add(self, data: bytes) -> None:
        """More bytes, for `take`."""
        self._buffer += data

    def take(self) -> Frame | None:
        """The next frame; None while it is not complete. StoreRefused as `feed`."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (total,) = _LENGTH.unpack_from(self._buffer)
        if total > self.max_bytes:
            raise StoreRefused(f"a frame is at most {self.max_bytes} bytes, got {total}")
        end = _LENGTH.size + int(total)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return decode(body)

    def forget(self) -> None:
        """Drop what has arrived."""
        self._buffer = bytearray()
