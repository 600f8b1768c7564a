"""From the kill of a worker to the next step, under Lightning, transformers and accelerate.

    python tests/bench/frameworks.py [--frameworks lightning,transformers,accelerate]
        [--repeat 3]

The examples of docs/frameworks.md, two workers; the one of rank 1 is killed with SIGKILL in the
midst of an epoch, and the time is taken until a rank begins its first step after that. There are
three ways to start workers: forked from a process that has imported the framework (`--preload`),
forked from one that has imported torch, and each in a new interpreter (`--start-method spawn`),
which is beside them, as torchrun has no other. They take turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from figures import Row, Samples, run

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS), str(TESTS / "integrations")]

from framework_jobs import PRELOAD, FrameworkJob  # noqa: E402
from jobs import Job  # noqa: E402

from elasticlib.testing.waiting import wait_until  # noqa: E402

KILLED_AT = 12
"""A step in the midst of the second epoch."""
SPAWN = "--start-method spawn"
WARM = {"preload": "`--preload`", "torch": "without `--preload`"}


def flags_of(name: str, way: str) -> tuple[str, ...]:
    if way == "preload":
        return ("--preload", PRELOAD[name])
    return tuple(SPAWN.split()) if way == SPAWN else ()


def once(name: str, way: str) -> float:
    """Seconds from the kill to the next generation's first step."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        try:
            running = FrameworkJob(job, name)
            running.start_flags = flags_of(name, way)
            node = running.alone("node", "--max-restarts", "1", kills=str(KILLED_AT))

            def trains_again() -> float:
                lines = running.lines()
                if any(line["generation"] == 2 and "step" in line for line in lines):
                    return time.monotonic()
                assert node.process.poll() is None, node.text
                return 0.0

            again = wait_until(f"{name} to train again", trains_again, 120.0)
            assert node.exit_code() == 0, node.text
            return again - float(Path(f"{running.hold}.killed").read_text())
        finally:
            job.close()


def measure(*, frameworks: str = ",".join(PRELOAD), repeat: int = 3) -> Iterator[Row | str]:
    for name in frameworks.split(","):
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeat):
            for way in (*WARM, SPAWN):
                taken[way].append(once(name, way))
        cold = Samples("s", taken[SPAWN])
        for way, said in WARM.items():
            mine = Samples("s", taken[way])
            yield Row(f"{name}.{way}", f"{name}, {said}", mine, cold, SPAWN)
        yield f"{name} {metadata.version(name)}."


if __name__ == "__main__":
    run(measure, __doc__)
