"""What the stream of events costs: at rest, for each event, and when the disk takes nothing.

    python tests/bench/events.py [--parts tell,held,rest] [--repeat 5] [--tells 20000]
        [--rest 20] [--rests 3]

- tell: the time of one `tell` in the thread that calls it, of a thousand in a row, and the CPU of
  an event until it stands in the file, all threads together. Beside it `record` of torch's own
  events to its `null` handler, which writes nothing.
- held: the longest of so many `tell`s in a row, on a disk that works, a file that never answers (a
  FIFO that nobody reads) and a full device. More are told than may wait, so the last
  of them are lost, and counted. It is for so long that an agent's loop is held at most; longer than
  some microseconds means that another thread had its turn at the interpreter.
- rest: a job with two workers that tell a step and its loss ten times a second and otherwise sleep,
  with and without events, side by side. Its agent's CPU, and of it that of the thread
  that writes events, as the kernel counts it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
from figures import Row, Samples, run

from elasticlib.observe.journal import EVENTS_FILE, NodeJournal
from elasticlib.testing.waiting import wait_until

ROUND = 1000
WORKERS = 2
BOUND = 60.0
THREADS = ("journal",)
WORKER = """
import os, sys, time
from pathlib import Path
from elasticlib import context
folder, step = Path(sys.argv[1]), 0
while not (folder / "finish").exists():
    context().step(step, loss=1 / (step + 1))
    (folder / f"stepped-{os.environ['RANK']}").touch()
    step += 1
    time.sleep(0.1)
"""


def one_tell(journal: NodeJournal) -> float:
    began = time.perf_counter()
    journal.record("worker.started", generation=1, rank=0, local_rank=0, name="pid 12345")
    return time.perf_counter() - began


def telling(repeat: int) -> Iterator[Row]:
    from torch.distributed.elastic.events import Event, EventSource, record

    mine, theirs, used = [], [], []
    facts: dict[str, str | int | float | bool | None] = {"local_rank": 0, "name": "pid 12345"}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeat):
            cpu = time.process_time()
            with contextlib.closing(
                NodeJournal("job", "node", Path(folder) / EVENTS_FILE)
            ) as journal:
                mine.append(sum(one_tell(journal) for _ in range(ROUND)) / ROUND)
            used.append((time.process_time() - cpu) / ROUND)
            began = time.perf_counter()
            for _ in range(ROUND):
                record(Event("worker.started", EventSource.AGENT, int(time.time()), facts))
            theirs.append((time.perf_counter() - began) / ROUND)
        kept = (Path(folder) / EVENTS_FILE).read_bytes().count(b"\n")
    assert kept == ROUND * repeat, f"{kept} events are in the file"
    both = (Samples("s", mine), Samples("s", theirs))
    yield Row("tell", "one `tell`", *both, "torch's `record`, which writes nothing")
    yield Row("written", "CPU of an event, until it is in the file", Samples("s", used))


def longest(path: Path, repeat: int, tells: int) -> list[float]:
    """Of each round, the longest of so many tells to this file."""
    found = []
    for _ in range(repeat):
        journal = NodeJournal("job", "node", path)
        found.append(max(one_tell(journal) for _ in range(tells)))
        # Whoever waits at a FIFO is let go by a reader, and what it writes then is dropped.
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if path.is_fifo() else None
        journal.close()
        if reader is not None:
            os.close(reader)
    return found


def held(repeat: int, tells: int) -> Iterator[Row]:
    what = f"longest of {tells:,} `tell`s"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fifo = folder / "fifo"
        os.mkfifo(fifo)
        for key, path, where in (
            ("works", folder / EVENTS_FILE, "the disk works"),
            ("hangs", fifo, "the file never answers"),
            ("full", Path("/dev/full"), "the device is full"),
        ):
            taken = longest(path, repeat, tells)
            yield Row(f"held.{key}", f"{what}: {where}", Samples("s", taken))


def run_agent(folder: Path, events: bool, rest: float, rests: int, told: Connection) -> None:
    """An agent in this process; tells the CPU of each window of rest, of all its threads and of
    those of the stream."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
    Path(tempfile.tempdir).mkdir(parents=True)
    from elasticlib.launch.arguments import parse
    from elasticlib.launch.elastic_launch import run_node

    script = folder / "worker.py"
    script.write_text(WORKER)
    flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--start-method=spawn"]
    flags += ["--log-dir", str(folder / "logs")] * events
    config, entrypoint = parse([*flags, str(script), str(folder)])
    config = attrs.evolve(config, events=events)

    def watch() -> None:
        told.send(shares_of_rest(folder, rest, rests))
        (folder / "finish").touch()

    watcher = threading.Thread(target=watch, daemon=True)
    result = run_node(config, entrypoint, on_start=lambda _: watcher.start())
    assert result.exit_code == 0, result.reason
    # In the logs and, as a link, in the record of the run.
    assert len([*folder.rglob(EVENTS_FILE)]) == 2 * events


def shares_of_rest(folder: Path, rest: float, rests: int) -> list[list[float]]:
    wait_until(
        f"{WORKERS} workers to step", lambda: len([*folder.glob("stepped-*")]) == WORKERS, BOUND
    )
    stream = [thread for thread in threading.enumerate() if thread.name in THREADS]
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in stream]
    # What a start leaves to do is over soon.
    time.sleep(3.0)

    def now() -> tuple[float, float]:
        return time.process_time(), sum(map(time.clock_gettime, clocks))

    found = []
    for _ in range(rests):
        before = now()
        time.sleep(rest)
        found.append([(b - a) / rest for a, b in zip(before, now(), strict=True)])
    return found


def resting(rest: float, rests: int) -> Iterator[Row]:
    spawn, found = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as name:
        agents = []
        for events in (True, False):
            ours, theirs = spawn.Pipe()
            given = (Path(name) / str(events), events, rest, rests, theirs)
            agents.append((events, ours, spawn.Process(target=run_agent, args=given)))
            agents[-1][2].start()
            theirs.close()
        for events, told, agent in agents:
            found[events] = told.recv()
            agent.join(BOUND)
            assert agent.exitcode == 0
    unit = "of a core"
    with_, without = (Samples(unit, [whole for whole, _ in found[e]]) for e in (True, False))
    stream = Samples(unit, [of for _, of in found[True]])
    yield Row("stream", "the thread that writes events, at rest, steps told", stream)
    yield Row("agent", "an agent at rest, steps told", with_, without, "without events")


def measure(
    *,
    parts: str = "tell,held,rest",
    repeat: int = 5,
    tells: int = 20_000,
    rest: float = 20.0,
    rests: int = 3,
) -> Iterator[Row]:
    """repeat: rounds of tells; rests: samples of rest, of so many seconds each."""
    ways = {
        "tell": partial(telling, repeat),
        "held": partial(held, repeat, tells),
        "rest": partial(resting, rest, rests),
    }
    for part in parts.split(","):
        yield from ways[part]()


if __name__ == "__main__":
    run(measure, __doc__)
