"""Signal handling in the worker processes of a DataLoader."""

from __future__ import annotations

import os
import signal
import threading


def ignore_signals_worker_init(worker_id: int) -> None:  # noqa: ARG001 - the loader passes it
    """Ignore SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 in a worker of a DataLoader.

    A scheduler or a terminal signals every process of a job. If the loader's workers exit, the
    loader raises before the training step at which the job would have saved. So give this function
    to the loader as its `worker_init_fn`::

        loader = DataLoader(dataset, num_workers=4, worker_init_fn=ignore_signals_worker_init)

    The training process still receives the signals, saves and exits. The workers exit with their
    loader, or within seconds if the training process is killed. SIGTERM from the training process
    itself still ends them, because Python sends it when it exits. If you have a `worker_init_fn` of
    your own, call this function in it.

    The function is for forked workers: on Linux with Python before 3.14, or with
    `multiprocessing_context="fork"`. A spawned worker exits on SIGTERM.

    Args:
        worker_id: number of the worker, which is not used.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A Python signal handler does not know the sender. If every SIGTERM were ignored, then at exit
    # multiprocessing would wait forever for the workers of an iterator that still exists.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(
        target=_exit_on_sigterm_from, args=(os.getppid(),), name="sigterm", daemon=True
    ).start()


def _exit_on_sigterm_from(sender: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != sender:
        pass
    os._exit(0)
