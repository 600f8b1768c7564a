"""Loader workers under real signals: they outlive what all are sent, and obey their own process."""

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

    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: heard.append(number))

    def say(*words):
        print(*words, flush=True)
        return sys.stdin.readline()

    held = iter(DataLoader(range(400), num_workers=2, worker_init_fn=ignore_signals_worker_init))
    # One of each worker: a signal may come before it has begun, and nothing can keep that off.
    next(held), next(held)
    say(*(worker.pid for worker in held._workers))
"""
LOADS_ON = TRAINING + "    say(len(heard), 2 + sum(1 for _ in held))"
RAISES = TRAINING + "    raise ValueError('a broken step, while the iterator is held')"


@contextmanager
def training(folder: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that trains, in a group of its own, and the pids of its loader's workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # In which multiprocessing's sockets stay behind with workers that had to be ended.
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
    with training(tmp_path, LOADS_ON) as (process, workers):
        assert len(workers) == 2
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, number)
        out, err = process.communicate("\n\n", timeout=100)
    # The interpreter acts on the signals that are pending before it reads the line.
    assert (out.split(), process.returncode) == (["4", "400"], 0), err


def test_a_training_process_that_raises_while_it_iterates_exits(tmp_path: Path) -> None:
    with training(tmp_path, RAISES) as (process, workers):
        ended = [os.pidfd_open(pid) for pid in workers]
        _, err = process.communicate("\n", timeout=100)
        assert process.returncode == 1
        assert "a broken step" in err
        for descriptor in ended:
            assert select.select([descriptor], [], [], 10)[0]
            os.close(descriptor)
