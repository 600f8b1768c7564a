"""The head of a pack: how large the pack is, what stands beside the state, where tensors lie.

A pack is a safetensors file. Its data begin at a multiple of 4096 bytes, as the JSON header is
padded with spaces, and the header's `__metadata__` has two strings of ours before the entries::

    0            uint64, little-endian: the size of the JSON header
    8            {"__metadata__":{"elasticlib":"pack 3 size=... head=... data=...",
                  "elasticlib.state":"{...}"},"model.weight":{"dtype":"F32",...},...}
    n * 4096     the entries' bytes, in the order of the header, without gaps

`size` is that of the whole file, in bytes; `head` the CRC-32 of the head without these eight
digits; `data` that of the data, or dashes where whoever stores or sends the pack sums it up. All
three are hexadecimal. The second string is the outline: JSON with the state's structure, its plain
values, and which tensor is which view of which entry (see `pack`).

Nothing here needs torch, so agents can read heads. Packs of the formats 1 and 2, which are still
read, have a binary head, and an outline of JSON behind it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..errors import CheckpointCorrupt
from .interface import Unreadable

FORMAT = 3
HEAD_BYTES = 128
"""The first bytes of a pack, by which its size is known."""

ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}
"""The dtypes of entries, by the names that safetensors gives them: those that all its readers for
torch know."""

_PAGE = 4096
_LENGTH = struct.Struct("<Q")
_NOTES, _FIRST, _OUTLINE = "__metadata__", "elasticlib", "elasticlib.state"
_RECORD = re.compile(
    rb'\{"__metadata__":\{"elasticlib":"pack ([0-9]{1,6}) size=([0-9a-f]{16}) '
    rb'head=([0-9a-f]{8}) data=([0-9a-f]{8}|-{8})"'
)
_UNSUMMED = "-" * 8

_OLD_MAGIC = b"ELPACK1\n"
_OLD_BYTES = 64
_OLD = struct.Struct("<8sQQI")
"""Of the formats 1 and 2: magic, size of the whole, size and CRC-32 of the outline; behind these
the CRC-32 of the 28 bytes before."""


@attrs.frozen
class Entry:
    """One run of bytes in a pack: begin, end: where, counted from the first byte of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@attrs.frozen
class Head:
    """What the head of a pack says.

    size: of the whole, in bytes. start: where its data begin. outline: as `write_head` was given
    it. entries: in the order of their bytes, all of the data; those of the formats 1 and 2 have
    none. summed: the CRC-32 of the data, if it is told here.
    """

    format: int
    size: int
    start: int
    outline: Mapping[str, Any]
    entries: tuple[Entry, ...] = ()
    summed: int | None = None


def write_head(entries: Iterable[Entry], outline: Mapping[str, Any], size: int) -> bytes:
    """The head of a pack.

    Args:
        entries: of names of their own, in the order of their bytes and without gaps.
        outline: plain JSON, with an object "meta".
        size: of the data, in bytes.
    """
    record = f"pack {FORMAT} size={0:016x} head={0:08x} data={_UNSUMMED}"
    header: dict[str, Any] = {_NOTES: {_FIRST: record, _OUTLINE: _dumps(outline)}}
    for one in entries:
        place = [one.begin, one.end]
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": place}
    text = _dumps(header)
    start = up(_LENGTH.size + len(text), _PAGE)
    text = text.replace(f"size={0:016x}", f"size={start + size:016x}", 1)
    text = text.ljust(start - _LENGTH.size)
    return _sealed(_LENGTH.pack(len(text)) + text.encode("ascii"))


def with_sum(head: bytes, crc32: int) -> bytes:
    """A head that `write_head` made, which tells the CRC-32 of the data behind it, too."""
    begin, end = _span(head, 4)
    return _sealed(head[:begin] + b"%08x" % crc32 + head[end:])


def size_of(first: bytes | memoryview) -> tuple[int, int]:
    """The size of a pack and that of its head, in bytes, by its first `HEAD_BYTES` bytes.

    Raises:
        CheckpointCorrupt: these are not the first bytes of a pack.
    """
    if len(first) < HEAD_BYTES:
        raise CheckpointCorrupt(f"a pack begins with {HEAD_BYTES} bytes, here are {len(first)}")
    if first[: len(_OLD_MAGIC)] == _OLD_MAGIC:
        return _old_size_of(first)
    size = int(_record(first)[2], 16)
    (length,) = _LENGTH.unpack_from(first)
    start = _LENGTH.size + length
    if start % _PAGE or start > size or size >= 2**63:
        raise CheckpointCorrupt(
            f"the first bytes of the pack were changed: a head of {start} bytes, {size} in all"
        )
    return size, start


