"""Launcher comparison: one training under five launchers, while workers are killed.

    python tests/bench/field.py [--only elasticrun,torchrun] [--seconds 120] [--every 10]
        [--start-seconds 0,5] [--python torchft=PATH,ray=PATH] [--json FILE] [--quote]

All run the same training: plain torch on the CPU, two workers of a gloo group, steps of about
50 ms, 2 MiB of model and optimizer (`tests/bench/trainers/work.py`). Every ten seconds one worker
is killed with SIGKILL, each in turn. Time counts from the first step, so that a launcher's own
start costs it nothing. With `--start-seconds 5` each start of the script takes five seconds more,
as long as a GPU's context, weights on their way to the device and compiled graphs may take.

**Samples kept** are those of the steps that count when the time is over, as a share of those on
which two plain processes train in as many seconds without a launcher, checkpoints or kills; that is
measured just before and just after, and the mean of both is taken. A step that is done again counts
once, and one that a single worker did on half of the batch counts half. A worker that does the
whole batch alone takes twice as long over it. A **pause** is the longest time without a step
between one kill and the next.

Where the other worker goes on when one is killed, its **stall** is the longest time between two of
its steps from one kill to the next, the step itself included. What a **newcomer costs** it is by
how much the step in which the newcomer first takes part is longer than its usual one.

Each launcher has its best settings, as far as its documentation tells them. The launchers whose
workers restart from a disk write a checkpoint every fourth step, without fsync: at one fault in ten
seconds, a checkpoint then costs about as much as it saves. `--python` names the Python that has a
launcher, by default this one. A launcher that is not installed there is reported as missing. These
environments have them:

    python3 -m venv ft && ft/bin/pip install torchft-nightly
    python3 -m venv nvrx && nvrx/bin/pip install nvidia-resiliency-ext
    python3 -m venv ray && ray/bin/pip install 'ray[train]' torch

`--json FILE` keeps the outcomes in that file, beside those of launchers that were run before.
`--quote` keeps them in docs/launcher_comparison.json, and writes docs/launcher_comparison.md and
the table in README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from figures import digits, in_markdown, said
from launched import free_port
from runs import TAG, end_all, machine
from trainers.work import PART, START

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRAINERS = HERE / "trainers"
README = ROOT / "README.md"
PAGE, KEPT = (ROOT / "docs" / f"launcher_comparison.{kind}" for kind in ("md", "json"))
TO_START = 120.0
"""Seconds within which a launcher's first step must be done."""
UNDISTURBED = 15.0
"""Seconds of each of the runs with which all are compared."""
BATCH = 2 * PART
SLOW = 5.0
"""Seconds that a script may take to start, in the tables' last column."""
BEGIN, END = "<!-- table: written by tests/bench/field.py -->", "<!-- end of the table -->"

Argv = list[str]


@attrs.frozen
class Launcher:
    """How somebody runs the training.

    name: as the command line has it. title: as the table has it. settings: a sentence that says
    with what. package: what must be installed. commands: from a Python, a port and the folder of
    the job to the command lines of its processes. variables: what they find in the environment.
    """

    name: str
    title: str
    settings: str
    package: str
    commands: Callable[[str, int, str], Sequence[Argv]]
    variables: Mapping[str, str] = attrs.field(factory=dict)


def trainer(name: str, folder: str) -> Argv:
    return [str(TRAINERS / f"{name}.py"), folder]


def torchrun(python: str, _port: int, folder: str) -> list[Argv]:
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1000"]
    quick = ["--monitor-interval=0.1"]
    command = [python, "-m", "torch.distributed.run", *flags, *quick]
    return [[*command, *trainer("plain", folder)]]


def elasticrun(python: str, _port: int, folder: str, script: str = "elastic") -> list[Argv]:
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1000"]
    return [[python, "-m", "elasticlib.launch", *flags, *trainer(script, folder)]]


def in_place(python: str, port: int, folder: str) -> list[Argv]:
    return elasticrun(python, port, folder, "in_place")


