"""Loader workers ignore signals to their process group, and exit with the training process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

TRAINING = """
    import os, signal, sys
    from torch.utils.data import DataLoader
    from elasticlib import ignore_signals_worker_init

    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: received.append(number))

    def print_and_wait(*values):
        print(*values, flush=True)
        return sys.stdin.readline()

    batches = iter(DataLoader(range(400), num_workers=2, worker_init_fn=ignore_signals_worker_init))
    # One batch of each worker, because a signal before a worker has started kills the worker.
    next(batches), next(batches)
    print_and_wait(*(worker.pid for worker in batches._workers))
"""
LOADS_ALL = TRAINING + "    print_and_wait(len(received), 2 + sum(1 for _ in batches))"
RAISES = TRAINING + "    raise ValueError('a broken step')"


@contextmanager
def start_training(folder: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a training in its own process group. Yield the process and the pids of its workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # multiprocessing leaves its sockets there if its workers were killed.
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        assert process.stdout
        yield process, [int(pid) for pid in process.stdout.readline().split()]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=100)


def test_signals_to_the_process_group_end_no_loader_worker(
    tmp_path: Path,
) -> None:
    with start_training(tmp_path, LOADS_ALL) as (process, workers):
        assert len(workers) == 2
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, number)
        out, err = process.communicate("\n\n", timeout=100)
    # The interpreter handles all pending signals before it reads the line.
    assert (out.split(), process.returncode) == (["4", "400"], 0), err


def test_a_training_process_that_raises_while_it_iterates_exits(tmp_path: Path) -> None:
    with start_training(tmp_path, RAISES) as (process, workers):
        descriptors = [os.pidfd_open(pid) for pid in workers]
        _, err = process.communicate("\n", timeout=100)
        assert process.returncode == 1
        assert "a broken step" in err
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], 10)[0]
            os.close(descriptor)
