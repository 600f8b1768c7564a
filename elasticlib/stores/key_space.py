"""The entries, versions, leases and watches of a store, and how each operation changes them.

Pure: one thread at a time, and the time is an argument.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Hashable, KeysView, Sequence
from typing import Generic, TypeVar

import attrs

from ..errors import ConfigError, LeaseLostError, StoreRejectedError

ABSENT = 0
"""The version to expect of a key that is not there."""

MAX_KEY_BYTES = 1024
MIB = 1024 * 1024

LONGEST_STEP = 1 / 4
"""The part of its ttl that one look can add to a lease's silence."""
LOOKS_PER_TTL = 8
"""How often the shortest lease is to be looked at within its ttl."""

WATCHES_PER_OWNER = 1000
TOLD_BYTES = MIB
"""A watcher that wants the listing gets it up to this size; beyond, only that there is one."""


@attrs.frozen
class Entry:
    """A key, its value, and the version of the store at which it was written."""

    key: str
    value: bytes
    version: int

    @property
    def size(self) -> int:
        """Bytes of the key and the value."""
        return len(self.key.encode()) + len(self.value)


@attrs.frozen
class CompareSetResult:
    """The outcome of a conditional write: whether it won, and what stands at the key now."""

    succeeded: bool
    entry: Entry | None


@attrs.frozen
class Listing:
    """All entries under a prefix, sorted by key, and the version that they were read at."""

    entries: tuple[Entry, ...]
    version: int


WatchResult = Listing | bool
Name = TypeVar("Name", bound=Hashable)


def check_key(key: str) -> str:
    """The key itself, or a ConfigError that says what a key may be."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:  # a lone surrogate, which has no UTF-8
        size = 0
    if not 0 < size <= MAX_KEY_BYTES or "\0" in key:
        raise ConfigError(
            f"a key is 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL, got {key[:80]!r}"
        )
    return key


def check_ttl(ttl: float | None) -> float | None:
    """The ttl itself, or a ConfigError unless it is a positive number of seconds."""
    if ttl is not None and not 0 < ttl < float("inf"):
        raise ConfigError(f"ttl is a positive, finite number of seconds, got {ttl!r}")
    return ttl


def lost_lease(key: str, version: int, why: str) -> LeaseLostError:
    """The error of a refresh that came too late, or was another client's to make."""
    return LeaseLostError(f"the lease on {key!r} written at version {version} is lost: {why}")


def check_lease(key: str, version: int, found: int | None, *, leased: bool) -> None:
    """Raises LeaseLostError unless the key stands at that version, and as a lease.

    found: the version at which the key stands; None if it is gone.
    """
    if found is None:
        raise lost_lease(key, version, "the key is gone")
    if found != version:
        raise lost_lease(key, version, f"the key was written again at version {found}")
    if not leased:
        raise lost_lease(key, version, "the key is no lease")


@attrs.define
class _Silence:
    ttl: float
    seen: float
    so_far: float = 0.0

    def look(self, now: float) -> bool:
        """Count the time since the last look; whether the lease has been silent for its ttl."""
        self.so_far += min(max(now - self.seen, 0.0), self.ttl * LONGEST_STEP)
        self.seen = now
        return self.so_far >= self.ttl


class LeaseTimers(Generic[Name]):
    """The silence of each lease, by name: measured by looks, none of which counts for much.

    A store that stood still (stopped, swapped out, its machine paused) thus gives every owner the
    chance to be heard on waking. Time is an argument, from one monotonic clock.
    """

    def __init__(self) -> None:
        self._silences: dict[Name, _Silence] = {}
        self._next = float("inf")

    @property
    def names(self) -> KeysView[Name]:
        """The leases there are."""
        return self._silences.keys()

    def hear(self, name: Name, ttl: float, now: float) -> None:
        """The owner wrote or refreshed: its silence starts again at nothing."""
        self._silences[name] = _Silence(ttl, now)
        self._next = min(self._next, now + ttl / LOOKS_PER_TTL)

    def forget(self, name: Name) -> None:
        """No lease of that name any more; harmless if there was none."""
        self._silences.pop(name, None)

    def until_due(self, now: float) -> float | None:
        """Seconds until the next look is worth taking; None without leases."""
        return max(self._next - now, 0.0) if self._silences else None

    def due(self, now: float) -> bool:
        """Whether a look is worth taking now."""
        return bool(self._silences) and now >= self._next

    def look(self, now: float) -> list[Name]:
        """Count the silence of all leases; the names of those silent for their ttl or longer."""
        silent = [name for name, silence in self._silences.items() if silence.look(now)]
        shortest = min((s.ttl for s in self._silences.values()), default=float("inf"))
        self._next = now + shortest / LOOKS_PER_TTL
        return silent


