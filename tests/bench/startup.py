"""How long the command lines take to answer `--help`, as whole processes.

    python tests/bench/startup.py [--runs 7]

Each is called once before, so that all read their files from memory. elasticrun takes torchrun's
flags without importing torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from figures import Row, Samples, run

COMMANDS = {"elasticrun": "elasticlib.launch", "torchrun": "torch.distributed.run"}


def once(module: str) -> float:
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", module, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    return time.monotonic() - began


def measure(*, runs: int = 7) -> Iterator[Row]:
    for module in COMMANDS.values():
        once(module)
    ours, torchs = (
        Samples("s", [once(module) for _ in range(runs)]) for module in COMMANDS.values()
    )
    yield Row("help", "`--help`, a whole process", ours, torchs, "torchrun")


if __name__ == "__main__":
    run(measure, __doc__)
