"""Event log: time to record an event, time with a blocked or full disk, and CPU while idle.

    python tests/bench/events.py [--parts record,blocked,idle] [--repeat 5] [--records 20000]
        [--idle-seconds 20] [--idle-samples 3]

An agent writes its events into a file from a thread of its own, so that a disk does not block its
event loop. The parts are:

- `record`: the time of one call of `record` in the calling thread, as the mean of 1,000 calls, and
  the CPU time of all threads per event, until the event is in the file. For comparison: `record` of
  torch's events with the `null` handler, which writes nothing.
- `blocked`: the longest of 20,000 calls in a row, on a disk that works, with a file that blocks
  forever (a FIFO without a reader), and with a full device. This is the longest time that `record`
  blocks the event loop of an agent. The calls are more than the queue holds, so the last events are
  dropped and counted. More than a few microseconds mean that another thread held the interpreter
  lock.
- `idle`: two jobs run at the same time, one with events and one without. Their two workers report a
  step and its loss ten times per second, and sleep otherwise. The rows show the CPU of the agent,
  and of the thread that writes events.
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
from results import Row, Samples, run_command_line

from elasticlib.observe.event_kinds import WorkerStarted
from elasticlib.observe.journal import EVENTS_FILE, NodeJournal
from elasticlib.testing.waiting import wait_until

CALLS = 1000  # in one sample of the part `record`
WORKERS = 2
TIMEOUT_S = 60.0
THREADS = ("journal",)  # the names of the threads that write events
WORKER = """
import os, sys, time
from pathlib import Path
from elasticlib import context
directory, step = Path(sys.argv[1]), 0
while not (directory / "finish").exists():
    context().step(step, loss=1 / (step + 1))
    (directory / f"stepped-{os.environ['RANK']}").touch()
    step += 1
    time.sleep(0.1)
"""


def time_record(journal: NodeJournal) -> float:
    """Return the seconds that one call of `record` takes."""
    started_at = time.perf_counter()
    body = WorkerStarted(local_rank=0, name="pid 12345")
    journal.record(body, generation=1, rank=0)
    return time.perf_counter() - started_at


def measure_record(repeat: int) -> Iterator[Row]:
    """Yield the time of a call, and the CPU time of an event."""
    from torch.distributed.elastic.events import Event, EventSource, record

    elastic, torch, cpu = [], [], []
    facts: dict[str, str | int | float | bool | None] = {"local_rank": 0, "name": "pid 12345"}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / EVENTS_FILE
        for _ in range(repeat):
            cpu_before = time.process_time()
            with contextlib.closing(NodeJournal("job", "node", file)) as journal:
                elastic.append(sum(time_record(journal) for _ in range(CALLS)) / CALLS)
            cpu.append((time.process_time() - cpu_before) / CALLS)
            started_at = time.perf_counter()
            for _ in range(CALLS):
                record(Event("worker.started", EventSource.AGENT, int(time.time()), facts))
            torch.append((time.perf_counter() - started_at) / CALLS)
        written = file.read_bytes().count(b"\n")
    assert written == CALLS * repeat, f"{written} events are in the file"
    samples = (Samples("s", elastic), Samples("s", torch))
    yield Row("record", "one call of `record`", *samples, "torch's `record`, which writes nothing")
    yield Row("written", "CPU of an event until it is in the file", Samples("s", cpu))


def longest_records(path: Path, repeat: int, records: int) -> list[float]:
    """Return the seconds of the longest of many calls in a row, once for each repetition."""
    longest = []
    for _ in range(repeat):
        journal = NodeJournal("job", "node", path)
        longest.append(max(time_record(journal) for _ in range(records)))
        # A reader unblocks the thread that waits for the FIFO. What it then writes is dropped.
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if path.is_fifo() else None
        journal.close()
        if reader is not None:
            os.close(reader)
    return longest


def measure_blocked(repeat: int, records: int) -> Iterator[Row]:
    """Yield the longest call for each condition of the disk."""
    text = f"longest of {records:,} calls of `record`"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        fifo = directory / "fifo"
        os.mkfifo(fifo)
        for key, path, condition in (
            ("works", directory / EVENTS_FILE, "the disk works"),
            ("hangs", fifo, "the file blocks forever"),
            ("full", Path("/dev/full"), "the device is full"),
        ):
            values = longest_records(path, repeat, records)
            yield Row(f"longest.{key}", f"{text}: {condition}", Samples("s", values))


def run_agent(
    directory: Path, events: bool, duration_s: float, count: int, connection: Connection
) -> None:
    """Run an agent in this process, and send the CPU shares of its idle periods."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory / "tmp")
    Path(tempfile.tempdir).mkdir(parents=True)
    from elasticlib.launch.arguments import parse_options
    from elasticlib.launch.elastic_launch import run_node

    script = directory / "worker.py"
    script.write_text(WORKER)
    flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--start-method=spawn"]
    flags += ["--log-dir", str(directory / "logs")] * events
    options, entrypoint = parse_options([*flags, str(script), str(directory)])
    options = attrs.evolve(options, observe=attrs.evolve(options.observe, events=events))

    def watch() -> None:
        connection.send(idle_cpu_shares(directory, duration_s, count))
        (directory / "finish").touch()

    watcher = threading.Thread(target=watch, daemon=True)
    result = run_node(options, entrypoint, on_start=lambda _: watcher.start())
    assert result.exit_code == 0, result.reason
    # The file is in the log directory, and the record of the run has a link to it.
    assert len([*directory.rglob(EVENTS_FILE)]) == 2 * events


