"""Which bytes of memory a set of tensors needs, and the tensors as views of such memory again.

Memory that several tensors share is one block and is written once, so they share it again when
they are read. A block is the smallest range that covers them, so a small view of a large storage
takes little. Strides, offsets, and the conjugate and negative bits come back as they were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeAlias, cast

import attrs
import torch
from torch.serialization import default_restore_location, location_tag

from .interface import Unreadable

MapLocation: TypeAlias = (
    str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], Any] | None
)
"""Where tensors go, as `torch.load` takes it: a device; a dict from the device that they were
saved from to another; a function of a storage and that device, which returns a storage, or None
to leave it to torch; or None for the device that they were saved from."""


@attrs.frozen
class Form:
    """How elements lie in memory; strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from the first one in memory to the last, with those in between."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def overlaps(self) -> bool:
        """Whether two elements may lie in one place."""
        reached = 1
        for step, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n > 1:
                if step < reached:
                    return True
                reached += (n - 1) * step
        return False

    @property
    def has_gaps(self) -> bool:
        """Whether each element has a place of its own, and something else lies between them."""
        return math.prod(self.shape) < self.extent and not self.overlaps

    @property
    def is_dense(self) -> bool:
        """Whether each element has a place of its own, and nothing else lies between them."""
        return math.prod(self.shape) == self.extent and not self.overlaps


@attrs.frozen(eq=False)
class Blocks:
    """The memory that some tensors lie in, as it is written.

    sources: what is written of each block, one tensor. blocks: for each, as plain JSON, its bytes
    in memory; in a row with the device, as torch names it, if that is not the CPU ("" for memory
    that is no tensor's, and stays there), and with how its elements lie in memory, if those that
    are written have gaps between them there. tensors: a row for each tensor: its dtype and shape,
    and the number of its block, of which it is all; or, behind these, its strides and its offset
    in the block, in elements, and whether it is a conjugate and a negative.
    """

    sources: list[torch.Tensor]
    blocks: list[Any]
    tensors: list[list[Any]]


