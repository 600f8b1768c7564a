"""Reports changes under one prefix of a store, by `Store.watch` or by a thread that waits.

A StoreWatcher has at most one watch at a time, and cancels it before it begins another one. So the
number of watches does not grow with the number of generations. Every exception of a store counts as
a failed watch: after a pause, a thread waits for the next change instead.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from functools import partial

from ..errors import format_error
from ..stores.interface import CancelWatch, Listing, Store, WatchResult
from ..threads import daemon_thread

log = logging.getLogger("elasticlib.rendezvous")

# Shorter than a last call, so that nodes which remember a job return before others start a new run.
MAX_BACKOFF_S = 0.5
WAIT_TIMEOUT_S = 1.0  # of one `Store.wait`: a cancelled watch keeps its thread for so long
# After this many failed watches in a row, a warning is logged.
FAILED_WATCHES_BEFORE_WARNING = 3


def backoff(failures: int) -> float:
    """Return a random pause in seconds after this many failures in a row."""
    return min(MAX_BACKOFF_S, 0.02 * 2.0 ** min(failures, 10)) * random.uniform(0.5, 1.0)


class _Watch:
    """One watch. It ends with a change, with a failure, or when it is cancelled."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.is_cancelled = threading.Event()
        self.cancel_in_store: CancelWatch | None = None  # None: a thread waits


class StoreWatcher:
    """Watches one prefix after another. One thread calls the methods.

    Args:
        store: The store.
        on_change: Called in any thread when `take_change` would return a change.
    """

    def __init__(self, store: Store, on_change: Callable[[], None]) -> None:
        self._store = store
        self._on_change = on_change
        self._lock = threading.Lock()  # guards the next two fields
        self._watch: _Watch | None = None  # the current watch; None after its end
        self._result: WatchResult | None = None  # of the last watch, until it is taken
        self._failures = 0  # failed watches in a row

    def watch(self, prefix: str, *, after: int, with_listing: bool) -> None:
        """Watch for changes of a prefix since a version, unless this is being done already."""
        if self._watch is not None and self._watch.prefix == prefix:
            return
        self.cancel()
        watch = self._watch = _Watch(prefix)
        if not self._failures:
            try:
                watch.cancel_in_store = self._store.watch(
                    prefix,
                    after=after,
                    callback=partial(self._end, watch),
                    with_listing=with_listing,
                )
            except Exception as error:  # a user's store may raise any exception
                self._note_failure(error)
        if watch.cancel_in_store is None:
            daemon_thread(
                partial(self._wait, watch, after),
                "rendezvous-watch",
                lambda _: self._end(watch, False),
            ).start()

    @property
    def has_change(self) -> bool:
        """True if `take_change` would return a change."""
        return self._result is not None

    def take_change(self) -> WatchResult | None:
        """Return the new listing, or True, if there was a change since the last call; else None."""
        with self._lock:
            result, self._result = self._result, None
            return result

    def cancel(self) -> None:
        """End the current watch. A change that is not taken yet is forgotten."""
        with self._lock:
            watch, self._watch, self._result = self._watch, None, None
        if watch is None:
            return
        watch.is_cancelled.set()
        if watch.cancel_in_store is not None:
            try:
                watch.cancel_in_store()
            except Exception as error:  # a user's store may raise any exception
                log.debug("cannot cancel a watch in the store: %s", format_error(error))

    def _end(self, watch: _Watch, result: WatchResult) -> None:
        """Take note of the result of a watch, in any thread."""
        with self._lock:
            if watch is not self._watch:
                return  # It was cancelled.
            if result is False:
                # Watching failed. The next watch uses a thread, which limits the rate of attempts.
                self._failures += 1
            self._result = result if isinstance(result, Listing) else True
            self._watch = None
        self._on_change()

    def _wait(self, watch: _Watch, after: int) -> None:
        has_changed = False
        try:
            while not has_changed and not watch.is_cancelled.is_set():
                has_changed = self._store.wait(watch.prefix, after=after, timeout=WAIT_TIMEOUT_S)
            self._failures = 0
        except Exception as error:  # a user's store may raise any exception
            if watch.is_cancelled.is_set():
                return
            self._note_failure(error)
            watch.is_cancelled.wait(backoff(self._failures))
        self._end(watch, True)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        is_new = self._failures == FAILED_WATCHES_BEFORE_WARNING
        log.log(
            logging.WARNING if is_new else logging.DEBUG,
            "cannot wait for changes in the store, retrying: %s",
            format_error(error),
        )
