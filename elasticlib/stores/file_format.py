"""What stands in the files of a FileStore, and under which names: bytes in, values out.

One file holds the version and the latest changes, one file each key with its value, version and
lease; a file that is not whole, or not of the key that its name says, is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from ..errors import StoreRefused
from .state import Entry

CHANGES_FILE = "changes"
KEY_PREFIX = "k."
LONGEST_QUOTED = 200
REMEMBERED = 256
"""How many changes are remembered; a waiter that is further behind is woken without a cause."""

_MAGIC = "elasticlib store 1"
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_Value = TypeVar("_Value")


@attrs.frozen
class FileLease:
    """Whose key it is, for how many seconds of silence, and the counter that its owner moves."""

    owner: str
    ttl: float
    beat: int = 0


@attrs.frozen
class Record:
    """An entry as it stands in its file."""

    entry: Entry
    lease: FileLease | None = None


@attrs.frozen
class Changes:
    """The store's version, and the latest changes as (version, key), oldest first.

    A version is claimed here before the key's file changes. A crash in between leaves a change
    that did not happen: a waiter is woken without a cause, and the number is not used again.
    """

    version: int = 0
    recent: tuple[tuple[int, str], ...] = ()
    forgotten: int = 0

    def claim(self, key: str) -> Changes:
        """The next version, claimed for the key."""
        version = self.version + 1
        kept = (*self.recent, (version, key))
        dropped = kept[:-REMEMBERED]
        forgotten = dropped[-1][0] if dropped else self.forgotten
        return Changes(version, kept[-REMEMBERED:], forgotten)

    def touched(self, prefix: str, after: int) -> bool:
        """Whether anything under the prefix has (or may have) changed past version `after`."""
        if not self.forgotten <= after <= self.version:
            return True
        return any(v > after and key.startswith(prefix) for v, key in reversed(self.recent))


def file_name(key: str) -> str:
    """The name of the key's file: readable, safe, and distinct where case does not count."""
    data = key.encode()
    quoted = "".join(chr(byte) if byte in _SAFE else f"%{byte:02x}" for byte in data)
    if len(quoted) > LONGEST_QUOTED:
        quoted = f"{quoted[:80]}.{hashlib.sha256(data).hexdigest()}"
    return KEY_PREFIX + quoted


def may_be_under(name: str, prefix: str) -> bool:
    """Whether the file of that name can be of a key under the prefix; False is certain."""
    start = file_name(prefix) if prefix else KEY_PREFIX
    # A quoted key may be cut at 80, between the characters of an escape even.
    length = min(len(start), len(KEY_PREFIX) + 80)
    return name[:length] == start[:length]


def encode_record(record: Record) -> bytes:
    """A JSON header of one line, and the value."""
    entry = record.entry
    header = {
        "format": _MAGIC,
        "key": entry.key,
        "version": entry.version,
        "size": len(entry.value),
        "crc": zlib.crc32(entry.value),
        "lease": None if record.lease is None else attrs.asdict(record.lease),
    }
    return json.dumps(header).encode() + b"\n" + entry.value


def decode_record(data: bytes, path: str) -> Record:
    """The record in the file's bytes. Raises StoreRefused, naming the file."""
    return _whole(_parse_record, data, path)


def encode_changes(changes: Changes) -> bytes:
    """The version on a line of its own, then the changes: `decode_version` needs the first."""
    head = f"{_MAGIC} version {changes.version}\n"
    body = {"forgotten": changes.forgotten, "recent": changes.recent}
    return head.encode() + json.dumps(body).encode() + b"\n"


def decode_changes(data: bytes, path: str) -> Changes:
    """The changes in the file's bytes. Raises StoreRefused, naming the file."""
    return _whole(_parse_changes, data, path)


def decode_version(data: bytes, path: str) -> int:
    """The version, of the file's first bytes. Raises StoreRefused, naming the file."""
    return _whole(_parse_version, data, path)


def _whole(parse: Callable[[bytes], _Value], data: bytes, path: str) -> _Value:
    try:
        return parse(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreRefused(f"{path} is no whole file of a FileStore: {error!r}") from None


def _parse_version(data: bytes) -> int:
    head, newline, _ = data.partition(b"\n")
    words = head.decode().rsplit(" ", 2)
    if not newline or words[:2] != [_MAGIC, "version"]:
        raise ValueError(f"it begins with {head[:40]!r}")
    return int(words[2])


def _parse_changes(data: bytes) -> Changes:
    version = _parse_version(data)
    body = json.loads(data.partition(b"\n")[2])
    recent = tuple((_int(number), _text(key)) for number, key in body["recent"])
    return Changes(version, recent, _int(body["forgotten"]))


def _parse_record(data: bytes) -> Record:
    head, _, value = data.partition(b"\n")
    header = json.loads(head)
    if header["format"] != _MAGIC:
        raise ValueError(f"its format is {header['format']!r}")
    if header["size"] != len(value) or header["crc"] != zlib.crc32(value):
        raise ValueError(f"{header['size']} bytes were written, {len(value)} are there")
    lease = header["lease"]
    entry = Entry(_text(header["key"]), value, _int(header["version"]))
    return Record(entry, None if lease is None else _lease(lease))


def _lease(fields: dict[str, Any]) -> FileLease:
    return FileLease(_text(fields["owner"]), float(fields["ttl"]), _int(fields["beat"]))


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no text")
    return value
