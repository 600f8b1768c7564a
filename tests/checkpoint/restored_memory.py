"""Scenarios of ranks that measure the memory of a restore, for `test_memory_of_a_restore.py`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from elasticlib import CheckpointManager

CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, 0x44000


def private_size() -> float:
    """Return the private memory of this process in MiB."""
    [kib] = re.findall(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)
    return int(kib) / 1024


def shared_size() -> float:
    """Return this process's share of the memory of restores, in MiB.

    The share of other mappings is not included. That of torch's libraries, for example, grows by
    100 MiB if other processes that use torch end meanwhile.
    """
    kib, is_of_restore = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_restore = "elasticlib-restore" in line
        elif is_of_restore and line.startswith("Pss:"):
            kib += int(line.split()[1])
    return kib / 1024


@attrs.frozen
class Memory:
    """The memory of this process in MiB."""

    private: float
    share: float  # private memory, and the process's share of the memory of restores

    @classmethod
    def now(cls) -> Memory:
        private = private_size()
        return cls(private, private + shared_size())

    def since(self, before: Memory) -> tuple[float, float]:
        return self.private - before.private, self.share - before.share


class Probe:
    """An object of the state that measures the memory of its rank while all ranks restore."""

    def __init__(self) -> None:
        self.memory = Memory(0, 0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        dist.barrier()  # All ranks have restored what is before this object in the state.
        self.memory = Memory.now()
        dist.barrier()


def make_state(mebibytes: int, value: float) -> dict[str, Any]:
    return {"w": torch.full((mebibytes << 18,), value), "probe": Probe()}


def leftovers() -> list[str]:
    """Return the memory of a restore that this process still maps or has open."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            lines.append(os.readlink(path))
    return [line for line in lines if "elasticlib-restore" in line]


def restore(folder: Path, mebibytes: int, limits: dict[str, int]) -> dict[str, Any]:
    """Restore, and return how much memory that took, and what of it stays.

    Args:
        folder: the directory of the checkpoints.
        mebibytes: the size of the tensor.
        limits: "file_bytes" (the maximum size of a file, of anonymous ones too), "without_proc" (a
            rank that sees no other processes).
    """
    state = make_state(mebibytes, 0.0)
    if "file_bytes" in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"], resource.RLIM_INFINITY))
    if "without_proc" in limits:
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == limits["without_proc"]:
            hide_processes(pid for pid in pids if pid != os.getpid())
    with CheckpointManager(folder) as manager:
        before = Memory.now()
        dist.barrier()
        result = manager.restore(state)
        after = Memory.now()
        return {
            "step": result.step,
            "values": [float(state["w"].min()), float(state["w"].max())],
            "skipped": result.skipped,
            "during": state["probe"].memory.since(before),
            "after": after.since(before),
            "left": leftovers(),
        }


def hide_processes(pids: Iterable[int]) -> None:
    """Mount an empty directory over /proc/PID of other processes, for this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "cannot change what is mounted")
    for pid in pids:
        if libc.mount(b"tmpfs", f"/proc/{pid}".encode(), b"tmpfs", 0, None):
            raise OSError(ctypes.get_errno(), f"cannot hide the process {pid}")
