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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import attrs
import torch
from torch.serialization import location_tag

from ..errors import CheckpointCorrupt, Unreadable
from .outline import Encoder, decode
from .pack_head import Entry, Head, read_head, up, write_head
from .pack_head import read_meta as read_meta
from .state import Way
from .storages import (
    Form,
    MapLocation,
    bare,
    dtype_named,
    form_of,
    is_plain,
    name_of,
    placed,
    unexpanded,
    viewed,
)

_ALIGN = 64
_PIECE = 16 << 20

_ENTRY_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _ENTRY_DTYPES.items()}
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
    each entry, in the order of their bytes, which are the state's own memory, not copies; offsets:
    where each begins. gaps: from where to where zeros are written. found: the state's tensors, in
    the order in which they stand there.
    """

    size: int
    head: bytes
    tensors: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]
    found: tuple[torch.Tensor, ...]


def lay_out(
    state: object,
    meta: Mapping[str, Any] | None = None,
    *,
    told: Callable[[Way], Way] = lambda way: way,
) -> Layout:
    """How to pack `state`, which is not copied yet.

    Args:
        state: nested containers of tensors, arrays and plain values, as `outline.Encoder` knows
            them. Dense tensors of any dtype, on any device.
        meta: what `read_meta` gives back without the tensors: plain JSON, such as the step.
        told: under which keys a tensor is shown to other tools, by those under which it stands.

    Raises:
        CheckpointError: the state cannot be saved; the message says what, and where it stands.
    """
    encoder = Encoder()
    tree = encoder.encode(state)
    made = _Blocks(encoder, told)
    made.add_all()
    blocks = sorted(made.blocks, key=lambda block: -_alignment(block.size))
    places = [0] * len(blocks)
    for place, block in enumerate(blocks):
        places[block.number] = place
    outline = {
        "meta": dict(meta or {}),
        "tree": tree,
        "blocks": [block.about for block in blocks],
        "tensors": [_at_place(row, places) for row in made.rows],
    }
    names = _names(made.blocks)
    entries, end = [], 0
    for block in blocks:
        begin, end = end, end + block.size
        entries.append(Entry(names[block.number], block.dtype, block.shape, begin, end))
    head = write_head(entries, outline, end)
    gaps = []
    for block, entry in zip(blocks, entries, strict=True):
        if not block.is_tensor and block.source.nbytes < block.size:
            gaps.append((len(head) + entry.begin + block.source.nbytes, len(head) + entry.end))
    return Layout(
        len(head) + end,
        head,
        tuple(block.source for block in blocks),
        tuple(len(head) + entry.begin for entry in entries),
        tuple(gaps),
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
            multiple of 64 bytes. What lies behind `layout.size` is left alone.
        wait: until a device has done all that it was told to.
    """
    buffer[: len(layout.head)].copy_(torch.frombuffer(bytearray(layout.head), dtype=torch.uint8))
    for begin, end in layout.gaps:
        buffer[begin:end].zero_()
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


def pieces(layout: Layout) -> Iterator[memoryview]:
    """The data of a pack without a second state in memory: piece by piece, of 16 MiB at most.

    Each is valid until the next one is asked for.
    """
    most = max((tensor.nbytes for tensor in layout.tensors), default=0)
    memory = bytearray(max(1, min(most, _PIECE)))
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    gaps = dict(layout.gaps)
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, len(flat), len(memory)):
            piece = flat[begin : begin + len(memory)]
            buffer[: len(piece)].copy_(piece)
            yield memoryview(memory)[: len(piece)]
        end = offset + len(flat)
        yield memoryview(bytes(gaps.get(end, end) - end))


def _alignment(size: int) -> int:
    return min(size & -size, _ALIGN) if size else _ALIGN


def _at_place(row: Any, places: Sequence[int]) -> Any:
    if type(row) is int:
        return places[row]
    name, shape, number, *more = row
    return [name, shape, places[number], *more]


def _names(blocks: Sequence[_Block]) -> list[str]:
    """A name for each entry, by its number: the path of the tensor that it is, if that is not
    another's; these choose first."""
    names = [block.path if block.is_tensor else f"{block.path}.storage" for block in blocks]
    taken = {"__metadata__"}
    for block in sorted(blocks, key=lambda block: not block.is_tensor):
        path = names[block.number]
        # Half a character, which Python can hold, is none in a file that others read.
        path = path if path.isascii() else path.encode("utf-8", "backslashreplace").decode()
        name, count = path, 1
        while name in taken:
            count += 1
            name = f"{path}~{count}"
        taken.add(name)
        names[block.number] = name
    return names


