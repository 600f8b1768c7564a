"""Which bytes of memory a set of tensors needs, and the tensors as views of such memory again.

Memory that several tensors share is one block and is written once, so they share it again when
they are read. A block is the smallest range that covers them, so a small view of a large storage
takes little. Strides, offsets, and the conjugate and negative bits come back as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.serialization import default_restore_location, location_tag

from .interface import Unreadable

MapLocation: TypeAlias = (
    str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None
)
"""Where tensors go, as `torch.load` takes it: a device; a dict from the device that they were
saved from to another; a function of a storage and that device, which returns a storage, or None
to leave it to torch; or None for the device that they were saved from."""


@attrs.frozen(eq=False)
class Entry:
    """A tensor of a state. host: its memory is not a tensor's own, and stays on the CPU."""

    tensor: torch.Tensor
    host: bool = False


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
class Block:
    """Memory that tensors lie in.

    source: what is written of it. size: its bytes in memory. location: its device, as torch names
    it; "" for memory that stays on the CPU. spread: how the elements of `source` lie in memory, if
    they have gaps between them, which are not written.
    """

    source: torch.Tensor
    size: int
    location: str
    spread: Form | None = None


@attrs.frozen
class View:
    """A tensor as a view of a block, given by its number; offset in elements."""

    form: Form
    block: int
    offset: int
    conj: bool = False
    neg: bool = False


def blocks_of(entries: Sequence[Entry]) -> tuple[list[Block], list[View]]:
    """The memory that these tensors need, and each one as a view of it. Nothing is copied."""
    blocks: list[Block] = []
    views: dict[int, View] = {}
    storages: dict[tuple[object, ...], list[_Member]] = {}
    for number, entry in enumerate(entries):
        member = _Member.of(number, entry.tensor)
        address = entry.tensor.untyped_storage().data_ptr()
        # What has no elements shares none.
        key = (entry.tensor.device, address) if member.end else number
        storages.setdefault((entry.host, key), []).append(member)
    for (host, _), members in storages.items():
        for run in _overlapping(members):
            start, block = _block(run, host=bool(host))
            for one in run:
                offset = (one.begin - start) // one.form.dtype.itemsize
                bits = one.tensor.is_conj(), one.tensor.is_neg()
                views[one.number] = View(one.form, len(blocks), offset, *bits)
            blocks.append(block)
    return blocks, [views[number] for number in range(len(entries))]


def view_of(view: View, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor, in the memory of its block, which is known to hold it."""
    found = _bare(storage, view.offset, view.form)
    found = found.conj() if view.conj else found
    return torch._neg_view(found) if view.neg else found


def spread_out(elements: torch.Tensor, form: Form) -> torch.UntypedStorage:
    """Memory of its own that these elements lie in as they did. What is in the gaps is 0.

    Raises:
        Unreadable: there is not as much memory.
    """
    try:
        memory = torch.zeros(form.extent, dtype=form.dtype)
    except RuntimeError as error:
        raise Unreadable(
            f"no memory for a tensor of {form.shape} {form.dtype} and strides {form.stride}"
        ) from error
    memory.as_strided(form.shape, form.stride).copy_(elements.view(form.shape))
    return memory.untyped_storage()


def located(
    storage: torch.UntypedStorage, location: str, map_location: MapLocation
) -> torch.UntypedStorage:
    """The storage where `map_location` wants what was saved from `location`."""
    if callable(map_location):
        moved = map_location(storage, location)
        if moved is None:
            moved = default_restore_location(storage, location)
    elif isinstance(map_location, Mapping):
        moved = default_restore_location(storage, map_location.get(location, location))
    elif map_location is None:
        moved = default_restore_location(storage, location)
    else:
        moved = default_restore_location(storage, str(map_location))
    # A function may give one of the typed kind.
    found: torch.UntypedStorage = getattr(moved, "_untyped_storage", moved)
    return found


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
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if key not in self._storages:
            self._storages[key] = storage.clone()
        view = View(form_of(tensor), 0, tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        copy = view_of(view, self._storages[key])
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        return copy.requires_grad_() if tensor.requires_grad else copy


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
    return _bare(once.untyped_storage(), once.storage_offset(), flat).view(torch.uint8)


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
        begin = tensor.storage_offset() * form.dtype.itemsize if form.extent else 0
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


def _block(run: list[_Member], *, host: bool) -> tuple[int, Block]:
    """The memory of what overlaps, and the byte of the storage that it begins at."""
    first, begin, end = run[0], run[0].begin, max(one.end for one in run)
    # Two storages may begin at one address, as those of two tensors made of one array do.
    storage = max((one.tensor.untyped_storage() for one in run), key=lambda found: found.nbytes())
    location = "" if host else location_tag(storage)
    form = form_of(unexpanded(first.tensor))
    alike = all((one.begin, one.form) == (begin, first.form) for one in run)
    if alike and form.has_gaps:
        source = _bare(storage, begin // form.dtype.itemsize, form)
        return begin, Block(source, end - begin, location, form)
    dtype = first.form.dtype
    if any(one.form.dtype != dtype for one in run):
        dtype = torch.uint8
        # The offset of each is still to be one in whole elements.
        begin -= begin % max(one.form.dtype.itemsize for one in run)
    whole = Form(dtype, ((end - begin) // dtype.itemsize,), (1,))
    return begin, Block(_bare(storage, begin // dtype.itemsize, whole), end - begin, location)


def _bare(storage: torch.UntypedStorage, offset: int, form: Form) -> torch.Tensor:
    """As it lies in memory, whatever bits a tensor there has."""
    found = torch.empty(0, dtype=form.dtype, device=storage.device)
    return found.set_(storage, offset, form.shape, form.stride)  # type: ignore[call-overload]
