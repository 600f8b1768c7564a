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

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from ..errors import CheckpointCorrupt
from .interface import Unreadable
from .pack_head import HEAD, HEAD_BYTES, MAGIC, PAGE, SUM, size_of, up
from .storages import (
    Block,
    Form,
    MapLocation,
    View,
    blocks_of,
    located,
    spread_out,
    view_of,
)
from .tree import Encoder, decode, dtype_named, dumps

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
    blocks, views = blocks_of(encoder.entries)
    places: list[int] = []
    end = 0
    for block in blocks:
        places.append(end)
        end += up(block.source.numel() * block.source.element_size(), _ALIGN)
    outline = dumps(
        {
            "format": FORMAT,
            "meta": dict(meta or {}),
            "tree": tree,
            "blocks": [_block_row(*each) for each in zip(blocks, places, strict=True)],
            "tensors": [_view_row(view) for view in views],
        }
    )
    start = up(HEAD_BYTES + len(outline), PAGE)
    first = HEAD.pack(MAGIC, start + end, len(outline), zlib.crc32(outline))
    head = (first + SUM.pack(zlib.crc32(first))).ljust(HEAD_BYTES, b"\0") + outline
    return Layout(
        start + end,
        head.ljust(start, b"\0"),
        tuple(block.source for block in blocks),
        tuple(start + place for place in places),
        tuple(entry.tensor for entry in encoder.entries),
    )


def _block_row(block: Block, place: int) -> list[Any]:
    spread = None if block.spread is None else _form_row(block.spread)
    return [place, block.size, block.location, spread]


def _view_row(view: View) -> list[Any]:
    return [*_form_row(view.form), view.block, view.offset, view.conj, view.neg]


def _form_row(form: Form) -> list[Any]:
    return [str(form.dtype).removeprefix("torch."), list(form.shape), list(form.stride)]


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
    data = pack[start:size]
    try:
        read = _blocks_1 if outline["format"] == 1 else _blocks
        blocks, views = read(data, outline)
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the pack's list of tensors cannot be read: {error}") from error
    memory = [_memory(block, map_location, copy=copy) for block in blocks]
    return decode(outline["tree"], [view_of(view, memory[view.block]) for view in views])


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


def _blocks(data: memoryview, outline: dict[str, Any]) -> tuple[list[Block], list[View]]:
    blocks = [_block(data, *row) for row in outline["blocks"]]
    views = [_view(blocks, row) for row in outline["tensors"]]
    return blocks, views


def _block(data: memoryview, place: Any, size: Any, location: Any, spread: Any) -> Block:
    form = None if spread is None else _form(spread)
    written = size if form is None else math.prod(form.shape) * form.dtype.itemsize
    if form is not None and not (form.has_gaps and form.extent * form.dtype.itemsize == size):
        raise ValueError(f"a block of {size} bytes is not what {spread} takes")
    if type(location) is not str:
        raise ValueError(f"a block lies at {location!r}")
    return Block(_elements(data, place, written), size, location, form)


def _view(blocks: list[Block], row: Sequence[Any]) -> View:
    *form, number, offset, conj, neg = row
    view = View(_form(form), _whole(number), _whole(offset), conj is True, neg is True)
    end = (view.offset + view.form.extent) * view.form.dtype.itemsize
    if number >= len(blocks) or end > blocks[number].size:
        raise ValueError(f"a tensor of {row} lies outside of its block")
    return view


def _form(row: Sequence[Any]) -> Form:
    name, shape, stride = row
    form = Form(dtype_named(name), tuple(map(_whole, shape)), tuple(map(_whole, stride)))
    if len(shape) != len(stride):
        raise ValueError(f"a tensor has the shape {shape} and the strides {stride}")
    return form


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _blocks_1(data: memoryview, outline: dict[str, Any]) -> tuple[list[Block], list[View]]:
    """Of format 1: each tensor by itself, its elements in the order of its indices."""
    blocks, views = [], []
    for number, (name, shape, place) in enumerate(outline["tensors"]):
        stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        form = _form([name, shape, stride])
        size = form.extent * form.dtype.itemsize
        blocks.append(Block(_elements(data, place, size), size, "cpu"))
        views.append(View(form, number, 0))
    return blocks, views


def _elements(data: memoryview, place: Any, size: Any) -> torch.Tensor:
    if _whole(place) + _whole(size) > len(data):
        raise ValueError(f"{size} bytes at {place} lie outside")
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=place)


def _memory(block: Block, map_location: MapLocation, *, copy: bool) -> torch.UntypedStorage:
    if block.spread is not None:
        storage = spread_out(block.source.view(block.spread.dtype), block.spread)
    else:
        storage = (block.source.clone() if copy else block.source).untyped_storage()
    return located(storage, block.location, map_location) if block.location else storage