def blocks_of(tensors: Sequence[torch.Tensor], hosts: Container[int] = ()) -> Blocks:
    """The memory that these tensors need. Nothing is copied.

    Args:
        hosts: the numbers of those whose memory is not a tensor's own, and stays on the CPU.
    """
    storages: dict[tuple[object, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        address = tensor.untyped_storage().data_ptr()
        # What has no elements shares none.
        key = (number in hosts, tensor.device, address) if tensor.numel() else (number,)
        storages.setdefault(key, []).append(number)
    made = Blocks([], [], [[] for _ in tensors])
    for numbers in storages.values():
        tensor = tensors[numbers[0]]
        location = "" if numbers[0] in hosts else _location(tensor)
        # Nearly all are such, and there may be many thousands.
        if len(numbers) == 1 and _is_plain(tensor):
            made.tensors[numbers[0]] = [name_of(tensor.dtype), [*tensor.shape], len(made.blocks)]
            size = tensor.numel() * tensor.element_size()
            made.blocks.append([size, location] if location != "cpu" else size)
            made.sources.append(tensor)
            continue
        members = [_Member.of(number, tensors[number]) for number in numbers]
        for run in _overlapping(members):
            _add(made, run, location)
    return made


def bases_of(
    rows: Sequence[Any], data: Callable[[int], torch.Tensor], *, copy: bool
) -> list[tuple[torch.Tensor, str]]:
    """The memory of each block, as bytes on the CPU, and the device that it was saved from.

    Args:
        rows: as `Blocks.blocks` has them.
        data: the next bytes of what was written, so many of them.
        copy: whether each gets memory of its own.

    Raises:
        ValueError, TypeError: the rows are none.
        Unreadable: there is not as much memory.
    """
    bases = []
    for row in rows:
        size, location, spread = (row, "cpu", None) if type(row) is int else (*row, None)[:3]
        if type(location) is not str:
            raise ValueError(f"a block lies on {location!r}")
        if spread is None:
            base = data(_whole(size))
            base = base.clone() if copy else base
        else:
            form = _form(*spread)
            if not form.has_gaps or form.extent * form.dtype.itemsize != size:
                raise ValueError(f"a block of {size} bytes is not what {spread} takes")
            base = spread_out(data(math.prod(form.shape) * form.dtype.itemsize), form)
        bases.append((base, location))
    return bases


def placed(base: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """The memory of a block where it is wanted. Raises what torch and the caller's function do."""
    if not location or map_location == "cpu":
        return base
    return _bytes(located(base.untyped_storage(), location, map_location))


def tensor_of(row: Sequence[Any], bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of one of `Blocks.tensors`. Raises ValueError, TypeError or RuntimeError."""
    name, shape, number, *more = row
    base, dtype = bases[_whole(number)], dtype_named(name)
    if not more:
        return base.view(dtype).view(shape)
    stride, offset, conj, neg = more
    form = _form(name, shape, stride)
    if (_whole(offset) + form.extent) * dtype.itemsize > len(base):
        raise ValueError(f"a tensor of {row} lies outside of its block")
    return _viewed(base.untyped_storage(), offset, form, conj=conj is True, neg=neg is True)


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """What `dtype_named` finds it by."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_named(name: str) -> torch.dtype:
    """The dtype that `str` calls torch.`name`. Raises ValueError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def _form(name: str, shape: Any, stride: Any) -> Form:
    if len(shape) != len(stride):
        raise ValueError(f"a tensor has the shape {shape} and the strides {stride}")
    return Form(dtype_named(name), tuple(map(_whole, shape)), tuple(map(_whole, stride)))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return _bare(storage, 0, Form(torch.uint8, (storage.nbytes(),), (1,)))


def _viewed(
    storage: torch.UntypedStorage, offset: int, form: Form, *, conj: bool, neg: bool
) -> torch.Tensor:
    found = _bare(storage, offset, form)
    found = found.conj() if conj else found
    return torch._neg_view(found) if neg else found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is as its shape and dtype alone say, and as `view` makes it of bytes."""
    step = 1
    # Not is_contiguous, which does not ask for the strides of what there is one of.
    for n, found in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if found != step:
            return False
        step *= n or 1
    return not (tensor.is_conj() or tensor.is_neg())


def _location(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else location_tag(tensor.untyped_storage())


def spread_out(data: torch.Tensor, form: Form) -> torch.Tensor:
    """Bytes of their own in which these elements lie as they did. What is in the gaps is 0.

    Raises:
        Unreadable: there is not as much memory.
    """
    try:
        memory = torch.zeros(form.extent, dtype=form.dtype)
    except RuntimeError as error:
        raise Unreadable(
            f"no memory for a tensor of {form.shape} {form.dtype} and strides {form.stride}"
        ) from error
    memory.as_strided(form.shape, form.stride).copy_(data.view(form.dtype).view(form.shape))
    return memory.view(torch.uint8)


def located(
    storage: torch.UntypedStorage, location: str, map_location: MapLocation
) -> torch.UntypedStorage:
    """The storage where `map_location` wants what was saved from `location`."""
    wanted: Any = location
    if callable(map_location):
        found = map_location(storage, location)
        if found is not None:
            # A function may give one of the typed kind.
            return cast(torch.UntypedStorage, getattr(found, "_untyped_storage", found))
    elif isinstance(map_location, dict):
        wanted = map_location.get(location, location)
    elif map_location is not None:
        wanted = str(map_location)
    restored = default_restore_location(storage, wanted)  # type: ignore[no-untyped-call]
    return cast(torch.UntypedStorage, restored)


def moved(tensor: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """A tensor of a storage of its own, which was saved from there, where it is wanted."""
    storage = located(tensor.untyped_storage(), location, map_location)
    return _bare(storage, int(tensor.storage_offset()), form_of(tensor))


class Copies:
    """Copies of tensors, which share memory where the tensors do, and not with these."""

    def __init__(self) -> None:
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        # With what they are copies of, as a number says which one only while that one lives.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy; the same one each time."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = (tensor, self._made(tensor))
        return self._tensors[id(tensor)][1]

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor.detach().clone()  # a DTensor, whose storage is not its own
        copy = self._memory_of(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.requires_grad_() if tensor.requires_grad else copy

    def _memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        known = self._storages.get(key)
        if known is None and storage.nbytes() == tensor.nbytes and _is_plain(tensor):
            copy = tensor.detach().clone()
            self._storages[key] = copy.untyped_storage()
            return copy
        if known is None:
            known = self._storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        offset, form = int(tensor.storage_offset()), form_of(tensor)
        return _viewed(known, offset, form, conj=tensor.is_conj(), neg=tensor.is_neg())


def form_of(tensor: torch.Tensor) -> Form:
    """How it lies in memory."""
    return Form(tensor.dtype, tuple(tensor.shape), tensor.stride())


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetitions that `expand` makes: each element in memory once."""
    for axis, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if n > 1 and step == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements as they lie in memory, copied only if there are gaps between."""
    once = unexpanded(tensor)
    form = form_of(once)
    if not form.is_dense:
        return bits_of(once)
    flat = Form(form.dtype, (form.extent,), (1,))
    return _bare(once.untyped_storage(), int(once.storage_offset()), flat).view(torch.uint8)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its elements as bytes, in the order of their indices."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor).view(-1).view(torch.uint8)


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


def _add(made: Blocks, run: list[_Member], location: str) -> None:
    """Add the memory that these overlap in."""
    first, begin, end = run[0], run[0].begin, max(one.end for one in run)
    # Two storages may begin at one address, as those of two tensors made of one array do.
    storage = max((one.tensor.untyped_storage() for one in run), key=lambda found: found.nbytes())
    form = form_of(unexpanded(first.tensor))
    alike = all((one.begin, one.form) == (begin, first.form) for one in run)
    row: list[Any] = [end - begin, location]
    if alike and form.has_gaps:
        row.append([name_of(form.dtype), [*form.shape], [*form.stride]])
    else:
        dtype = first.form.dtype
        if any(one.form.dtype != dtype for one in run):
            dtype = torch.uint8
            # The offset of each is still to be one in whole elements.
            begin -= begin % max(one.form.dtype.itemsize for one in run)
            row[0] = end - begin
        form = Form(dtype, ((end - begin) // dtype.itemsize,), (1,))
    for one in run:
        offset = (one.begin - begin) // one.form.dtype.itemsize
        bits = one.tensor.is_conj(), one.tensor.is_neg()
        shape, stride = [*one.form.shape], [*one.form.stride]
        number = len(made.blocks)
        made.tensors[one.number] = [name_of(one.form.dtype), shape, number, stride, offset, *bits]
    made.blocks.append(row)
    made.sources.append(_bare(storage, begin // form.dtype.itemsize, form))


def _bare(storage: torch.UntypedStorage, offset: int, form: Form) -> torch.Tensor:
    """As it lies in memory, whatever bits a tensor there has."""
    found = torch.empty(0, dtype=form.dtype, device=storage.device)
    return found.set_(storage, offset, form.shape, form.stride)
