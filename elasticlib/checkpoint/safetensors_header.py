"""Header of a pack: its size, its checksums, the plain values of the state, and where tensors are.

A pack is a safetensors file. The data begin at a multiple of 4096 bytes, because the JSON header is
padded with spaces, and the header's `__metadata__` has three strings before the entries::

    0            uint64, little-endian: the size of the JSON header
    8            {"__metadata__":{"elasticlib":"pack 4 size=... head=... data=...",
                  "elasticlib.values":"{...}","elasticlib.tree":"{...}"},
                  "model/weight":{"dtype":"F32",...},...}
    n * 4096     the bytes of the entries, in the order of the header, without gaps

- `size` is the size of the file in bytes, `head` the CRC-32 of the header without these eight
  digits, and `data` the checksum of the data (see `storage.checksum`). If this checksum is stored
  elsewhere, `data` is eight dashes. All three are hexadecimal.
- The values are JSON that changes from save to save: `meta` (such as the step) and `values`, the
  plain values of the state in the order of the tree.
- The tree is JSON that depends only on the structure of the state (see `state_tree`). It is
  encoded once for many snapshots, together with the entries.

This module does not import torch, so that agents can read headers.
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

from ..errors import CheckpointCorruptError, CheckpointUnreadableError

FORMAT = 4
PREFIX_BYTES = 128  # The first bytes of a pack, which contain its size.
ALIGNMENT = 64  # Entries whose size allows it begin at a multiple of so many bytes.
PAGE_BYTES = 4096
# Unused bytes that a new layout leaves in the header, so that the plain values can grow.
_SPARE_BYTES = 256

# torch's names of the dtypes that all safetensors readers for torch know, by safetensors' names.
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
}
# safetensors' names by NumPy's names.
ARRAY_DTYPES = {
    **{"<f8": "F64", "<f4": "F32", "<f2": "F16", "<c8": "C64"},
    **{"<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8"},
    **{"<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL"},
}
ITEM_BYTES = {
    name: 1 if name == "BOOL" else int(re.findall("[0-9]+", name)[0]) // 8 for name in DTYPES
}

_LENGTH = struct.Struct("<Q")
_VALUES = b',"elasticlib.values":'
_TREE = ',"elasticlib.tree":'
_RECORD = re.compile(
    rb'\{"__metadata__":\{"elasticlib":"pack ([0-9]{1,6}) size=([0-9a-f]{16}) '
    rb'head=([0-9a-f]{8}) data=([0-9a-f]{8}|-{8})"'
)
_NO_CHECKSUM = b"-" * 8
# `encode_tree` writes an entry in exactly this form, and `read_header` accepts no other.
_ENTRY = re.compile(
    r',"((?:[^"\\]|\\.)*)":\{"dtype":"([A-Z0-9_]{1,12})","shape":\[([0-9,]*)\],'
    r'"data_offsets":\[([0-9]{1,19}),([0-9]{1,19})\]\}'
)
_compact = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class PackEntry(NamedTuple):
    """A range of bytes in a pack that safetensors readers see as a tensor."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    begin: int  # Offsets are counted from the first byte of the data.
    end: int


@attrs.frozen
class PackHeader:
    """The decoded header of a pack."""

    size: int  # of the whole pack, in bytes
    start: int  # offset of the data in the pack, in bytes
    meta: Mapping[str, Any]  # JSON values that were saved next to the state, such as the step
    values: Sequence[Any]  # encoded plain values of the state, in the order of the tree
    tree: Mapping[str, Any]  # JSON that describes the structure of the state
    entries: tuple[PackEntry, ...]  # in the order of their bytes; they cover all data
    checksum: int | None = None  # of the data (`storage.checksum`), if the header contains it


def encode_tree(entries: Iterable[PackEntry], tree: Mapping[str, Any]) -> bytes:
    """Encode the part of a header that depends only on the structure of the state.

    Args:
        entries: Entries with different names, in the order of their bytes and without gaps.
        tree: A JSON object.
    """
    text = [f"{_TREE}{quoted(_compact(tree))}}}"]
    for name, dtype, shape, begin, end in entries:
        counts = ",".join(map(str, shape))
        row = f'"dtype":"{dtype}","shape":[{counts}],"data_offsets":[{begin},{end}]'
        text.append(f",{quoted(name)}:{{{row}}}")
    text.append("}")
    return "".join(text).encode("ascii")


