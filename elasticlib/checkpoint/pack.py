"""A state as one run of bytes: the same on the disk, in shared memory, and between nodes.

An outline first (JSON, see `tree`), then the memory that tensors lie in (see `storages`), each
block of it at a multiple of 64 bytes::

    0   8 bytes   b"ELPACK1\\n"
    8   uint64    size of the whole, in bytes (all numbers little-endian)
    16  uint64    size of the outline
    24  uint32    CRC-32 of the outline
    28  uint32    CRC-32 of the 28 bytes before
    64            the outline; then zeros up to a multiple of 4096; then the blocks

The blocks carry no sum of their own here: whoever stores or sends a pack sums it up.

Packs of format 1, which are still read, have no blocks: each tensor's elements stand there in the
order of its indices, whatever its strides were.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import torch

from ..errors import CheckpointCorrupt
from .interface import Unreadable
from .pack_head import HEAD, HEAD_BYTES, MAGIC, PAGE, SUM, size_of, up
from .storages import MapLocation, bases_of, blocks_of, dtype_named, placed, tensor_of
from .tree import Encoder, decode, dumps

FORMAT = 2
_ALIGN = 64


@attrs.frozen(eq=False)
class Layout:
    """Where everything goes.

    size: of the pack, in bytes. head: its first bytes, up to the blocks. tensors: what is written
    of each block, which are the state's own memory, not copies; offsets: where each begins. found:
    the state's tensors, in the order of their numbers.
    """

    size: int
    head: bytes
    tensors: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    found: tuple[torch.Tensor, ...]


def lay_out(state: object, meta: Mapping[str, Any] | None = None) -> Layout:
    """How to pack `state`, which is not copied yet.

    Args:
        state: nested containers of tensors, arrays and plain values, as `tree.Encoder` knows
            them. Dense tensors of any dtype, on any device.
        meta: what `read_meta` gives back without the tensors: plain JSON, such as the step.

    Raises:
        CheckpointError: the state cannot be saved; the message says what, and where it stands.
    """
    encoder = Encoder()
    tree = encoder.encode(state)
    made = blocks_of(encoder.tensors, encoder.arrays)
    places: list[int] = []
    end = 0
    for source in made.sources:
        places.append(end)
        end += up(source.numel() * source.element_size(), _ALIGN)
    outline = dumps(
        {
            "format": FORMAT,
            "meta": dict(meta or {}),
            "tree": tree,
            "blocks": made.blocks,
            "tensors": made.tensors,
        }
    )
    start = up(HEAD_BYTES + len(outline), PAGE)
    first = HEAD.pack(MAGIC, start + end, len(outline), zlib.crc32(outline))
    head = (first + SUM.pack(zlib.crc32(first))).ljust(HEAD_BYTES, b"\0") + outline
    return Layout(
        start + end,
        head.ljust(start, b"\0"),
        tuple(made.sources),
        tuple(start + place for place in places),
        tuple(encoder.tensors),
    )


def _wait_for(device: torch.device) -> None:
    torch.accelerator.synchronize(device)


def fill(
    layout: Layout, buffer: torch.Tensor, wait: Callable[[torch.device], None] = _wait_for
) -> None:
    """Copy the state into `buffer`, and wait until that is done: the one copy that a save costs.

    Args:
        buffer: uint8, of at least `layout.size` elements, contiguous, on the CPU; its memory at a
            multiple of 64 bytes. What lies behind `layout.size` is left alone, and so are the
            gaps between tensors.
        wait: until a device has done all that it was told to.
    """
    buffer[: len(layout.head)].copy_(torch.frombuffer(bytearray(layout.head), dtype=torch.uint8))
    elsewhere = set()
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        size = tensor.numel() * tensor.element_size()
        if size:
            place = buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            if tensor.device.type != "cpu":
                elsewhere.add(tensor.device)
    # Each of them, and not the current one alone: copies into page-locked memory are on their way.
    for device in elsewhere:
        wait(device)


def read_meta(pack: memoryview | bytes) -> dict[str, Any]:
    """What `lay_out` was told beside the state; needs the pack's head only.

    Raises:
        CheckpointCorrupt: it is no pack, or its head was changed or cut short.
    """
    return dict(_outline(pack)["meta"])


def unpack(pack: memoryview, *, map_location: MapLocation = "cpu", copy: bool = True) -> Any:
    """The state that a pack holds.

    Args:
        pack: writable memory, at a multiple of 64 bytes.
        map_location: where tensors go, as `torch.load` takes it; arrays of NumPy stay.
        copy: whether tensors get memory of their own. If not, those on the CPU are views of the
            pack's, and change with it; but for those that were written without gaps.

    Raises:
        CheckpointCorrupt: it is no pack, or its head was changed or cut short. (The elements
            carry no sum here.)
        Unreadable: a newer version wrote it, or this program lacks a class or library for it.
    """
    outline = _outline(pack)
    size, start = size_of(pack[:HEAD_BYTES])
    if len(pack) < size:
        raise CheckpointCorrupt(f"the pack has {size} bytes, and {len(pack)} are here")
    elements = _Elements(pack[start:size])
    with _Rows():
        read = _bases_1 if outline["format"] == 1 else _bases
        bases, rows = read(elements, outline, copy)
    # Outside: what a device or the caller's function refuses is no fault of the pack.
    memory = [placed(*base, map_location) for base in bases]
    with _Rows():
        tensors = [tensor_of(row, memory) for row in rows]
    return decode(outline["tree"], tensors)


def _outline(pack: memoryview | bytes) -> dict[str, Any]:
    size_of(pack[:HEAD_BYTES])
    _, _, length, summed = HEAD.unpack_from(pack)
    text = bytes(pack[HEAD_BYTES : HEAD_BYTES + length])
    if len(text) != length or zlib.crc32(text) != summed:
        raise CheckpointCorrupt("the pack's outline was changed or cut short")
    try:
        outline = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"the pack's outline is no JSON: {error}") from error
    found = outline.get("format") if isinstance(outline, dict) else None
    if type(found) is int and found > FORMAT:
        # Nobody changed it: what a newer version wrote is no reason to go back to an older state.
        raise Unreadable(f"the pack has format {found}, this version reads 1 to {FORMAT}")
    if type(found) is not int or found < 1:
        raise CheckpointCorrupt(f"the pack has format {found!r}, this version reads 1 to {FORMAT}")
    if not isinstance(outline.get("meta"), dict):
        raise CheckpointCorrupt("the pack's outline says nothing beside the state")
    return dict(outline)


class _Elements:
    """The bytes behind the head, one block after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def next(self, size: int) -> torch.Tensor:
        """So many bytes, which are views of the pack. Raises ValueError."""
        begin = self._at
        self._at = up(begin + size, _ALIGN)
        return self.at(begin, size)

    def at(self, begin: int, size: int) -> torch.Tensor:
        if not 0 <= begin <= begin + size <= len(self._data):
            raise ValueError(f"{size} bytes at {begin} lie outside")
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._data, dtype=torch.uint8, count=size, offset=begin)


class _Rows:
    """Where rows are read, what cannot be done with them says that they are none."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        errors = (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
        if isinstance(error, errors):
            raise CheckpointCorrupt(
                f"the pack's list of tensors cannot be read: {error}"
            ) from error


_Read: TypeAlias = tuple[list[tuple[torch.Tensor, str]], list[list[Any]]]
"""The memory of blocks, and the rows of the tensors in it."""


def _bases(elements: _Elements, outline: dict[str, Any], copy: bool) -> _Read:
    return bases_of(outline["blocks"], elements.next, copy=copy), outline["tensors"]


def _bases_1(elements: _Elements, outline: dict[str, Any], copy: bool) -> _Read:
    """Of format 1: each tensor by itself, its elements in the order of its indices."""
    bases, rows = [], []
    for number, (name, shape, place) in enumerate(outline["tensors"]):
        size = math.prod(shape) * dtype_named(name).itemsize
        data = functools.partial(elements.at, place)
        bases += bases_of([size], data, copy=copy)
        rows.append([name, shape, number])
    return bases, rows
