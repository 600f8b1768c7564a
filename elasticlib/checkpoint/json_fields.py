"""JSON that anybody may have written, read as a value of ours: each field of its type, or refused.

A sum that is right says that the bytes are as somebody wrote them, and nothing of who that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import attrs

T = TypeVar("T")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
}


def read_fields(kind: type[T], value: object, **ready: object) -> T:
    """The value of this attrs class with these fields, each of exactly the type that it names.

    Args:
        kind: a class whose fields are of the types int, float, str and bool, but for those `ready`.
        value: the JSON object with the other fields; those with a default may be missing.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    if type(value) is not dict:
        raise ValueError(f"an object is expected, not {value!r:.80}")
    fields = value
    known = attrs.fields_dict(kind)  # type: ignore[arg-type]
    for field in known.values():
        if field.name in ready:
            continue
        if field.name not in fields:
            if field.default is attrs.NOTHING:
                raise ValueError(f"{field.name} is missing")
        elif type(fields[field.name]) not in _TYPES[str(field.type)]:
            raise ValueError(f"{field.name} is {fields[field.name]!r:.80}, must be {field.type}")
    unknown = [name for name in fields if name in ready or name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r:.80} is no field of it")
    return kind(**fields, **ready)
