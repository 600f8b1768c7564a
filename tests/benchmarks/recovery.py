"""From the death of a worker to a working process group, beside torchrun on the same work.

    python tests/benchmarks/recovery.py [--rounds 4] [--kills 5]

Two gloo workers on one node; one is killed with SIGKILL, and the time is taken until both ranks of
the next attempt have finished an all_reduce; likewise from the start of the launcher to the first
group. The launchers take turns, so that all meet the same machine, each for a few kills of one
job. torchrun runs in the mode that works, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: in its default one,
restarted workers read the addresses of the attempt before. What fails to come back is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORKER = Path(__file__).parent.parent / "programs" / "allreduce.py"
LAUNCHERS = {
    "elasticrun": ("elasticlib.launch",),
    "  spawn": ("elasticlib.launch", "--start-method=spawn"),
    "torchrun": ("torch.distributed.run",),
}
QUIET = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
BOUND = 60.0


class Job:
    """A running job of two workers, whose groups can be waited for."""

    def __init__(self, launcher: str, folder: Path, kills: int) -> None:
        module, *own = LAUNCHERS[launcher]
        flags = [*own, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills)]
        self.folder = folder
        self.attempt = 0
        self.log = (folder / "log").open("wb")
        self.agent = subprocess.Popen(
            [sys.executable, "-m", module, *flags, str(WORKER), str(folder)],
            env={**os.environ, **QUIET},
            stdout=self.log,
            stderr=self.log,
        )

    def up(self) -> list[int]:
        """Waits for both ranks of this attempt; their pids."""
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            places = [json.loads(p.read_text()) for p in self.folder.glob("place.*.json")]
            here = [p for p in places if p["TORCHELASTIC_RESTART_COUNT"] == str(self.attempt)]
            if len(here) == 2:
                return [place["pid"] for place in here]
            time.sleep(0.002)
        raise TimeoutError(f"no group within {BOUND:g} s: {(self.folder / 'log').read_text()}")

    def kill_one(self) -> float:
        """Kill a worker; seconds until the next group works."""
        victim = max(self.up())
        self.attempt += 1
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.up()
        return time.monotonic() - began

    def end(self) -> None:
        (self.folder / "finish").touch()
        try:
            self.agent.wait(BOUND)
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()
        self.log.close()


@contextmanager
def job(launcher: str, kills: int) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        running = Job(launcher, Path(folder), kills)
        try:
            yield running
        finally:
            running.end()


def measure(launcher: str, kills: int, starts: list[float], restarts: list[float]) -> int:
    """One job of so many kills; returns how many of them were not recovered from."""
    began = time.monotonic()
    with job(launcher, kills) as running:
        running.up()
        starts.append(time.monotonic() - began)
        for kill in range(kills):
            try:
                restarts.append(running.kill_one())
            except TimeoutError:
                return kills - kill
    return 0


def tell(what: str, times: dict[str, list[float]], failed: dict[str, int]) -> None:
    print(f"{what:26} {'median':>8} {'p99':>8} {'worst':>8} {'failed':>8}")
    for launcher, taken in times.items():
        p99 = statistics.quantiles(taken, n=100)[98] if len(taken) > 1 else taken[0]
        row = (statistics.median(taken), min(p99, max(taken)), max(taken))
        print(f"  {launcher:24} " + " ".join(f"{x:8.3f}" for x in row), f"{failed[launcher]:8}")
    middle = {launcher: statistics.median(taken) for launcher, taken in times.items()}
    print(f"  elasticrun / torchrun, medians: {middle['elasticrun'] / middle['torchrun']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    given = parser.parse_args()
    starts: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
    restarts: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
    failed = dict.fromkeys(LAUNCHERS, 0)
    for _ in range(given.rounds):
        for name in LAUNCHERS:
            failed[name] += measure(name, given.kills, starts[name], restarts[name])
    tell("seconds to the first group", starts, dict.fromkeys(LAUNCHERS, 0))
    tell("seconds from kill to group", restarts, failed)


if __name__ == "__main__":
    main()