@attrs.frozen
class Limits:
    """How much a store holds before it refuses."""

    value_bytes: int = 4 * MIB
    total_bytes: int = 256 * MIB
    keys: int = 100_000
    journal: int = 4096
    watches: int = 100_000


@attrs.frozen
class Lease:
    """Whose key it is, and for how many seconds of silence."""

    owner: int
    ttl: float


@attrs.frozen(eq=False)
class Watch:
    """An owner's wish, by a number of its own, to be told once of a change past version `after`.

    listing: whether it is to be told what is there then.
    """

    owner: int
    number: int
    prefix: str
    after: int
    listing: bool = False


@attrs.define(eq=False)
class ChangeLog:
    """The store's version, and the keys of the latest changes, each of which took the next one.

    It is bounded, so `changed` may answer True without a cause, but never misses one.
    """

    version: int = 0
    keys: deque[str] = attrs.field(factory=deque)

    def record(self, key: str) -> int:
        """The next version, as that of a change of the key."""
        self.keys.append(key)
        self.version += 1
        return self.version

    def changed(self, prefix: str, after: int) -> bool:
        """Whether anything under the prefix has (or may have) changed past version `after`."""
        count = self.version - after
        # A version from the future comes from a store that stood here before this one.
        if not 0 <= count <= len(self.keys):
            return True
        newest = itertools.islice(reversed(self.keys), count)
        return any(key.startswith(prefix) for key in newest)


