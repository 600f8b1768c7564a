"""Tensors in memory: how strides address elements, and how elements move between devices.

Host memory that receives copies from a GPU is page-locked, so that the bus runs at full speed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch.serialization import default_restore_location, location_tag

from ..errors import CheckpointUnreadableError

if TYPE_CHECKING:
    from .snapshot_slots import MappedSlot

MapLocation: TypeAlias = (
    str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], Any] | None
)
"""The devices on which tensors are placed, as `torch.load` takes it."""

_DTYPE_NAME = re.compile(r"(u?int|b?float|complex|bits)[0-9]+(_[a-z0-9]+)*")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        CheckpointUnreadableError: this version of torch has no such dtype, and another one may.
        ValueError: this is no name of a dtype.
    """
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    if _DTYPE_NAME.fullmatch(name):
        raise CheckpointUnreadableError(
            f"the state has tensors of {name}, and torch {torch.__version__} has no such dtype: use"
            " the version of torch that saved the state"
        )
    raise ValueError(f"torch has no dtype {name!r}")


@cache
def is_copyable(dtype: torch.dtype) -> bool:
    """Return True if torch can copy elements of this dtype; it cannot copy uint4, for example."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except RuntimeError:
        return False
    return True


@attrs.frozen
class StridedLayout:
    """The dtype, the shape and the strides (in elements) of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StridedLayout:
        """Return the layout of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def num_bytes(self) -> int:
        """The size of the elements in bytes, without gaps between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """The number of elements from the first in memory to the last, including gaps."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def is_dense(self) -> bool:
        """True if the elements are adjacent, in any order of the dimensions."""
        if math.prod(self.shape) != self.extent:
            return False
        reached = 1
        for step, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n > 1:
                if step < reached:
                    return False  # Two elements share a place.
                reached += (n - 1) * step
        return True

    @property
    def is_row_major(self) -> bool:
        """True if the strides are exactly those of a new tensor of this shape."""
        return self.stride == row_major_stride(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps, as `Tensor.is_contiguous` says.

        The strides of dimensions of size 1 and of tensors without elements do not matter.
        """
        if 0 in self.shape:
            return True
        expected = row_major_stride(self.shape)
        return all(
            n == 1 or step == want
            for n, step, want in zip(self.shape, self.stride, expected, strict=True)
        )

    def densified(self) -> StridedLayout:
        """Return this layout if it is dense, else the row-major layout of the same shape."""
        if self.is_dense:
            return self
        return StridedLayout(self.dtype, self.shape, row_major_stride(self.shape))


def row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= n or 1
    return tuple(reversed(stride))


def strided_view(storage: torch.UntypedStorage, offset: int, layout: StridedLayout) -> torch.Tensor:
    """Return a tensor of this layout in existing memory.

    Args:
        storage: The memory.
        offset: The number of elements before the first one.
        layout: The layout.
    """
    tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
    return tensor.set_(storage, offset, layout.shape, layout.stride)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that has only the first index in each dimension of stride 0."""
    for axis, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if n > 1 and step == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements as bytes, in the order of their indices."""
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor).view(-1).view(torch.uint8)


def device_tag(tensor: torch.Tensor) -> str:
    """Return the name of the tensor's device as `torch.load` passes it to `map_location`."""
    return "cpu" if tensor.is_cpu else str(location_tag(tensor.untyped_storage()))


def relocated(tensor: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """Return a tensor in the CPU's memory as a tensor on the device where the caller wants it.

    Args:
        tensor: The tensor, which has a storage of its own.
        location: The device from which it was saved. If it is empty, the tensor stays on the CPU.
        map_location: As `torch.load` takes it. Its exceptions are passed on.
    """
    if not location or map_location == "cpu":
        return tensor
    storage = tensor.untyped_storage()
    moved: Any = None
    if callable(map_location):
        moved = map_location(storage, location)
    elif isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = str(map_location)
    if moved is None:
        moved = default_restore_location(storage, location)  # type: ignore[no-untyped-call]
    # The function may return a typed storage.
    moved = getattr(moved, "_untyped_storage", moved)
    return strided_view(moved, int(tensor.storage_offset()), StridedLayout.of(tensor))


# -- copies from GPUs ---------------------------------------------------------------------------

_ALREADY_REGISTERED = 712  # CUDA's error for locked memory, if an earlier call was interrupted


@attrs.frozen
class CudaPageLock:
    """The lock of the pages of a range of memory, for CUDA."""

    address: int
    is_locked: bool  # False if the machine does not allow it: copies are slower, and still correct

    def release(self) -> None:
        """Unlock the pages. Call this before the memory is unmapped."""
        if self.is_locked:
            _cuda().cudaHostUnregister(self.address)


def lock_pages(slot: MappedSlot) -> None:
    """Lock the pages of a slot, if this process uses CUDA."""
    if slot.page_lock is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        address = memory.data_ptr()
        error = int(_cuda().cudaHostRegister(address, memory.numel(), 0))
        slot.keep_page_lock(CudaPageLock(address, error in (0, _ALREADY_REGISTERED)))


@torch.no_grad()
def copy_from_devices(
    targets: list[torch.Tensor], sources: list[torch.Tensor], devices: Iterable[torch.device]
) -> None:
    """Copy tensors, some of which are on `devices`, to host memory, and wait for the copies.

    If the only device is a CUDA device, they are copied in a stream that only this function uses,
    after the work that is in the current stream when it is called. This function then does not wait
    for work that is added to any stream later. If it is interrupted, copies may still be running:
    the copies of the next call wait for them, because they are in the same stream.
    """
    devices = list(devices)
    is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_cuda and [device.type for device in devices] == ["cuda"]:
        stream = _copy_stream(devices[0])
        stream.wait_stream(torch.cuda.current_stream(devices[0]))
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, True)
            copied = stream.record_event()
        copied.synchronize()
        return
    try:
        torch._foreach_copy_(targets, sources, True)
    finally:
        for device in devices:
            torch.accelerator.synchronize(device)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
