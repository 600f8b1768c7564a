"""One training under five launchers, while workers are killed.

    python tests/bench/field.py [--only elasticrun,torchrun] [--seconds 120] [--every 10]
        [--python torchft=PATH,ray=PATH] [--json FILE] [--quote]

All run the same training: plain torch on the CPU, two workers of a gloo group, steps of about
20 ms, 2 MiB of model and optimizer (`tests/bench/trainers/work.py`). Every ten seconds of two
minutes one worker is killed with SIGKILL, each rank in turn. Time counts from the first step, so
that a launcher's own start costs it nothing.

**Steps kept** is the number of the last step when the time is over, as a share of the steps that
two plain processes do in as many seconds without a launcher, checkpoints or kills; that is measured
just before. A step that is done again counts once. A **pause** is the longest time without a step
between one kill and the next.

Each launcher has its best settings, as far as its documentation tells them. The launchers whose
workers restart from a disk write a checkpoint each ten steps, without fsync: at one fault in ten
seconds, a checkpoint then costs about as much as it saves. `--python` names the Python that has a
launcher, by default this one. A launcher that is not installed there is reported as missing. These
environments have them:

    python3 -m venv ft && ft/bin/pip install torchft-nightly
    python3 -m venv nvrx && nvrx/bin/pip install nvidia-resiliency-ext
    python3 -m venv ray && ray/bin/pip install 'ray[train]' torch

`--json FILE` keeps the outcomes in that file, beside those of launchers that were run before.
`--quote` keeps them in docs/field.json, and writes docs/field.md and the table in README.md.
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
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from figures import digits, in_markdown, said
from launched import free_port
from runs import TAG, end_all, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRAINERS = HERE / "trainers"
README, PAGE, KEPT = (ROOT / name for name in ("README.md", "docs/field.md", "docs/field.json"))
TO_START = 120.0
"""Seconds within which a launcher's first step must be done."""
UNDISTURBED = 20.0
"""Seconds of the run with which all are compared."""
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


