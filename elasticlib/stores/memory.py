"""The contract in the fewest lines: a store inside one process, also the simulator's.

It has no thread: every operation first ends the leases that its clock says are over, and with
`timeout=0` even `wait` never blocks, so an injected clock drives all of it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from ..clock import Clock, monotonic
from ..errors import StoreUnavailable
from .forks import renew_in_children
from .interface import CompareSet, Entry, Listing, Store, check_key, check_ttl
from .state import KeySpace, Lease, Limits


@attrs.frozen(eq=False)
class _Shared:
    clock: Clock
    space: KeySpace
    changed: threading.Condition = attrs.field(factory=threading.Condition)
    owners: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    lost: bool = False


class MemoryStore(Store):
    """A store in this process, and in no child of it; `client()` gives further clients of it.

    Args:
        clock: seconds, for leases and for the timeout of `wait`.
        limits: how much it holds; `StoreRefused` beyond.
    """

    def __init__(self, clock: Clock = monotonic, *, limits: Limits | None = None) -> None:
        self._attach(_Shared(clock, KeySpace(limits)))

    def _attach(self, shared: _Shared) -> None:
        self._shared = shared
        self._owner = next(shared.owners)
        self._closed = False
        renew_in_children(self)

    def begin_anew(self) -> None:
        """What a forked child has is a copy that nobody else sees: it serves nothing there."""
        self._shared = _Shared(self._shared.clock, KeySpace(), lost=True)

    def client(self) -> MemoryStore:
        """Another client of the same store, with leases of its own."""
        other = MemoryStore.__new__(type(self))
        other._attach(self._shared)
        return other

    def expire(self) -> float | None:
        """End the leases that are over by the clock; seconds until the next look is worth it.

        Operations do this by themselves. A simulator calls it when it has moved its clock, in
        steps of less than a quarter of the shortest ttl, so that waiters wake; None means that
        there are no leases.
        """
        with self._turn() as space:
            return space.clock.until_due(self._shared.clock())

    def get(self, key: str) -> Entry | None:
        with self._turn() as space:
            return space.get(check_key(key))

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        with self._turn() as space:
            return space.put(key, bytes(value), self._lease(ttl), self._shared.clock())

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
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
        clock = self._shared.clock
        deadline = clock() + timeout
        with self._turn() as space:
            while not space.changed(prefix, after):
                left = deadline - clock()
                if left <= 0:
                    return False
                look = space.clock.until_due(clock())
                # Releases the lock; other clients change the space meanwhile.
                self._shared.changed.wait(left if look is None else min(left, look))
                self._refuse_when_closed()
                self._expire(space)
        return True

    def close(self) -> None:
        with self._shared.changed:
            self._closed = True
            self._shared.space.end_leases_of(self._owner)
            self._shared.changed.notify_all()

    def _lease(self, ttl: float | None) -> Lease | None:
        return None if check_ttl(ttl) is None else Lease(self._owner, float(ttl or 0))

    def _refuse_when_closed(self) -> None:
        if self._shared.lost:
            raise StoreUnavailable(
                "a MemoryStore is in the process that made it, and this is a forked child of that"
            )
        if self._closed:
            raise StoreUnavailable("this MemoryStore is closed")

    def _expire(self, space: KeySpace) -> None:
        before = space.version
        space.end_silent_leases(self._shared.clock())
        if space.version != before:
            self._shared.changed.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[KeySpace]:
        """The space, ours alone and with its ended leases gone; waiters wake if it changed."""
        with self._shared.changed:
            self._refuse_when_closed()
            space = self._shared.space
            self._expire(space)
            before = space.version
            yield space
            if space.version != before:
                self._shared.changed.notify_all()
