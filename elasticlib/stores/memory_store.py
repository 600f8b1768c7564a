"""A store inside one process. The simulator of the rendezvous uses it too.

It has no thread: each operation first removes the leases that have expired by its clock. With
`timeout=0`, also `wait` never blocks, so an injected clock controls everything.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from ..clock import Clock, monotonic
from ..errors import StoreConnectionError
from .interface import CompareSetResult, Entry, Listing, Store, check_key, check_ttl
from .key_space import KeySpace, KeySpaceLimits, Lease


@attrs.define(eq=False)
class _SharedKeySpace:
    """The state that all clients of one store share. Only the owner of the lock uses it."""

    clock: Clock
    space: KeySpace
    pid: int = attrs.field(factory=os.getpid)  # the process whose memory this is
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    owners: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))  # numbers of clients
    changed: threading.Condition = attrs.field()  # is notified of each change

    @changed.default
    def _condition_of_the_lock(self) -> threading.Condition:
        return threading.Condition(self.lock)


class MemoryStore(Store):
    """A client of a store in the memory of this process. Thread-safe.

    Args:
        clock: Returns the time in seconds, for leases and for the timeout of `wait`.
        limits: The size above which writes raise StoreRejectedError.
    """

    def __init__(self, clock: Clock = monotonic, *, limits: KeySpaceLimits | None = None) -> None:
        self._attach(_SharedKeySpace(clock, KeySpace(limits)))

    def _attach(self, shared: _SharedKeySpace) -> None:
        self._shared = shared
        self._owner = next(shared.owners)  # owner of this client's leases
        self._closed = False

    def client(self) -> MemoryStore:
        """Return another client of the same store, with leases of its own."""
        other = MemoryStore.__new__(type(self))
        other._attach(self._shared)
        return other

    def get(self, key: str) -> Entry | None:
        with self._exclusive() as space:
            return space.get(check_key(key))

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        with self._exclusive() as space:
            return space.put(key, bytes(value), self._make_lease(ttl), self._shared.clock())

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        with self._exclusive() as space:
            now, lease = self._shared.clock(), self._make_lease(ttl)
            return space.compare_set(check_key(key), bytes(value), expected, lease, now)

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        with self._exclusive() as space:
            return space.delete(check_key(key), expected)

    def refresh(self, key: str, version: int) -> None:
        with self._exclusive() as space:
            space.refresh(check_key(key), version, self._owner, self._shared.clock())

    def list(self, prefix: str) -> Listing:
        with self._exclusive() as space:
            return space.list(prefix)

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        shared = self._shared
        deadline = shared.clock() + timeout
        with self._exclusive() as space:
            while not space.has_changed(prefix, after):
                left_s = deadline - shared.clock()
                if left_s <= 0:
                    return False
                tick_s = space.lease_timers.until_due(shared.clock())
                # This releases the lock, so that other clients can change the key space.
                shared.changed.wait(
                    min(left_s, threading.TIMEOUT_MAX if tick_s is None else tick_s)
                )
                self._expire_leases()
        return True

    def close(self) -> None:
        if self._shared.pid != os.getpid():
            return
        with self._shared.lock:
            self._closed = True
            self._shared.space.remove_owner(self._owner)
            self._shared.changed.notify_all()

    def _make_lease(self, ttl: float | None) -> Lease | None:
        ttl = check_ttl(ttl)
        return None if ttl is None else Lease(self._owner, float(ttl))

    def _expire_leases(self) -> None:
        """Expire leases, and wake waits if one has expired. Raise if this client is closed."""
        shared = self._shared
        if self._closed:
            raise StoreConnectionError("this store is closed")
        version = shared.space.version
        shared.space.expire_leases(shared.clock())
        if shared.space.version != version:
            shared.changed.notify_all()

    @contextmanager
    def _exclusive(self) -> Iterator[KeySpace]:
        """Lock the key space and expire leases. At the end, wake waits if there was a change."""
        shared = self._shared
        if shared.pid != os.getpid():
            # No other process sees the copy in a child.
            raise StoreConnectionError(
                "a MemoryStore is in the process that made it, and this is a forked child of that"
            )
        with shared.lock:
            self._expire_leases()
            version = shared.space.version
            yield shared.space
            if shared.space.version != version:
                shared.changed.notify_all()