def data_offset(values: str, tree: bytes) -> int:
    """Return the offset at which the data of a pack with this header can begin, in bytes."""
    length = PREFIX_BYTES + len(_VALUES) + len(quoted(values)) + len(tree)
    return round_up(length + _SPARE_BYTES, PAGE_BYTES)


def encode_header(values: str, tree: bytes, start: int, data_bytes: int) -> bytes | None:
    """Encode a header of `start` bytes. Return None if `start` is too small for the values.

    Args:
        values: JSON text of an object with `meta` and `values`.
        tree: The result of `encode_tree`.
        start: Offset of the data, a multiple of 4096.
        data_bytes: Size of the data.
    """
    length = start - _LENGTH.size
    front = b'%s{"__metadata__":{"elasticlib":"pack %d size=%016x head=' % (
        _LENGTH.pack(length),
        FORMAT,
        start + data_bytes,
    )
    back = b' data=%s"%s%s%s' % (_NO_CHECKSUM, _VALUES, quoted(values).encode("ascii"), tree)
    back = back.ljust(start - len(front) - 8)
    if len(front) + 8 + len(back) > start:
        return None
    return b"%s%08x%s" % (front, zlib.crc32(back, zlib.crc32(front)), back)


def with_data_checksum(header: bytes, checksum: int) -> bytes:
    """Return an encoded header that contains the checksum of the data."""
    begin, end = _span(header, 4)
    return _with_header_crc32(header[:begin] + b"%08x" % checksum + header[end:])


def order_entries(sizes: Sequence[int]) -> list[int]:
    """Return the indices of entries of these sizes, in the order in which they are written.

    safetensors allows no gaps between entries. They are sorted by the largest power of two that
    divides their size, so that each starts at a multiple of its element size, and of `ALIGNMENT` if
    its size is a multiple of that.
    """

    def alignment(index: int) -> int:
        return min(sizes[index] & -sizes[index] or ALIGNMENT, ALIGNMENT)

    return sorted(range(len(sizes)), key=alignment, reverse=True)


def read_size(prefix: bytes | memoryview) -> tuple[int, int]:
    """Return the size of a pack and the size of its header, in bytes.

    Args:
        prefix: The first `PREFIX_BYTES` bytes of the pack.

    Raises:
        CheckpointCorruptError: These are not the first bytes of a pack.
    """
    if len(prefix) < PREFIX_BYTES:
        raise CheckpointCorruptError(f"a pack has at least {PREFIX_BYTES} bytes, got {len(prefix)}")
    size = int(_record(prefix)[2], 16)
    (length,) = _LENGTH.unpack_from(prefix)
    start = _LENGTH.size + length
    if start % PAGE_BYTES or start > size or size >= 2**63:
        raise CheckpointCorruptError(
            f"the first bytes of the pack were changed: a header of {start} bytes, {size} in all"
        )
    return size, start


def read_header(pack: bytes | memoryview) -> PackHeader:
    """Decode the header of a pack after checking every byte of it.

    Args:
        pack: The pack, or at least its header.

    Raises:
        CheckpointCorruptError: The bytes are not a pack, or the header was changed or truncated.
        CheckpointUnreadableError: Another version of elasticlib wrote the pack in another format.
    """
    size, start = read_size(pack[:PREFIX_BYTES])
    header = bytes(pack[:start])
    if len(header) < start:
        raise CheckpointCorruptError(f"the pack's header has {start} bytes, got {len(header)}")
    record = _record(header)
    if int(record[3], 16) != _header_crc32(header):
        raise CheckpointCorruptError("the pack's header was changed or truncated")
    if int(record[1]) != FORMAT:
        # The pack is intact, so this is no reason to use an older checkpoint instead.
        raise CheckpointUnreadableError(
            f"the pack has format {int(record[1])}, this version reads {FORMAT}"
        )
    try:
        values, tree, entries = _parse_after_record(
            header[_LENGTH.size :].decode("ascii"), record.end()
        )
    except ValueError as error:
        raise CheckpointCorruptError(
            f"the pack's header cannot be parsed: {error!s:.200}"
        ) from error
    _check_cover(entries, size - start)
    checksum = None if record[4] == _NO_CHECKSUM else int(record[4], 16)
    notes = _load_object(values, "values")
    meta, rows = notes.get("meta"), notes.get("values")
    if not isinstance(meta, dict) or not isinstance(rows, list):
        raise CheckpointCorruptError("the pack's values lack the list of values or the metadata")
    return PackHeader(size, start, meta, rows, _load_object(tree, "tree"), entries, checksum)


