"""Page-locked host memory, to which copies from a GPU run at the full speed of the bus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_ALREADY_REGISTERED = 712  # CUDA's error for locked memory, if an earlier call was interrupted


def is_page_lockable(devices: Iterable[torch.device]) -> bool:
    """Return True if copies from one of these devices are faster into page-locked memory."""
    return any(device.type == "cuda" for device in devices)


def lock_pages(address: int, size: int) -> bool:
    """Lock the pages of a range of memory. Return False if the machine does not allow it.

    Copies into memory that is not locked are slower, and still correct.
    """
    return int(_cuda().cudaHostRegister(address, size, 0)) in (0, _ALREADY_REGISTERED)


def unlock_pages(address: int) -> None:
    """Unlock the pages of the range of memory that starts at this address."""
    _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
