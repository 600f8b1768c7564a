"""Header of a pack: where its tensors are, the structure of the state, and its plain values.

A pack is a plain safetensors file::

    0         uint64, little-endian: the size of the JSON header
    8         {"__metadata__":{"elasticlib":"5"},"~state":{"dtype":"U8",...},
               "model/weight":{"dtype":"F32",...},...,"~crc":{"dtype":"U8","shape":[8],...}}
    n * 4096  ~state: {"meta":{...},"values":[...],"tree":{...}}
    m * 4096  the bytes of the tensors, in the order of the header, without gaps
    size - 8  ~crc: the checksum of all bytes before it, as 8 hexadecimal digits

- The header depends only on the structure of the state, so it is encoded once for many snapshots.
- `~state` has what changes from save to save: `meta` (such as the step) and `values`, the plain
  values of the state in the order of `tree` (see `state_tree`). It ends with spaces, because a save
  of the next step must have the same layout, and safetensors allows no gaps.
- `~crc` is zero in memory. `storage.write` and the sender of a replica compute it.
- In a part of a sharded state, `DCP_SHARDING_INFO` has the offsets of each entry, as torch's
  distributed checkpoint (DCP) writes and reads them.

This module does not import torch, so that agents can read headers.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from ..errors import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError

FORMAT = 5
STATE, CRC, CRC_BYTES = "~state", "~crc", 8  # No name of a tensor begins like these two.
ALIGNMENT = 64  # Entries whose size allows it begin at a multiple of so many bytes.
PAGE_BYTES = 4096  # The header and `~state` are whole pages, and so the tensors begin at a page.
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
MAX_STATE_BYTES = 1 << 30

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
_MAX_DIMENSIONS = 64  # as many as torch allows
_MAX_COUNT = 2**63
_MIN_SPARE_BYTES = 1024  # of a new `~state`, so that the plain values can grow
compact_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class PackEntry(NamedTuple):
    """A range of bytes in a pack that safetensors readers see as a tensor."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    begin: int  # Offsets are counted from the first byte of `~state`.
    end: int


@attrs.frozen
class PackHeader:
    """The decoded header of a pack."""

    size: int  # of the whole pack, in bytes
    start: int  # offset of `~state` in the pack, in bytes
    entries: tuple[PackEntry, ...]  # of tensors, in the order of their bytes
    meta: Mapping[str, Any]  # JSON values that were saved next to the state, such as the step
    values: Sequence[Any]  # encoded plain values of the state, in the order of the tree
    tree: Mapping[str, Any]  # JSON that describes the structure of the state


# -- encoding --------------------------------------------------------------------------------------