def read_meta(pack: bytes | memoryview) -> dict[str, Any]:
    """Return the metadata in the header of a pack.

    Raises:
        CheckpointCorruptError: The bytes are not a pack, or the header was changed or truncated.
        CheckpointUnreadableError: Another version of elasticlib wrote the pack in another format.
    """
    return dict(read_header(pack).meta)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def _record(header: bytes | memoryview) -> re.Match[bytes]:
    match = _RECORD.match(bytes(header[_LENGTH.size : PREFIX_BYTES]))
    if match is None:
        raise CheckpointCorruptError(
            "a pack begins with a record in the header of a safetensors file, and this one with "
            f"{bytes(header[:24])!r}"
        )
    return match


def _span(header: bytes, group: int) -> tuple[int, int]:
    begin, end = _record(header).span(group)
    return _LENGTH.size + begin, _LENGTH.size + end


def _header_crc32(header: bytes) -> int:
    begin, end = _span(header, 3)
    return zlib.crc32(memoryview(header)[end:], zlib.crc32(header[:begin]))


def _with_header_crc32(header: bytes) -> bytes:
    begin, end = _span(header, 3)
    return b"".join((header[:begin], b"%08x" % _header_crc32(header), memoryview(header)[end:]))


def _parse_after_record(text: str, at: int) -> tuple[str, str, tuple[PackEntry, ...]]:
    """Return the values, the tree and the entries of a header whose record ends at `at`.

    Only the form that `encode_header` writes is accepted, so that all readers agree on a header.

    Raises:
        ValueError: The header has another form.
    """
    decoder, strings = json.JSONDecoder(), []
    for name, label in (("values", _VALUES.decode()), ("tree", _TREE)):
        if not text.startswith(label, at):
            raise ValueError(f"the {name} are missing at byte {at}")
        string, at = decoder.raw_decode(text, at + len(label))
        if type(string) is not str:
            raise ValueError(f"the {name} that end at byte {at} are not a string")
        strings.append(string)
    if text[at : at + 1] != "}":
        raise ValueError(f"the metadata does not end at byte {at}")
    at += 1
    entries: dict[str, PackEntry] = {}
    for match in _ENTRY.finditer(text, at):
        if match.start() != at:
            break
        entry = _entry(*match.groups())
        if entry.name in entries:
            raise ValueError(f"the entry {entry.name!r:.80} occurs twice")
        entries[entry.name] = entry
        at = match.end()
    if text[at:].rstrip(" ") != "}":
        raise ValueError(f"expected an entry or the end at byte {at}: {text[at:][:40]!r}")
    return strings[0], strings[1], tuple(entries.values())


def _entry(name: str, dtype: str, shape: str, begin: str, end: str) -> PackEntry:
    if "\\" in name:
        name = json.loads(f'"{name}"')
    counts = tuple(map(int, shape.split(","))) if shape else ()
    entry = PackEntry(name, dtype, counts, int(begin), int(end))
    if dtype not in DTYPES:
        raise ValueError(f"the entry {name!r:.80} has the unknown dtype {dtype}")
    size = entry.end - entry.begin
    if math.prod(counts) * ITEM_BYTES[dtype] != size:
        raise ValueError(f"the entry {name!r:.80} of {counts!s:.80} {dtype} has {size} bytes")
    return entry


def _check_cover(entries: Sequence[PackEntry], size: int) -> None:
    at = 0
    for entry in entries:
        if entry.begin != at:
            raise CheckpointCorruptError(
                f"the pack's entry {entry.name!r:.80} begins at {entry.begin}, and the entry before"
                f" it ends at {at}"
            )
        at = entry.end
    if at != size:
        raise CheckpointCorruptError(f"the pack's entries have {at} bytes, and its data {size}")


def _load_object(text: str, field: str) -> dict[str, Any]:
    """Parse a JSON object. `field` is the field of the pack's metadata, for messages."""
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"the pack's {field} are not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise CheckpointCorruptError(f"the pack's {field} are not a JSON object")
    return loaded
