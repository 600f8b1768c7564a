"""Watches of key ranges, each a thread that reads an endless answer of etcd's.

A watch remembers one number, the revision of the newest change in its range since its start: so
whoever asks later than the change still hears of it, and nobody who waits holds up another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from ..errors import StoreError, StoreRefused, StoreUnavailable
from ..threads import helper
from .etcd_connection import NoSuchRevision, Request, Stream
from .etcd_gateway import Gateway

MOST_WATCHES = 8
"""Kept open for a next wait; each is a connection and a thread."""

END_SECONDS = 1.0
"""To wait for a watch's thread when closing; one that still connects ends by itself later."""


class Watch:
    """The changes of one range from revision `start` on."""

    def __init__(self, gateway: Gateway, span: Mapping[str, Any], start: int) -> None:
        self.start = start
        self.waiting = 0
        self._gateway = gateway
        body = {"create_request": {**span, "start_revision": start}}
        self._request = Request("watch", body, "watch", repeatable=True)
        self._state = threading.Condition()
        self._newest = 0
        self._ended: StoreError | None = None
        self._stream: Stream | None = None
        self._thread = helper(self._run, "etcd-watch")
        self._thread.start()

    @property
    def ended(self) -> StoreError | None:
        """Why it sees nothing any more."""
        return self._ended

    def changed(self, after: int, timeout: float) -> bool:
        """Whether a change past `after` was seen, by `timeout` or until the watch ended."""
        with self._state:
            self._state.wait_for(lambda: self._newest > after or self._ended is not None, timeout)
            return self._newest > after

    def end(self, error: StoreError) -> None:
        """See nothing any more; whoever waits wakes."""
        with self._state:
            if self._ended is None:
                self._ended = error
            self._state.notify_all()
            stream = self._stream
        if stream is not None:
            stream.shut()

    def join(self) -> None:
        """Wait for its thread, if not for long."""
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._gateway.stream(self._request)) as stream:
                with self._state:
                    self._stream = stream
                    over = self._ended is not None
                if not over:
                    for message in stream.messages():
                        self._hear(message)
        except StoreError as error:
            self.end(error)
        finally:
            # A watch that hears nothing is never taken for a quiet one.
            self.end(StoreUnavailable("the watch failed"))

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message.get("canceled"):
            if "compact_revision" in message:
                raise NoSuchRevision(f"the changes from revision {self.start} on are compacted")
            raise StoreRefused(f"etcd would not watch: {message.get('cancel_reason', 'no reason')}")
        newest = max((int(e["kv"]["mod_revision"]) for e in message.get("events", ())), default=0)
        if newest:
            with self._state:
                self._newest = max(newest, self._newest)
                self._state.notify_all()


class Watches:
    """The watches of one store, at most one a range."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._state = threading.Lock()
        self._watches: dict[str, Watch] = {}
        self._closed: StoreError | None = None

    def enter(self, span: Mapping[str, Any], start: int) -> Watch:
        """A watch of the range that sees all from `start` on; to be left again."""
        with self._state:
            if self._closed is not None:
                raise StoreUnavailable(str(self._closed))
            watch = self._watches.pop(span["key"], None)
            if watch is not None and (watch.ended is not None or watch.start > start):
                watch.end(StoreUnavailable("another watch took its place"))
                watch = None
            if watch is None:
                self._end_idle()
                watch = Watch(self._gateway, span, start)
            # The last place is that of the one used last.
            self._watches[span["key"]] = watch
            watch.waiting += 1
            return watch

    def leave(self, watch: Watch) -> None:
        with self._state:
            watch.waiting -= 1

    def close(self, error: StoreError) -> None:
        """End all of them with the error, and take no more."""
        with self._state:
            self._closed = error
            watches = list(self._watches.values())
            self._watches.clear()
        for watch in watches:
            watch.end(error)
        for watch in watches:
            watch.join()

    def _end_idle(self) -> None:
        idle = [key for key, watch in self._watches.items() if not watch.waiting]
        for key in idle[: max(len(self._watches) - MOST_WATCHES + 1, 0)]:
            self._watches.pop(key).end(StoreUnavailable("the watch was not used"))
