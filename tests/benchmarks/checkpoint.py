"""What a checkpoint costs a training step, when it is durable, and how long it takes to read.

    python tests/benchmarks/checkpoint.py [--mib 1024] [--repeat 5] [--folder DIR] [--threads N]

Beside it, in the same run and in turns: a plain copy of the tensors into memory that is reused,
`torch.save` (which syncs nothing) and an fsync after it, DCP's `async_save`, writing the same
bytes with one fsync, and `torch.load`. A snapshot goes into memory as an agent of ours has it.
Medians in milliseconds, and the ratios that matter.

    python tests/benchmarks/checkpoint.py --beside

How much slower a loop of Python code, which holds the interpreter's lock, is while a checkpoint
is written: by a thread, as `save` does it, and by a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from elasticlib import CheckpointManager
from elasticlib.checkpoint.agree import restore_from
from elasticlib.checkpoint.commit import Committer
from elasticlib.checkpoint.disk import LocalPlace
from elasticlib.checkpoint.fence import Writer
from elasticlib.checkpoint.folder import CheckpointFolder
from elasticlib.checkpoint.prune import Retention
from elasticlib.checkpoint.room import room
from elasticlib.checkpoint.snapshots import SnapshotMemory
from elasticlib.checkpoint.told import Told

CHUNK = 16 << 20
State = dict[str, torch.Tensor]


def make_state(mib: int) -> State:
    """Tensors of 16 MiB and, a sixteenth of it all, of 256 KiB each: some hundreds for 1 GiB, as
    of a model and its optimizer."""
    count = max(1, mib * 15 // 16 // 16)
    small = max(1, (mib << 20) // 16 // (256 << 10))
    state = {f"large.{at}": torch.randn(4 << 20) for at in range(count)}
    return state | {f"small.{at}": torch.randn(64 << 10) for at in range(small)}


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Ways:
    """Each way to do one thing, called once a round; all rounds are kept."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}

    def note(self, name: str, taken: float) -> None:
        self.taken.setdefault(name, []).append(taken)

    def median(self, name: str) -> float:
        return statistics.median(self.taken[name])

    def show(self, name: str, beside: str = "") -> None:
        ratio = f"   {self.median(name) / self.median(beside):5.2f} x {beside}" if beside else ""
        low, high = min(self.taken[name]) * 1e3, max(self.taken[name]) * 1e3
        print(f"{name:34}{self.median(name) * 1e3:9.1f} ms   ({low:.1f} to {high:.1f}){ratio}")


def write_plainly(path: Path, data: memoryview) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    for start in range(0, len(data), CHUNK):
        os.write(handle, data[start : start + CHUNK])
    os.fsync(handle)
    os.close(handle)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def one_round(
    ways: Ways,
    state: State,
    folder: Path,
    copy: State,
    ours: tuple[CheckpointManager, SnapshotMemory],
) -> None:
    """Each way once. What is on the disk is deleted in between, and the disk comes to rest."""
    manager, memory = ours

    def copy_all() -> None:
        for name, tensor in state.items():
            copy[name].copy_(tensor)

    ways.note("plain copy", seconds(copy_all))
    manager.save(len(ways.taken["plain copy"]), state)
    ways.note("save: stall", manager.stall)
    manager.wait()
    ways.note("save: durable", manager.durable or 0.0)
    ways.note("load", seconds(manager.load))
    in_memory(ways, state, memory)
    data = memoryview(copy["large.0"].numpy()).cast("B")
    repeated = memoryview(bytearray(sum(t.nbytes for t in state.values())))
    repeated[: len(data)] = data
    ways.note("write and fsync", seconds(lambda: write_plainly(folder / "plain", repeated)))
    os.unlink(folder / "plain")
    ways.note("torch.save", seconds(lambda: torch.save(state, folder / "a.pt")))
    durably = ways.taken["torch.save"][-1] + seconds(lambda: sync(folder / "a.pt"))
    ways.note("torch.save and fsync", durably)
    ways.note("torch.load", seconds(lambda: torch.load(folder / "a.pt", weights_only=True)))
    os.unlink(folder / "a.pt")
    began = time.perf_counter()
    future = dcp.async_save(dict(state), checkpoint_id=folder / "dcp")
    ways.note("async_save: stall", time.perf_counter() - began)
    future.result()  # type: ignore[union-attr]
    ways.note("async_save: done", time.perf_counter() - began)
    shutil.rmtree(folder / "dcp")
    os.sync()


