"""Recovery under Lightning, transformers and accelerate: time from a kill to the next step.

    python tests/bench/frameworks.py [--frameworks lightning,transformers,accelerate]
        [--repeat 3]

Each framework runs its example of docs/frameworks.md with two workers. The worker of rank 1 is
killed with SIGKILL in the middle of an epoch. The time ends when a rank starts its first step after
that. elasticrun starts workers in three ways, which take turns:

- `--preload`: workers are forked from a process that has imported the framework.
- without `--preload`: workers are forked from a process that has imported torch.
- `--start-method spawn`: each worker is a new interpreter, as under torchrun. The other two are
  compared with this one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from results import Row, Samples, run_command_line

TESTS = Path(__file__).parent.parent
sys.path += [str(TESTS), str(TESTS / "integrations")]

from framework_jobs import PRELOAD, FrameworkJob  # noqa: E402
from jobs import Job  # noqa: E402

from elasticlib.testing.waiting import wait_until  # noqa: E402

KILL_STEP = 12  # in the middle of the second epoch
SPAWN = "--start-method spawn"
FORK_METHODS = {"preload": "`--preload`", "torch": "without `--preload`"}


def start_flags(name: str, method: str) -> tuple[str, ...]:
    """Return the options of elasticrun for one way to start workers."""
    if method == "preload":
        return ("--preload", PRELOAD[name])
    return tuple(SPAWN.split()) if method == SPAWN else ()


def time_recovery(name: str, method: str) -> float:
    """Return the seconds from the kill to the first step of the next generation."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory))
        try:
            training = FrameworkJob(job, name)
            training.start_flags = start_flags(name, method)
            node = training.start_single("node", "--max-restarts", "1", kills=str(KILL_STEP))

            def first_step_at() -> float:
                lines = training.read_lines()
                if any(line["generation"] == 2 and "step" in line for line in lines):
                    return time.monotonic()
                assert node.process.poll() is None, node.text
                return 0.0

            resumed_at = wait_until(f"{name} to train again", first_step_at, 120.0)
            assert node.exit_code() == 0, node.text
            return resumed_at - float(Path(f"{training.hold}.killed").read_text())
        finally:
            job.close()


def measure(*, frameworks: str = ",".join(PRELOAD), repeat: int = 3) -> Iterator[Row | str]:
    """Measure the frameworks, and yield their rows and versions.

    Args:
        frameworks: The frameworks to measure, separated by commas.
        repeat: The number of samples.
    """
    for name in frameworks.split(","):
        values: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeat):
            for method in (*FORK_METHODS, SPAWN):
                values[method].append(time_recovery(name, method))
        spawn = Samples("s", values[SPAWN])
        for method, label in FORK_METHODS.items():
            samples = Samples("s", values[method])
            yield Row(f"{name}.{method}", f"{name}, {label}", samples, spawn, f"`{SPAWN}`")
        yield f"The version of {name} is {metadata.version(name)}."


if __name__ == "__main__":
    run_command_line(measure, __doc__)
