"""What checkpoints and recoveries cost where workers compute on a GPU.

    python tests/gpu/bench.py [--parts stall,recovery] [--mib 4096] [--kills 5] [--out FILE]

- stall: how long a step waits for `save`, beside a copy of the same bytes into page-locked memory.
- recovery: one of two gloo workers, each with a CUDA context, is killed, until both ranks of the
  next generation have reduced a tensor of the GPU; beside torchrun.

The figures are written with the device's name. `--device cpu` shows that it runs, and no more.
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
from figures import HEAD, Found, Row, Samples, cells, in_markdown, to_plain  # noqa: E402
from launched import job  # noqa: E402

WORKER = str(HERE / "worker.py")


def stall(given: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        found = checkpointing.stall(given.device, Path(folder), given.mib)
    mine, link = (Samples("s", found[name]) for name in ("save", "link"))
    yield Row("stall", f"{given.mib} MiB: a step waits for `save`", mine, link, "a copy")


def recovery(given: argparse.Namespace) -> Iterator[Row]:
    taken: dict[str, list[float]] = {"elasticrun": [], "torchrun": []}
    for launcher, found in taken.items():
        with job(launcher) as running:
            flags = ("--standalone", "--nproc-per-node=2", f"--max-restarts={given.kills}")
            running.start(*flags, program=WORKER, args=(given.device, "gloo"))
            places = running.up(2)
            for _ in range(given.kills):
                began = time.monotonic()
                os.kill(places[-1]["pid"], signal.SIGKILL)
                places = running.up(2)
                found.append(time.monotonic() - began)
    both = [Samples("s", values) for values in taken.values()]
    yield Row("recovery", "kill of a worker to the next group of 2", *both, "torchrun")


PARTS = {part.__name__: part for part in (stall, recovery)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="any of these, with commas")
    parser.add_argument("--mib", type=int, default=4096, help="of state")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write all samples there as well, as JSON")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("Nothing was measured: torch sees no CUDA device here.")
        return
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    rows = [row for part in given.parts.split(",") for row in PARTS[part](given)]
    print(f"{name}, torch {torch.__version__}\n{in_markdown(HEAD, map(cells, rows))}")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        kept = {"device": name, "torch": torch.__version__, **to_plain(Found(rows))}
        given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
