"""A state as one run of bytes: the same on the disk, in shared memory, and between nodes.

The bytes are a safetensors file (see `pack_head` for its head), so any tool can open a pack. A
tensor whose elements lie in the order of its indices is an entry under its path in the state, such
as `model.layers.0.weight`. Memory that several tensors share is written once, so they share it
again when they are read: it is the entry of the tensor that covers it, if there is one, and else
an entry of bytes, `PATH.storage`, as is the memory of a tensor that lies otherwise (transposed,
expanded, conjugated) or has a dtype that safetensors has not. Which tensor is which view of which
entry stands in the outline: strides, offsets, conjugate and negative bits come back as they were.
Of a large storage the smallest range is written that covers what the state uses. The entries carry
no sum here: whoever stores or sends a pack sums it up.

The outline is the state as JSON, with its tensors taken out and numbered. Nothing is unpickled when
it is read back, so a file cannot run code: less than even `torch.load(weights_only=True)` lets in.
Equal things are equal again, of the same types.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import attrs
import torch
from torch.serialization import location_tag

from ..errors import CheckpointCorrupt, CheckpointError, Unreadable
from ..foreign import full_name, with_article
from .pack_head import (
    ARRAY_DTYPES,
    DTYPES,
    Entry,
    Head,
    entry_names,
    in_order,
    read_head,
    up,
    write_head,
)
from .state import (
    Form,
    MapLocation,
    Step,
    Walk,
    Way,
    array_of,
    bare,
    bytes_of,
    check_elements,
    dtype_named,
    form_of,
    is_array,
    is_number,
    is_plain,
    moved,
    name_of,
    number_of,
    order_of,
    spoken,
    unexpanded,
    viewed,
)

_Like: TypeAlias = tuple[str, tuple[int, ...]]
_Stored: TypeAlias = tuple[int, str, int, Any]
"""A block: where its bytes begin, the device that it was saved from, its bytes in memory, and how
its elements lie there if they have gaps."""
_NOT_AS_WRITTEN = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError)
_ENTRY_DTYPES = {dtype_named(name): entry for entry, name in DTYPES.items()}
MAX_INT_BITS = 8192
"""Python reads no integers of many more digits from text; longer ones are written in hex."""

_NAN_OF_JSON = struct.pack(">d", math.nan)

MAPPINGS: dict[str, type] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
    "defaultdict": defaultdict,
}
"""The containers with keys, by their names in an outline."""
_PLAIN = (type(None), bool, float, str)
_MAPPINGS = {kind: name for name, kind in MAPPINGS.items()}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (int, float, list, dict, set)},
}
"""The default factories that a defaultdict in a state may have, by their names in an outline."""


def _to_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _encode_float(value: float) -> float | dict[str, str]:
    """Encode a float so that it keeps its bits: JSON has one NaN, and Python has 2**53 of them."""
    if not math.isnan(value) or struct.pack(">d", value) == _NAN_OF_JSON:
        return value
    return {"nan": struct.pack(">d", value).hex()}


def _decode_float(encoded: Any) -> float:
    return _decode_nan(encoded["nan"]) if isinstance(encoded, dict) else encoded


def _decode_nan(pattern: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(pattern))[0])


@cache
def _is_copyable(dtype: torch.dtype) -> bool:
    """Return whether torch can copy elements of this dtype; it cannot copy uint4, for example."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except RuntimeError:
        return False
    return True


_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", _to_text, _from_text),
    bytearray: ("bytearray", _to_text, lambda text: bytearray(_from_text(text))),
    complex: (
        "complex",
        lambda v: [_encode_float(v.real), _encode_float(v.imag)],
        lambda parts: complex(*map(_decode_float, parts)),
    ),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", name_of, dtype_named),
    torch.device: ("device", str, torch.device),
}
"""By type: its name in JSON, and how it is written and read."""


# -- an outline, written ---------------------------------------------------------------------------


