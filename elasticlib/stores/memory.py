"""A store inside one process: the contract in the fewest lines, also the simulator's.

It has no thread: every operation first ends the leases that its clock says are over, and with
`timeout=0` even `wait` never blocks, so an injected clock drives all of it. Where a server serves
the same keyspace to other processes, it is the server that ends leases, and that lends its thread
to `watch`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from ..clock import Clock, monotonic
from ..errors import StoreUnavailable
from .interface import CompareSet, Entry, Listing, Store, Watched, check_key, check_ttl
from .keyspace import KeySpace, Lease, Limits, Watch
from .sockets import renew_in_children


@attrs.define(eq=False)
class Shared:
    """A keyspace of which one thread at a time, that holds `lock`, has its turn.

    is_served: whether a server ends the leases that are over. rouse: tells it that there may be one
    sooner than it thought. ended: why nothing is done any more.
    """

    clock: Clock
    space: KeySpace
    is_served: bool = False
    rouse: Callable[[], None] = lambda: None
    ended: str = ""
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    owners: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    changed: threading.Condition = attrs.field()

    @changed.default
    def _at_the_lock(self) -> threading.Condition:
        return threading.Condition(self.lock)  # a condition's own lock is slower to take

    @property
    def is_settled(self) -> bool:
        """Whether nothing has changed since `settle`."""
        return self.space.told == self.space.version

    def settle(self) -> Sequence[tuple[Watch, Watched]]:
        """After each turn: whoever waits wakes; and whom the caller is to tell, without the lock,
        what."""
        if self.is_settled:
            return []
        self.changed.notify_all()
        return self.space.news()

    def end(self, why: str) -> Sequence[tuple[Watch, Watched]]:
        """Do nothing any more; whom the caller is to tell."""
        with self.lock:
            self.ended = why
            self.changed.notify_all()
            return [(watch, False) for watch in self.space.forget_watches()]


class MemoryStore(Store):
    """A store in this process, and in no child of it; `client()` gives further clients of it.

    Args:
        clock: seconds, for leases and for the timeout of `wait`.
        limits: how much it holds; `StoreRefused` beyond.
    """

    def __init__(self, clock: Clock = monotonic, *, limits: Limits | None = None) -> None:
        self._attach(Shared(clock, KeySpace(limits)))

    def _attach(self, shared: Shared) -> None:
        self._shared = shared
        self._owner = next(shared.owners)
        self._numbers = itertools.count(1)
        self._closed = False
        renew_in_children(self)

    def begin_anew(self) -> None:
        """What a forked child has is a copy that nobody else sees: it serves nothing there."""
        why = "a MemoryStore is in the process that made it, and this is a forked child of that"
        self._shared = Shared(self._shared.clock, KeySpace(), ended=why)

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
            entry = space.put(key, bytes(value), self._lease(ttl), self._shared.clock())
        self._rouse(ttl)
        return entry

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        with self._turn() as space:
            now, lease = self._shared.clock(), self._lease(ttl)
            outcome = space.compare_set(check_key(key), bytes(value), expected, lease, now)
        self._rouse(ttl)
        return outcome

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
            while not space.changed(prefix, after):
                left = deadline - shared.clock()
                if left <= 0:
                    return False
                look = None if shared.is_served else space.clock.until_due(shared.clock())
                # Releases the lock; other clients change the space meanwhile.
                shared.changed.wait(min(left, threading.TIMEOUT_MAX if look is None else look))
                self._begin()
        return True

    def watch(
        self, prefix: str, *, after: int, changed: Callable[[Watched], None], listing: bool = False
    ) -> bool:
        if not self._shared.is_served:
            return False  # nobody would end the leases of those who are gone
        with self._turn() as space:
            number = next(self._numbers)
            watched = space.watch(Watch(self._owner, number, prefix, after, changed, listing))
        if watched is not False:
            changed(watched)
        return True

    def close(self) -> None:
        with self._shared.lock:
            self._closed = True
            unheard = self._shared.space.depart(self._owner)
            self._shared.changed.notify_all()
            news = self._shared.settle()
        for watch, watched in (*((watch, False) for watch in unheard), *news):
            watch.tell(watched)

    def _lease(self, ttl: float | None) -> Lease | None:
        ttl = check_ttl(ttl)
        return None if ttl is None else Lease(self._owner, float(ttl))

    def _rouse(self, ttl: float | None) -> None:
        """Tell the server of a lease, once it is there to be seen by one that is awake."""
        if ttl is not None:
            self._shared.rouse()

    def _begin(self) -> None:
        """Refuse if it is over; else end the leases that are, where no server does that."""
        if self._shared.ended or self._closed:
            raise StoreUnavailable(self._shared.ended or "this store is closed")
        if not self._shared.is_served:
            self._shared.space.end_silent_leases(self._shared.clock())
            self._shared.settle()

    @contextmanager
    def _turn(self) -> Iterator[KeySpace]:
        """The space, ours alone and with its ended leases gone; whoever waits for what has changed
        is told."""
        with self._shared.lock:
            self._begin()
            yield self._shared.space
            news = self._shared.settle()
        for watch, watched in news:
            watch.tell(watched)


class HostedStore(MemoryStore):
    """A client of a TCP store in the process that serves it: no socket, and no thread of its own.

    Its leases end when it is closed, and with the process.
    """

    label = ""
    """It has no connection that the server could count."""

    def __init__(self, shared: Shared, local_address: str) -> None:
        self.local_address = local_address
        self._attach(shared)

    def connect(self, timeout: float | None = None) -> None:
        """Raises StoreUnavailable where the server is gone; else there is nothing to do."""
        del timeout
        with self._turn():
            pass