def read_head(pack: bytes | memoryview) -> Head:
    """All that the head says, having checked every byte of it.

    Args:
        pack: its first bytes, up to the data at least.

    Raises:
        CheckpointCorrupt: it is no pack, or its head was changed or cut short.
        Unreadable: a newer version wrote it.
    """
    size, start = size_of(pack[:HEAD_BYTES])
    head = bytes(pack[:start])
    if len(head) < start:
        raise CheckpointCorrupt(f"the pack's head has {start} bytes, and {len(head)} are here")
    if head.startswith(_OLD_MAGIC):
        return _old_head(head, size, start)
    record = _record(head)
    if int(record[3], 16) != _sum(head):
        raise CheckpointCorrupt("the pack's head was changed or cut short")
    _check_format(int(record[1]), 3, FORMAT)
    header = _read(head[_LENGTH.size :])
    try:
        outline = _read(header.pop(_NOTES)[_OUTLINE])
        entries = tuple(_entry(name, row) for name, row in header.items())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the pack's header is none: {error!r:.200}") from error
    _check_cover(entries, size - start)
    summed = None if record[4] == _UNSUMMED.encode() else int(record[4], 16)
    return Head(int(record[1]), size, start, _with_meta(outline), entries, summed)


def read_meta(pack: bytes | memoryview) -> dict[str, Any]:
    """What `pack.lay_out` was told beside the state; needs the pack's head only.

    Raises:
        As `read_head`.
    """
    return dict(read_head(pack).outline["meta"])


def up(size: int, to: int) -> int:
    """The next multiple."""
    return -(-size // to) * to


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _record(head: bytes | memoryview) -> re.Match[bytes]:
    found = _RECORD.match(bytes(head[_LENGTH.size : HEAD_BYTES]))
    if found is None:
        raise CheckpointCorrupt(
            "a pack begins with the record of one in the header of a safetensors file, this with "
            f"{bytes(head[:24])!r}"
        )
    return found


def _span(head: bytes, group: int) -> tuple[int, int]:
    begin, end = _record(head).span(group)
    return _LENGTH.size + begin, _LENGTH.size + end


def _sum(head: bytes) -> int:
    begin, end = _span(head, 3)
    return zlib.crc32(memoryview(head)[end:], zlib.crc32(head[:begin]))


def _sealed(head: bytes) -> bytes:
    begin, end = _span(head, 3)
    return head[:begin] + b"%08x" % _sum(head) + head[end:]


def _read(text: bytes | str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"the pack's header is no JSON: {error}") from error
    if type(found) is not dict:
        raise CheckpointCorrupt(f"the pack's header is a {type(found).__name__}, no JSON object")
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r:.80} stands in it twice")
    return found


def _entry(name: str, row: Mapping[str, Any]) -> Entry:
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    if any(type(n) is not int or not 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise ValueError(f"{name!r:.80} has the shape {shape} and the bytes {begin} to {end}")
    if math.prod(shape) * ITEM_BYTES[row["dtype"]] != end - begin:
        raise ValueError(f"{name!r:.80} of {shape} {row['dtype']} has {end - begin} bytes")
    return Entry(name, row["dtype"], shape, begin, end)


def _check_cover(entries: Iterable[Entry], size: int) -> None:
    at = 0
    for one in entries:
        if one.begin != at:
            raise CheckpointCorrupt(
                f"the pack's entry {one.name!r:.80} begins at {one.begin}, the one before it ends "
                f"at {at}"
            )
        at = one.end
    if at != size:
        raise CheckpointCorrupt(f"the pack's entries are {at} bytes, its data {size}")


def _check_format(found: object, least: int, most: int) -> None:
    reads = f"this version reads 1 to {FORMAT}"
    if type(found) is int and found > FORMAT:
        # Nobody changed it: what a newer version wrote is no reason to go back to an older state.
        raise Unreadable(f"the pack has format {found}, {reads}")
    if type(found) is not int or not least <= found <= most:
        raise CheckpointCorrupt(f"the pack has format {found!r}, {reads}")


def _with_meta(outline: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(outline.get("meta"), dict):
        raise CheckpointCorrupt("the pack's outline says nothing beside the state")
    return outline


def _old_size_of(first: bytes | memoryview) -> tuple[int, int]:
    _, size, outline, _ = _OLD.unpack_from(first)
    (summed,) = struct.unpack_from("<I", first, _OLD.size)
    start = up(_OLD_BYTES + outline, _PAGE)
    if summed != zlib.crc32(first[: _OLD.size]) or start > size:
        raise CheckpointCorrupt("the first bytes of the pack were changed")
    return size, start


def _old_head(head: bytes, size: int, start: int) -> Head:
    _, _, length, summed = _OLD.unpack_from(head)
    text = head[_OLD_BYTES : _OLD_BYTES + length]
    if zlib.crc32(text) != summed:
        raise CheckpointCorrupt("the pack's outline was changed or cut short")
    outline = _read(text)
    found = outline.get("format")
    _check_format(found, 1, 2)
    return Head(int(found or 0), size, start, _with_meta(outline))
