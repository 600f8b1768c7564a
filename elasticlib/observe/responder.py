"""Base class that answers requests which other programs write into the store of a job."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..stores.interface import CancelWatch, Entry, Store, WatchResult
from ..threads import BackgroundQueue
from .node_status import FailureLog

if TYPE_CHECKING:
    from typing_extensions import Self

# A store that replaced another one counts its versions from 0, so an existing request may look old
# to `wait`. The responder therefore lists the requests after this time in any case.
MAX_WAIT_S = 30.0
PAUSE_AFTER_ANSWER_S = 0.05  # bounds the load that many requests can cause
RETRY_INTERVAL_S = 0.5


class StoreResponder(abc.ABC):
    """Answers requests on one node within a `with` block. Failures never affect the job.

    If the store can report changes (`Store.watch`), the thread of the responder exists only while
    there are requests. Otherwise it always exists, and waits for the next change.

    Args:
        name: the name of the thread.
        store: the store of the job.
        prefix: the prefix of the keys of the requests.
        consequence: what does not work after a failure, as a part of the log message.
        poll_interval: seconds between two listings of the requests; 0 to call `Store.wait`. Useful
            for a store whose `wait` polls more often than requests need.
    """

    def __init__(
        self, name: str, store: Store, prefix: str, consequence: str, *, poll_interval: float = 0.0
    ) -> None:
        self._failures = FailureLog(consequence, RETRY_INTERVAL_S)
        self._queue = BackgroundQueue(name, lambda _: None)
        self._store = store
        self._prefix = prefix
        self._poll_interval = poll_interval
        self._cancel_watch: CancelWatch | None = None  # of the last watch, if the store has watches

    @abc.abstractmethod
    def answer_all(self, entries: Iterable[Entry]) -> bool:
        """Answer the requests in `entries`, which has all current requests, that are new.

        Returns:
            True if the requests should be listed again soon, because there was a new one.
        """

    def __enter__(self) -> Self:
        self._queue.call(self._serve)
        return self

    def __exit__(self, *error: object) -> None:
        # A thread that waits for the store ends when the owner of the store closes it.
        self._queue.close(0.0)
        if self._cancel_watch is not None:
            try:
                self._cancel_watch()
            except Exception as error:  # a user's store may raise any exception
                self._failures.log(error)

    def _serve(self) -> None:
        """Answer requests until the store watches for the next one, or the responder is closed."""
        while True:
            try:
                pause = self._poll()
            except Exception as error:
                self._failures.log(error)
                pause = RETRY_INTERVAL_S
            if pause is None or not self._queue.wait_before_retry(pause):
                return

    def _poll(self) -> float | None:
        """Answer all requests, or wait for the next one.

        Returns:
            Seconds until the next poll, or None if the store watches for the next request.
        """
        prefix = self._prefix
        listing = self._store.list(prefix)
        if self.answer_all(listing.entries):
            return PAUSE_AFTER_ANSWER_S
        if self._poll_interval:
            while not self._store.wait(prefix, after=listing.version, timeout=0.0):
                if not self._queue.wait_before_retry(self._poll_interval):
                    break
            return 0.0

        def on_change(_: WatchResult) -> None:
            self._queue.call(self._serve)

        watch = self._store.watch(prefix, after=listing.version, callback=on_change)
        self._cancel_watch = watch
        if watch is not None:
            return None
        self._store.wait(prefix, after=listing.version, timeout=MAX_WAIT_S)
        return 0.0
