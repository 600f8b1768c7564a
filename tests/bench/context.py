"""Time of one call of the worker context in a training step.

    python tests/bench/context.py [--calls 100000] [--repeat 7]

Each sample is the mean time of a call in a loop of `--calls` calls, while the agent requests
nothing. For comparison: scripts that do not use the context exchange a flag with an all-reduce. The
all-reduce here runs over gloo with a single rank, which waits for no other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from results import Row, Samples, run_command_line

from elasticlib.workers.context import WorkerContext
from elasticlib.workers.worker_channel import WorkerChannel


def time_calls(call: Callable[[], object], calls: int, repeat: int) -> Samples:
    """Return the mean seconds of a call, once for each round of calls."""
    values = []
    for _ in range(repeat):
        started_at = time.perf_counter()
        for _ in range(calls):
            call()
        values.append((time.perf_counter() - started_at) / calls)
    return Samples("s", values)


def time_all_reduce(calls: int, repeat: int) -> Samples:
    """Return the seconds of an all-reduce of one number, with one rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    flag = torch.zeros(1)
    samples = time_calls(lambda: dist.all_reduce(flag), calls, repeat)
    dist.destroy_process_group()
    return samples


def measure(*, calls: int = 100_000, repeat: int = 7) -> Iterator[Row]:
    """Measure the calls of the context, and yield their rows.

    Args:
        calls: The number of calls in one sample. An all-reduce is called a hundredth as often.
        repeat: The number of samples.
    """
    context = WorkerContext(WorkerChannel(WorkerChannel.create().path))
    should_stop = time_calls(context.should_stop, calls, repeat)
    flag = time_all_reduce(max(1, calls // 100), repeat)
    text = "`context().should_stop()`"
    yield Row("should_stop", text, should_stop, flag, "all-reduce of a flag")
    step = time_calls(lambda: context.step(1), calls, repeat)
    yield Row("step", "`context().step(n)`", step)
    with_values = time_calls(lambda: context.step(1, loss=0.5, samples=32), calls, repeat)
    yield Row("step_with", "`context().step(n, loss=..., samples=...)`", with_values)


if __name__ == "__main__":
    run_command_line(measure, __doc__)