def idle_cpu_shares(directory: Path, duration_s: float, count: int) -> list[list[float]]:
    """Return for each period the CPU share of this process, and that of its event threads."""
    wait_until(
        f"{WORKERS} workers to step",
        lambda: len([*directory.glob("stepped-*")]) == WORKERS,
        TIMEOUT_S,
    )
    threads = [thread for thread in threading.enumerate() if thread.name in THREADS]
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in threads]
    time.sleep(3.0)  # by then the agent has finished the work of the start

    def cpu_times() -> tuple[float, float]:
        return time.process_time(), sum(map(time.clock_gettime, clocks))

    shares = []
    for _ in range(count):
        before = cpu_times()
        time.sleep(duration_s)
        shares.append([(b - a) / duration_s for a, b in zip(before, cpu_times(), strict=True)])
    return shares


def measure_idle(duration_s: float, count: int) -> Iterator[Row]:
    """Yield the CPU shares of an idle agent with events, compared with one without."""
    spawn, shares = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as name:
        agents = []
        for events in (True, False):
            connection, remote = spawn.Pipe()
            args = (Path(name) / str(events), events, duration_s, count, remote)
            agents.append((events, connection, spawn.Process(target=run_agent, args=args)))
            agents[-1][2].start()
            remote.close()
        for events, connection, agent in agents:
            shares[events] = connection.recv()
            agent.join(TIMEOUT_S)
            assert agent.exitcode == 0
    unit = "of a core"
    sides = (Samples(unit, [agent for agent, _ in shares[events]]) for events in (True, False))
    threads = Samples(unit, [thread for _, thread in shares[True]])
    yield Row("stream", "the thread that writes events, idle", threads)
    yield Row("agent", "an idle agent with events", *sides, "without events")


def measure(
    *,
    parts: str = "record,blocked,idle",
    repeat: int = 5,
    records: int = 20_000,
    idle_seconds: float = 20.0,
    idle_samples: int = 3,
) -> Iterator[Row]:
    """Measure the parts, and yield their rows.

    Args:
        parts: The parts to measure, separated by commas.
        repeat: The number of samples of the parts `record` and `blocked`.
        records: The number of calls of which the part `blocked` measures the longest.
        idle_seconds: The duration of one sample of the part `idle`.
        idle_samples: The number of samples of the part `idle`.
    """
    functions = {
        "record": partial(measure_record, repeat),
        "blocked": partial(measure_blocked, repeat, records),
        "idle": partial(measure_idle, idle_seconds, idle_samples),
    }
    for part in parts.split(","):
        yield from functions[part]()


if __name__ == "__main__":
    run_command_line(measure, __doc__)
