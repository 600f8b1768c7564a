"""Host memory that a state is copied into, reused from save to save.

It grows when a state does. Where tensors lie on a GPU it is page-locked, so that copies run at
the bus's full speed.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch

from .pack import Layout, fill
from .summing import room


class HostBuffer:
    """Room for one state. Not to be copied into while somebody reads it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def take(self, layout: Layout) -> memoryview:
        """Copy a state here, and wait until it is; its bytes."""
        if self._memory is None or len(self._memory) < layout.size:
            self.close()
            self._memory = room(layout.size)
            self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        if not self._locked and any(tensor.is_cuda for tensor in layout.tensors):
            self._lock()
        fill(layout, self._tensor)
        return memoryview(self._memory)[: layout.size]

    def close(self) -> None:
        """Give the memory back."""
        if self._locked:
            _cuda().cudaHostUnregister(self._tensor.data_ptr())
        self._locked = False
        self._memory = None
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def _lock(self) -> None:
        # Where the machine allows no more locked memory, copies are slower, and no less right.
        answer = _cuda().cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0)
        self._locked = int(answer) == 0


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
