"""What a checkpoint costs a training step, when it is durable, and how long it takes to read.

    python tests/bench/checkpoint.py [--mib 1024] [--repeat 5] [--folder DIR] [--threads N]
        [--parts compare,beside]

Beside it, in the same run and in turns: a plain copy of the tensors into memory that is reused,
`torch.save` (which syncs nothing) and an fsync after it, DCP's `save`, `async_save` and `load` of
one rank, writing the same bytes with one fsync, and `torch.load`. A snapshot goes into memory as an
agent of ours has it; the first one of a job comes when the training has gone on for as long as its
memory took to be made. What a disk takes differs much from one write to the next; a copy does not.

What is timed as a read was read once before, and is in the page cache: `save` gives its pages back
to the system, `torch.save` leaves them. `load` and `torch.load` (with `mmap=False`) read into new
tensors; `restore` and DCP's `load` into those that are there. Ours verify the checksums of all that
they read; `restore` without its sums shows what these cost, and is not an option for users.

The part `beside` shows how much slower a loop of Python code, which holds the interpreter's lock,
is while a checkpoint is written: by a thread, as `save` does it, and by a process of its own.
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
from figures import Row, Samples, run

from elasticlib import CheckpointManager
from elasticlib.checkpoint import storage
from elasticlib.checkpoint.catalog import CheckpointCatalog, Retention
from elasticlib.checkpoint.commit import Committer, RankWriters, WriterIdentity
from elasticlib.checkpoint.restore import restore_from
from elasticlib.checkpoint.snapshot_source import SnapshotLocation, SnapshotSource
from elasticlib.checkpoint.storage import LocalStorage, new_memory

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
    # What the round before had is given back, so that new tensors are new memory, as in a start.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    began = time.perf_counter()
    made = act()
    taken = time.perf_counter() - began
    del made
    return taken


class Ways:
    """Each way to do one thing, called once a round; all rounds are kept."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}

    def note(self, name: str, taken: float) -> None:
        self.taken.setdefault(name, []).append(taken)

    def row(self, name: str, what: str, ours: str, beside: str) -> Row:
        """They are taken in the same rounds, but the disk is not the same in two moments."""
        mine, theirs = (Samples("s", self.taken[way]) for way in (ours, beside))
        return Row(name, what, mine, theirs, beside.replace(": stall", "").replace(": done", ""))


@contextlib.contextmanager
def unsummed() -> Iterator[None]:
    """Every sum is right, and takes no time."""
    summed, flaw = storage.zlib, CheckpointCatalog._find_file_corruption
    storage.zlib = types.SimpleNamespace(crc32=lambda *_: 0)  # type: ignore[assignment]
    CheckpointCatalog._find_file_corruption = lambda *args: flaw(*args) and None  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        storage.zlib, CheckpointCatalog._find_file_corruption = summed, flaw  # type: ignore[method-assign]


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
    ours: tuple[CheckpointManager, SnapshotSource],
) -> None:
    """Each way once. What is on the disk is deleted in between, and the disk comes to rest."""
    manager, memory = ours

    def copy_all() -> None:
        for name, tensor in state.items():
            copy[name].copy_(tensor)

    ways.note("plain copy", seconds(copy_all))
    manager.save(len(ways.taken["plain copy"]), state)
    ways.note("save: stall", manager.last_stall_s)
    manager.wait()
    ways.note("save: durable", manager.last_durable_s or 0.0)
    from_disk(ways, copy, manager)
    in_memory(ways, state, memory)
    data = memoryview(copy["large.0"].numpy()).cast("B")
    repeated = memoryview(bytearray(sum(t.nbytes for t in state.values())))
    repeated[: len(data)] = data
    ways.note("write and fsync", seconds(lambda: write_plainly(folder / "plain", repeated)))
    os.unlink(folder / "plain")
    ways.note("torch.save", seconds(lambda: torch.save(state, folder / "a.pt")))
    durably = ways.taken["torch.save"][-1] + seconds(lambda: sync(folder / "a.pt"))
    ways.note("torch.save and fsync", durably)
    plainly = functools.partial(torch.load, folder / "a.pt", weights_only=True, mmap=False)
    ways.note("torch.load", seconds(plainly))
    os.unlink(folder / "a.pt")
    with_dcp(ways, state, folder / "dcp", copy)
    os.sync()


def from_disk(ways: Ways, into: State, manager: CheckpointManager) -> None:
    """Of what was saved last."""
    manager.load()
    ways.note("load", seconds(manager.load))
    ways.note("restore", seconds(lambda: manager.restore(into)))
    with unsummed():
        ways.note("restore without sums", seconds(lambda: manager.restore(into)))


def with_dcp(ways: Ways, state: State, folder: Path, into: State) -> None:
    began = time.perf_counter()
    future = dcp.async_save(dict(state), checkpoint_id=folder)
    ways.note("async_save: stall", time.perf_counter() - began)
    future.result()  # type: ignore[union-attr]
    ways.note("async_save: done", time.perf_counter() - began)
    shutil.rmtree(folder)
    os.sync()
    ways.note("dcp.save", seconds(lambda: dcp.save(dict(state), checkpoint_id=folder)))
    ways.note("dcp.load", seconds(lambda: dcp.load(into, checkpoint_id=folder)))
    shutil.rmtree(folder)


