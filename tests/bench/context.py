"""What the context costs a training step: the time of a call when nothing is asked.

    python tests/bench/context.py [--calls 100000] [--repeat 7]

Beside it what scripts do without one: an all-reduce of a flag over gloo, of one rank alone, which
has nobody to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from figures import Row, Samples, run

from elasticlib.workers.context import WorkerContext
from elasticlib.workers.worker_channel import WorkerChannel


def rounds(call: Callable[[], object], calls: int, repeat: int) -> Samples:
    """Of so many rounds, the time of one call."""
    taken = []
    for _ in range(repeat):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - began) / calls)
    return Samples("s", taken)


def reduced(calls: int, repeat: int) -> Samples:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    flag = torch.zeros(1)
    found = rounds(lambda: dist.all_reduce(flag), calls, repeat)
    dist.destroy_process_group()
    return found


def measure(*, calls: int = 100_000, repeat: int = 7) -> Iterator[Row]:
    context = WorkerContext(WorkerChannel(WorkerChannel.create().path))
    asked = rounds(context.should_stop, calls, repeat)
    flag = reduced(max(1, calls // 100), repeat)
    yield Row("should_stop", "`context().should_stop()`", asked, flag, "all_reduce of a flag")
    told = rounds(lambda: context.step(1), calls, repeat)
    yield Row("step", "`context().step(n)`", told)
    more = rounds(lambda: context.step(1, loss=0.5, samples=32), calls, repeat)
    yield Row("step_with", "`context().step(n, loss=..., samples=...)`", more)


if __name__ == "__main__":
    run(measure, __doc__)