class _Block(NamedTuple):
    """Memory that is written as one entry.

    source: what is written, one tensor. size: of the entry, in bytes. about: as plain JSON, how it
    lies in memory: 0 if it lies on the CPU as it does in the entry; or a row of the device, as
    torch names it ("" for memory that is no tensor's, and stays on the CPU), its bytes there, if
    these are not the entry's, and, if elements have gaps between them there, how they lie.
    is_tensor: whether the entry's dtype and shape are those of the tensor at `path`.
    """

    number: int
    source: torch.Tensor
    size: int
    about: Any
    path: str
    dtype: str
    shape: tuple[int, ...]
    is_tensor: bool


@attrs.frozen(eq=False)
class _Member:
    """A tensor of a storage; begin, end: the bytes of the storage that it lies within."""

    number: int
    tensor: torch.Tensor
    form: Form
    begin: int
    end: int

    @staticmethod
    def of(number: int, tensor: torch.Tensor) -> _Member:
        form = form_of(tensor)
        begin = int(tensor.storage_offset()) * form.dtype.itemsize if form.extent else 0
        return _Member(number, tensor, form, begin, begin + form.extent * form.dtype.itemsize)


class _Blocks:
    """The memory that an encoder's tensors lie in.

    rows: for each tensor, by its number: the number of the block that is all of it, with its dtype
    and shape; or its dtype, shape, and block, its strides and its offset in the block, in elements,
    and whether it is a conjugate and a negative.
    """

    def __init__(self, encoder: Encoder, told: Callable[[Way], Way]) -> None:
        self._tensors = encoder.tensors
        self._paths = [".".join(map(str, told(way))) or "state" for way in encoder.ways]
        self._arrays = encoder.arrays
        self.blocks: list[_Block] = []
        self.rows: list[Any] = [None] * len(self._tensors)

    def add_all(self) -> None:
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
                self._add(tensor, tensor.nbytes, about, number, entry)
                continue
            members = [_Member.of(number, self._tensors[number]) for number in numbers]
            for run in _overlapping(members):
                self._add_shared(run)

    def _add(
        self,
        source: torch.Tensor,
        size: int,
        about: Any,
        number: int,
        entry: tuple[str, tuple[int, ...]] | None,
    ) -> None:
        dtype, shape = entry or ("U8", (size,))
        at, path = len(self.blocks), self._paths[number]
        self.blocks.append(_Block(at, source, size, about, path, dtype, shape, entry is not None))

    def _entry_of(self, number: int) -> tuple[str, tuple[int, ...]] | None:
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
            owner = first if form.shape == first.form.shape and not _has_bits(first) else None
            size = math.prod(form.shape) * item
        else:
            dtype = first.form.dtype
            if any(one.form.dtype != dtype for one in run):
                dtype = torch.uint8
            form = Form(dtype, ((end - begin) // dtype.itemsize,), (1,))
            size = up(end - begin, item)
            whole = (one for one in run if (one.begin, one.end) == (begin, begin + size))
            # Whose elements lie in the order of their indices, whatever its strides say.
            owner = next((one for one in whole if _is_in_order(one)), None)
        for one in run:
            offset = (one.begin - begin) // one.form.dtype.itemsize
            bits = one.tensor.is_conj(), one.tensor.is_neg()
            row = [name_of(one.form.dtype), one.form.shape, len(self.blocks), one.form.stride]
            self.rows[one.number] = [*row, offset, *bits]
        source = bare(storage, begin // form.dtype.itemsize, form)
        entry = self._entry_of(owner.number) if owner else None
        self._add(source, size, about, (owner or first).number, entry)


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


def _has_bits(one: _Member) -> bool:
    return one.tensor.is_conj() or one.tensor.is_neg()


def _is_in_order(one: _Member) -> bool:
    return one.tensor.is_contiguous() and not _has_bits(one)


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
    with _Rows():
        bases = [(_base(data, one, copy=copy), one[1]) for one in _stored(head)]
    # Outside: what a device or the caller's function refuses is no fault of the pack.
    stays = map_location == "cpu"
    memory = [one if stays else placed(one, place, map_location) for one, place in bases]
    with _Rows():
        tensors = [_tensor(row, head, memory) for row in _rows(head)]
    return decode(head.outline["tree"], tensors)


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
        base = bases[row].view(_DTYPES[entry.dtype])
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
