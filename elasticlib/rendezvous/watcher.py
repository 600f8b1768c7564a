"""Waits for a store to change, and tells of it; it does nothing else.

Where a store has only `wait` to offer, or watching it fails, that takes a thread of its own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..errors import StoreError
from ..stores.interface import Listing, Store, Watched
from ..threads import helper
from .backoff import backoff

log = logging.getLogger("elasticlib.rendezvous")


class Watcher:
    """Calls `changed` once for each time that it was armed, from another thread; perhaps with
    what is there now.

    A thread of its own ends with the wait that it is in, or when the store is closed; nobody need
    wait for that. patience: seconds that one call on the store may take.
    """

    def __init__(
        self, store: Store, patience: float, changed: Callable[[Listing | None], None]
    ) -> None:
        self._store = store
        self._patience = patience
        self._changed = changed
        self._stopping = threading.Event()
        self._fences: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._thread = helper(self._watch, "rendezvous-watch")
        self._failures = 0

    def arm(self, prefix: str, version: int, *, listing: bool) -> None:
        """Tell once when something under the prefix has changed since that version; with a
        listing of it, if one is wanted and to be had.

        To be called from one thread. Raises StoreError.
        """
        if not self._failures and self._store.watch(
            prefix, after=version, changed=self._told, listing=listing
        ):
            return
        self._fences.put((prefix, version))
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._fences.put(None)

    def _told(self, watched: Watched) -> None:
        if watched is False:
            # Who armed us meets the same failure at its next call; where only watching fails,
            # the thread sees to it that nobody tries too often.
            self._failures += 1
        self._changed(watched if isinstance(watched, Listing) else None)

    def _watch(self) -> None:
        while (fence := self._fences.get()) is not None:
            prefix, version = fence
            try:
                while not self._stopping.is_set() and not self._store.wait(
                    prefix, after=version, timeout=self._patience
                ):
                    continue
                self._failures = 0
            except StoreError as error:
                # It is a poll from now on, and no faster than others' tries.
                self._failures += 1
                level = logging.WARNING if self._failures == 3 else logging.DEBUG
                log.log(level, "waiting: %s", error)
                self._stopping.wait(backoff(self._failures))
            self._changed(None)
