"""The head of a pack: how large the pack is, what stands beside the state, where tensors lie.

A pack is a safetensors file. Its data begin at a multiple of 4096 bytes, as the JSON header is
padded with spaces, and the header's `__metadata__` has two strings of ours before the entries::

    0            uint64, little-endian: the size of the JSON header
    8            {"__metadata__":{"elasticlib":"pack 3 size=... head=... data=...",
                  "elasticlib.state":"{...}"},"model.weight":{"dtype":"F32",...},...}
    n * 4096     the entries' bytes, in the order of the header, without gaps

`size` is that of the whole file, in bytes; `head` the CRC-32 of the head without these eight
digits; `data` the checksum of the data (see `place.checksum_of`), or dashes where whoever stores
or sends the pack sums it up. All three are hexadecimal. The second string is the outline: JSON with
the state's structure, its plain values, and which tensor is which view of which entry (see `pack`).

Nothing here needs torch, so agents can read heads.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

import attrs

from ..errors import CheckpointCorrupt, Unreadable

FORMAT = 3
HEAD_BYTES = 128
"""The first bytes of a pack, by which its size is known."""

DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
}
"""Of entries, by the names that safetensors gives them, what torch calls them: those that all its
readers for torch know."""
ARRAY_DTYPES = {
    **{"<f8": "F64", "<f4": "F32", "<f2": "F16", "<c8": "C64"},
    **{"<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8"},
    **{"<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL"},
}
"""By what NumPy calls them."""
ITEM_BYTES = {
    name: 1 if name == "BOOL" else int(re.findall("[0-9]+", name)[0]) // 8 for name in DTYPES
}

ALIGN, _PAGE = 64, 4096
_LENGTH = struct.Struct("<Q")
_OUTLINE = ',"elasticlib.state":'
_RECORD = re.compile(
    rb'\{"__metadata__":\{"elasticlib":"pack ([0-9]{1,6}) size=([0-9a-f]{16}) '
    rb'head=([0-9a-f]{8}) data=([0-9a-f]{8}|-{8})"'
)
_UNSUMMED = "-" * 8


_ENTRY = re.compile(
    r',"((?:[^"\\]|\\.)*)":\{"dtype":"([A-Z0-9_]{1,12})","shape":\[([0-9,]*)\],'
    r'"data_offsets":\[([0-9]{1,19}),([0-9]{1,19})\]\}'
)
"""The one way in which an entry is written, and so the one in which it is read."""


class Entry(NamedTuple):
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
    it. entries: in the order of their bytes, all of the data. summed: the checksum of the data,
    if the head has it.
    """

    size: int
    start: int
    outline: Mapping[str, Any]
    entries: tuple[Entry, ...]
    summed: int | None = None


def write_head(entries: Iterable[Entry], outline: Mapping[str, Any], size: int) -> bytes:
    """The head of a pack.

    Args:
        entries: of names of their own, in the order of their bytes and without gaps.
        outline: plain JSON, with an object "meta".
        size: of the data, in bytes.
    """
    record = f"pack {FORMAT} size={0:016x} head={0:08x} data={_UNSUMMED}"
    text = [f'{{"__metadata__":{{"elasticlib":"{record}"{_OUTLINE}{quoted(_dumps(outline))}}}']
    for name, dtype, shape, begin, end in entries:
        counts = ",".join(map(str, shape))
        row = f'"dtype":"{dtype}","shape":[{counts}],"data_offsets":[{begin},{end}]'
        text.append(f",{quoted(name)}:{{{row}}}")
    text.append("}")
    header = "".join(text)
    start = up(_LENGTH.size + len(header), _PAGE)
    header = header.replace(f"size={0:016x}", f"size={start + size:016x}", 1)
    header = header.ljust(start - _LENGTH.size)
    return _sealed(_LENGTH.pack(len(header)) + header.encode("ascii"))


def in_order(sizes: Sequence[int]) -> list[int]:
    """The entries in the order of their bytes. safetensors allows no gaps, so they are sorted by
    the power of two that divides their size: each begins at a multiple of it, up to `ALIGN`, and so
    of its elements' size."""
    return sorted(range(len(sizes)), key=lambda at: -min(sizes[at] & -sizes[at] or ALIGN, ALIGN))


