"""Time of `--help`: how long the command lines take to start and answer.

    python tests/bench/startup.py [--runs 7]

The time is that of a whole process, from its start until its exit. Each command runs once before
the first measurement, so that all of them read their files from memory. elasticrun accepts the
options of torchrun and does not import torch to parse them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from results import Row, Samples, run_command_line

COMMANDS = {"elasticrun": "elasticlib.launch", "torchrun": "torch.distributed.run"}


def time_help(module: str) -> float:
    """Return the seconds that `python -m MODULE --help` takes."""
    started_at = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", module, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    return time.monotonic() - started_at


def measure(*, runs: int = 7) -> Iterator[Row]:
    """Measure both launchers, and yield one row.

    Args:
        runs: The number of samples.
    """
    for module in COMMANDS.values():
        time_help(module)
    elasticrun, torchrun = (
        Samples("s", [time_help(module) for _ in range(runs)]) for module in COMMANDS.values()
    )
    yield Row("help", "`--help`, a whole process", elasticrun, torchrun, "torchrun")


if __name__ == "__main__":
    run_command_line(measure, __doc__)
