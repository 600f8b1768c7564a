"""Checkpoints: how long training waits, when a checkpoint is durable, and how long a load takes.

    python tests/bench/checkpoint.py [--mib 1024] [--repeat 5] [--dir DIR] [--threads N]
        [--parts compare,interference]

The part `compare` saves and loads the same tensors in several ways, which take turns in each
repetition:

- `save`, `load` and `restore` of `CheckpointManager`. `load` reads into new tensors, and `restore`
  into existing ones. Both verify the checksums of everything that they read. `restore` without
  checksums shows what the checksums cost, and is not an option for users.
- `snapshot`, which copies into shared memory like that of an agent, and `restore` from this memory.
  The first `save` and the first `snapshot` also allocate memory, and have rows of their own.
- copy in memory: a copy of the tensors into existing memory.
- `torch.save`, which does not call fsync, and `torch.save` followed by fsync. `torch.load` runs
  with `mmap=False` and reads into new tensors.
- DCP's `save`, `async_save` and `load` with one rank. They write the same bytes and call fsync
  once. `load` reads into existing tensors.
- `write` and fsync: one file with the same number of bytes.

A save "until it is durable" includes fsync. The write speed of the disk changes from one save to
the next, and that of memory does not. `save` removes its pages from the page cache, and
`torch.save` leaves them there. Therefore everything is read once before a read is timed.

The part `interference` runs a loop of Python code, which holds the interpreter lock, while a
checkpoint is written. A thread writes it, as `save` does, or another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import secrets
import shutil
import statistics
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from results import Row, Samples, run_command_line

from elasticlib import CheckpointManager
from elasticlib.checkpoint import storage
from elasticlib.checkpoint.catalog import CheckpointCatalog
from elasticlib.checkpoint.commit import Committer
from elasticlib.checkpoint.refs import KeepLast, Writer, begin
from elasticlib.checkpoint.restore import restore_from
from elasticlib.checkpoint.snapshot_source import SnapshotSource
from elasticlib.checkpoint.storage import LocalStorage, new_memory
from elasticlib.checkpoint.writer import write_alone

CHUNK_BYTES = 16 << 20
State = dict[str, torch.Tensor]


def create_state(mib: int) -> State:
    """Return tensors of 16 MiB and, for a sixteenth of the bytes, of 256 KiB each.

    For 1 GiB these are some hundreds of tensors, like those of a model and its optimizer.
    """
    num_large = max(1, mib * 15 // 16 // 16)
    num_small = max(1, (mib << 20) // 16 // (256 << 10))
    state = {f"large.{at}": torch.randn(4 << 20) for at in range(num_large)}
    return state | {f"small.{at}": torch.randn(64 << 10) for at in range(num_small)}


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    # Memory of the previous call is returned to the system, so that new tensors need new memory, as
    # after the start of a process.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    started_at = time.perf_counter()
    result = function()
    elapsed = time.perf_counter() - started_at
    del result
    return elapsed


class Timings:
    """The seconds of each way to save or load, once for each repetition."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, elapsed_s: float) -> None:
        """Add the seconds of one repetition."""
        self.values.setdefault(name, []).append(elapsed_s)

    def row(self, name: str, text: str, elastic: str, baseline: str) -> Row:
        """Return the row that compares two ways.

        The samples are not paired: the two were measured in the same repetitions, but the speed of
        the disk changes in between.
        """
        samples, other = (Samples("s", self.values[way]) for way in (elastic, baseline))
        label = baseline.replace(": stall", "").replace(": done", "")
        return Row(name, text, samples, other, label)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Accept every checksum without computing it."""
    zlib, find_corruption = storage.zlib, CheckpointCatalog._find_file_corruption
    storage.zlib = types.SimpleNamespace(crc32=lambda *_: 0)  # type: ignore[assignment]
    CheckpointCatalog._find_file_corruption = lambda *args: find_corruption(*args) and None  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        storage.zlib, CheckpointCatalog._find_file_corruption = zlib, find_corruption  # type: ignore[method-assign]


def write_file(path: Path, data: memoryview) -> None:
    """Write a new file, and sync it to the disk."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    for start in range(0, len(data), CHUNK_BYTES):
        os.write(descriptor, data[start : start + CHUNK_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def sync_file(path: Path) -> None:
    """Sync an existing file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure_all_ways(
    timings: Timings,
    state: State,
    directory: Path,
    copy: State,
    elastic: tuple[CheckpointManager, SnapshotSource],
) -> None:
    """Save and load the state once in each way.

    Files are deleted after each way, and the disk is synced at the end.
    """
    manager, memory = elastic

    def copy_state() -> None:
        for name, tensor in state.items():
            copy[name].copy_(tensor)

    timings.add("copy in memory", seconds(copy_state))
    manager.save(len(timings.values["copy in memory"]), state)
    timings.add("save: stall", manager.last_stall_s)
    manager.wait()
    timings.add("save: durable", manager.last_durable_s or 0.0)
    measure_loads(timings, copy, manager)
    measure_snapshot(timings, state, memory)
    data = memoryview(copy["large.0"].numpy()).cast("B")
    content = memoryview(bytearray(sum(t.nbytes for t in state.values())))
    content[: len(data)] = data
    timings.add("write and fsync", seconds(lambda: write_file(directory / "plain", content)))
    os.unlink(directory / "plain")
    file = directory / "a.pt"
    timings.add("torch.save", seconds(lambda: torch.save(state, file)))
    durable = timings.values["torch.save"][-1] + seconds(lambda: sync_file(file))
    timings.add("torch.save and fsync", durable)
    load = functools.partial(torch.load, file, weights_only=True, mmap=False)
    timings.add("torch.load", seconds(load))
    os.unlink(file)
    measure_dcp(timings, state, directory / "dcp", copy)
    os.sync()


def measure_loads(timings: Timings, target: State, manager: CheckpointManager) -> None:
    """Load the newest checkpoint in each way of the manager."""
    manager.load()
    timings.add("load", seconds(manager.load))
    timings.add("restore", seconds(lambda: manager.restore(target)))
    with without_checksums():
        timings.add("restore without checksums", seconds(lambda: manager.restore(target)))


def measure_dcp(timings: Timings, state: State, directory: Path, target: State) -> None:
    """Save and load the state with torch.distributed.checkpoint."""
    started_at = time.perf_counter()
    future = dcp.async_save(dict(state), checkpoint_id=directory)
    timings.add("async_save: stall", time.perf_counter() - started_at)
    future.result()  # type: ignore[union-attr]
    timings.add("async_save: done", time.perf_counter() - started_at)
    shutil.rmtree(directory)
    os.sync()
    timings.add("dcp.save", seconds(lambda: dcp.save(dict(state), checkpoint_id=directory)))
    timings.add("dcp.load", seconds(lambda: dcp.load(target, checkpoint_id=directory)))
    shutil.rmtree(directory)


def measure_snapshot(timings: Timings, state: State, memory: SnapshotSource) -> None:
    """Make a snapshot as a worker does, and restore it as the next worker does."""
    step = len(timings.values["copy in memory"])
    timings.add("snapshot: stall", seconds(lambda: memory.snapshot(step, state)))
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    timings.add("restore from memory", seconds(lambda: restore_from([memory], target)))


@contextlib.contextmanager
def open_snapshot_memory() -> Iterator[SnapshotSource]:
    """Yield snapshot memory like that which an agent gives to a worker."""
    with tempfile.TemporaryDirectory(prefix="elasticlib-", dir="/dev/shm") as name:
        directory = Path(name) / "1"
        directory.mkdir()
        with contextlib.closing(SnapshotSource(str(directory), Writer("benchmark"))) as memory:
            yield memory


def compare(mib: int, repeat: int, directory: Path) -> Iterator[Row]:
    """Yield the rows that compare elasticlib with torch and DCP."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = create_state(mib)
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    timings = Timings()
    with (
        CheckpointManager(directory / "elasticlib", keep_last=1) as manager,
        open_snapshot_memory() as memory,
    ):
        # The first save and the first two snapshots allocate memory.
        timings.add("first snapshot: stall", seconds(lambda: memory.snapshot(0, state)))
        first = Timings()
        measure_all_ways(first, state, directory, copy, (manager, memory))
        timings.add("first save: stall", first.values["save: stall"][0])
        for _ in range(repeat):
            measure_all_ways(timings, state, directory, copy, (manager, memory))
    dist.destroy_process_group()
    size = f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib} MiB"
    for name, text, elastic, baseline in COMPARISONS:
        yield timings.row(name, f"{size}: {text}", elastic, baseline)


# The name and the description of each row, and the two ways that it compares.
COMPARISONS = (
    ("save", "training waits for `save`", "save: stall", "copy in memory"),
    ("snapshot", "training waits for `snapshot`", "snapshot: stall", "copy in memory"),
    ("save.first", "training waits for the first `save`", "first save: stall", "copy in memory"),
    (
        "snapshot.first",
        "training waits for the first `snapshot`",
        "first snapshot: stall",
        "copy in memory",
    ),
    ("save.torch", "training waits for `save`", "save: stall", "torch.save"),
    ("save.fsync", "training waits for `save`", "save: stall", "torch.save and fsync"),
    ("save.dcp", "training waits for `save`", "save: stall", "async_save: stall"),
    ("durable", "`save` until it is durable", "save: durable", "write and fsync"),
    ("durable.dcp", "`save` until it is durable", "save: durable", "async_save: done"),
    ("durable.dcp.save", "`save` until it is durable", "save: durable", "dcp.save"),
    ("load", "`load` from the disk", "load", "torch.load"),
    ("restore", "`restore` from the disk", "restore", "torch.load"),
    (
        "restore.unsummed",
        "`restore` without checksums",
        "restore without checksums",
        "torch.load",
    ),
    ("restore.dcp", "`restore` from the disk", "restore", "dcp.load"),
    ("memory", "`restore` from memory", "restore from memory", "torch.load"),
)


def run_python_loop() -> int:
    """Run some milliseconds of Python code."""
    return sum(number * number for number in range(40_000))


def write_checkpoint(data: memoryview, directory: Path) -> None:
    """Write and commit one checkpoint."""
    catalog = CheckpointCatalog(LocalStorage(directory))
    writer = Writer(incarnation=secrets.token_hex(8))
    write_alone(Committer(catalog, writer, begin(None, writer), KeepLast(1)), 1, data)


def interference(mib: int, repeat: int, directory: Path) -> Iterator[Row]:
    """Yield the time of a Python loop while nothing, a thread or a process writes a checkpoint."""
    size = mib << 20
    memory = new_memory(size)
    memory[:] = os.urandom(1 << 20) * mib
    data = memoryview(memory)
    context = multiprocessing.get_context("fork")
    timings = Timings()
    writers = {
        "no save": None,
        "a thread": threading.Thread,
        "a process": context.Process,
    }
    for _ in range(repeat):
        for name, create_writer in writers.items():
            arguments = {"target": write_checkpoint, "args": (data, directory / name)}
            writer = create_writer(**arguments) if create_writer else None
            if writer:
                writer.start()
            values = [seconds(run_python_loop) for _ in range(40)]
            while writer and writer.is_alive():
                values.append(seconds(run_python_loop))
            if writer:
                writer.join()
            timings.add(name, statistics.fmean(values))
    for name in ("a thread", "a process"):
        key = f"interference.{name.split()[1]}"
        yield timings.row(key, f"a Python loop while {name} saves", name, "no save")


PARTS = {part.__name__: part for part in (compare, interference)}


def measure(
    *,
    mib: int = 1024,
    repeat: int = 5,
    dir: str = ".",
    threads: int = 0,
    parts: str = ",".join(PARTS),
) -> Iterator[Row]:
    """Measure the parts, and yield their rows.

    Args:
        mib: The size of the state in MiB.
        repeat: The number of samples.
        dir: A directory on the disk that is measured.
        threads: The number of threads of torch. 0 keeps torch's default.
        parts: The parts to measure, separated by commas.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    warnings.simplefilter("ignore")
    for part in parts.split(","):
        with tempfile.TemporaryDirectory(dir=dir, prefix="benchmark-") as name:
            yield from PARTS[part](mib, repeat, Path(name))


if __name__ == "__main__":
    run_command_line(measure, __doc__)