class _Encoder(Walk):
    """Makes of a state what `json.dumps` takes and `_Decoder` reads, with numbers for its tensors.

    What cannot be saved is a CheckpointError that says what it is, and where it stands.

    tensors: those found so far, in the order of their numbers; ways: where each stands first.
    arrays: those that are the bytes of NumPy's arrays: dtype, shape, and order in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.ways: list[Way] = []
        self.arrays: dict[int, tuple[str, tuple[int, ...], str]] = {}
        # With the value, as another one may get its id once it is gone.
        self._numbers: dict[int, tuple[int, object]] = {}

    def leaf(self, way: Way, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return _encode_float(value) if kind is float else value
        if kind is int:
            return value if value.bit_length() <= MAX_INT_BITS else {"int": hex(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(way, value)
        if kind in _SETS:
            # Each process has an order of its own, and equal states are to be equal bytes.
            items = sorted((self.walk(item, way) for item in value), key=json.dumps)
            return {_SETS[kind]: items}
        if kind in _LEAVES:
            name, write, _ = _LEAVES[kind]
            return {name: write(value)}
        if is_array(value):
            return self._array(way, value)
        if is_number(value):
            check_elements(way, value)
            return {"number": _to_text(value.tobytes()), "dtype": value.dtype.str}
        raise _refusal(way, value)

    def node(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> Any:
        kind = type(value)
        if kind in _MAPPINGS:
            return self._mapping(way, value, parts)
        items = list(parts.values())
        return items if kind is list else {"tuple": items}

    def _mapping(self, way: Way, value: Any, parts: Mapping[Any, Any]) -> dict[str, Any]:
        items = [
            [key if type(key) is str else self.walk(key, (*way, Step(f".key({key!r})"))), part]
            for key, part in parts.items()
        ]
        found: dict[str, Any] = {_MAPPINGS[type(value)]: items}
        if isinstance(value, defaultdict):
            found["factory"] = _factory(way, value)
        # A module's state dict carries its parts' versions in an attribute.
        attributes = getattr(value, "__dict__", None)
        if attributes:
            found["attributes"] = {
                name: self.walk(item, (*way, Step(f".{name}"))) for name, item in attributes.items()
            }
        return found

    def _tensor(self, way: Way, tensor: torch.Tensor) -> dict[str, Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(
                f"{spoken(way)} is a {full_name(tensor)}: a subclass of torch.Tensor is not saved "
                "as it is"
            )
        if tensor.is_nested:
            raise CheckpointError(
                f"{spoken(way)} is a nested tensor, which is not saved: save the list of its "
                "tensors, tensor.unbind()"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(
                f"{spoken(way)} is a tensor without plain elements ({tensor.layout}, "
                f"{tensor.device})"
            )
        if not _is_copyable(tensor.dtype):
            raise CheckpointError(
                f"{spoken(way)} is a tensor of {name_of(tensor.dtype)}, which torch cannot copy: "
                "save its bytes, tensor.view(torch.uint8)"
            )
        # Nearly all want no gradient, and each new tensor takes its time.
        plain = tensor.detach() if tensor.requires_grad else tensor
        number = self._number(way, tensor, lambda: plain)
        if type(tensor) is torch.nn.Parameter:
            return {"parameter": number, "grad": tensor.requires_grad}
        wanted = tensor.requires_grad and tensor.is_leaf
        return {"tensor": number, "grad": True} if wanted else {"tensor": number}

    def _array(self, way: Way, array: Any) -> dict[str, Any]:
        check_elements(way, array)
        number = self._number(way, array, lambda: bytes_of(array))
        dtype, shape, order = self.arrays[number] = array.dtype.str, array.shape, order_of(array)
        return {"array": number, "dtype": dtype, "shape": shape, "order": order}

    def _number(self, way: Way, value: object, tensor: Callable[[], torch.Tensor]) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors), value
            self.tensors.append(tensor())
            self.ways.append(way)
        return self._numbers[id(value)][0]


def _refusal(way: Way, value: object) -> CheckpointError:
    plain = type(value).__module__ == "builtins"
    name = with_article(value) if plain else f"a {full_name(value)}"
    what = f"{spoken(way)} is {name}"
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        if callable(getattr(value, "load_state_dict", None)):
            return CheckpointError(f"{what}: give what its state_dict() returns")
        return CheckpointError(f"{what}, which has a state_dict and no load_state_dict: save that")
    return CheckpointError(f"{what}, which a checkpoint does not hold: save what it is made of")


def _factory(way: Way, value: defaultdict[Any, Any]) -> str:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise CheckpointError(
        f"{spoken(way)} is a defaultdict of {value.default_factory!r}, and a checkpoint holds "
        f"those of {', '.join(_FACTORIES)}: save a dict of it"
    )


# -- and read --------------------------------------------------------------------------------------


class _Decoder:
    """One thing has one number, and where it stands in several places it is one again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[tuple[object, ...], Any] = {}

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        kind = next(iter(encoded))
        payload = encoded[kind]
        if kind in ("tensor", "parameter", "array"):
            key = (kind, payload, encoded.get("grad", False))
            if key not in self._made:
                self._made[key] = _placed(kind, self._tensors[payload], encoded)
            return self._made[key]
        if kind in MAPPINGS:
            return self._mapping(encoded, kind)
        if kind == "number":
            return number_of(_from_text(payload), encoded["dtype"])
        if kind in _READ:
            return _READ[kind](payload)
        if kind in _ITEMS:
            return _ITEMS[kind](self.decode(payload))
        raise ValueError(f"there is no kind {kind!r}")

    def _mapping(self, encoded: dict[str, Any], kind: str) -> Any:
        found: Any = MAPPINGS[kind]()
        if kind == "defaultdict":
            found.default_factory = _FACTORIES[encoded["factory"]]
        found.update({self.decode(key): self.decode(item) for key, item in encoded[kind]})
        for name, item in encoded.get("attributes", {}).items():
            found.__dict__[name] = self.decode(item)
        return found