def state_capacity(state: bytes) -> int:
    """Return the size of a `~state` in which this one can grow, in bytes.

    Raises:
        CheckpointError: The plain values are too large.
    """
    capacity = round_up(len(state) + max(_MIN_SPARE_BYTES, len(state) // 4), PAGE_BYTES)
    if capacity > MAX_STATE_BYTES:
        raise CheckpointError(
            f"the values of the state that are not tensors have {len(state)} bytes as text, which "
            "is too much: make large strings and lists of numbers tensors or arrays"
        )
    return capacity


def order_entries(sizes: Sequence[int]) -> list[int]:
    """Return the indices of entries of these sizes, in the order in which they are written.

    safetensors allows no gaps between entries. They are sorted by the largest power of two that
    divides their size, so that each starts at a multiple of its element size, and of `ALIGNMENT` if
    its size is a multiple of that.
    """

    def alignment(index: int) -> int:
        return min(sizes[index] & -sizes[index] or ALIGNMENT, ALIGNMENT)

    return sorted(range(len(sizes)), key=alignment, reverse=True)


def encode_header(
    capacity: int,
    entries: Iterable[PackEntry],
    offsets: Mapping[str, Sequence[int] | None] | None = None,
) -> tuple[bytes, int]:
    """Encode the header of a pack.

    Args:
        capacity: The size of `~state`, see `state_capacity`.
        entries: The entries of tensors, whose bytes follow each other after `~state`. Their offsets
            are counted from its end.
        offsets: In a part of a sharded state: where the shards begin in the whole tensors, by the
            names of their entries. Other entries are whole.

    Returns:
        All bytes before `~state`, and the size of the pack.

    Raises:
        CheckpointError: The state has too many tensors.
    """
    rows = [PackEntry(STATE, "U8", (capacity,), 0, capacity)]
    rows += (one._replace(begin=capacity + one.begin, end=capacity + one.end) for one in entries)
    end = rows[-1].end
    rows.append(PackEntry(CRC, "U8", (CRC_BYTES,), end, end + CRC_BYTES))
    metadata = {"elasticlib": str(FORMAT)}
    if offsets is not None:
        begins = {row.name: offsets.get(row.name) or [0] * len(row.shape) for row in rows}
        places = {name: {"saved_offsets": begin} for name, begin in begins.items()}
        metadata["DCP_SHARDING_INFO"] = compact_json(places)
    fields: dict[str, Any] = {"__metadata__": metadata}
    for name, dtype, shape, begin, end in rows:
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = compact_json(fields).encode("ascii")
    start = round_up(_LENGTH.size + len(text), PAGE_BYTES)
    if start > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the state has {len(rows) - 2} tensors, and their names and shapes need more than the "
            f"{MAX_HEADER_BYTES} bytes that safetensors allows: stack small tensors"
        )
    return _LENGTH.pack(start - _LENGTH.size) + text.ljust(start - _LENGTH.size), start + end


# -- decoding --------------------------------------------------------------------------------------


def read_head(read_first: Callable[[int], bytes]) -> bytes:
    """Return the first bytes of a pack, from which `read_header` decodes its header.

    Args:
        read_first: Returns so many of the first bytes of the pack, or fewer if it is shorter.

    Raises:
        CheckpointCorruptError: The bytes are not the header of a pack.
        CheckpointUnreadableError: Another version of elasticlib wrote the pack in another format.
    """
    header = read_first(_header_bytes(read_first(_LENGTH.size)))
    return read_first(len(header) + _decode_entries(header)[0].end)


def read_size(head: bytes | memoryview) -> int:
    """Return the size of a pack in bytes. Argument and errors are those of `read_header`."""
    start = _header_bytes(head)
    return start + _decode_entries(bytes(head[:start]))[-1].end


def read_header(pack: bytes | memoryview) -> PackHeader:
    """Decode the header of a pack, and check each of its fields.

    Args:
        pack: The pack, or at least the result of `read_head`.

    Raises:
        CheckpointCorruptError: The bytes are not a pack, or the header was changed or truncated.
        CheckpointUnreadableError: Another version of elasticlib wrote the pack in another format.
    """
    start = _header_bytes(pack)
    state, *entries, crc = _decode_entries(bytes(pack[:start]))
    text = bytes(pack[start : start + state.end])
    if len(text) < state.end:
        raise CheckpointCorruptError(f"the pack's {STATE} has {len(text)} of {state.end} bytes")
    fields = _load_object(text, f"the pack's {STATE}")
    meta, values, tree = (fields.get(name) for name in ("meta", "values", "tree"))
    if not (isinstance(meta, dict) and isinstance(values, list) and isinstance(tree, dict)):
        raise CheckpointCorruptError(f"the pack's {STATE} lacks meta, values or tree")
    return PackHeader(start + crc.end, start, tuple(entries), meta, values, tree)


def read_meta(pack: bytes | memoryview) -> dict[str, Any]:
    """Return the metadata in a pack. Argument and errors are those of `read_header`."""
    return dict(read_header(pack).meta)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def _header_bytes(head: bytes | memoryview) -> int:
    """Return the number of bytes before `~state`, given the first eight bytes of a pack."""
    if len(head) < _LENGTH.size:
        raise CheckpointCorruptError(f"a pack has at least {_LENGTH.size} bytes, got {len(head)}")
    start = _LENGTH.size + int(_LENGTH.unpack_from(head)[0])
    if start % ALIGNMENT or start > MAX_HEADER_BYTES:
        raise CheckpointCorruptError(
            f"a pack has a header of a multiple of {ALIGNMENT} bytes, at most {MAX_HEADER_BYTES}, "
            f"and this one has {start}"
        )
    return start


def _decode_entries(header: bytes) -> list[PackEntry]:
    """Return all entries of a header, of which `~state` is the first and `~crc` the last."""
    fields = _load_object(header[_LENGTH.size :], "the pack's header")
    metadata = fields.pop("__metadata__", None)
    version = metadata.get("elasticlib") if isinstance(metadata, dict) else None
    if type(version) is not str:
        raise CheckpointCorruptError("the file's header does not say that elasticlib wrote it")
    if version != str(FORMAT):
        # The pack may be intact, so this is no reason to use an older checkpoint instead.
        raise CheckpointUnreadableError(
            f"the pack has format {version:.80}, this version reads {FORMAT}"
        )
    try:
        entries = [_decode_entry(name, row) for name, row in fields.items()]
    except ValueError as error:
        raise CheckpointCorruptError(f"the pack's header is not valid: {error}") from error
    begins = [0, *(entry.end for entry in entries)]
    for begin, entry in zip(begins, entries, strict=False):
        if entry.begin != begin:
            raise CheckpointCorruptError(
                f"the pack's entry {entry.name!r:.80} begins at {entry.begin}, and the entry before"
                f" it ends at {begin}"
            )
    ends = [(one.name, one.dtype, len(one.shape)) for one in (*entries[:1], *entries[-1:])]
    if ends != [(STATE, "U8", 1), (CRC, "U8", 1)] or entries[-1].shape != (CRC_BYTES,):
        raise CheckpointCorruptError(
            f"a pack's first entry is {STATE} and its last one {CRC}, of {CRC_BYTES} bytes, got "
            f"{ends!s:.200}"
        )
    if entries[0].end > MAX_STATE_BYTES:
        raise CheckpointCorruptError(
            f"the pack's {STATE} has {entries[0].end} bytes, at most {MAX_STATE_BYTES} are allowed"
        )
    return entries


def _decode_entry(name: str, row: Any) -> PackEntry:
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry {name!r:.80} is {row!r:.80}")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"the entry {name!r:.80} has the unknown dtype {dtype!r:.80}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the entry {name!r:.80} has the shape {shape!r:.80} at {offsets!r:.80}")
    entry = PackEntry(name, dtype, tuple(shape), *offsets)
    size = entry.end - entry.begin
    if math.prod(shape) * ITEM_BYTES[dtype] != size:
        raise ValueError(f"the entry {name!r:.80} of {shape!s:.80} {dtype} has {size} bytes")
    return entry


def _are_counts(value: Any) -> bool:
    is_short = type(value) is list and len(value) <= _MAX_DIMENSIONS
    return is_short and all(type(n) is int and 0 <= n < _MAX_COUNT for n in value)


def _load_object(text: bytes, what: str) -> dict[str, Any]:
    """Decode a JSON object in which no key occurs twice, so that all readers agree on it."""
    try:
        loaded = json.loads(text.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{what} cannot be decoded: {error!s:.200}") from error
    if not isinstance(loaded, dict):
        raise CheckpointCorruptError(f"{what} is not a JSON object")
    return loaded


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.80} occurs twice")
    return fields