def in_memory(ways: Ways, state: State, memory: SnapshotMemory) -> None:
    """A snapshot as a worker makes it, and what the next worker does with it."""
    made = memory.snapshot(len(ways.taken["plain copy"]), state)
    assert made is not None
    ways.note("snapshot: stall", made.seconds)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    ways.note("restore from memory", seconds(lambda: restore_from([memory], target)))


def agents_memory(folder: Path) -> SnapshotMemory:
    """As an agent gives it to a worker."""
    era = folder / "1"
    era.mkdir()
    return SnapshotMemory(Told(str(era), "benchmark", 1))


def compare(args: argparse.Namespace, folder: Path) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = make_state(args.mib)
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ways = Ways()
    with (
        CheckpointManager(folder / "ours", keep_last=1) as manager,
        tempfile.TemporaryDirectory(prefix="elasticlib-", dir="/dev/shm") as shared,
        contextlib.closing(agents_memory(Path(shared))) as memory,
    ):
        # The second snapshot makes memory, too.
        memory.snapshot(0, state)
        one_round(Ways(), state, folder, copy, (manager, memory))
        for _ in range(args.repeat):
            one_round(ways, state, folder, copy, (manager, memory))
    ways.show("plain copy")
    ways.show("save: stall", "plain copy")
    ways.show("snapshot: stall", "plain copy")
    ways.show("torch.save")
    ways.show("torch.save and fsync")
    ways.show("save: stall", "torch.save")
    ways.show("save: stall", "torch.save and fsync")
    ways.show("async_save: stall", "plain copy")
    ways.show("write and fsync")
    ways.show("save: durable", "write and fsync")
    ways.show("async_save: done", "write and fsync")
    ways.show("torch.load")
    ways.show("load", "torch.load")
    ways.show("restore from memory", "torch.load")
    dist.destroy_process_group()


def python_step() -> int:
    """Some milliseconds of Python code."""
    return sum(number * number for number in range(40_000))


def writing(data: memoryview, folder: Path, saves: int) -> None:
    place = CheckpointFolder(LocalPlace(folder))
    commits = Committer(place, Writer("", "b", 0, secrets.token_hex(8)), Retention(1))
    for step in range(saves):
        commits.save(step, data)


def beside(args: argparse.Namespace, folder: Path) -> None:
    """The same loop alone, beside a thread that saves, and beside a process that does."""
    import threading

    size = args.mib << 20
    memory = room(size)
    memory[:] = os.urandom(1 << 20) * args.mib
    data = memoryview(memory)
    context = multiprocessing.get_context("fork")
    ways = Ways()
    makers = {
        "alone": None,
        "beside a thread": threading.Thread,
        "beside a process": context.Process,
    }
    for _ in range(args.repeat):
        for name, make in makers.items():
            given = {"target": writing, "args": (data, folder / name, 4)}
            worker = make(**given) if make else None
            if worker:
                worker.start()
            taken = [seconds(python_step) for _ in range(40)]
            while worker and worker.is_alive():
                taken.append(seconds(python_step))
            if worker:
                worker.join()
            ways.note(name, statistics.fmean(taken))
    ways.show("alone")
    ways.show("beside a thread", "alone")
    ways.show("beside a process", "alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", help="on the disk to be measured (default: the current one's)")
    parser.add_argument("--beside", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=args.folder or ".") as folder:
        (beside if args.beside else compare)(args, Path(folder))


if __name__ == "__main__":
    main()
