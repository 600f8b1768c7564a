"""Processes that exit during or after a save, each in another way.

Usage: save_and_exit.py FOLDER. Each process is a fork of this one. It saves to the directory with
the name of its function, and writes its standard error to a log file next to that directory.
"""

from __future__ import annotations

import atexit
import errno
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import LocalStorage


class SlowDisk(LocalStorage):
    def write(self, name: str, data: memoryview) -> int:
        time.sleep(0.2)
        return super().write(name, data)


class FullDisk(LocalStorage):
    def write(self, _name: str, _data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, {"w": torch.full((1000,), float(step))})


def first_save_at_exit(folder: Path) -> None:
    atexit.register(save, CheckpointManager(SlowDisk(folder)), 1)


def save_at_exit_after_another(folder: Path) -> None:
    manager = CheckpointManager(SlowDisk(folder))
    atexit.register(save, manager, 2)
    save(manager, 1)


def failing_save_at_exit(folder: Path) -> None:
    atexit.register(save, CheckpointManager(FullDisk(folder)), 1)


def save_in_a_thread_that_outlives_the_main_thread(folder: Path) -> None:
    def run() -> None:
        threading.main_thread().join()
        save(CheckpointManager(SlowDisk(folder)), 1)

    threading.Thread(target=run).start()


def exit_after_a_save(folder: Path) -> None:
    save(CheckpointManager(SlowDisk(folder)), 1)
    sys.exit()


def interrupt_after_a_save(folder: Path) -> None:
    save(CheckpointManager(SlowDisk(folder)), 1)
    signal.raise_signal(signal.SIGINT)


def interrupt_of_a_save_that_waits(folder: Path) -> None:
    manager = CheckpointManager(SlowDisk(folder))
    save(manager, 1)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    save(manager, 2)


def exit_of_a_process_of_multiprocessing(folder: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=exit_after_a_save, args=(folder,))
    process.start()
    process.join()


WAYS: list[Callable[[Path], None]] = [
    first_save_at_exit,
    save_at_exit_after_another,
    failing_save_at_exit,
    save_in_a_thread_that_outlives_the_main_thread,
    exit_after_a_save,
    interrupt_after_a_save,
    interrupt_of_a_save_that_waits,
    exit_of_a_process_of_multiprocessing,
]


def main() -> None:
    folder, pids = Path(sys.argv[1]), list[int]()
    gc.freeze()  # Without garbage collection of these objects, a fork exits several times faster.
    for way in WAYS:
        if not (pid := os.fork()):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            sys.stderr.flush()
            os.dup2(os.open(folder / f"{way.__name__}.log", os.O_WRONLY | os.O_CREAT), 2)
            return way(folder / way.__name__)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    main()
