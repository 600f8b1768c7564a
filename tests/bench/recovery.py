"""Time of a start, a restart, a join and a node loss, and CPU of an idle agent.

    python tests/bench/recovery.py [--parts restart,start,join,loss,notice,rest] [--spawn]
        [--rounds 2] [--kills 10] [--repeat 3] [--rest 10]

elasticrun and torchrun run the same worker, which forms a gloo process group and runs an
all-reduce. A group works when all of its ranks have finished their first all-reduce. The parts are:

- `restart`: a job of two workers on one node. One worker is killed with SIGKILL, and the time ends
  when the next group of two works. This part also measures the time from the start of the launcher
  to the first working group.
- `start`: the time from the start of the launcher to the first line of a script that imports
  nothing.
- `join`: a node with one worker runs, and a second node is started. One time starts with the second
  launcher. The other starts when the running worker exits, which is how long training stops. Both
  end when the group of two works.
- `loss`: on one of two nodes, the launcher and its worker are killed with SIGKILL. The worker of
  the other node does not poll for changes. The time ends when the group of the other node works.
- `notice`: one of two nodes gets the notice that its machine will be preempted. elasticrun reads a
  file (`--preemption-notice file:PATH`), and the launcher of torchrun gets SIGTERM, which is what a
  machine sends when it shuts down. The time ends when the group of the other node works.
- `rest`: CPU seconds per second of a launcher and its service processes, while its two workers
  sleep.

The launchers take turns. elasticrun waits 0.1 s for late nodes. torchrun waits 1 s, the shortest
time that it accepts. torchrun runs with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Without this
variable, restarted workers read the addresses of the attempt before. A launcher that does not
finish within the time limit has failed and is not tried again. Rows with `spawn` use
`--start-method spawn`, which starts a new interpreter for each worker. By default, elasticrun
starts one process that imports torch, and forks all workers from it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

from results import Row, run_command_line
from timed_jobs import (
    LAUNCHERS,
    MEMBERSHIP_TIMEOUT_S,
    TIMEOUT_S,
    Timings,
    cpu_seconds,
    find_children,
    is_alive,
    open_job,
    run_in_turns,
)

from elasticlib.testing.waiting import wait_until

FIRST_LINE = "import sys, time; open(f'{sys.argv[1]}/line', 'x').write(str(time.monotonic()))"
# The measurements of each part, and their descriptions.
MEASUREMENTS = {
    "restart": {
        "first": "start of the launcher until the first group of 2 works",
        "restart": "kill of a worker until the next group of 2 works",
    },
    "start": {"start": "start of the launcher until the first line of the script"},
    "join": {
        "join": "join: start of the second launcher until the group of 2 works",
        "standstill": "join: exit of the running worker until the group of 2 works",
    },
    "loss": {"loss": "kill of a node until the group of the other node works"},
    "notice": {"notice": "notice to one node until the group of the other node works"},
    "rest": {"rest": "CPU of an idle launcher"},
}


def measure_restarts(timings: Timings, kills: int, launcher: str) -> None:
    """Start a job, and kill one worker after the other."""
    started_at = time.monotonic()
    with open_job(launcher) as job:
        job.start("--standalone", "--nproc-per-node=2", f"--max-restarts={kills}")
        ranks = job.wait_for_group(2)
        timings.add_elapsed(started_at, "first", launcher)
        for _ in range(kills):
            os.kill(ranks[-1]["pid"], signal.SIGKILL)
            ranks = timings.time_group("restart", launcher, job, 2, TIMEOUT_S)


def measure_start(timings: Timings, launcher: str) -> None:
    """Start a script that writes down when it starts."""
    with open_job(launcher) as job:
        script = job.directory / "script.py"
        script.write_text(FIRST_LINE)
        started_at = time.monotonic()
        job.start("--standalone", program=str(script))
        assert job.agents[0].wait(TIMEOUT_S) == 0
        first_line_at = float((job.directory / "line").read_text())
        timings.add("start", launcher, first_line_at - started_at)


def measure_join(timings: Timings, launcher: str) -> None:
    """Start a second node while the first one runs."""
    with open_job(launcher) as job:
        job.start_node()
        (first,) = job.wait_for_group(1)
        started_at = time.monotonic()
        job.start_node()
        with timings.counting_failures(launcher, *MEASUREMENTS["join"]):
            wait_until(
                "the worker to exit", lambda: not is_alive(first["pid"]), MEMBERSHIP_TIMEOUT_S
            )
            stopped_at = time.monotonic()
            job.wait_for_group(2, MEMBERSHIP_TIMEOUT_S)
        timings.add_elapsed(started_at, "join", launcher)
        timings.add_elapsed(stopped_at, "standstill", launcher)


def measure_node_loss(timings: Timings, launcher: str) -> None:
    """Kill the second of two nodes."""
    with open_job(launcher) as job:
        # The first node hosts the store. The loss of the store is not measured here.
        for world in (1, 2):
            job.start_node()
            job.wait_for_group(world)
        job.kill_node(job.agents.pop())
        timings.time_group("loss", launcher, job, 1)


def measure_notice(timings: Timings, launcher: str) -> None:
    """Give the second of two nodes a notice of preemption."""
    with open_job(launcher) as job:
        notice = job.directory / "notice"
        flags = () if launcher == "torchrun" else (f"--preemption-notice=file:{notice}",)
        for world in (1, 2):
            job.start_node(*flags if world == 2 else ())
            job.wait_for_group(world)
        if launcher == "torchrun":
            job.agents[-1].terminate()
        else:
            notice.touch()
        timings.time_group("notice", launcher, job, 1)


def measure_idle_cpu(timings: Timings, duration_s: float, launcher: str) -> None:
    """Measure the CPU time of a launcher and its service processes while its workers sleep."""
    with open_job(launcher) as job:
        job.start("--standalone", "--nproc-per-node=2", args=("once",))
        workers = {rank["pid"] for rank in job.wait_for_group(2)}
        pids = [job.agents[0].pid]
        for pid in pids:
            pids += [child for child in find_children(pid) if child not in workers]
        # By then the work of the start is done: the fork server has imported what it keeps for
        # later workers, and is idle.
        time.sleep(6.0)
        before = sum(map(cpu_seconds, pids))
        time.sleep(duration_s)
        used = sum(map(cpu_seconds, pids)) - before
        timings.add("rest", launcher, used / duration_s)


def measure(
    *,
    parts: str = ",".join(MEASUREMENTS),
    spawn: bool = False,
    rounds: int = 2,
    kills: int = 10,
    repeat: int = 3,
    rest: float = 10.0,
) -> Iterator[Row]:
    """Measure the parts, and yield their rows.

    Args:
        parts: The parts to measure, separated by commas.
        spawn: Also measure elasticrun with `--start-method spawn`.
        rounds: The number of jobs of the part `restart`.
        kills: The number of workers that are killed in each of these jobs.
        repeat: The number of samples of all other parts.
        rest: The duration of one CPU measurement in seconds.
    """
    timings = Timings()
    runs: dict[str, tuple[int, Callable[[str], None]]] = {
        "restart": (rounds, partial(measure_restarts, timings, kills)),
        "start": (repeat, partial(measure_start, timings)),
        "join": (repeat, partial(measure_join, timings)),
        "loss": (repeat, partial(measure_node_loss, timings)),
        "notice": (repeat, partial(measure_notice, timings)),
        "rest": (repeat, partial(measure_idle_cpu, timings, rest)),
    }
    launchers = [name for name in LAUNCHERS if spawn or "spawn" not in name]
    for part in parts.split(","):
        run_in_turns(launchers, *runs[part])
        yield from rows_of_part(timings, part, launchers)


def rows_of_part(timings: Timings, part: str, launchers: list[str]) -> Iterator[Row]:
    """Yield a row for each measurement of a part and each start method of elasticrun."""
    unit = "of a core" if part == "rest" else "s"
    for name, description in MEASUREMENTS[part].items():
        torchrun = timings.samples(name, "torchrun", unit)
        for launcher in launchers:
            if launcher != "torchrun":
                samples, suffix = timings.samples(name, launcher, unit), launcher.partition(", ")[2]
                text = f"{description} ({suffix})" if suffix else description
                key = f"{name}.{suffix}" if suffix else name
                yield Row(key, text, samples, torchrun, "torchrun")


if __name__ == "__main__":
    run_command_line(measure, __doc__)
