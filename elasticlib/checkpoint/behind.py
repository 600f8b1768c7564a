"""One thing at a time, done behind the training step; what fails is raised at the next call.

A process that ends waits for it: the thread is no daemon. A fork of the process has nothing to
do with it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger("elasticlib.checkpoint")


class Behind:
    """Runs one task at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._owner = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this is a fork of the process that it belongs to."""
        return os.getpid() != self._owner

    def start(self, task: Callable[[], None]) -> None:
        """Begin a task; the one before it is over, and its failure was raised."""
        self._thread = threading.Thread(target=self._run, args=(task,), name="elasticlib-save")
        self._thread.start()

    def settle(self) -> None:
        """Wait until nothing is under way; a failure is kept for `wait`."""
        thread = self._thread
        if thread is not None and not self.foreign:
            thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until nothing is under way. Raises what has failed since the last time, once."""
        self.settle()
        error, self._error = self._error, None
        if error is not None and not self.foreign:
            raise error

    def last_words(self) -> None:
        """Wait, and log a failure that nobody has asked for: there will be no next call."""
        try:
            self.wait()
        except BaseException as error:
            log.error("a checkpoint was not saved: %s", error)

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            self._error = error
