"""What a start, a restart, a join, a loss and rest cost, beside torchrun on the same work.

    python tests/bench/recovery.py [--parts restart,start,join,loss,rest] [--spawn]
        [--rounds 2] [--kills 10] [--repeat 3] [--rest 10]

- restart: two gloo workers on one node; one is killed with SIGKILL, and the time is taken until
  both ranks of the next attempt have finished an all_reduce. Also from the start of the launcher
  to the first group.
- start: from the start of the launcher to the first line of a script that imports nothing.
- join: a node with one worker runs, and another is started. Counted from its agent's start, and
  from the end of the running worker, which is the time in which nobody trains, to the group of two.
- loss: an agent and its worker are killed with SIGKILL, while the other node's worker is busy and
  looks at nothing; until the survivor's group of one works.
- rest: CPU seconds per second of an agent and what serves it, while its two workers sleep.

Both wait for a last call, which is as short as each takes it: elasticrun's is 0.1 s, and
torchrun's, in whole seconds alone, 1 s. The launchers take turns, so that all meet the same
machine. torchrun runs in the mode that works, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: in its default
one, restarted workers read the addresses of the attempt before. What did not happen within the
bound is counted as failed, and not as a time; who failed so is not tried again. `spawn` is
elasticrun with cold workers, `--start-method spawn`. A first start costs what an interpreter with
torch costs, once for the process that all later workers are forked from.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

from figures import Row, run
from launched import (
    BOUND,
    LAUNCHERS,
    PROBABLY_NEVER,
    Times,
    cpu_seconds,
    find_children,
    in_turn,
    is_alive,
    job,
)

from elasticlib.testing.waiting import wait_until

FIRST_LINE = "import sys, time; open(f'{sys.argv[1]}/line', 'x').write(str(time.monotonic()))"
MEASURED = {
    "restart": {
        "first": "start of the launcher to the first group of 2",
        "restart": "kill of a worker to the next group of 2",
    },
    "start": {"start": "start of the launcher to the first line of the script"},
    "join": {
        "join": "join: start of the second agent to a group of 2",
        "standstill": "join: end of the running worker to a group of 2",
    },
    "loss": {"loss": "kill of an agent and its worker to the survivor's group"},
    "rest": {"rest": "CPU of an agent at rest"},
}
"""By part, what it takes."""


def restart(times: Times, kills: int, launcher: str) -> None:
    began = time.monotonic()
    with job(launcher) as running:
        running.start("--standalone", "--nproc-per-node=2", f"--max-restarts={kills}")
        places = running.up(2)
        times.since(began, "first", launcher)
        for _ in range(kills):
            os.kill(places[-1]["pid"], signal.SIGKILL)
            places = times.group("restart", launcher, running, 2, BOUND)


def start(times: Times, launcher: str) -> None:
    with job(launcher) as running:
        script = running.folder / "script.py"
        script.write_text(FIRST_LINE)
        began = time.monotonic()
        running.start("--standalone", program=str(script))
        assert running.agents[0].wait(BOUND) == 0
        times.note("start", launcher, float((running.folder / "line").read_text()) - began)


def join(times: Times, launcher: str) -> None:
    with job(launcher) as running:
        running.join()
        (alone,) = running.up(1)
        began = time.monotonic()
        running.join()
        with times.trying(launcher, *MEASURED["join"]):
            wait_until("the worker to end", lambda: not is_alive(alone["pid"]), PROBABLY_NEVER)
            stopped = time.monotonic()
            running.up(2, PROBABLY_NEVER)
        times.since(began, "join", launcher)
        times.since(stopped, "standstill", launcher)


def loss(times: Times, launcher: str) -> None:
    with job(launcher) as running:
        # The first hosts the store, whose loss would be another matter.
        for world in (1, 2):
            running.join()
            running.up(world)
        running.lose(running.agents.pop())
        times.group("loss", launcher, running, 1)


def at_rest(times: Times, seconds: float, launcher: str) -> None:
    with job(launcher) as running:
        running.start("--standalone", "--nproc-per-node=2", args=("once",))
        workers = {place["pid"] for place in running.up(2)}
        agent = running.agents[0].pid
        serving = [agent]
        for pid in serving:
            serving += [child for child in find_children(pid) if child not in workers]
        # What a start leaves to do is over by then: the fork server has begun to rest, and imported
        # what it keeps for later workers.
        time.sleep(6.0)
        used = sum(map(cpu_seconds, serving))
        time.sleep(seconds)
        used = sum(map(cpu_seconds, serving)) - used
        times.note("rest", launcher, used / seconds)


def measure(
    *,
    parts: str = ",".join(MEASURED),
    spawn: bool = False,
    rounds: int = 2,
    kills: int = 10,
    repeat: int = 3,
    rest: float = 10.0,
) -> Iterator[Row]:
    """rounds: jobs whose workers are killed, so many of each; repeat: of all else."""
    times = Times()
    stories: dict[str, tuple[int, Callable[[str], None]]] = {
        "restart": (rounds, partial(restart, times, kills)),
        "start": (repeat, partial(start, times)),
        "join": (repeat, partial(join, times)),
        "loss": (repeat, partial(loss, times)),
        "rest": (repeat, partial(at_rest, times, rest)),
    }
    launchers = [name for name in LAUNCHERS if spawn or "spawn" not in name]
    for part in parts.split(","):
        in_turn(launchers, *stories[part])
        unit = "of a core" if part == "rest" else "s"
        for name, what in MEASURED[part].items():
            torchs = times.of(name, "torchrun", unit)
            for launcher in [one for one in launchers if one != "torchrun"]:
                mine, mark = times.of(name, launcher, unit), launcher.partition(", ")[2]
                words = f"{what} ({mark})" if mark else what
                full = f"{name}.{mark}" if mark else name
                yield Row(full, words, mine, torchs, "torchrun")


if __name__ == "__main__":
    run(measure, __doc__)