_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "nan": _decode_nan,
    **{name: read for name, _, read in _LEAVES.values()},
}
_ITEMS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _placed(kind: str, tensor: torch.Tensor, encoded: dict[str, Any]) -> Any:
    if kind == "array":
        return array_of(tensor, encoded["dtype"], encoded["shape"], encoded["order"])
    grad = encoded.get("grad", False)
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_() if grad else tensor


# -- a pack, written -------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Layout:
    """Where everything goes.

    size: of the pack, in bytes. head: its first bytes, up to the data. parts: what is written of
    each entry, in their order, a tensor which is the state's own memory, no copy, and from where to
    where; what it does not fill of that is zeros. found: the state's tensors, in the order in which
    they stand there.
    """

    size: int
    head: bytes
    parts: tuple[tuple[torch.Tensor, int, int], ...]
    found: tuple[torch.Tensor, ...]


def lay_out(
    state: object,
    meta: Mapping[str, Any] | None = None,
    *,
    shown_as: Callable[[Way], Way] = lambda way: way,
) -> Layout:
    """How to pack `state`, which is not copied yet.

    Args:
        state: nested containers of plain values, arrays and dense tensors, of any dtype, on any
            device.
        meta: what `read_meta` gives back without the tensors: plain JSON, such as the step.
        shown_as: the keys by which other tools find a tensor, for those by which it stands here.

    Raises:
        CheckpointError: the state cannot be saved; the message says what, and where it stands.
    """
    encoder = _Encoder()
    tree = encoder.walk(state)
    made = _Blocks(encoder, shown_as)
    names = entry_names([(block.path, block.like is not None) for block in made.blocks])
    order = in_order([block.size for block in made.blocks])
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
    spans = ((len(head) + entry.begin, len(head) + entry.end) for entry in entries)
    parts = tuple((block.source, *span) for block, span in zip(blocks, spans, strict=True))
    return Layout(len(head) + end, head, parts, tuple(encoder.tensors))


