"""JSON encoding of attrs classes, with exactly their fields and checked types.

Annotations may be str, bool, int, float, an enum, another attrs class, `X | None` and
`tuple[X, ...]`. Decoding never executes anything, and rejects data of any other shape.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import attrs

from ..errors import ConfigError, RendezvousConfigError

MAX_NUMBER = 2**63

_SCALARS: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
}

Value = TypeVar("Value")


def encode(value: Any) -> bytes:
    """Encode an attrs object, or lists and dicts of such objects."""
    return _ENCODER.encode(value).encode()


def decode(kind: type[Value], data: bytes, name: str) -> Value:
    """Decode an object of this attrs class.

    Args:
        kind: the class.
        data: the JSON text.
        name: the name of the record, for error messages.

    Raises:
        RendezvousConfigError: the data has another form. The message names the invalid field.
    """
    return from_json(kind, parse(data, name), name)


def parse(data: bytes, name: str) -> Any:
    """Parse JSON text. Raises RendezvousConfigError if it is invalid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RendezvousConfigError(f"{name} in the store is not JSON: {error}") from error


def from_json(kind: type[Value], raw: Any, name: str) -> Value:
    """Convert parsed JSON to an object of this class, as `decode` does."""
    try:
        return typing.cast(Value, _reader(typing.cast(Any, kind))(raw))
    except _DecodeError as error:
        raise RendezvousConfigError(f"{name}{error}") from error


def fields_of(value: Any, kind: type) -> dict[str, Any]:
    """Return the fields that the attrs class `kind` declares, with their values in `value`."""
    return {name: getattr(value, name) for name in _field_names(kind)}


def _to_json(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else fields_of(value, type(value))


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(attrs.fields_dict(kind))


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_to_json)


class _DecodeError(Exception):
    """A value of the wrong form. The message starts with the path of the field."""


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts parsed JSON to a value of this annotation."""
    if kind in _SCALARS:
        return partial(_read_scalar, kind)
    if attrs.has(kind):
        hints = typing.get_type_hints(kind)
        readers = {name: _reader(hints[name]) for name in _field_names(kind)}
        return partial(_read_object, kind, readers)
    if isinstance(kind, types.UnionType):
        (wanted,) = (arg for arg in typing.get_args(kind) if arg is not types.NoneType)
        return partial(_read_optional, _reader(wanted))
    if typing.get_origin(kind) is tuple:
        return partial(_read_tuple, _reader(typing.get_args(kind)[0]))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return partial(_read_enum, {member.value: member for member in kind})
    raise TypeError(f"no record has fields of type {kind}: this is a bug in elasticlib")


def _read_scalar(kind: type, raw: Any) -> Any:
    # isinstance would accept a bool as an int.
    is_number = kind in (int, float)
    if type(raw) not in _SCALARS[kind] or (is_number and not -MAX_NUMBER < raw < MAX_NUMBER):
        raise _DecodeError(f" is {raw!r}")
    return raw


def _read_enum(members: dict[str, Any], raw: Any) -> Any:
    if not isinstance(raw, str) or raw not in members:
        raise _DecodeError(f" is {raw!r}, not one of {sorted(members)}")
    return members[raw]


def _read_optional(read_value: Callable[[Any], Any], raw: Any) -> Any:
    return None if raw is None else read_value(raw)


def _read_tuple(read_item: Callable[[Any], Any], raw: Any) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise _DecodeError(f" is {raw!r}, not a list")
    values: list[Any] = []
    try:
        for item in raw:
            values.append(read_item(item))
    except _DecodeError as error:
        raise _DecodeError(f"[{len(values)}]{error}") from error
    return tuple(values)


def _read_object(kind: Any, readers: dict[str, Callable[[Any], Any]], raw: Any) -> Any:
    if not isinstance(raw, dict) or raw.keys() != readers.keys():
        got = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise _DecodeError(f" needs the fields {sorted(readers)}, got {got}")
    fields, name = {}, ""
    try:
        for name, read_field in readers.items():
            fields[name] = read_field(raw[name])
    except _DecodeError as error:
        raise _DecodeError(f": field {name!r}{error}") from error
    try:
        return kind(**fields)
    except ConfigError as error:
        raise _DecodeError(f": {error}") from error
