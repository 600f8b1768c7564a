"""A state as one run of bytes: the same on the disk, in shared memory, and between nodes.

An outline first (JSON, see `tree`), then the tensors' elements as they lie in memory, each at a
multiple of 64 bytes::

    0   8 bytes   b"ELPACK1\\n"
    8   uint64    size of the whole, in bytes (all numbers little-endian)
    16  uint64    size of the outline
    24  uint32    CRC-32 of the outline
    28  uint32    CRC-32 of the 28 bytes before
    64            the outline; then zeros up to a multiple of 4096; then the tensors

The elements carry no sum of their own here: whoever stores or sends a pack sums it up.
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
from .pack_head import HEAD as _HEAD
from .pack_head import HEAD_BYTES, MAGIC, size_of
from .pack_head import PAGE as _PAGE
from .pack_head import SUM as _SUM
from .pack_head import up as _up
from .tree import Encoder, decode, dtype_named, dumps

FORMAT = 1
_ALIGN = 64


@attrs.frozen(eq=False)
class Layout:
    """Where everything goes.

    size: of the pack, in bytes. head: its first bytes, up to the tensors. tensors: the state's
    own, not copies; offsets: where each one's elements begin.
    """

    size: int
    head: bytes
    tensors: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]


def lay_out(state: object, meta: Mapping[str, Any] | None = None) -> Layout:
    """How to pack `state`, which is not copied yet.

    Args:
        state: nested dicts, lists, tuples and sets of tensors, numbers, strings, bytes and None,
            of these exact types. Dense tensors of any dtype, on any device.
        meta: what `read_meta` gives back without the tensors: plain JSON, such as the step.

    Raises:
        CheckpointError: the state cannot be saved; the message says what, and where it stands.
    """
    encoder = Encoder()
    tree = encoder.encode(state)
    tensors = tuple(encoder.tensors)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    places: list[int] = []
    end = 0
    for size in sizes:
        places.append(end)
        end += _up(size, _ALIGN)
    rows = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place]
        for tensor, place in zip(tensors, places, strict=True)
    ]
    outline = dumps({"format": FORMAT, "meta": dict(meta or {}), "tree": tree, "tensors": rows})
    start = _up(HEAD_BYTES + len(outline), _PAGE)
    first = _HEAD.pack(MAGIC, start + end, len(outline), zlib.crc32(outline))
    head = (first + _SUM.pack(zlib.crc32(first))).ljust(HEAD_BYTES, b"\0") + outline
    return Layout(
        start + end,
        head.ljust(start, b"\0"),
        tensors,
        tuple(start + place for place in places),
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


def unpack(pack: memoryview, *, map_location: str | torch.device = "cpu", copy: bool = True) -> Any:
    """The state that a pack holds.

    Args:
        pack: writable memory, at a multiple of 64 bytes.
        map_location: the device that tensors are put on.
        copy: whether tensors get memory of their own. If not, those on the CPU are views of the
            pack's, and change with it.

    Raises:
        CheckpointCorrupt: it is no pack, or its head was changed or cut short. (The elements
            carry no sum here.)
    """
    outline = _outline(pack)
    size, start = size_of(pack[:HEAD_BYTES])
    if len(pack) < size:
        raise CheckpointCorrupt(f"the pack has {size} bytes, and {len(pack)} are here")
    try:
        tensors = [_tensor(pack, start, size, row) for row in outline["tensors"]]
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the pack's list of tensors cannot be read: {error}") from error
    moved = [tensor.to(map_location, copy=copy) for tensor in tensors]
    return decode(outline["tree"], moved)


def _outline(pack: memoryview | bytes) -> dict[str, Any]:
    size_of(pack[:HEAD_BYTES])
    _, _, length, summed = _HEAD.unpack_from(pack)
    text = bytes(pack[HEAD_BYTES : HEAD_BYTES + length])
    if len(text) != length or zlib.crc32(text) != summed:
        raise CheckpointCorrupt("the pack's outline was changed or cut short")
    try:
        outline = json.loads(text)
    except ValueError as error:
        raise CheckpointCorrupt(f"the pack's outline is no JSON: {error}") from error
    if not isinstance(outline, dict) or outline.get("format") != FORMAT:
        found = outline.get("format") if isinstance(outline, dict) else None
        raise CheckpointCorrupt(f"the pack has format {found!r}, this version reads {FORMAT}")
    return outline


def _tensor(pack: memoryview, start: int, size: int, row: Sequence[Any]) -> torch.Tensor:
    name, shape, place = row
    dtype = dtype_named(name)
    count = math.prod(shape)
    if not 0 <= place <= size - start or count * dtype.itemsize > size - start - place:
        raise ValueError(f"a tensor of {shape} at {place} lies outside")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(pack, dtype=dtype, count=count, offset=start + place).view(shape)