def in_memory(ways: Ways, state: State, memory: SnapshotSource) -> None:
    """A snapshot as a worker makes it, and what the next worker does with it."""
    made = memory.snapshot(len(ways.taken["plain copy"]), state)
    assert made is not None
    ways.note("snapshot: stall", made.seconds)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    ways.note("restore from memory", seconds(lambda: restore_from([memory], target)))


@contextlib.contextmanager
def agents_memory() -> Iterator[SnapshotSource]:
    """As an agent gives it to a worker."""
    with tempfile.TemporaryDirectory(prefix="elasticlib-", dir="/dev/shm") as folder:
        era = Path(folder) / "1"
        era.mkdir()
        with contextlib.closing(
            SnapshotSource(SnapshotLocation(str(era), "benchmark", 1))
        ) as memory:
            yield memory


def compare(mib: int, repeat: int, folder: Path) -> Iterator[Row]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    state = make_state(mib)
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ways = Ways()
    with (
        CheckpointManager(folder / "ours", keep_last=1) as manager,
        agents_memory() as memory,
    ):
        # The first save and the first two snapshots allocate memory.
        made = memory.snapshot(0, state)
        assert made is not None
        first = Ways()
        one_round(first, state, folder, copy, (manager, memory))
        ways.note("first snapshot: stall", made.seconds)
        ways.note("first save: stall", first.taken["save: stall"][0])
        for _ in range(repeat):
            one_round(ways, state, folder, copy, (manager, memory))
    dist.destroy_process_group()
    size = f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib} MiB"
    for name, what, ours, beside in COMPARED:
        yield ways.row(name, f"{size}: {what}", ours, beside)


COMPARED = (
    ("save", "a step waits for `save`", "save: stall", "plain copy"),
    ("snapshot", "a step waits for `snapshot`", "snapshot: stall", "plain copy"),
    ("save.first", "a step waits for its first `save`", "first save: stall", "plain copy"),
    (
        "snapshot.first",
        "a step waits for its first `snapshot`",
        "first snapshot: stall",
        "plain copy",
    ),
    ("save.torch", "a step waits for `save`", "save: stall", "torch.save"),
    ("save.fsync", "a step waits for `save`", "save: stall", "torch.save and fsync"),
    ("save.dcp", "a step waits for `save`", "save: stall", "async_save: stall"),
    ("durable", "`save` until it is durable", "save: durable", "write and fsync"),
    ("durable.dcp", "`save` until it is durable", "save: durable", "async_save: done"),
    ("durable.dcp.save", "`save` until it is durable", "save: durable", "dcp.save"),
    ("load", "`load` from the disk", "load", "torch.load"),
    ("restore", "`restore` from the disk", "restore", "torch.load"),
    ("restore.unsummed", "`restore` without its sums", "restore without sums", "torch.load"),
    ("restore.dcp", "`restore` from the disk", "restore", "dcp.load"),
    ("memory", "`restore` from memory", "restore from memory", "torch.load"),
)


def python_step() -> int:
    """Some milliseconds of Python code."""
    return sum(number * number for number in range(40_000))


def writing(data: memoryview, folder: Path) -> None:
    place = CheckpointCatalog(LocalStorage(folder))
    writer = WriterIdentity("", "b", 0, secrets.token_hex(8))
    RankWriters(Committer(place, writer, Retention(1))).write(1, data)


def beside(mib: int, repeat: int, folder: Path) -> Iterator[Row]:
    """The same loop alone, beside a thread that saves, and beside a process that does."""
    size = mib << 20
    memory = new_memory(size)
    memory[:] = os.urandom(1 << 20) * mib
    data = memoryview(memory)
    context = multiprocessing.get_context("fork")
    ways = Ways()
    makers = {
        "alone": None,
        "beside a thread": threading.Thread,
        "beside a process": context.Process,
    }
    for _ in range(repeat):
        for name, make in makers.items():
            given = {"target": writing, "args": (data, folder / name)}
            worker = make(**given) if make else None
            if worker:
                worker.start()
            taken = [seconds(python_step) for _ in range(40)]
            while worker and worker.is_alive():
                taken.append(seconds(python_step))
            if worker:
                worker.join()
            ways.note(name, statistics.fmean(taken))
    for way in ("beside a thread", "beside a process"):
        yield ways.row(way.replace(" ", "."), f"a loop {way} that saves", way, "alone")


PARTS = {part.__name__: part for part in (compare, beside)}


def measure(
    *,
    mib: int = 1024,
    repeat: int = 5,
    folder: str = ".",
    threads: int = 0,
    parts: str = ",".join(PARTS),
) -> Iterator[Row]:
    """folder: on the disk to be measured. threads: torch's own number where it is 0."""
    torch.set_num_threads(threads or torch.get_num_threads())
    warnings.simplefilter("ignore")
    for part in parts.split(","):
        with tempfile.TemporaryDirectory(dir=folder, prefix="benchmark-") as name:
            yield from PARTS[part](mib, repeat, Path(name))


if __name__ == "__main__":
    run(measure, __doc__)
