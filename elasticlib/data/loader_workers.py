"""What the worker processes of a DataLoader do about signals that are not meant for them.

A scheduler or a terminal signals every process of a job, and a loader without its workers raises
before the training step at which the job would have saved; so they leave the answer to the
process that they load for, and end when it says so.
"""

from __future__ import annotations

import os
import signal
import threading


def ignore_signals_worker_init(worker_id: int) -> None:  # noqa: ARG001 - torch gives it
    """A `worker_init_fn`: SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 do not end this loader's workers.

    ::

        loader = DataLoader(dataset, num_workers=4, worker_init_fn=ignore_signals_worker_init)

    The training process hears them, saves and ends as it would without the loader; workers end
    with their loader, and within seconds of a training process that was killed. SIGTERM from the
    training process itself ends them at once: it is how Python ends them at exit, and waits.
    If you have a `worker_init_fn` of your own, call this one in it. It is for workers that are
    forked from the training process, as they are on Linux before Python 3.14, and with
    `multiprocessing_context="fork"`; one that is spawned is ended by SIGTERM.

    Args:
        worker_id: the worker's number in its loader; not used.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A handler in Python is not told who sent a signal, and ignoring SIGTERM from all would leave
    # multiprocessing waiting for ever, at exit, for workers of an iterator that is still held.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    arguments = (os.getppid(),)
    threading.Thread(target=_end_when_told, args=arguments, name="sigterm", daemon=True).start()


def _end_when_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
