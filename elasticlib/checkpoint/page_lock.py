"""Copies from GPUs to host memory, whose pages are locked so that the bus runs at full speed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from .snapshot_slots import MappedSlot

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
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and slot.page_lock is None:
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        address = memory.data_ptr()
        error = int(_cuda().cudaHostRegister(address, memory.numel(), 0))
        slot.page_lock = CudaPageLock(address, error in (0, _ALREADY_REGISTERED))


def copy_from_devices(
    targets: list[torch.Tensor], sources: list[torch.Tensor], devices: Iterable[torch.device]
) -> None:
    """Copy tensors of which some are on devices to host memory, and wait until they are there.

    Tensors of one CUDA device are copied in a stream of their own, after all work that the current
    stream has by now. So work that follows in other streams need not be waited for. An interrupted
    call may leave copies running: the next copies, in the same stream, follow them.
    """
    devices = list(devices)
    if len(devices) == 1 and devices[0].type == "cuda":
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