def elasticrun(python: str, _port: int, folder: str) -> list[Argv]:
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1000"]
    return [[python, "-m", "elasticlib.launch", *flags, *trainer("elastic", folder)]]


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
        "`--max-restarts 1000`; each step is kept in the agent's memory, each tenth is saved",
        "elasticlib",
        elasticrun,
    ),
    Launcher(
        "torchrun",
        f"torchrun with `{SHARED}=1`",
        "`--max-restarts 1000 --monitor-interval 0.1`, and the variable without which restarted "
        "workers read what the workers before them wrote; a checkpoint each ten steps",
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
        "0.1 s for stragglers and 1 s for heartbeats; a step that one replica makes alone, on half "
        "of the batch, counts as a whole step",
        "torchft-nightly",
        torchft,
    ),
    Launcher(
        "nvrx",
        "nvidia-resiliency-ext",
        "`ft_launcher --max-restarts 1000 --monitor-interval 0.1 --workers-stop-timeout 1`; a "
        "checkpoint each ten steps; not its in-process restart, which cannot bring back a killed "
        "process and would need a spare one for each kill",
        "nvidia-resiliency-ext",
        nvrx,
    ),
    Launcher(
        "ray",
        "Ray Train",
        "`FailureConfig(-1)`, workers polled each 0.1 s instead of 2 s; a checkpoint each ten "
        "steps, written directly, since `ray.train.report` costs more",
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

    possible: the steps of an undisturbed run of so many seconds. kills: those that hit a worker.
    missed: those that found none. redone: steps done more than once. pauses: after each kill, the
    longest time without a step until the next kill. error: why there are no numbers.
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

    @property
    def share(self) -> str:
        return f"{100 * self.kept / self.possible:.1f} %"


# -- a run ----------------------------------------------------------------------------------------


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

    def steps(self) -> dict[str, list[tuple[int, float]]]:
        """Number and time of each step that is done, by rank."""
        found = {}
        for path in self.folder.glob("steps.*"):
            words = [line.split() for line in path.read_text().splitlines()]
            found[path.suffix] = [(int(step), float(at)) for step, at in words]
        return found

    def wait_for_first_step(self) -> float:
        """When all ranks had done a step."""
        deadline = time.monotonic() + TO_START
        while len(begun := [taken for taken in self.steps().values() if taken]) < 2:
            if time.monotonic() > deadline or all(p.poll() is not None for p in self._processes):
                said = (self.folder / "log").read_text(errors="replace")
                raise TimeoutError(f"no step within {TO_START:g} s: {said[-3000:]}")
            time.sleep(0.01)
        return max(taken[0][1] for taken in begun)

    def kill(self, first: int) -> bool:
        """SIGKILL to the worker of this rank, or of the other if it has none; whether one was
        there."""
        for rank in (first, 1 - first):
            pid, started = (self.folder / f"worker.{rank}").read_text().split()
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if fields[19] == started and fields[0] not in "ZX":
                    os.kill(int(pid), signal.SIGKILL)
                    return True
        return False

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
    killed: list[float] = []
    missed = 0
    for at in range(1, math.ceil(seconds / every)):
        time.sleep(max(0.0, began + at * every - time.monotonic()))
        if job.kill(at % 2):
            killed.append(time.monotonic())
        else:
            missed += 1
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    steps = job.steps()
    if not killed:
        raise TimeoutError("no worker to kill")
    return {
        "kept": last_step(steps, began + seconds),
        "kills": len(killed),
        "missed": missed,
        "redone": max(redone(taken) for taken in steps.values()),
        "pauses": pauses(steps, killed, began + seconds),
    }


# -- what is read off a run -----------------------------------------------------------------------


def last_step(steps: Mapping[str, Sequence[tuple[int, float]]], until: float) -> int:
    """The number of the last step that was done by then; the furthest rank's."""
    done = ([step for step, at in taken if at <= until] for taken in steps.values())
    return max(numbers[-1] for numbers in done if numbers)


def redone(taken: Sequence[tuple[int, float]]) -> int:
    """How many steps of a rank it had done before."""
    return len(taken) - len({step for step, _ in taken})


def pauses(
    steps: Mapping[str, Sequence[tuple[int, float]]], killed: Sequence[float], end: float
) -> list[float]:
    """From each kill to the next, or to the end, the longest time in which no rank did a step."""
    times = sorted(at for taken in steps.values() for _, at in taken)
    found = []
    for begin, until in zip(killed, [*killed[1:], end], strict=True):
        within = [begin, *(at for at in times if begin < at < until), until]
        found.append(max(b - a for a, b in itertools.pairwise(within)))
    return found


# -- the table ------------------------------------------------------------------------------------

HEAD = (
    "launcher",
    "steps kept",
    "pause after a kill, median",
    "95th percentile",
    "steps redone per kill",
)


def table(outcomes: Mapping[str, Outcome]) -> str:
    return in_markdown(HEAD, (cells(one, outcomes.get(one.name)) for one in LAUNCHERS))


def cells(launcher: Launcher, outcome: Outcome | None) -> tuple[str, ...]:
    if outcome is None or outcome.error:
        why = outcome.error if outcome else "not measured yet"
        return (launcher.title, why, "", "", "")
    title = launcher.title
    if launcher.package != "elasticlib":
        title += f" {outcome.version}"
    pauses = sorted(outcome.pauses)
    # The least pause that so many are not above.
    middle, most = (said(pauses[math.ceil(n * len(pauses)) - 1], "s") for n in (0.5, 0.95))
    return (title, outcome.share, middle, most, digits(outcome.redone / outcome.kills))


def page(outcomes: Mapping[str, Outcome]) -> str:
    """docs/field.md: the table, the text above, each launcher's settings, and the runs."""
    title, _, text = (__doc__ or "").partition("\n\n")
    settings = "\n".join(f"- {one.title}: {one.settings}." for one in LAUNCHERS)
    runs = [run_of(one, outcomes[one.name]) for one in LAUNCHERS if one.name in outcomes]
    parts = [f"# {title.rstrip('.')}", table(outcomes), text.strip("\n"), "## Settings", settings]
    if runs:
        parts += ["## Runs", "\n".join(runs)]
    return "\n\n".join(parts) + "\n"


def run_of(launcher: Launcher, outcome: Outcome) -> str:
    host = outcome.machine
    begin = (
        f"- {launcher.name} {outcome.version}, on {outcome.date}, {host['processor']}, "
        f"{host['memory']}, load average before it {outcome.load:.1f}"
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
        outcome["pauses"] = [round(pause, 3) for pause in outcome["pauses"]]
    file.write_text(json.dumps(plain, indent=1) + "\n")


# -- the command ----------------------------------------------------------------------------------


def version_of(package: str, python: str) -> str:
    """Of a package where this Python looks; nothing if it is not there."""
    code = "import sys; from importlib import metadata; print(metadata.version(sys.argv[1]))"
    done = subprocess.run(
        [python, "-c", code, package], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def measure_one(
    launcher: Launcher, python: str, given: argparse.Namespace, rate: float
) -> Outcome | None:
    version = version_of(launcher.package, python)
    if not version:
        print(f"{launcher.name}: {launcher.package} is not installed for {python}", flush=True)
        return None
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    load = round(os.getloadavg()[0], 2)
    outcome = Outcome(version, today, load, machine(), given.seconds, given.every)
    port = free_port()
    print(f"{launcher.name} {version}: {given.seconds:g} s", flush=True)
    with running(lambda folder: launcher.commands(python, port, folder), launcher.variables) as job:
        try:
            found = disturbed(job, given.seconds, given.every)
        except TimeoutError as error:
            print(error, file=sys.stderr)
            return attrs.evolve(outcome, error=str(error).partition(":")[0])
        finally:
            if given.logs:
                given.logs.mkdir(parents=True, exist_ok=True)
                text = (job.folder / "log").read_bytes()
                (given.logs / f"{launcher.name}.log").write_bytes(text)
    return attrs.evolve(outcome, possible=round(rate * given.seconds, 1), **found)


def arguments() -> argparse.Namespace:
    names = [launcher.name for launcher in LAUNCHERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(names), help="launchers, with commas")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from kill to kill")
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
    rate = undisturbed(min(UNDISTURBED, given.seconds)) if chosen else 0.0
    if chosen:
        print(f"undisturbed: {rate:.1f} steps a second", flush=True)
    for launcher in chosen:
        python = given.python.get(launcher.name, sys.executable)
        outcome = measure_one(launcher, python, given, rate)
        if outcome is not None:
            outcomes[launcher.name] = outcome
            if file is not None:
                write(file, outcomes)
    print(table(outcomes))
    if given.quote:
        PAGE.write_text(page(outcomes))
        README.write_text(quoted(README.read_text(), table(outcomes)))
    return int(any(outcomes[one].error for one in given.only if one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
