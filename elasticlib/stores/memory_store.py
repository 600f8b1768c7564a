"""A store inside one process: the contract in the fewest lines, also the simulator's.

It has no thread: every operation first ends the leases that its clock says are over, and with
`timeout=0` even `wait` never blocks, so an injected clock drives all of it.
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
class Shared:
    """What the clients of one store share: a keyspace, used by the thread that holds `lock`."""

    clock: Clock
    space: KeySpace
    pid: int = attrs.field(factory=os.getpid)  # the one process that has the keyspace
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    owners: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    changed: threading.Condition = attrs.field()

    @changed.default
    def _at_the_lock(self) -> threading.Condition:
        return threading.Condition(self.lock)  # a condition's own lock is slower to take


class MemoryStore(Store):
    """A store in this process, and in no child of it; `client()` gives further clients of it.

    Args:
        clock: seconds, for leases and for the timeout of `wait`.
        limits: how much it holds; `StoreRejectedError` beyond.
    """

    def __init__(self, clock: Clock = monotonic, *, limits: KeySpaceLimits | None = None) -> None:
        self._attach(Shared(clock, KeySpace(limits)))

    def _attach(self, shared: Shared) -> None:
        self._shared = shared
        self._owner = next(shared.owners)
        self._closed = False

    def client(self) -> MemoryStore:
        """Another client of the same store, with leases of its own."""
        other = MemoryStore.__new__(type(self))
        other._attach(self._shared)
        return other

    def get(self, key: str) -> Entry | None:
        with self._turn() as space:
            return space.get(check_key(key))

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        with self._turn() as space:
            return space.put(key, bytes(value), self._lease(ttl), self._shared.clock())

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        with self._turn() as space:
            now, lease = self._shared.clock(), self._lease(ttl)
            return space.compare_set(check_key(key), bytes(value), expected, lease, now)

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        with self._turn() as space:
            return space.delete(check_key(key), expected)

    def refresh(self, key: str, version: int) -> None:
        with self._turn() as space:
            space.refresh(check_key(key), version, self._owner, self._shared.clock())

    def list(self, prefix: str) -> Listing:
        with self._turn() as space:
            return space.list(prefix)

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        shared = self._shared
        deadline = shared.clock() + timeout
        with self._turn() as space:
            while not space.has_changed(prefix, after):
                left = deadline - shared.clock()
                if left <= 0:
                    return False
                look = space.lease_timers.until_due(shared.clock())
                # Releases the lock; other clients change the space meanwhile.
                shared.changed.wait(min(left, threading.TIMEOUT_MAX if look is None else look))
                self._begin()
        return True

    def close(self) -> None:
        if self._shared.pid != os.getpid():
            return
        with self._shared.lock:
            self._closed = True
            self._shared.space.remove_owner(self._owner)
            self._shared.changed.notify_all()

    def _lease(self, ttl: float | None) -> Lease | None:
        ttl = check_ttl(ttl)
        return None if ttl is None else Lease(self._owner, float(ttl))

    def _begin(self) -> None:
        """Refuse if the store is closed; else end the leases that are over."""
        shared = self._shared
        if self._closed:
            raise StoreConnectionError("this store is closed")
        version = shared.space.version
        shared.space.expire_leases(shared.clock())
        if shared.space.version != version:
            shared.changed.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[KeySpace]:
        """The keyspace, without ended leases, for this thread alone; wakes waiters on a change."""
        shared = self._shared
        if shared.pid != os.getpid():
            # What the child has is a copy that no other process sees.
            raise StoreConnectionError(
                "a MemoryStore is in the process that made it, and this is a forked child of that"
            )
        with shared.lock:
            self._begin()
            version = shared.space.version
            yield shared.space
            if shared.space.version != version:
                shared.changed.notify_all()
