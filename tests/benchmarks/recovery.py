"""From the death of a worker to a working process group, beside torchrun on the same work.

    python tests/benchmarks/recovery.py [--kills 10]

Two gloo workers on one node; one is killed with SIGKILL, and the time is taken until both ranks of
the next attempt have finished an all_reduce. The launchers take turns, so that both meet the same
machine. torchrun runs in the mode that works, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: in its default
one, restarted workers read the addresses of the attempt before.
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
    "elasticrun": ("elasticlib.launch", {}),
    "torchrun": ("torch.distributed.run", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
}
BOUND = 60.0


class Job:
    """A running job of two workers, whose groups can be waited for."""

    def __init__(self, launcher: str, folder: Path, kills: int) -> None:
        module, extra = LAUNCHERS[launcher]
        flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills)]
        self.folder = folder
        self.attempt = 0
        self.log = (folder / "log").open("wb")
        self.agent = subprocess.Popen(
            [sys.executable, "-m", module, *flags, str(WORKER), str(folder)],
            env={**os.environ, **extra},
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    kills = parser.parse_args().kills
    times: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
    for _ in range(kills):
        for launcher, taken in times.items():
            with job(launcher, 1) as running:
                taken.append(running.kill_one())
    print(f"{'launcher':12} {'median':>8} {'min':>8} {'max':>8}   of {kills} kills, in seconds")
    for launcher, taken in times.items():
        middle = statistics.median(taken)
        print(f"{launcher:12} {middle:8.2f} {min(taken):8.2f} {max(taken):8.2f}")
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    print(f"elasticrun / torchrun, median of the pairs: {ratio:.2f}")


if __name__ == "__main__":
    main()
