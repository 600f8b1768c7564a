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
- rest: a job with two workers that tell a step ten times a second and otherwise sleep, with events
  and with `--no-events`, side by side. Its agent's CPU, and of it that of the thread that writes
  events, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Row, Samples, parser_of, tell

from elasticlib.observe.journal import FILE, NodeJournal

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
    context().step(step)
    (folder / f"stepped-{os.environ['RANK']}").touch()
    step += 1
    time.sleep(0.1)
"""


def one_tell(journal: NodeJournal) -> float:
    began = time.perf_counter()
    journal.tell("worker.began", generation=1, rank=0, local_rank=0, name="pid 12345")
    return time.perf_counter() - began


def telling(given: argparse.Namespace) -> Iterator[Row]:
    from torch.distributed.elastic.events import Event, EventSource, record

    mine, theirs, used = [], [], []
    facts: dict[str, str | int | float | bool | None] = {"local_rank": 0, "name": "pid 12345"}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.repeat):
            cpu = time.process_time()
            with contextlib.closing(NodeJournal("job", "node", Path(folder) / FILE)) as journal:
                mine.append(sum(one_tell(journal) for _ in range(ROUND)) / ROUND)
            used.append((time.process_time() - cpu) / ROUND)
            began = time.perf_counter()
            for _ in range(ROUND):
                record(Event("worker.began", EventSource.AGENT, int(time.time()), facts))
            theirs.append((time.perf_counter() - began) / ROUND)
        kept = (Path(folder) / FILE).read_bytes().count(b"\n")
    assert kept == ROUND * given.repeat, f"{kept} events are in the file"
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


def held(given: argparse.Namespace) -> Iterator[Row]:
    what = f"longest of {given.tells:,} `tell`s"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fifo = folder / "fifo"
        os.mkfifo(fifo)
        for key, path, where in (
            ("works", folder / FILE, "the disk works"),
            ("hangs", fifo, "the file never answers"),
            ("full", Path("/dev/full"), "the device is full"),
        ):
            taken = longest(path, given.repeat, given.tells)
            yield Row(f"held.{key}", f"{what}: {where}", Samples("s", taken))


def run_agent(folder: Path, events: bool, given: argparse.Namespace) -> None:
    """An agent in this process; at its end, the CPU of each window of rest goes to a file."""
    from elasticlib.launch.arguments import parse
    from elasticlib.launch.elastic_launch import run_node

    script, logs = folder / "worker.py", folder / "logs"
    script.write_text(WORKER)
    flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--start-method=spawn"]
    flags += ["--log-dir", str(logs)] if events else ["--no-events"]
    config, entrypoint = parse([*flags, str(script), str(folder)])
    watcher = threading.Thread(target=watch, args=(folder, given), daemon=True)
    result = run_node(config, entrypoint, began=lambda _: watcher.start())
    assert result.exit_code == 0, result.reason
    # In the logs and, as a link, in the record of the run.
    assert len([*folder.rglob(FILE)]) == 2 * events


def watch(folder: Path, given: argparse.Namespace) -> None:
    deadline = time.monotonic() + BOUND
    while len([*folder.glob("stepped-*")]) < WORKERS and time.monotonic() < deadline:
        time.sleep(0.1)
    names = {thread.name: thread for thread in threading.enumerate()}
    # What a start leaves to do is over soon.
    time.sleep(3.0)
    clocks = [
        time.pthread_getcpuclockid(names[name].ident or 0) for name in THREADS if name in names
    ]

    def now() -> tuple[float, float]:
        return time.process_time(), sum(map(time.clock_gettime, clocks))

    found = []
    for _ in range(given.rests):
        before = now()
        time.sleep(given.rest)
        found.append([(b - a) / given.rest for a, b in zip(before, now(), strict=True)])
    (folder / "found").write_text(json.dumps(found))
    (folder / "finish").touch()


def resting(given: argparse.Namespace) -> Iterator[Row]:
    numbers = ("--rest", str(given.rest), "--rests", str(given.rests))
    with tempfile.TemporaryDirectory() as name:
        agents = []
        for events in (True, False):
            folder = Path(name) / str(events)
            (folder / "tmp").mkdir(parents=True)
            environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
            command = (sys.executable, __file__, "--agent-in", str(folder), *numbers)
            extra = () if events else ("--without-events",)
            with (folder / "log").open("wb") as log:
                agents.append(
                    subprocess.Popen((*command, *extra), stdout=log, stderr=log, env=environment)
                )
        for agent, events in zip(agents, (True, False), strict=True):
            code = agent.wait(BOUND + given.rest * given.rests)
            assert code == 0, (Path(name) / str(events) / "log").read_text()
        found = {
            events: json.loads((Path(name) / str(events) / "found").read_text())
            for events in (True, False)
        }
    # Of each window the share of a core of all threads, and of those of the stream.
    unit = "of a core"
    with_, without = (Samples(unit, [all_ for all_, _ in found[e]]) for e in (True, False))
    stream = Samples(unit, [of for _, of in found[True]])
    yield Row("stream", "the thread that writes events, at rest, steps told", stream)
    yield Row("agent", "an agent at rest, steps told", with_, without, "without events")


PARTS = {"tell": telling, "held": held, "rest": resting}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="any of these, with commas")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of tells")
    parser.add_argument("--tells", type=int, default=20_000, help="in a row, on each disk")
    parser.add_argument("--rest", type=float, default=20.0, help="seconds that are one sample")
    parser.add_argument("--rests", type=int, default=3, help="samples of rest")
    parser.add_argument("--agent-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without-events", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agent_in:
        run_agent(given.agent_in, not given.without_events, given)
    else:
        tell(given, [row for part in given.parts.split(",") for row in PARTS[part](given)])


if __name__ == "__main__":
    main()
