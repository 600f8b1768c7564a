"""Compare launchers that run the same training while workers are killed.

    python tests/bench/compare_launchers.py [--only elasticrun,torchrun] [--seconds 120]
        [--every 10] [--start-seconds 0,5] [--python torchft=PATH,ray=PATH] [--json FILE]
        [--quote] [--redraw]

docs/launcher_comparison.md explains what is measured, and how the environments of the launchers are
created. A launcher that is not installed for its interpreter is reported as missing.

`--json FILE` stores the outcomes in FILE, together with those that it contains. `--quote` stores
them in docs/launcher_comparison.json, and writes docs/launcher_comparison.md and the table in
README.md. `--redraw` runs nothing and writes these from the stored outcomes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from benchmark_process import TAG, describe_machine, kill_tagged
from launcher_page import (
    BASELINE_S,
    KILL_INTERVAL_S,
    OUTCOMES,
    PAGE,
    README,
    Outcome,
    page,
    read_outcomes,
    readme_table,
    results_table,
    run_key,
    survivors_table,
    with_table,
    write_outcomes,
)
from launchers import LAUNCHERS, Argv, Launcher, trainer
from timed_jobs import free_port
from trainers.work import START_DELAY
from training_steps import (
    StepRecord,
    Steps,
    count_repeated,
    count_samples,
    last_step,
    longest_pauses,
    survivor_costs,
)

FIRST_STEP_TIMEOUT_S = 120.0  # for the first step of both workers
EXIT_TIMEOUT_S = 10.0  # for a launcher after SIGTERM


class TrainingJob:
    """The processes of one job, in a directory of their own, and the steps of its workers.

    Args:
        directory: The directory of the job.
        commands: The command lines of its processes, which are started.
        variables: Their environment, in addition to that of this process.
    """

    def __init__(
        self, directory: Path, commands: Iterable[Argv], variables: Mapping[str, str]
    ) -> None:
        self.directory, self._tag = directory, uuid.uuid4().hex
        own = {TAG: self._tag, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
        environment = {**os.environ, **own, **variables}
        with (directory / "log").open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    command,
                    cwd=directory,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for command in commands
            ]

    def steps(self) -> Steps:
        """Return the steps that each worker has finished so far."""
        steps = {}
        for path in self.directory.glob("steps.*"):
            lines = (line.split() for line in path.read_text().splitlines())
            steps[path.suffix] = [
                StepRecord(int(step), float(at), int(pid), int(samples))
                for step, at, pid, samples in lines
            ]
        return steps

    def wait_for_first_step(self) -> float:
        """Wait until both workers have finished a step; return when the second one had.

        Raises:
            TimeoutError: There is no step within the timeout, or all processes have exited.
        """
        deadline = time.monotonic() + FIRST_STEP_TIMEOUT_S
        while len(workers := [records for records in self.steps().values() if records]) < 2:
            has_exited = all(process.poll() is not None for process in self._processes)
            if time.monotonic() > deadline or has_exited:
                log = (self.directory / "log").read_text(errors="replace")
                raise TimeoutError(f"no step within {FIRST_STEP_TIMEOUT_S:g} s: {log[-3000:]}")
            time.sleep(0.01)
        return max(records[0].finished_at for records in workers)

    def kill_worker(self, slot: int) -> int:
        """Kill this worker with SIGKILL, or the other one if it does not run.

        Returns:
            The pid of the killed process, or 0 if no worker runs.
        """
        for number in (slot, 1 - slot):
            pid, started = (self.directory / f"worker.{number}").read_text().split()
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if fields[19] == started and fields[0] not in "ZX":
                    os.kill(int(pid), signal.SIGKILL)
                    return int(pid)
        return 0

    def stop(self) -> None:
        """Stop the launcher, and kill all processes of the job that are left."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        kill_tagged(self._tag, 0.0)
        for process in self._processes:
            process.wait()


@contextlib.contextmanager
def running_job(
    commands: Callable[[str], Sequence[Argv]], variables: Mapping[str, str]
) -> Iterator[TrainingJob]:
    """Start a job in a temporary directory, and stop it at the end of the block."""
    # Ray creates sockets in this directory, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as directory:
        job = TrainingJob(Path(directory), commands(directory), variables)
        try:
            yield job
        finally:
            job.stop()


def baseline_rate(duration_s: float) -> float:
    """Return the steps per second of two processes without launcher, checkpoints and kills."""
    port = free_port()

    def commands(directory: str) -> list[Argv]:
        group = ["MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}", "WORLD_SIZE=2"]
        command = [sys.executable, *trainer("plain", directory), "unsaved"]
        return [["env", *group, f"RANK={rank}", *command] for rank in range(2)]

    with running_job(commands, {}) as job:
        started_at = job.wait_for_first_step()
        time.sleep(max(0.0, started_at + duration_s - time.monotonic()))
        rate = last_step(job.steps(), started_at + duration_s) / duration_s
    print(f"baseline: {rate:.1f} steps per second", flush=True)
    return rate