def fill(layout: Layout, buffer: torch.Tensor) -> None:
    """Copy the state into `buffer`, and wait until that is done: the one copy that a save costs.

    Args:
        buffer: uint8, of at least `layout.size` elements, contiguous, on the CPU; its memory at a
            multiple of 64 bytes. What lies behind `layout.size` is left alone.
    """
    buffer[: len(layout.head)].copy_(torch.frombuffer(bytearray(layout.head), dtype=torch.uint8))
    elsewhere = {tensor.device for tensor, _, _ in layout.parts if tensor.device.type != "cpu"}
    for tensor, begin, end in layout.parts:
        filled = begin + tensor.nbytes
        if filled > begin:
            place = buffer[begin:filled].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
        if filled < end:
            buffer[filled:end].zero_()
    # Each of them, and not the current one alone: copies into page-locked memory are on their way.
    for device in elsewhere:
        torch.accelerator.synchronize(device)


def _at_place(row: Any, places: Mapping[int, int]) -> Any:
    if type(row) is int:
        return places[row]
    name, shape, number, *more = row
    return [name, shape, places[number], *more]


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

    def __init__(self, encoder: _Encoder, shown_as: Callable[[Way], Way]) -> None:
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
            return (ARRAY_DTYPES[name], shape) if name in ARRAY_DTYPES and order == "C" else None
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


# -- and read --------------------------------------------------------------------------------------


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
        Unreadable: a version with another format wrote it, or this program lacks a
            library for it.
    """
    head = read_head(pack)
    if len(pack) < head.size:
        raise CheckpointCorrupt(f"the pack has {head.size} bytes, and {len(pack)} are here")
    data = pack[head.start : head.size]
    with _reading("pack's list of tensors"):
        bases = [(_base(data, one, copy=copy), one[1]) for one in _stored(head)]
    # Outside: what a device or the caller's function refuses is no fault of the pack.
    memory = [moved(base, location, map_location) for base, location in bases]
    with _reading("pack's list of tensors"):
        tensors = [_tensor(row, head, memory) for row in head.outline["tensors"]]
    with _reading("state's outline"):
        return _Decoder(tensors).decode(head.outline["tree"])


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """What cannot be done with it says that it is not what was written."""
    try:
        yield
    except _NOT_AS_WRITTEN as error:
        raise CheckpointCorrupt(f"the {what} cannot be read: {error}") from error


def _stored(head: Head) -> Iterator[_Stored]:
    for entry, about in zip(head.entries, head.outline["blocks"], strict=True):
        size = entry.end - entry.begin
        location, *more = about or ["cpu"]
        size, form = (*more, None)[:2] if more else (size, None)
        yield entry.begin, location, size, form


def _base(data: memoryview, stored: _Stored, *, copy: bool) -> torch.Tensor:
    """The memory of a block, as bytes on the CPU; what is in gaps between elements is 0. Raises
    ValueError, TypeError, Unreadable."""
    begin, location, size, spread = stored
    if type(location) is not str:
        raise ValueError(f"a block lies on {location!r}")
    if spread is None:
        base = _bytes_at(data, begin, size)
        return base.clone() if copy else base
    form = _form(*spread)
    if not form.has_gaps or form.extent * form.dtype.itemsize != size:
        raise ValueError(f"a block of {size} bytes is not what {spread} takes")
    elements = _bytes_at(data, begin, form.bytes)
    try:
        memory = torch.zeros(form.extent, dtype=form.dtype)
    except RuntimeError as error:
        raise Unreadable(
            f"no memory for a tensor of {form.shape} {form.dtype} and strides {form.stride}"
        ) from error
    memory.as_strided(form.shape, form.stride).copy_(elements.view(form.dtype).view(form.shape))
    return memory.view(torch.uint8)


def _bytes_at(data: memoryview, begin: int, size: int) -> torch.Tensor:
    if not 0 <= begin <= begin + size <= len(data):
        raise ValueError(f"{size} bytes at {begin} lie outside")
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, count=size, offset=begin)


def _tensor(row: Any, head: Head, bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of a row, as `_Blocks` makes them."""
    if type(row) is int:
        entry = head.entries[_whole(row)]
        base = bases[row].view(dtype_named(DTYPES[entry.dtype]))
        return base if len(entry.shape) == 1 else base.view(entry.shape)
    name, shape, number, stride, offset, conj, neg = row
    base, dtype = bases[_whole(number)], dtype_named(name)
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