def entry_names(paths: Sequence[tuple[str, bool]]) -> list[str]:
    """A name of its own for each entry.

    Args:
        paths: where in the state the tensor stands that the entry is, or the first of those in it;
            and whether it is a tensor. Tensors choose first: a path is a tensor's name.
    """
    wanted = [path if is_tensor else f"{path}.storage" for path, is_tensor in paths]
    names, taken = [""] * len(wanted), {"__metadata__"}
    for at in sorted(range(len(wanted)), key=lambda at: not paths[at][1]):
        # Half a character, which Python can hold, is none in a file that others read.
        path = wanted[at]
        path = path if path.isascii() else path.encode("utf-8", "backslashreplace").decode()
        name, count = path, 1
        while name in taken:
            count += 1
            name = f"{path}~{count}"
        taken.add(name)
        names[at] = name
    return names


def with_sum(head: bytes, checksum: int) -> bytes:
    """Return a head that `write_head` made, with the checksum of its data."""
    begin, end = _span(head, 4)
    return _sealed(head[:begin] + b"%08x" % checksum + head[end:])


def size_of(first: bytes | memoryview) -> tuple[int, int]:
    """The size of a pack and that of its head, in bytes, by its first `HEAD_BYTES` bytes.

    Raises:
        CheckpointCorrupt: these are not the first bytes of a pack.
    """
    if len(first) < HEAD_BYTES:
        raise CheckpointCorrupt(f"a pack begins with {HEAD_BYTES} bytes, here are {len(first)}")
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
        Unreadable: a version with another format wrote it.
    """
    size, start = size_of(pack[:HEAD_BYTES])
    head = bytes(pack[:start])
    if len(head) < start:
        raise CheckpointCorrupt(f"the pack's head has {start} bytes, and {len(head)} are here")
    record = _record(head)
    if int(record[3], 16) != _sum(head):
        raise CheckpointCorrupt("the pack's head was changed or cut short")
    if int(record[1]) != FORMAT:
        # The pack is not damaged, so this is no reason to fall back to an older checkpoint.
        raise Unreadable(f"the pack has format {int(record[1])}, this version reads {FORMAT}")
    try:
        outline, entries = _header(head[_LENGTH.size :].decode("ascii"), record.end())
    except ValueError as error:
        raise CheckpointCorrupt(f"the pack's header is none: {error!s:.200}") from error
    _check_cover(entries, size - start)
    summed = None if record[4] == _UNSUMMED.encode() else int(record[4], 16)
    return Head(size, start, _checked(outline), entries, summed)


def read_meta(pack: bytes | memoryview) -> dict[str, Any]:
    """What `pack.lay_out` was given as `meta`; needs the pack's head only.

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


def _header(text: str, at: int) -> tuple[str, tuple[Entry, ...]]:
    """The outline and the entries of a header, whose record ends at `at`. Raises ValueError.

    Only what is written as `write_head` does is read, which leaves nothing to differ about.
    """
    if not text.startswith(_OUTLINE, at):
        raise ValueError(f"at byte {at} there is no outline")
    outline, at = json.JSONDecoder().raw_decode(text, at + len(_OUTLINE))
    if type(outline) is not str or text[at : at + 1] != "}":
        raise ValueError(f"the outline that ends at byte {at} is no text")
    at += 1
    entries: dict[str, Entry] = {}
    for found in _ENTRY.finditer(text, at):
        if found.start() != at:
            break
        entry = _entry(*found.groups())
        if entry.name in entries:
            raise ValueError(f"{entry.name!r:.80} stands in it twice")
        entries[entry.name] = entry
        at = found.end()
    if text[at:].rstrip(" ") != "}":
        raise ValueError(f"at byte {at} there is neither an entry nor the end: {text[at:][:40]!r}")
    return outline, tuple(entries.values())


def _entry(name: str, dtype: str, shape: str, begin: str, end: str) -> Entry:
    if "\\" in name:
        name = json.loads(f'"{name}"')
    counts = tuple(map(int, shape.split(","))) if shape else ()
    entry = Entry(name, dtype, counts, int(begin), int(end))
    if dtype not in DTYPES:
        raise ValueError(f"{name!r:.80} has the dtype {dtype}, which no entry has")
    if math.prod(counts) * ITEM_BYTES[dtype] != entry.end - entry.begin:
        size = entry.end - entry.begin
        raise ValueError(f"{name!r:.80} of {counts!s:.80} {dtype} has {size} bytes")
    return entry


def _check_cover(entries: Sequence[Entry], size: int) -> None:
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


def _checked(text: str) -> dict[str, Any]:
    try:
        outline = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"the pack's outline is no JSON: {error}") from error
    if not isinstance(outline, dict) or not isinstance(outline.get("meta"), dict):
        raise CheckpointCorrupt("the pack's outline says nothing beside the state")
    return outline
