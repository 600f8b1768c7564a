"""Signals in the worker processes of a DataLoader."""

from __future__ import annotations

import os
import signal
import threading


def ignore_signals_worker_init(worker_id: int) -> None:  # noqa: ARG001 - torch gives it
    """Keep SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 from ending a loader's worker.

    A scheduler or a terminal signals every process of a job, and a loader without its workers
    raises before the training step at which the job would have saved. Give this function to the
    loader as its `worker_init_fn`::

        loader = DataLoader(dataset, num_workers=4, worker_init_fn=ignore_signals_worker_init)

    The training process gets the signals, saves and ends as usual. The workers end with their
    loader, or within seconds if the training process is killed. SIGTERM from the training process
    itself ends them at once, because Python ends them so at exit, and waits for them. If you have a
    `worker_init_fn` of your own, call this one in it. It is for workers that are forked, as they
    are on Linux before Python 3.14, and with `multiprocessing_context="fork"`; one that is spawned
    is ended by SIGTERM.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A handler in Python does not learn a signal's sender; ignoring SIGTERM from all would leave
    # multiprocessing waiting forever, at exit, for workers of an iterator that is still held.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = (os.getppid(),)
    threading.Thread(target=_await_sigterm, args=parent, name="sigterm", daemon=True).start()


def _await_sigterm(sender: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != sender:
        pass
    os._exit(0)
