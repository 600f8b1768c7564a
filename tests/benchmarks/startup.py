"""How long the command lines take to answer `--help`, as whole processes.

python tests/benchmarks/startup.py [--runs 7]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {"elasticrun": "elasticlib.launch", "torchrun": "torch.distributed.run"}


def once(module: str) -> float:
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", module, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for name, module in COMMANDS.items():
        once(module)
        taken[name] = [once(module) for _ in range(runs)]
    for name, times in taken.items():
        middle = statistics.median(times)
        print(f"{name:12} {middle:.3f} s ({min(times):.3f} to {max(times):.3f}, {runs} runs)")


if __name__ == "__main__":
    main()
