"""Memory for states: whole pages of our own, large ones where the kernel has them."""

from __future__ import annotations

import contextlib
import mmap


def room(size: int) -> mmap.mmap:
    """So many bytes, all zero, that go when nobody refers to them any more."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Touched for the first time, memory costs less in pages of 2 MiB than in those of 4 KiB.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