class KeySpace(ChangeLog):
    """Keys, their leases, the journal of changes, and who watches for which."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        super().__init__(keys=deque(maxlen=self.limits.journal))
        self._entries: dict[str, Entry] = {}
        self._order: list[str] = []
        self._leases: dict[str, Lease] = {}
        self._bytes = 0
        self.clock: LeaseTimers[str] = LeaseTimers()
        self._watches: dict[str, dict[tuple[int, int], Watch]] = {}
        self._watched: dict[int, dict[int, str]] = {}
        self._watch_count = 0
        self._told = 0
        """The version up to which `news` has been asked."""

    def get(self, key: str) -> Entry | None:
        """What stands at the key."""
        return self._entries.get(key)

    def put(self, key: str, value: bytes, lease: Lease | None, now: float) -> Entry:
        """Write, whatever was there, and replace or end the lease on the key."""
        entry = Entry(check_key(key), value, self.version + 1)
        old = self._entries.get(key)
        total = self._bytes + entry.size - (old.size if old else 0)
        self._check(entry, total, is_new=old is None)
        self._drop_lease(key)
        if old is None:
            bisect.insort(self._order, key)
        self._entries[key] = entry
        self._bytes = total
        if lease is not None:
            self._leases[key] = lease
            self.clock.hear(key, lease.ttl, now)
        self.record(key)
        return entry

    def compare_set(
        self, key: str, value: bytes, expected: int, lease: Lease | None, now: float
    ) -> CompareSetResult:
        """Write only over the expected version."""
        current = self._entries.get(key)
        if expected != (current.version if current else ABSENT):
            return CompareSetResult(False, current)
        return CompareSetResult(True, self.put(key, value, lease, now))

    def delete(self, key: str, expected: int | None) -> bool:
        """Remove the key, only at version `expected` if given; whether it was removed."""
        current = self._entries.get(key)
        if current is None or expected not in (None, current.version):
            return False
        self._remove(current)
        return True

    def refresh(self, key: str, version: int, owner: int, now: float) -> None:
        """The owner was heard. Raises LeaseLostError, saying why it is not its lease."""
        lease, current = self._leases.get(key), self._entries.get(key)
        check_lease(key, version, current.version if current else None, leased=lease is not None)
        if lease is None or lease.owner != owner:
            whose = "it belongs to another client, or to a broken connection"
            raise lost_lease(key, version, whose)
        self.clock.hear(key, lease.ttl, now)

    def list(self, prefix: str) -> Listing:
        """All entries under the prefix, and the version of this moment."""
        start = bisect.bisect_left(self._order, prefix)
        keys = itertools.takewhile(
            lambda key: key.startswith(prefix), itertools.islice(self._order, start, None)
        )
        return Listing(tuple(self._entries[key] for key in keys), self.version)

    def depart(self, owner: int) -> None:
        """Remove the leases and the watches of an owner that is gone."""
        for key in sorted(key for key, lease in self._leases.items() if lease.owner == owner):
            self._remove(self._entries[key])
        for number in list(self._watched.get(owner, ())):
            self._take_watch(owner, number)

    def expire_leases(self, now: float) -> None:
        """Look at the leases, if a look is due, and end those silent for their ttl."""
        if self.clock.due(now):
            for key in self.clock.look(now):
                self._remove(self._entries[key])

    # -- watches ------------------------------------------------------------------------------

    def watch(self, watch: Watch) -> WatchResult:
        """What there is to tell at once; False if `news` is going to have it.

        Raises:
            StoreRejectedError: too many watches, or a prefix that no key can begin with.
        """
        # Kept for as long as the watch: no key begins with a longer one.
        if len(watch.prefix) > MAX_KEY_BYTES:
            raise StoreRejectedError(
                f"a prefix to wait for is at most {MAX_KEY_BYTES} long, got {len(watch.prefix)}"
            )
        if self.changed(watch.prefix, watch.after):
            return self._what_is_there(watch.prefix) if watch.listing else True
        own = self._watched.setdefault(watch.owner, {})
        if len(own) >= WATCHES_PER_OWNER or watch.number in own:
            raise StoreRejectedError(
                f"a client has at most {WATCHES_PER_OWNER} waits, each with its own id"
            )
        if self._watch_count >= self.limits.watches:
            raise StoreRejectedError(
                f"all clients together have at most {self.limits.watches} waits"
            )
        self._watch_count += 1
        own[watch.number] = watch.prefix
        self._watches.setdefault(watch.prefix, {})[watch.owner, watch.number] = watch
        return False

    def unwatch(self, owner: int, number: int) -> bool:
        """That watch is not to be told any more; whether it was, or was about to be."""
        watch = self._take_watch(owner, number)
        return watch is None or self.changed(watch.prefix, watch.after)

    def _take_watch(self, owner: int, number: int) -> Watch | None:
        own = self._watched.get(owner, {})
        prefix = own.pop(number, None)
        if prefix is None:
            return None
        if not own:
            del self._watched[owner]
        self._watch_count -= 1
        watches = self._watches[prefix]
        watch = watches.pop((owner, number))
        if not watches:
            del self._watches[prefix]
        return watch

    @property
    def has_changed(self) -> bool:
        """Whether there is a change that `news` has not been asked for."""
        return self._told != self.version

    def news(self) -> Sequence[tuple[Watch, WatchResult]]:
        """The watches whose change has come since this was last asked, and what to tell them."""
        if not self.has_changed:
            return []
        touched = [prefix for prefix in self._watches if self.changed(prefix, self._told)]
        self._told = self.version
        found: list[tuple[Watch, WatchResult]] = []
        for prefix in touched:
            there: WatchResult = False
            for watch in list(self._watches[prefix].values()):
                # One that came behind the change goes on waiting.
                if not self.changed(prefix, watch.after):
                    continue
                self._take_watch(watch.owner, watch.number)
                if watch.listing and there is False:
                    there = self._what_is_there(prefix)
                found.append((watch, there if watch.listing else True))
        return found

    def _what_is_there(self, prefix: str) -> WatchResult:
        """The listing if it is short; else that there is one to ask for."""
        listing = self.list(prefix)
        return listing if sum(entry.size for entry in listing.entries) <= TOLD_BYTES else True

    # -- within -------------------------------------------------------------------------------

    def _check(self, entry: Entry, total: int, *, is_new: bool) -> None:
        limits = self.limits
        if len(entry.value) > limits.value_bytes:
            raise StoreRejectedError(
                f"a value is at most {limits.value_bytes} bytes, "
                f"got {len(entry.value)} for key {entry.key!r}"
            )
        if total > limits.total_bytes:
            raise StoreRejectedError(
                f"the store holds at most {limits.total_bytes} bytes, "
                f"key {entry.key!r} would make it {total}"
            )
        if is_new and len(self._entries) >= limits.keys:
            raise StoreRejectedError(
                f"the store holds at most {limits.keys} keys, got {entry.key!r} too"
            )

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        del self._order[bisect.bisect_left(self._order, entry.key)]
        self._bytes -= entry.size
        self._drop_lease(entry.key)
        self.record(entry.key)

    def _drop_lease(self, key: str) -> None:
        if self._leases.pop(key, None) is not None:
            self.clock.forget(key)