def torchft(python: str, port: int, folder: str) -> list[Argv]:
    """A lighthouse, and for each replica a torchrun that starts it anew."""
    lighthouse = [str(Path(python).with_name("torchft_lighthouse")), f"--bind=[::]:{port}"]
    patience = ["--join_timeout_ms=100", "--quorum_tick_ms=10", "--heartbeat_timeout_ms=1000"]
    commands = [[*lighthouse, "--min_replicas=1", *patience]]
    for replica in range(2):
        flags = ["--standalone", "--nproc-per-node=1", "--max-restarts=1000"]
        command = [python, "-m", "torch.distributed.run", *flags, "--monitor-interval=0.1"]
        env = ["env", f"TORCHFT_LIGHTHOUSE=http://localhost:{port}", f"REPLICA_GROUP_ID={replica}"]
        commands.append([*env, *command, *trainer("replica", folder)])
    return commands


def nvrx(python: str, port: int, folder: str) -> list[Argv]:
    command = [python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    flags = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=1000"]
    quick = ["--monitor-interval=0.1", "--workers-stop-timeout=1"]
    return [[*command, *meeting, *flags, *quick, *trainer("plain", folder)]]


def ray(python: str, _port: int, folder: str) -> list[Argv]:
    return [[python, *trainer("ray_train", folder)]]


SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
LAUNCHERS = (
    Launcher(
        "elasticrun",
        "**elasticrun**",
        "`--max-restarts 1000`; each step is kept in the agent's memory, and each 200th saved, for "
        "when the machine is lost",
        "elasticlib",
        elasticrun,
    ),
    Launcher(
        "in-place",
        "**elasticrun, in place**",
        "the same flags, and `elasticlib.steps` on torch 2.14 or newer: the other worker goes on, "
        "and does whole batches until the next is there; each fourth step is kept in the agent's "
        "memory, for when both are lost, and each 200th saved, for when the machine is",
        "elasticlib",
        in_place,
    ),
    Launcher(
        "torchrun",
        f"torchrun with `{SHARED}=1`",
        "`--max-restarts 1000 --monitor-interval 0.1`, and the variable without which restarted "
        "workers read what the workers before them wrote; a checkpoint every fourth step",
        "torch",
        torchrun,
        {SHARED: "1"},
    ),
    Launcher(
        "torchrun-installed",
        "torchrun as installed",
        "the same without the variable",
        "torch",
        torchrun,
        {SHARED: "0"},
    ),
    Launcher(
        "torchft",
        "torchft",
        "two replicas of one worker, each under a torchrun that restarts it; the lighthouse waits "
        "0.1 s for stragglers and 1 s for heartbeats; a replica that is alone makes its steps on "
        "half of the batch; no checkpoints, as the other replica has the state",
        "torchft-nightly",
        torchft,
    ),
    Launcher(
        "nvrx",
        "nvidia-resiliency-ext",
        "`ft_launcher --max-restarts 1000 --monitor-interval 0.1 --workers-stop-timeout 1`; a "
        "checkpoint every fourth step; not its in-process restart, which cannot bring back a "
        "killed process and would need a spare one for each kill",
        "nvidia-resiliency-ext",
        nvrx,
    ),
    Launcher(
        "ray",
        "Ray Train",
        "`FailureConfig(-1)`, workers polled each 0.1 s instead of 2 s; a checkpoint every "
        "fourth step, written directly, since `ray.train.report` costs more",
        "ray",
        ray,
        {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    ),
)


@attrs.frozen
class Outcome:
    """What came of one launcher's run, and when and where.

    start: seconds that the script takes to start. possible: the steps of an undisturbed run of so
    many seconds. kept: the last step's number. samples: those trained on in the steps that count; 0
    in a record of before they were counted. kills: those that hit a worker. missed: those that
    found none. redone: steps done more than once. pauses: after each kill, the longest time without
    a step until the next kill. stalls, joins: of workers that went on, and what newcomers cost
    them, in seconds. error: why there are no numbers.
    """

    version: str
    date: str
    load: float
    machine: Mapping[str, str]
    seconds: float
    every: float
    possible: float = 0.0
    kept: int = 0
    kills: int = 0
    missed: int = 0
    redone: int = 0
    pauses: Sequence[float] = ()
    error: str = ""
    start: float = 0.0
    samples: int = 0
    stalls: Sequence[float] = ()
    joins: Sequence[float] = ()

    @property
    def share(self) -> str:
        return f"{100 * self.samples / BATCH / self.possible:.1f} %" if self.samples else "-"


# -- a run ----------------------------------------------------------------------------------------


@attrs.frozen
class Done:
    """A step that a process has done, when, and on how many samples."""

    step: int
    at: float
    pid: int
    samples: int


Steps = Mapping[str, Sequence[Done]]
"""What each of the two workers has done, in its order; a worker and who replaces it are one."""


class Run:
    """The processes of one job, in a folder of its own, and the steps that they have done."""

    def __init__(
        self, folder: Path, commands: Iterable[Argv], variables: Mapping[str, str]
    ) -> None:
        self.folder, self._tag = folder, uuid.uuid4().hex
        own = {TAG: self._tag, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        environment = {**os.environ, **own, **variables}
        with (folder / "log").open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for command in commands
            ]

    def steps(self) -> Steps:
        found = {}
        for path in self.folder.glob("steps.*"):
            lines = (line.split() for line in path.read_text().splitlines())
            found[path.suffix] = [Done(int(a), float(b), int(c), int(d)) for a, b, c, d in lines]
        return found

    def wait_for_first_step(self) -> float:
        """When both workers had done a step."""
        deadline = time.monotonic() + TO_START
        while len(begun := [taken for taken in self.steps().values() if taken]) < 2:
            if time.monotonic() > deadline or all(p.poll() is not None for p in self._processes):
                said = (self.folder / "log").read_text(errors="replace")
                raise TimeoutError(f"no step within {TO_START:g} s: {said[-3000:]}")
            time.sleep(0.01)
        return max(taken[0].at for taken in begun)

    def kill(self, first: int) -> int:
        """SIGKILL to this worker, or to the other if it is not there; its process, or 0."""
        for slot in (first, 1 - first):
            pid, started = (self.folder / f"worker.{slot}").read_text().split()
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if fields[19] == started and fields[0] not in "ZX":
                    os.kill(int(pid), signal.SIGKILL)
                    return int(pid)
        return 0

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + 10.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        end_all(self._tag, 0.0)
        for process in self._processes:
            process.wait()


@contextlib.contextmanager
def running(
    commands: Callable[[str], Sequence[Argv]], variables: Mapping[str, str]
) -> Iterator[Run]:
    # Sockets of Ray lie there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as folder:
        job = Run(Path(folder), commands(folder), variables)
        try:
            yield job
        finally:
            job.end()


def undisturbed(seconds: float) -> float:
    """The steps a second of two plain processes."""
    port = free_port()

    def commands(folder: str) -> list[Argv]:
        meeting = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", "WORLD_SIZE=2"]
        command = [sys.executable, *trainer("plain", folder), "unsaved"]
        return [["env", *meeting, f"RANK={rank}", *command] for rank in range(2)]

    with running(commands, {}) as job:
        began = job.wait_for_first_step()
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return last_step(job.steps(), began + seconds) / seconds


def disturbed(job: Run, seconds: float, every: float) -> dict[str, Any]:
    """Kills a worker of it again and again; what was kept."""
    began = job.wait_for_first_step()
    killed: list[tuple[float, int]] = []
    missed = 0
    for at in range(1, math.ceil(seconds / every)):
        time.sleep(max(0.0, began + at * every - time.monotonic()))
        now, pid = time.monotonic(), job.kill(at % 2)
        if pid:
            killed.append((now, pid))
        else:
            missed += 1
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    steps = job.steps()
    if not killed:
        raise TimeoutError("no worker to kill")
    stalls, joins = survivors(steps, killed, began + seconds)
    return {
        "kept": last_step(steps, began + seconds),
        "samples": samples(steps, began + seconds),
        "kills": len(killed),
        "missed": missed,
        "redone": max(redone(taken) for taken in steps.values()),
        "pauses": pauses(steps, [at for at, _ in killed], began + seconds),
        "stalls": stalls,
        "joins": joins,
    }


# -- what is read off a run -----------------------------------------------------------------------


def last_step(steps: Steps, until: float) -> int:
    """The number of the last step that was done by then; the furthest worker's."""
    done = ([one.step for one in taken if one.at <= until] for taken in steps.values())
    return max(numbers[-1] for numbers in done if numbers)


def samples(steps: Steps, until: float) -> int:
    """On how many samples the steps up to the last one trained, those done again counted once."""
    last = last_step(steps, until)
    of_step: dict[int, dict[str, int]] = defaultdict(dict)
    for worker, taken in steps.items():
        for one in taken:
            if one.at <= until and one.step <= last:
                of_step[one.step][worker] = one.samples
    # A worker may be killed when it has done its part, and the other does the step again alone.
    return sum(min(BATCH, sum(parts.values())) for parts in of_step.values())


def redone(taken: Sequence[Done]) -> int:
    """How many steps of a worker it had done before."""
    return len(taken) - len({one.step for one in taken})


def pauses(steps: Steps, killed: Sequence[float], end: float) -> list[float]:
    """From each kill to the next, or to the end, the longest time in which no rank did a step."""
    times = sorted(one.at for taken in steps.values() for one in taken)
    found = []
    for begin, until in zip(killed, [*killed[1:], end], strict=True):
        within = [begin, *(at for at in times if begin < at < until), until]
        found.append(max(b - a for a, b in itertools.pairwise(within)))
    return found


def survivors(
    steps: Steps, killed: Sequence[tuple[float, int]], end: float
) -> tuple[list[float], list[float]]:
    """After each kill, of a process that went on: its longest time between two steps until the next
    kill; and what the step took beyond its usual one in which a newcomer first took part."""
    of_process: dict[int, list[Done]] = defaultdict(list)
    for taken in steps.values():
        for one in taken:
            of_process[one.pid].append(one)
    stalls, joins = [], []
    ends = [*(at for at, _ in killed[1:]), end]
    for (begin, victim), until in zip(killed, ends, strict=True):
        first = {done[0].step for done in of_process.values() if begin < done[0].at < until}
        for pid, done in of_process.items():
            since = sum(one.at <= begin for one in done)
            within = done[max(0, since - 1) : sum(one.at < until for one in done)]
            # A worker that is stopped for the loss of another may have had a step to end first.
            went_on = within and within[-1].at > (begin + until) / 2
            if pid == victim or not since or len(within) < 2 or not went_on:
                continue
            gaps = [(b.at - a.at, a, b) for a, b in itertools.pairwise(within)]
            usual = statistics.median(gap for gap, _, _ in gaps)
            stalls.append(max(gap for gap, _, _ in gaps))
            joins += [gap - usual for gap, a, b in gaps if a.at > begin and b.step in first]
    return stalls, joins


# -- the table ------------------------------------------------------------------------------------

HEAD = (
    "launcher",
    "duration of the run",
    "samples kept",
    "pause after a kill, median",
    "95th percentile",
    "steps repeated per kill",
    f"samples kept if a start takes {SLOW:g} s",
)
SURVIVORS = (
    "launcher",
    "a start takes",
    "kills",
    "stall of the other worker, median",
    "95th percentile",
    "longest",
    "a newcomer costs it, median",
    "most",
)


def key(name: str, start: float) -> str:
    """By which a launcher's outcome is kept."""
    return f"{name}, {start:g} s to start" if start else name


def table(outcomes: Mapping[str, Outcome]) -> str:
    return in_markdown(HEAD, (cells(one, outcomes) for one in LAUNCHERS))


def cells(launcher: Launcher, outcomes: Mapping[str, Outcome]) -> tuple[str, ...]:
    outcome = outcomes.get(launcher.name)
    slow = outcomes.get(key(launcher.name, SLOW))
    late = "-" if slow is None else slow.error or slow.share
    if outcome is None or outcome.error:
        why = outcome.error if outcome else "not measured yet"
        return (launcher.title, "", why, "", "", "", late)
    title = launcher.title
    if launcher.package != "elasticlib":
        title += f" {outcome.version}"
    middle, most = (within(outcome.pauses, share) for share in (0.5, 0.95))
    redone = digits(outcome.redone / outcome.kills)
    duration = f"{outcome.seconds:g} s"
    return (title, duration, outcome.share, middle, most, redone, late)


def within(times: Sequence[float], share: float) -> str:
    """The least of these times that this share of them is not above; - of none."""
    return said(sorted(times)[math.ceil(share * len(times)) - 1], "s") if times else "-"


def survivors_table(outcomes: Mapping[str, Outcome]) -> str:
    rows = []
    for launcher in LAUNCHERS:
        for start in (0.0, SLOW):
            outcome = outcomes.get(key(launcher.name, start))
            if outcome is not None and outcome.stalls:
                stalls = (within(outcome.stalls, share) for share in (0.5, 0.95, 1.0))
                joins = (within(outcome.joins, share) for share in (0.5, 1.0))
                facts = (f"{start:g} s", f"{outcome.kills}", *stalls, *joins)
                rows.append((launcher.title, *facts))
    return in_markdown(SURVIVORS, rows)


def page(outcomes: Mapping[str, Outcome]) -> str:
    """Return docs/launcher_comparison.md: tables, the text above, settings and runs."""
    title, _, text = (__doc__ or "").partition("\n\n")
    settings = "\n".join(f"- {one.title}: {one.settings}." for one in LAUNCHERS)
    kept = [(one, outcomes.get(key(one.name, start))) for one in LAUNCHERS for start in (0.0, SLOW)]
    runs = [run_of(one, outcome) for one, outcome in kept if outcome is not None]
    parts = [f"# {title.rstrip('.')}", table(outcomes)]
    if any(outcome is not None and outcome.stalls for _, outcome in kept):
        parts += ["Where the other worker goes on:", survivors_table(outcomes)]
    parts += [text.strip("\n"), "## Settings", settings]
    if runs:
        parts += ["## Runs", "\n".join(runs)]
    return "\n\n".join(parts) + "\n"


def run_of(launcher: Launcher, outcome: Outcome) -> str:
    host = outcome.machine
    begin = (
        f"- {key(launcher.name, outcome.start)} {outcome.version}, on {outcome.date}, "
        f"{host['processor']}, {host['memory']}, load average before it {outcome.load:.1f}"
    )
    if outcome.error:
        return f"{begin}: {outcome.error}."
    missed = f"; {outcome.missed} more kills found no worker alive" if outcome.missed else ""
    return (
        f"{begin}: {outcome.kept} of {outcome.possible:.0f} steps in {outcome.seconds:g} s, "
        f"{outcome.kills} kills{missed}."
    )


def quoted(readme: str, text: str) -> str:
    """The README with this text where field.py writes; ValueError if it has no such place."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def read(file: Path) -> dict[str, Outcome]:
    plain = json.loads(file.read_text()) if file.exists() else {}
    return {name: Outcome(**outcome) for name, outcome in plain.items()}


def write(file: Path, outcomes: Mapping[str, Outcome]) -> None:
    plain = {name: attrs.asdict(outcome) for name, outcome in outcomes.items()}
    for outcome in plain.values():
        for times in ("pauses", "stalls", "joins"):
            outcome[times] = [round(seconds, 3) for seconds in outcome[times]]
    file.write_text(json.dumps(plain, indent=1) + "\n")


# -- the command ----------------------------------------------------------------------------------


def version_of(package: str, python: str) -> str:
    """Of a package where this Python looks; nothing if it is not there."""
    code = "import sys; from importlib import metadata; print(metadata.version(sys.argv[1]))"
    done = subprocess.run(
        [python, "-c", code, package], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def measure_one(launcher: Launcher, start: float, given: argparse.Namespace) -> Outcome | None:
    python = given.python.get(launcher.name, sys.executable)
    name, version = key(launcher.name, start), version_of(launcher.package, python)
    if not version:
        print(f"{name}: {launcher.package} is not installed for {python}", flush=True)
        return None
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    load = round(os.getloadavg()[0], 2)
    outcome = Outcome(version, today, load, machine(), given.seconds, given.every, start=start)
    before = plain_rate(given)
    port, variables = free_port(), {**launcher.variables, START: str(start)}
    print(f"{name} {version}: {given.seconds:g} s", flush=True)
    with running(lambda folder: launcher.commands(python, port, folder), variables) as job:
        try:
            found = disturbed(job, given.seconds, given.every)
        except TimeoutError as error:
            print(error, file=sys.stderr)
            return attrs.evolve(outcome, error=str(error).partition(":")[0])
        finally:
            if given.logs:
                given.logs.mkdir(parents=True, exist_ok=True)
                text = (job.folder / "log").read_bytes()
                (given.logs / f"{name}.log").write_bytes(text)
    rate = statistics.mean((before, plain_rate(given)))
    return attrs.evolve(outcome, possible=round(rate * given.seconds, 1), **found)


def plain_rate(given: argparse.Namespace) -> float:
    rate = undisturbed(min(UNDISTURBED, given.seconds))
    print(f"undisturbed: {rate:.1f} steps a second", flush=True)
    return rate


def arguments() -> argparse.Namespace:
    names = [launcher.name for launcher in LAUNCHERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(names), help="launchers, with commas")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from kill to kill")
    parser.add_argument(
        "--start-seconds", default="0", help="how long a script takes to start, with commas"
    )
    parser.add_argument("--python", default="", help="NAME=PATH,...: the Python of a launcher")
    parser.add_argument("--json", type=Path, help="the file in which outcomes are kept")
    parser.add_argument(
        "--quote",
        action="store_true",
        help="keep them in docs/, and write there and into README.md",
    )
    parser.add_argument("--logs", type=Path, help="a folder for what the launchers print")
    given = parser.parse_args()
    if not 0 < given.every < given.seconds:
        parser.error(f"no kill every {given.every:g} s within {given.seconds:g} s")
    given.starts = [float(start) for start in given.start_seconds.split(",")]
    given.only = [name for name in given.only.split(",") if name]
    pairs = (pair.partition("=") for pair in given.python.split(",") if pair)
    given.python = {name: str(Path(path).absolute()) for name, _, path in pairs}
    if unknown := {*given.only, *given.python} - set(names):
        parser.error(f"no launcher {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    return given


def main() -> int:
    given = arguments()
    # So that what it runs is ended, as with SIGINT.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    file = given.json or (KEPT if given.quote else None)
    outcomes = read(file) if file else {}
    chosen = [launcher for launcher in LAUNCHERS if launcher.name in given.only]
    for start, launcher in itertools.product(given.starts, chosen):
        outcome = measure_one(launcher, start, given)
        if outcome is not None:
            outcomes[key(launcher.name, start)] = outcome
            if file is not None:
                write(file, outcomes)
    print(table(outcomes), survivors_table(outcomes), sep="\n\n")
    if given.quote:
        PAGE.write_text(page(outcomes))
        README.write_text(quoted(README.read_text(), table(outcomes)))
    names = [key(one, start) for one in given.only for start in given.starts]
    return int(any(outcomes[name].error for name in names if name in outcomes))


if __name__ == "__main__":
    sys.exit(main())
