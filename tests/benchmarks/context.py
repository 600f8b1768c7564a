"""What the context costs a training step: microseconds a call when nothing is asked.

    python tests/benchmarks/context.py [--calls 100000] [--repeat 7]

Beside it what scripts do without one: an all-reduce of a flag over gloo, of one rank alone, which
has nobody to wait for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from elasticlib import Context
from elasticlib.workers.channel import Channel


def microseconds(call: Callable[[], object], calls: int, repeat: int) -> float:
    """The median of several rounds, for one call."""
    taken = []
    for _ in range(repeat):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "channel")
        Channel(path, create=True).close()
        context = Context(Channel(path))
        for name, call in (
            ("should_stop()", context.should_stop),
            ("step(n)", lambda: context.step(1)),
            ("step(n, loss, samples)", lambda: context.step(1, loss=0.5, samples=32)),
        ):
            print(f"{name:24} {microseconds(call, args.calls, args.repeat):8.2f} us")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    flag = torch.zeros(1)
    reduced = microseconds(lambda: dist.all_reduce(flag), max(1, args.calls // 100), args.repeat)
    print(f"{'all_reduce(flag)':24} {reduced:8.2f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