def kill_repeatedly(job: TrainingJob, duration_s: float, interval_s: float) -> dict[str, Any]:
    """Kill workers of a job in turns; return the measured fields of its outcome.

    Raises:
        TimeoutError: The training does not start, or no kill found a running worker.
    """
    started_at = job.wait_for_first_step()
    kills: list[tuple[float, int]] = []
    missed = 0
    for number in range(1, math.ceil(duration_s / interval_s)):
        time.sleep(max(0.0, started_at + number * interval_s - time.monotonic()))
        now, pid = time.monotonic(), job.kill_worker(number % 2)
        if pid:
            kills.append((now, pid))
        else:
            missed += 1
    end = started_at + duration_s
    time.sleep(max(0.0, end - time.monotonic()))
    steps = job.steps()
    if not kills:
        raise TimeoutError("no kill found a running worker")
    stalls, join_costs = survivor_costs(steps, kills, end)
    return {
        "last_step": last_step(steps, end),
        "trained_samples": count_samples(steps, end),
        "kills": len(kills),
        "missed_kills": missed,
        "repeated_steps": max(count_repeated(records) for records in steps.values()),
        "pauses_s": longest_pauses(steps, [at for at, _ in kills], end),
        "stalls_s": stalls,
        "join_costs_s": join_costs,
    }


def installed_version(package: str, python: str) -> str:
    """Return the version of a package for an interpreter, or an empty text if it is missing."""
    code = "import sys; from importlib import metadata; print(metadata.version(sys.argv[1]))"
    result = subprocess.run(
        [python, "-c", code, package], capture_output=True, text=True, timeout=60, check=False
    )
    return result.stdout.strip()


def run_launcher(
    launcher: Launcher, start_delay_s: float, options: argparse.Namespace
) -> Outcome | None:
    """Run the training under a launcher; return None if the launcher is not installed."""
    python = options.python.get(launcher.name, sys.executable)
    name = run_key(launcher.name, start_delay_s)
    version = installed_version(launcher.package, python)
    if not version:
        print(f"{name}: {launcher.package} is not installed for {python}", flush=True)
        return None
    outcome = Outcome(
        version,
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        round(os.getloadavg()[0], 2),
        describe_machine(),
        options.seconds,
        options.every,
        start_delay_s,
        installed_version("torch", python),
    )
    baseline_s = min(BASELINE_S, options.seconds)
    rate_before = baseline_rate(baseline_s)
    port, variables = free_port(), {**launcher.variables, START_DELAY: str(start_delay_s)}
    print(f"{name} {version}: {options.seconds:g} s", flush=True)

    def commands(directory: str) -> Sequence[Argv]:
        return launcher.commands(python, port, directory)

    with running_job(commands, variables) as job:
        try:
            measured = kill_repeatedly(job, options.seconds, options.every)
        except TimeoutError as error:
            print(error, file=sys.stderr)
            return attrs.evolve(outcome, error=str(error).partition(":")[0])
        finally:
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                text = (job.directory / "log").read_bytes()
                (options.logs / f"{name}.log").write_bytes(text)
    rate = statistics.mean((rate_before, baseline_rate(baseline_s)))
    return attrs.evolve(outcome, baseline_steps=round(rate * options.seconds, 1), **measured)


# -- the command line ------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    names = [launcher.name for launcher in LAUNCHERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default=",".join(names), help="comma-separated launchers (default: all)")
    add("--seconds", type=float, default=120.0, help="duration of a run (default: 120)")
    add("--every", type=float, default=KILL_INTERVAL_S, help="seconds between kills (default: 10)")
    add("--start-seconds", default="0", help="comma-separated start delays (default: 0)")
    add("--python", default="", help="NAME=PATH,...: the Python interpreter of a launcher")
    add("--json", type=Path, help="the file in which outcomes are stored")
    add("--quote", action="store_true", help="store outcomes in docs/, and write the tables")
    add("--redraw", action="store_true", help="run nothing, and write the tables")
    add("--logs", type=Path, help="a directory for the output of the launchers")
    options = parser.parse_args()
    if not 0 < options.every < options.seconds:
        both = f"--every {options.every:g} and --seconds {options.seconds:g}"
        parser.error(f"--every must be above 0 and below --seconds, got {both}")
    options.start_delays = [float(delay) for delay in options.start_seconds.split(",")]
    options.only = [name for name in options.only.split(",") if name]
    pairs = (pair.partition("=") for pair in options.python.split(",") if pair)
    options.python = {name: str(Path(path).absolute()) for name, _, path in pairs}
    if unknown := {*options.only, *options.python} - set(names):
        parser.error(f"no launcher {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    return options


def main() -> int:
    """Run the launchers that the command line names; return the exit code."""
    options = parse_arguments()
    # SIGTERM ends this program like SIGINT, so that the processes that it has started end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    has_page = options.quote or options.redraw
    file = options.json or (OUTCOMES if has_page else None)
    outcomes = read_outcomes(file) if file else {}
    chosen = [one for one in LAUNCHERS if one.name in options.only and not options.redraw]
    for start_delay_s, launcher in itertools.product(options.start_delays, chosen):
        outcome = run_launcher(launcher, start_delay_s, options)
        if outcome is not None:
            outcomes[run_key(launcher.name, start_delay_s)] = outcome
            if file is not None:
                write_outcomes(file, outcomes)
    print(results_table(outcomes), survivors_table(outcomes), sep="\n\n")
    if has_page:
        PAGE.write_text(page(outcomes))
        README.write_text(with_table(README.read_text(), readme_table(outcomes)))
    keys = [run_key(one.name, delay) for one in chosen for delay in options.start_delays]
    return int(any(outcomes[key].error for key in keys if key in outcomes))


if __name__ == "__main__":
    sys.exit(main())
