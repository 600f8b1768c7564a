"""Waits for a store to change, in a thread of its own, and tells of it; it does nothing else."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..errors import StoreError
from ..stores.interface import Store
from .backoff import backoff

log = logging.getLogger("elasticlib.rendezvous")


class Watcher:
    """Calls `changed` once for each time that it was armed, from its own thread.

    Its thread ends with the wait that it is in, or when the store is closed; nobody need wait for
    that. patience: seconds that one call on the store may take.
    """

    def __init__(self, store: Store, patience: float, changed: Callable[[], None]) -> None:
        self._store = store
        self._patience = patience
        self._changed = changed
        self._stopping = threading.Event()
        self._fences: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="rendezvous-watch", daemon=True)

    def arm(self, prefix: str, version: int) -> None:
        """Tell once when something under the prefix has changed since that version.

        To be called from one thread.
        """
        self._fences.put((prefix, version))
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._fences.put(None)

    def _watch(self) -> None:
        failures = 0
        while (fence := self._fences.get()) is not None:
            prefix, version = fence
            try:
                while not self._stopping.is_set() and not self._store.wait(
                    prefix, after=version, timeout=self._patience
                ):
                    continue
                failures = 0
            except StoreError as error:
                # Who armed it meets the same failure at the next call, and deals with it; where
                # only waiting fails, it is a poll from now on, and no faster than others' tries.
                failures += 1
                log.log(logging.WARNING if failures == 3 else logging.DEBUG, "waiting: %s", error)
                self._stopping.wait(backoff(failures))
            self._changed()
