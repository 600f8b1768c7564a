"""Reading of files, compressed bytes and JSON that another program may have written.

A worker, a peer, a user or another job may have written them. Opening such a file never blocks and
follows a link only on request, reading and decompressing are bounded, and any JSON that is not
valid raises ValueError.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import zlib
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
_SAFE_OPEN_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class IrregularFileError(OSError):
    """A pipe, a device or a directory is in the place of a file. A retry does not help."""


@contextlib.contextmanager
def open_regular_file(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    *,
    mode: int = 0o600,
    follow_link: bool = False,
) -> Iterator[int]:
    """Open a regular file, yield its descriptor and close it at the end.

    Args:
        path: The file.
        flags: The flags of `os.open`.
        mode: The permissions of a new file.
        follow_link: Whether the path may be a link to the file.

    Raises:
        IrregularFileError: The path is a pipe, a device or a directory.
        OSError: The file does not exist, or is a link.
    """
    fd = os.open(path, flags | _SAFE_OPEN_FLAGS | (0 if follow_link else os.O_NOFOLLOW), mode)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise IrregularFileError(errno.EINVAL, "this is not a regular file", os.fspath(path))
        yield fd
    finally:
        os.close(fd)


def read_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return at most the first `max_bytes` bytes of a regular file.

    Raises:
        OSError: As `open_regular_file` raises it.
    """
    with open_regular_file(path) as fd, open(fd, "rb", closefd=False) as file:
        return file.read(max_bytes)


def decompress(data: bytes, max_bytes: int) -> bytes:
    """Return what `zlib.compress` was given, if it has at most `max_bytes` bytes.

    Raises:
        ValueError: The data is damaged, truncated, or larger than `max_bytes` when decompressed.
    """
    decompressor = zlib.decompressobj()
    try:
        result = decompressor.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"not compressed by zlib, or damaged: {data[:60]!r}") from error
    if len(result) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes when decompressed")
    if not decompressor.eof:
        raise ValueError(f"the {len(data)} compressed bytes are truncated")
    return result


def read_json(data: bytes | str) -> Any:
    """Return the decoded JSON value.

    A number without a finite value (NaN, Infinity, 1e999) is returned as its text.

    Raises:
        ValueError: The data is not JSON, is nested too deeply, or has an integer of too many
            digits.
    """
    try:
        return json.loads(data, parse_constant=str, parse_float=_parse_float)
    except RecursionError as error:
        raise ValueError(f"brackets are nested too deeply in {data[:40]!r}...") from error


def read_object(data: bytes | str) -> dict[str, Any]:
    """Return the decoded JSON object.

    Raises:
        ValueError: The data is not JSON, or its value is not an object.
    """
    value = read_json(data)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is expected, got {data[:40]!r}")
    return value


def read_fields(kind: type[T], value: object, **preset: object) -> T:
    """Return an instance of an attrs class from a JSON object, after checking each field's type.

    Args:
        kind: The class. Its fields are of the types int, float, str and bool, except for those in
            `preset`.
        value: The JSON object with the other fields. A field with a default may be missing.
        preset: Fields that are not taken from the JSON object.

    Raises:
        ValueError: A field is missing, unknown or of another type.
    """
    if type(value) is not dict:
        raise ValueError(f"an object is expected, got {value!r:.80}")
    known = attrs.fields_dict(kind)  # type: ignore[arg-type]
    for field in known.values():
        if field.name in preset:
            continue
        if field.name not in value:
            if field.default is attrs.NOTHING:
                raise ValueError(f"{field.name} is missing")
        elif type(value[field.name]) not in _TYPES[str(field.type)]:
            raise ValueError(f"{field.name} must be {field.type}, got {value[field.name]!r:.80}")
    unknown = [name for name in value if name in preset or name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r:.80} is an unknown field")
    return kind(**value, **preset)


def full_name(value: object) -> str:
    """Return the name of the class of a value, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def class_name_with_article(value: object) -> str:
    """Return the name of the class of a value after `a` or `an`."""
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _parse_float(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text
