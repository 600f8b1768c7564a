"""The JSON form of attrs values: written without rules of their own, and read strictly.

Manifests, fences and the headers of snapshots use it. A value has one JSON form, which follows from
the annotations of its class: an attrs class is an object of its fields, a tuple is an array, an
enum is its value, and a mapping has strings as keys. Whatever has another form is rejected, because
another program may have written or damaged it.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any, TypeVar

import attrs

T = TypeVar("T")

_PLAIN: Mapping[object, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
}


def to_json(value: Any) -> Any:
    """Return the JSON form of an attrs value, a tuple, a mapping, an enum or a plain value."""
    if attrs.has(type(value)):
        names = _field_names(typing.cast(Hashable, type(value)))
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return value.value if isinstance(value, enum.Enum) else value


def from_json(kind: type[T], value: object) -> T:
    """Return the value of an attrs class from its JSON form.

    Args:
        kind: the class. A field with a default may be missing in the JSON form.
        value: the decoded JSON.

    Raises:
        ValueError: a field is missing, unknown or of another type.
    """
    return typing.cast(T, _reader(typing.cast(Hashable, kind))(value, kind.__name__))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind))


_Reader: typing.TypeAlias = Callable[[object, str], Any]
"""Returns the value of a JSON form, given its name for messages."""


@cache
def _reader(kind: Any) -> _Reader:
    """Return the function that reads values of an annotation."""
    if kind in _PLAIN:
        return _plain_reader(kind)
    if isinstance(kind, type) and attrs.has(kind):
        return _attrs_reader(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return lambda value, _: kind(value)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple_reader(_reader(arguments[0]))
    if origin in (types.UnionType, typing.Union) and type(None) in arguments:
        [inner] = [_reader(each) for each in arguments if each is not type(None)]
        return lambda value, name: None if value is None else inner(value, name)
    return _mapping_reader(_reader(arguments[1]))


def _plain_reader(kind: Any) -> _Reader:
    def read(value: object, name: str) -> Any:
        if type(value) not in _PLAIN[kind]:
            raise ValueError(f"{name} must be {kind.__name__}, got {value!r:.80}")
        return value

    return read


def _tuple_reader(read_item: _Reader) -> _Reader:
    def read(value: object, name: str) -> Any:
        if type(value) is not list:
            raise ValueError(f"{name} must be a list, got {value!r:.80}")
        return tuple(read_item(item, name) for item in value)

    return read


def _mapping_reader(read_item: _Reader) -> _Reader:
    def read(value: object, name: str) -> Any:
        if type(value) is not dict:
            raise ValueError(f"{name} must be an object, got {value!r:.80}")
        return {key: read_item(item, f"{name}.{key:.40}") for key, item in value.items()}

    return read


def _attrs_reader(kind: type) -> _Reader:
    hints, fields = typing.get_type_hints(kind), attrs.fields_dict(kind)
    readers: dict[str, _Reader] = {}  # filled when they are first used: a class may contain itself

    def read(value: object, name: str) -> Any:
        if type(value) is not dict:
            raise ValueError(f"{name} must be an object, got {value!r:.80}")
        for unknown in value.keys() - fields.keys():
            raise ValueError(f"{unknown!r:.80} is an unknown field")
        for field in fields.values():
            if field.name not in value and field.default is attrs.NOTHING:
                raise ValueError(f"{field.name} is missing")
        for field_name in value.keys() - readers.keys():
            readers[field_name] = _reader(hints[field_name])
        return kind(**{each: readers[each](item, each) for each, item in value.items()})

    return read
