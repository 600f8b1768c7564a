"""Cost of checkpoints and recoveries where workers compute on a GPU.

    python tests/gpu/bench.py [--parts stall,recovery] [--mib 4096] [--kills 5] [--out FILE]

- `stall`: how long training waits for `save`, compared with a copy of the same bytes into
  page-locked memory.
- `recovery`: one of two gloo workers, each with a CUDA context, is killed. The time ends when both
  ranks of the next generation have reduced a tensor of the GPU. It is compared with torchrun.

The results contain the name of the device. `--device cpu` only shows that the program runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "bench"), str(HERE)]

import checkpointing  # noqa: E402
import torch  # noqa: E402
from results import (  # noqa: E402
    HEADER,
    Results,
    Row,
    Samples,
    markdown_table,
    results_to_json,
    table_cells,
)
from timed_jobs import open_job  # noqa: E402

WORKER = str(HERE / "worker.py")


def stall(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the time that training waits for a save."""
    with tempfile.TemporaryDirectory() as directory:
        times = checkpointing.stall(options.device, Path(directory), options.mib)
    save, copy = (Samples("s", times[name]) for name in ("save", "copy"))
    yield Row("stall", f"{options.mib} MiB: training waits for `save`", save, copy, "a copy")


def recovery(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the time from the kill of a worker to the next working group."""
    values: dict[str, list[float]] = {"elasticrun": [], "torchrun": []}
    for launcher, of_launcher in values.items():
        with open_job(launcher) as job:
            flags = ("--standalone", "--nproc-per-node=2", f"--max-restarts={options.kills}")
            job.start(*flags, program=WORKER, args=(options.device, "gloo"))
            ranks = job.wait_for_group(2)
            for _ in range(options.kills):
                killed_at = time.monotonic()
                os.kill(ranks[-1]["pid"], signal.SIGKILL)
                ranks = job.wait_for_group(2)
                of_launcher.append(time.monotonic() - killed_at)
    sides = [Samples("s", of_launcher) for of_launcher in values.values()]
    yield Row("recovery", "kill of a worker until the next group of 2 works", *sides, "torchrun")


PARTS = {part.__name__: part for part in (stall, recovery)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--mib", type=int, default=4096, help="size of the state in MiB")
    parser.add_argument("--kills", type=int, default=5, help="number of killed workers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="also write all samples to this JSON file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Nothing was measured: torch sees no CUDA device here.")
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    rows = [row for part in options.parts.split(",") for row in PARTS[part](options)]
    print(f"{name}, torch {torch.__version__}\n{markdown_table(HEADER, map(table_cells, rows))}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        stored = {"device": name, "torch": torch.__version__, **results_to_json(Results(rows))}
        options.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
