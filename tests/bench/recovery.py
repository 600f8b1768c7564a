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

import argparse
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import attrs
from figures import Row, Samples, parser_of, tell
from launched import BOUND, LAUNCHERS, children, cpu_seconds, gone, job

PROBABLY_NEVER = 20.0
"""Seconds in which a membership that is going to change has changed, by far."""
FIRST_LINE = "import sys, time; open(f'{sys.argv[1]}/line', 'x').write(str(time.monotonic()))"


@attrs.define
class Measured:
    """What was taken of one kind, by launcher, and how often it did not come."""

    name: str
    what: str
    unit: str = "s"
    taken: dict[str, list[float]] = attrs.Factory(lambda: defaultdict(list))
    failed: Counter[str] = attrs.Factory(Counter)
    why: str = f"not within {PROBABLY_NEVER:g} s"

    def of(self, launcher: str) -> Samples:
        failed = self.failed[launcher]
        return Samples(self.unit, self.taken[launcher], failed, self.why if failed else "")

    def rows(self) -> Iterator[Row]:
        torchs = self.of("torchrun")
        for launcher in [name for name in LAUNCHERS if name != "torchrun"]:
            if launcher in {*self.taken, *self.failed}:
                mark = launcher.partition(", ")[2]
                what = f"{self.what} ({mark})" if mark else self.what
                name = f"{self.name}.{mark}" if mark else self.name
                yield Row(name, what, self.of(launcher), torchs, "torchrun")


def restart(launchers: list[str], given: argparse.Namespace) -> list[Measured]:
    first = Measured("first", "start of the launcher to the first group of 2")
    again = Measured("restart", "kill of a worker to the next group of 2")
    again.why = f"not within {BOUND:g} s"

    def one(launcher: str) -> bool:
        began = time.monotonic()
        with job(launcher) as running:
            running.start("--standalone", "--nproc-per-node=2", f"--max-restarts={given.kills}")
            places = running.up(2)
            first.taken[launcher].append(time.monotonic() - began)
            for kill in range(given.kills):
                victim = places[-1]["pid"]
                began = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                try:
                    places = running.up(2)
                except TimeoutError:
                    again.failed[launcher] += given.kills - kill
                    break
                again.taken[launcher].append(time.monotonic() - began)
        return True

    _in_turn(launchers, given.rounds, one)
    return [first, again]


def start(launchers: list[str], given: argparse.Namespace) -> list[Measured]:
    found = Measured("start", "start of the launcher to the first line of the script")

    def one(launcher: str) -> bool:
        with job(launcher) as running:
            script = running.folder / "script.py"
            script.write_text(FIRST_LINE)
            began = time.monotonic()
            running.start("--standalone", program=str(script))
            assert running.agents[0].wait(BOUND) == 0
            found.taken[launcher].append(float((running.folder / "line").read_text()) - began)
        return True

    _in_turn(launchers, given.repeat, one)
    return [found]


def join(launchers: list[str], given: argparse.Namespace) -> list[Measured]:
    whole = Measured("join", "join: start of the second agent to a group of 2")
    still = Measured("standstill", "join: end of the running worker to a group of 2")

    def one(launcher: str) -> bool:
        with job(launcher) as running:
            running.join()
            (alone,) = running.up(1)
            began = time.monotonic()
            running.join()
            try:
                gone(alone["pid"], PROBABLY_NEVER)
                stopped = time.monotonic()
                running.up(2, PROBABLY_NEVER)
            except TimeoutError:
                whole.failed[launcher] += 1
                still.failed[launcher] += 1
                return False
            whole.taken[launcher].append(time.monotonic() - began)
            still.taken[launcher].append(time.monotonic() - stopped)
        return True

    _in_turn(launchers, given.repeat, one)
    return [whole, still]


def loss(launchers: list[str], given: argparse.Namespace) -> list[Measured]:
    found = Measured("loss", "kill of an agent and its worker to the survivor's group")

    def one(launcher: str) -> bool:
        with job(launcher) as running:
            # The first hosts the store, whose loss would be another matter.
            for world in (1, 2):
                running.join()
                running.up(world)
            began = time.monotonic()
            running.lose(running.agents.pop())
            try:
                running.up(1, PROBABLY_NEVER)
            except TimeoutError:
                found.failed[launcher] += 1
                return False
            found.taken[launcher].append(time.monotonic() - began)
        return True

    _in_turn(launchers, given.repeat, one)
    return [found]


def rest(launchers: list[str], given: argparse.Namespace) -> list[Measured]:
    found = Measured("rest", "CPU of an agent at rest", "of a core")

    def one(launcher: str) -> bool:
        with job(launcher) as running:
            running.start("--standalone", "--nproc-per-node=2", args=("once",))
            workers = {place["pid"] for place in running.up(2)}
            agent = running.agents[0].pid
            serving = [agent, *(pid for pid in children(agent) if pid not in workers)]
            # What a start leaves to do is over soon.
            time.sleep(1.0)
            used = sum(map(cpu_seconds, serving))
            time.sleep(given.rest)
            used = sum(map(cpu_seconds, serving)) - used
            found.taken[launcher].append(used / given.rest)
        return True

    _in_turn(launchers, given.repeat, one)
    return [found]


def _in_turn(launchers: list[str], rounds: int, one: Callable[[str], bool]) -> None:
    """Whoever says that it did not come through is not tried again."""
    here = list(launchers)
    for _ in range(rounds):
        here = [launcher for launcher in here if one(launcher)]


PARTS = {part.__name__: part for part in (restart, start, join, loss, rest)}


def measured(given: argparse.Namespace) -> Iterable[Row]:
    launchers = [name for name in LAUNCHERS if given.spawn or "spawn" not in name]
    for name in given.parts.split(","):
        for found in PARTS[name](launchers, given):
            yield from found.rows()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="any of these, with commas")
    parser.add_argument("--spawn", action="store_true", help="elasticrun with cold workers as well")
    parser.add_argument("--rounds", type=int, default=2, help="jobs whose workers are killed")
    parser.add_argument("--kills", type=int, default=10, help="of each such job")
    parser.add_argument("--repeat", type=int, default=3, help="starts, joins, losses and rests")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds")
    given = parser.parse_args()
    tell(given, measured(given))


if __name__ == "__main__":
    main()
