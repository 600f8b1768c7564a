"""A state as one run of bytes: the same on the disk, in shared memory, and between nodes.

The bytes are a safetensors file (see `pack_head` for its head), so any tool can open a pack. A
tensor whose elements lie in the order of its indices is an entry under its path in the state, such
as `model.layers.0.weight`. Memory that several tensors share is written once, so they share it
again when they are read: it is the entry of the tensor that covers it, if there is one, and else
an entry of bytes, `PATH.storage`, as is the memory of a tensor that lies otherwise (transposed,
expanded, conjugated) or has a dtype that safetensors has not. Which tensor is which view of which
entry stands in the outline: strides, offsets, conjugate and negative bits come back as they were.
Of a large storage the smallest range is written that covers what the state uses.

safetensors allows no gaps, so entries are sorted by the power of two that divides their size: each
begins at a multiple of it, up to 64, and so of its elements' size.

The entries carry no sum here: whoever stores or sends a pack sums it up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import attrs
import torch
from torch.serialization import location_tag

from ..errors import CheckpointCorrupt, Unreadable
from .outline import Encoder, decode
from .pack_head import DTYPES, Entry, Head, read_head, up, write_head
from .state import Way
from .storages import (
    Form,
    MapLocation,
    bare,
    dtype_named,
    form_of,
    is_plain,
    moved,
    name_of,
    unexpanded,
    viewed,
)

_ALIGN = 64
_PIECE = 16 << 20

_ENTRY_DTYPES = {dtype_named(name): entry for entry, name in DTYPES.items()}
_ARRAY_DTYPES = {
    **{"<f8": "F64", "<f4": "F32", "<f2": "F16", "<c8": "C64"},
    **{"<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8"},
    **{"<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL"},
}

# -- writing ---------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Layout:
    """Where everything goes.

    size: of the pack, in bytes. head: its first bytes, up to the data. tensors: what is written of
    each entry, in the order of their bytes, which are the state's own memory, not copies; spans:
    from where to where; what a tensor does not fill of its own is zeros. found: the state's
    tensors, in the order in which they stand there.
    """

    size: int
    head: bytes
    tensors: tuple[torch.Tensor, ...]
    spans: tuple[tuple[int, int], ...]
    found: tuple[torch.Tensor, ...]


def lay_out(
    state: object,
    meta: Mapping[str, Any] | None = None,
    *,
    shown_as: Callable[[Way], Way] = lambda way: way,
) -> Layout:
    """How to pack `state`, which is not copied yet.

    Args:
        state: nested containers of tensors, arrays and plain values, as `outline.Encoder` knows
            them. Dense tensors of any dtype, on any device.
        meta: what `read_meta` gives back without the tensors: plain JSON, such as the step.
        shown_as: the keys by which other tools find a tensor, for those by which it stands here.

    Raises:
        CheckpointError: the state cannot be saved; the message says what, and where it stands.
    """
    encoder = Encoder()
    tree = encoder.walk(state)
    made = _Blocks(encoder, shown_as)
    names = _names(made.blocks)
    order = sorted(range(len(names)), key=lambda at: -_alignment(made.blocks[at].size))
    blocks = [made.blocks[at] for at in order]
    places = {at: place for place, at in enumerate(order)}
    outline = {
        "meta": dict(meta or {}),
        "tree": tree,
        "blocks": [block.about for block in blocks],
        "tensors": [_at_place(row, places) for row in made.rows],
    }
    entries, end = [], 0
    for at, block in zip(order, blocks, strict=True):
        begin, end = end, end + block.size
        entries.append(Entry(names[at], *(block.like or ("U8", (block.size,))), begin, end))
    head = write_head(entries, outline, end)
    return Layout(
        len(head) + end,
        head,
        tuple(block.source for block in blocks),
        tuple((len(head) + entry.begin, len(head) + entry.end) for entry in entries),
        tuple(encoder.tensors),
    )


def fill(layout: Layout, buffer: torch.Tensor) -> None:
    """Copy the state into `buffer`, and wait until that is done: the one copy that a save costs.

    Args:
        buffer: uint8, of at least `layout.size` elements, contiguous, on the CPU; its memory at a
            multiple of 64 bytes. What lies behind `layout.size` is left alone.
    """
    buffer[: len(layout.head)].copy_(torch.frombuffer(bytearray(layout.head), dtype=torch.uint8))
    elsewhere = set()
    for tensor, (begin, end) in zip(layout.tensors, layout.spans, strict=True):
        filled = begin + tensor.nbytes
        if filled > begin:
            place = buffer[begin:filled].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            if tensor.device.type != "cpu":
                elsewhere.add(tensor.device)
        if filled < end:
            buffer[filled:end].zero_()
    # Each of them, and not the current one alone: copies into page-locked memory are on their way.
    for device in elsewhere:
        torch.accelerator.synchronize(device)


def pieces(layout: Layout) -> Iterator[memoryview]:
    """The data of a pack without a second state in memory: piece by piece, of 16 MiB at most.

    Each is valid until the next one is asked for.
    """
    most = max((tensor.nbytes for tensor in layout.tensors), default=0)
    memory = bytearray(max(1, min(most, _PIECE)))
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    for tensor, (begin, end) in zip(layout.tensors, layout.spans, strict=True):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        for at in range(0, len(flat), len(memory)):
            piece = flat[at : at + len(memory)]
            buffer[: len(piece)].copy_(piece)
            yield memoryview(memory)[: len(piece)]
        yield memoryview(bytes(end - begin - len(flat)))


def _alignment(size: int) -> int:
    return min(size & -size, _ALIGN) if size else _ALIGN


def _at_place(row: Any, places: Mapping[int, int]) -> Any:
    if type(row) is int:
        return places[row]
    name, shape, number, *more = row
    return [name, shape, places[number], *more]


def _names(blocks: Sequence[_Block]) -> list[str]:
    """A name for each entry: the path of the tensor that it is, if that is not another's; these
    choose first."""
    names = [""] * len(blocks)
    taken = {"__metadata__"}
    for at in sorted(range(len(blocks)), key=lambda at: blocks[at].like is None):
        path = blocks[at].path if blocks[at].like else f"{blocks[at].path}.storage"
        # Half a character, which Python can hold, is none in a file that others read.
        path = path if path.isascii() else path.encode("utf-8", "backslashreplace").decode()
        name, count = path, 1
        while name in taken:
            count += 1
            name = f"{path}~{count}"
        taken.add(name)
        names[at] = name
    return names


_Like: TypeAlias = tuple[str, tuple[int, ...]]


class _Block(NamedTuple):
    """Memory that is written as one entry.

    source: what is written, one tensor. size: of the entry, in bytes. about: as plain JSON, how it
    lies in memory: 0 if it lies on the CPU as it does in the entry; or a row of the device, as
    torch names it ("" for memory that is no tensor's, and stays on the CPU), its bytes there, if
    these are not the entry's, and, if elements have gaps between them there, how they lie.
    like: the dtype and shape of the tensor at `path`, if that is what the entry is; else it is
    bytes.
    """

    source: torch.Tensor
    size: int
    about: Any
    path: str
    like: _Like | None


class _Member(NamedTuple):
    """A tensor of a storage, by its number.

    begin, end: the bytes of the storage that it is in. bits: whether it is conjugated, and negated.
    """

    number: int
    tensor: torch.Tensor
    form: Form
    begin: int
    end: int
    bits: tuple[bool, bool]

    @staticmethod
    def of(number: int, tensor: torch.Tensor) -> _Member:
        form = form_of(tensor)
        begin = int(tensor.storage_offset()) * form.dtype.itemsize if form.extent else 0
        end = begin + form.extent * form.dtype.itemsize
        return _Member(number, tensor, form, begin, end, (tensor.is_conj(), tensor.is_neg()))


class _Blocks:
    """The memory that an encoder's tensors lie in.

    rows: for each tensor, by its number: the number of the block that is all of it, with its dtype
    and shape; or its dtype, shape, and block, its strides and its offset in the block, in elements,
    and whether it is a conjugate and a negative.
    """

    def __init__(self, encoder: Encoder, shown_as: Callable[[Way], Way]) -> None:
        self._tensors, self._arrays = encoder.tensors, encoder.arrays
        self._paths = [".".join(map(str, shown_as(way))) or "state" for way in encoder.ways]
        self.blocks: list[_Block] = []
        self.rows: list[Any] = [None] * len(self._tensors)
        storages: dict[tuple[object, ...], list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            address = tensor.untyped_storage().data_ptr()
            # What has no elements shares none.
            key = (number in self._arrays, tensor.device, address) if tensor.numel() else (number,)
            storages.setdefault(key, []).append(number)
        for numbers in storages.values():
            number, tensor = numbers[0], self._tensors[numbers[0]]
            entry = self._entry_of(number)
            # Nearly all are such, and there may be many thousands.
            if len(numbers) == 1 and entry and is_plain(tensor):
                self.rows[number] = len(self.blocks)
                location = self._location(number)
                about = 0 if location == "cpu" else [location]
                path = self._paths[number]
                self.blocks.append(_Block(tensor, tensor.nbytes, about, path, entry))
                continue
            for run in _overlapping([_Member.of(one, self._tensors[one]) for one in numbers]):
                self._add_shared(run)

    def _entry_of(self, number: int) -> _Like | None:
        """The dtype and shape of the entry that a plain tensor or array is; None if it is none."""
        if number in self._arrays:
            name, shape, order = self._arrays[number]
            return (_ARRAY_DTYPES[name], shape) if name in _ARRAY_DTYPES and order == "C" else None
        tensor = self._tensors[number]
        dtype = _ENTRY_DTYPES.get(tensor.dtype)
        return (dtype, tuple(tensor.shape)) if dtype else None

    def _location(self, number: int) -> str:
        if number in self._arrays:
            return ""
        tensor = self._tensors[number]
        return "cpu" if tensor.device.type == "cpu" else location_tag(tensor.untyped_storage())

    def _add_shared(self, run: list[_Member]) -> None:
        """The memory that these overlap in."""
        first, begin, end = run[0], run[0].begin, max(one.end for one in run)
        # Two storages may begin at one address, as those of two tensors made of one array do.
        storages = (one.tensor.untyped_storage() for one in run)
        storage = max(storages, key=lambda found: found.nbytes())
        # The offset of each is to be one in whole elements.
        item = max(one.form.dtype.itemsize for one in run)
        begin -= begin % item
        about: list[Any] = [self._location(first.number), end - begin]
        form = form_of(unexpanded(first.tensor))
        owner: _Member | None
        if form.has_gaps and all((one.begin, one.form) == (begin, first.form) for one in run):
            about.append([name_of(form.dtype), [*form.shape], [*form.stride]])
            owner = first if form.shape == first.form.shape and not any(first.bits) else None
            size = form.bytes
        else:
            dtype = first.form.dtype
            if any(one.form.dtype != dtype for one in run):
                dtype = torch.uint8
            form = Form(dtype, ((end - begin) // dtype.itemsize,), (1,))
            size = up(end - begin, item)
            whole = (one for one in run if (one.begin, one.end) == (begin, begin + size))
            # Whose elements lie in the order of their indices, whatever its strides say.
            fits = (one for one in whole if one.tensor.is_contiguous() and not any(one.bits))
            owner = next(fits, None)
        for one in run:
            offset = (one.begin - begin) // one.form.dtype.itemsize
            row = [name_of(one.form.dtype), one.form.shape, len(self.blocks), one.form.stride]
            self.rows[one.number] = [*row, offset, *one.bits]
        source = bare(storage, begin // form.dtype.itemsize, form)
        entry = self._entry_of(owner.number) if owner else None
        path = self._paths[(owner or first).number]
        self.blocks.append(_Block(source, size, about, path, entry))


def _overlapping(members: list[_Member]) -> Iterator[list[_Member]]:
    """Those that lie within one range of memory, together."""
    run: list[_Member] = []
    end = 0
    for one in sorted(members, key=lambda one: one.begin):
        if run and one.begin >= end:
            yield run
            run = []
        run.append(one)
        end = max(end, one.end)
    yield run


# -- reading ---------------------------------------------------------------------------------------


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
    head = read_head(pack)
    if len(pack) < head.size:
        raise CheckpointCorrupt(f"the pack has {head.size} bytes, and {len(pack)} are here")
    data = pack[head.start : head.size]
    with _reading_rows():
        bases = [(_base(data, one, copy=copy), one[1]) for one in _stored(head)]
    # Outside: what a device or the caller's function refuses is no fault of the pack.
    memory = [moved(base, location, map_location) for base, location in bases]
    with _reading_rows():
        tensors = [_tensor(row, head, memory) for row in _rows(head)]
    return decode(head.outline["tree"], tensors)


@contextlib.contextmanager
def _reading_rows() -> Iterator[None]:
    """What cannot be done with rows says that they are none."""
    try:
        yield
    except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"the pack's list of tensors cannot be read: {error}") from error


_Stored: TypeAlias = tuple[int, str, int, Any]
"""A block: where its bytes begin, the device that it was saved from, its bytes in memory, and how
its elements lie there if they have gaps."""


def _stored(head: Head) -> Iterator[_Stored]:
    if head.format == 1:
        # Each tensor by itself, its elements in the order of its indices.
        for name, shape, begin in head.outline["tensors"]:
            yield begin, "cpu", math.prod(shape) * dtype_named(name).itemsize, None
    elif head.format == 2:
        begin = 0
        for row in head.outline["blocks"]:
            size, location, form = (row, "cpu", None) if type(row) is int else (*row, None)[:3]
            yield begin, location, size, form
            begin = up(begin + (size if form is None else _form(*form).bytes), _ALIGN)
    else:
        for entry, about in zip(head.entries, head.outline["blocks"], strict=True):
            size = entry.end - entry.begin
            location, *more = about or ["cpu"]
            size, form = (*more, None)[:2] if more else (size, None)
            yield entry.begin, location, size, form


def _rows(head: Head) -> Sequence[Any]:
    """A row for each tensor, as `_Blocks` makes them."""
    rows: Sequence[Any] = head.outline["tensors"]
    return rows if head.format > 1 else [(*row[:2], at) for at, row in enumerate(rows)]


def _base(data: memoryview, stored: _Stored, *, copy: bool) -> torch.Tensor:
    """The memory of a block, as bytes on the CPU. Raises ValueError, TypeError, Unreadable."""
    begin, location, size, spread = stored
    if type(location) is not str:
        raise ValueError(f"a block lies on {location!r}")
    if spread is None:
        base = _bytes_at(data, begin, size)
        return base.clone() if copy else base
    form = _form(*spread)
    if not form.has_gaps or form.extent * form.dtype.itemsize != size:
        raise ValueError(f"a block of {size} bytes is not what {spread} takes")
    return _spread_out(_bytes_at(data, begin, form.bytes), form)


def _bytes_at(data: memoryview, begin: int, size: int) -> torch.Tensor:
    if not 0 <= begin <= begin + size <= len(data):
        raise ValueError(f"{size} bytes at {begin} lie outside")
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=begin)


def _spread_out(data: torch.Tensor, form: Form) -> torch.Tensor:
    """Bytes of their own in which these elements lie as they did. What is in the gaps is 0."""
    try:
        memory = torch.zeros(form.extent, dtype=form.dtype)
    except RuntimeError as error:
        raise Unreadable(
            f"no memory for a tensor of {form.shape} {form.dtype} and strides {form.stride}"
        ) from error
    memory.as_strided(form.shape, form.stride).copy_(data.view(form.dtype).view(form.shape))
    return memory.view(torch.uint8)


def _tensor(row: Any, head: Head, bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of one of `_rows`. Raises IndexError, ValueError, TypeError or RuntimeError."""
    if type(row) is int:
        entry = head.entries[_whole(row)]
        base = bases[row].view(dtype_named(DTYPES[entry.dtype]))
        return base if len(entry.shape) == 1 else base.view(entry.shape)
    name, shape, number, *more = row
    base, dtype = bases[_whole(number)], dtype_named(name)
    if not more:
        return base.view(dtype).view(shape)
    stride, offset, conj, neg = more
    form = _form(name, shape, stride)
    if (_whole(offset) + form.extent) * dtype.itemsize > len(base):
        raise ValueError(f"a tensor of {row} lies outside of its block")
    return viewed(base.untyped_storage(), offset, form, conj=conj is True, neg=neg is True)


def _form(name: str, shape: Any, stride: Any) -> Form:
    if len(shape) != len(stride):
        raise ValueError(f"a tensor has the shape {shape} and the strides {stride}")
    return Form(dtype_named(name), tuple(map(_whole, shape)), tuple(map(_whole, stride)))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value
