"""What a stranger may have written: a worker, a peer, a user, a folder that many share.

A file is looked at only where that cannot block, follow a link or have no end; and what cannot be
read as JSON raises ValueError, whatever is wrong with it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import attrs

T = TypeVar("T")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
}
_NEVER_WAITS = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, mode: int = 0o600
) -> Iterator[int]:
    """The descriptor of a regular file, to be closed by this.

    Args:
        flags, mode: as `os.open` takes them.

    Raises:
        OSError: it is not there, or no file: a pipe, a device, a folder or a link.
    """
    handle = os.open(path, flags | _NEVER_WAITS, mode)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "this is not a regular file", os.fspath(path))
        yield handle
    finally:
        os.close(handle)


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """The first `most` bytes of a regular file. Raises OSError as `opened` does."""
    with opened(path) as handle, open(handle, "rb", closefd=False) as file:
        return file.read(most)


def read_json(data: bytes | str) -> Any:
    """What is written there; a number that is none (NaN, Infinity, 1e999) is its text.

    Raises:
        ValueError: it is no JSON, is nested too deep, or has a whole number of too many digits.
    """
    try:
        return json.loads(data, parse_constant=str, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f"brackets are nested too deeply in {data[:40]!r}...") from error


def read_object(data: bytes | str) -> dict[str, Any]:
    """The object that is written there. Raises ValueError where that is something else."""
    found = read_json(data)
    if not isinstance(found, dict):
        raise ValueError(f"this is a JSON object, got {data[:40]!r}")
    return found


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
        raise ValueError(f"{unknown[0]!r:.80} is an unknown field")
    return kind(**fields, **ready)


def full_name(value: object) -> str:
    """The name of its class, with its module's."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def with_article(value: object) -> str:
    """The name of its class after `a` or `an`."""
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _finite(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text
