"""The memory that a tensor lies in, and tensors as views of such memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from torch.serialization import _get_restore_location

MapLocation: TypeAlias = (
    str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], Any] | None
)
"""Where tensors go, as `torch.load` takes it."""


@attrs.frozen
class Form:
    """How elements lie in memory; strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of the elements, without what lies between them."""
        return math.prod(self.shape) * self.dtype.itemsize

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


class Copies:
    """Copies of tensors, which share memory where the tensors do, and not with these."""

    def __init__(self) -> None:
        self._storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
        # With what they are copies of, as a number says which one only while that one lives.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy; the same one each time."""
        if id(tensor) not in self._tensors:
            copy = self._copy(tensor).requires_grad_(tensor.requires_grad)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
            self._tensors[id(tensor)] = (tensor, copy)
        return self._tensors[id(tensor)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        known = self._storages.get(key)
        if known is None and storage.nbytes() == tensor.nbytes and is_plain(tensor):
            copy = tensor.detach().clone()
            self._storages[key] = copy.untyped_storage()
            return copy
        if known is None:
            known = self._storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        offset, form = int(tensor.storage_offset()), form_of(tensor)
        return viewed(known, offset, form, conj=tensor.is_conj(), neg=tensor.is_neg())


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
    return bare(once.untyped_storage(), int(once.storage_offset()), flat).view(torch.uint8)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its elements as bytes, in the order of their indices."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor).view(-1).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is as its shape and dtype alone say, and as `view` makes it of bytes."""
    step, strides = 1, tensor.stride()
    # Not is_contiguous, which does not ask for the strides of what there is one of.
    for axis, n in enumerate(reversed(tensor.shape), 1):
        if strides[-axis] != step:
            return False
        step *= n or 1
    return not (tensor.is_conj() or tensor.is_neg())


def viewed(
    storage: torch.UntypedStorage, offset: int, form: Form, *, conj: bool, neg: bool
) -> torch.Tensor:
    found = bare(storage, offset, form)
    found = found.conj() if conj else found
    return torch._neg_view(found) if neg else found


def bare(storage: torch.UntypedStorage, offset: int, form: Form) -> torch.Tensor:
    """As it lies in memory, whatever bits a tensor there has."""
    found = torch.empty(0, dtype=form.dtype, device=storage.device)
    return found.set_(storage, offset, form.shape, form.stride)


def moved(tensor: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """A tensor that was saved from the device `location` ("" for memory that stays), with its
    storage where it is wanted. Raises what torch and the caller's function do."""
    if not location or map_location == "cpu":
        return tensor
    found = _get_restore_location(map_location)(tensor.untyped_storage(), location)  # type: ignore[no-untyped-call]
    # A function may give one of the typed kind.
    storage = getattr(found, "_untyped_storage", found)
    return bare(storage, int(tensor.storage_offset()), form_of(tensor))
