"""Entries, versions, leases and watches of a store, and the operations that change them.

Pure: the caller passes the time, and only one thread uses a key space at a time.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Hashable, KeysView, Sequence
from typing import Generic, TypeVar

import attrs

from ..errors import ConfigError, LeaseLostError, StoreRejectedError

ABSENT = 0  #: `expected` version of a key that does not exist

MAX_KEY_BYTES = 1024
MIB = 1024 * 1024
MAX_TICK_FRACTION = 1 / 4  # the largest part of its ttl that one tick can add to a lease's age
TICKS_PER_TTL = 8  # number of ticks within the shortest ttl
MAX_WATCHES_PER_OWNER = 1000
MAX_NOTIFICATION_BYTES = MIB  # a notification contains the listing only if it is at most this long


@attrs.frozen
class Entry:
    """A key, its value, and the version of the store at which the value was written."""

    key: str
    value: bytes
    version: int

    @property
    def size(self) -> int:
        """Number of bytes of the key and the value."""
        return len(self.key.encode()) + len(self.value)


@attrs.frozen
class CompareSetResult:
    """The result of a `compare_set`: whether this call wrote, and the entry at the key now."""

    succeeded: bool
    entry: Entry | None


@attrs.frozen
class Listing:
    """All entries under a prefix, sorted by key, and the version at which they were read."""

    entries: tuple[Entry, ...]
    version: int

    @property
    def size(self) -> int:
        """Number of bytes of the keys and the values."""
        return sum(entry.size for entry in self.entries)


WatchResult = Listing | bool
LeaseName = TypeVar("LeaseName", bound=Hashable)


def check_key(key: str) -> str:
    """Return the key, or raise ConfigError if it is not a valid key."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8
        size = 0
    if not 0 < size <= MAX_KEY_BYTES or "\0" in key:
        raise ConfigError(
            f"a key is 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL, got {key[:80]!r}"
        )
    return key


def check_ttl(ttl: float | None) -> float | None:
    """Return the ttl, or raise ConfigError unless it is None or a positive, finite number."""
    if ttl is not None and not 0 < ttl < float("inf"):
        raise ConfigError(f"ttl is a positive, finite number of seconds, got {ttl!r}")
    return ttl


def lost_lease(key: str, version: int, reason: str) -> LeaseLostError:
    """Return the error of a refresh that is too late, or that comes from another client."""
    return LeaseLostError(f"the lease on {key!r} written at version {version} is lost: {reason}")


def check_lease(key: str, version: int, current: int | None, *, is_leased: bool) -> None:
    """Raise LeaseLostError unless the key has a lease that was written at `version`.

    Args:
        key: The key of the lease.
        version: The version at which the caller wrote the lease.
        current: The version of the key now, or None if it does not exist.
        is_leased: True if the key is a lease.
    """
    if current is None:
        raise lost_lease(key, version, "the key is gone")
    if current != version:
        raise lost_lease(key, version, f"the key was written again at version {current}")
    if not is_leased:
        raise lost_lease(key, version, "the key is no lease")


@attrs.define
class _LeaseTimer:
    ttl: float
    last_tick_at: float
    age_s: float = 0.0  # time since the last refresh, as far as it was counted

    def tick(self, now: float) -> bool:
        """Count the time since the last tick. Return True if the lease has expired."""
        self.age_s += min(max(now - self.last_tick_at, 0.0), self.ttl * MAX_TICK_FRACTION)
        self.last_tick_at = now
        return self.age_s >= self.ttl


class LeaseTimers(Generic[LeaseName]):
    """The time since the last refresh of each lease, counted in bounded ticks.

    One tick adds at most a fraction of the ttl. If the process that counts is stopped or its
    machine is paused, owners thus have time to refresh afterwards. Time is an argument, in seconds
    of one monotonic clock.
    """

    def __init__(self) -> None:
        self._timers: dict[LeaseName, _LeaseTimer] = {}
        self._next_tick_at = float("inf")

    @property
    def names(self) -> KeysView[LeaseName]:
        """The names of all leases."""
        return self._timers.keys()

    def restart(self, name: LeaseName, ttl: float, now: float) -> None:
        """Start the timer of a lease that was written or refreshed."""
        self._timers[name] = _LeaseTimer(ttl, now)
        self._next_tick_at = min(self._next_tick_at, now + ttl / TICKS_PER_TTL)

    def remove(self, name: LeaseName) -> None:
        """Remove the timer of a lease, if it exists."""
        self._timers.pop(name, None)

    def until_due(self, now: float) -> float | None:
        """Return the seconds until the next tick, or None if there is no lease."""
        return max(self._next_tick_at - now, 0.0) if self._timers else None

    def is_due(self, now: float) -> bool:
        """Return True if `tick` must be called now to expire leases."""
        return bool(self._timers) and now >= self._next_tick_at

    def tick(self, now: float) -> list[LeaseName]:
        """Advance all timers, and return the names of the leases that have expired."""
        expired = [name for name, timer in self._timers.items() if timer.tick(now)]
        shortest = min((timer.ttl for timer in self._timers.values()), default=float("inf"))
        self._next_tick_at = now + shortest / TICKS_PER_TTL
        return expired


@attrs.frozen
class KeySpaceLimits:
    """The limits above which a store rejects writes and watches."""

    value_bytes: int = 4 * MIB
    total_bytes: int = 256 * MIB
    keys: int = 100_000
    change_log: int = 4096  # number of changes that are remembered
    watches: int = 100_000


@attrs.frozen
class Lease:
    """The owner of a leased key, and the seconds after which it expires without a refresh."""

    owner: int
    ttl: float


@attrs.frozen(eq=False)
class Watch:
    """A request to be notified once of a change under a prefix.

    Attributes:
        owner: The client that is notified.
        number: A number that the owner has not used for another pending watch.
        prefix: The prefix of the keys.
        after: The version since which changes count.
        with_listing: Whether the notification contains the entries.
    """

    owner: int
    number: int
    prefix: str
    after: int
    with_listing: bool = False


@attrs.define(eq=False)
class ChangeLog:
    """The version of the store, and the keys of its latest changes, one for each version.

    The log is bounded. `has_changed` can return True for a change that never happened, and never
    returns False for one that did.
    """

    version: int = 0
    keys: deque[str] = attrs.field(factory=deque)

    def record(self, key: str) -> int:
        """Record a change of the key, and return its version."""
        self.keys.append(key)
        self.version += 1
        return self.version

    def has_changed(self, prefix: str, after: int) -> bool:
        """Return True if a key under the prefix has, or may have, changed since version `after`."""
        count = self.version - after
        # A newer version belongs to another store that was at this address before.
        if not 0 <= count <= len(self.keys):
            return True
        newest = itertools.islice(reversed(self.keys), count)
        return any(key.startswith(prefix) for key in newest)


class KeySpace(ChangeLog):
    """The keys of a store with their leases, the log of changes, and the pending watches."""

    def __init__(self, limits: KeySpaceLimits | None = None) -> None:
        self.limits = limits or KeySpaceLimits()
        super().__init__(keys=deque(maxlen=self.limits.change_log))
        self.lease_timers: LeaseTimers[str] = LeaseTimers()
        self._entries: dict[str, Entry] = {}
        self._sorted_keys: list[str] = []
        self._leases: dict[str, Lease] = {}
        self._total_bytes = 0  # size of all entries
        self._watches: dict[str, dict[tuple[int, int], Watch]] = {}  # prefix -> owner, number
        self._watched: dict[int, dict[int, str]] = {}  # owner -> number -> prefix
        self._watch_count = 0
        self._notified_version = 0  # version of the last `take_notifications`

    def get(self, key: str) -> Entry | None:
        """Return the entry at the key, or None if the key does not exist."""
        return self._entries.get(key)

    def put(self, key: str, value: bytes, lease: Lease | None, now: float) -> Entry:
        """Write the key, and replace or end its lease.

        Raises:
            StoreRejectedError: The write would exceed a limit.
        """
        entry = Entry(check_key(key), value, self.version + 1)
        old = self._entries.get(key)
        total = self._total_bytes + entry.size - (old.size if old else 0)
        self._check_limits(entry, total, is_new=old is None)
        self._end_lease(key)
        if old is None:
            bisect.insort(self._sorted_keys, key)
        self._entries[key] = entry
        self._total_bytes = total
        if lease is not None:
            self._leases[key] = lease
            self.lease_timers.restart(key, lease.ttl, now)
        self.record(key)
        return entry

    def compare_set(
        self, key: str, value: bytes, expected: int, lease: Lease | None, now: float
    ) -> CompareSetResult:
        """Write the key if its version is `expected`."""
        current = self._entries.get(key)
        if expected != (current.version if current else ABSENT):
            return CompareSetResult(False, current)
        return CompareSetResult(True, self.put(key, value, lease, now))

    def delete(self, key: str, expected: int | None) -> bool:
        """Remove the key, only at version `expected` if given. Return True if it was removed."""
        current = self._entries.get(key)
        if current is None or expected not in (None, current.version):
            return False
        self._remove(current)
        return True

    def refresh(self, key: str, version: int, owner: int, now: float) -> None:
        """Restart the timer of a lease.

        Raises:
            LeaseLostError: The key is not a lease that `owner` wrote at `version`.
        """
        lease, current = self._leases.get(key), self._entries.get(key)
        check_lease(key, version, current.version if current else None, is_leased=bool(lease))
        if lease is None or lease.owner != owner:
            reason = "it belongs to another client, or to a broken connection"
            raise lost_lease(key, version, reason)
        self.lease_timers.restart(key, lease.ttl, now)

    def list(self, prefix: str) -> Listing:
        """Return all entries under the prefix, and the current version."""
        start = bisect.bisect_left(self._sorted_keys, prefix)
        keys = itertools.takewhile(
            lambda key: key.startswith(prefix), itertools.islice(self._sorted_keys, start, None)
        )
        return Listing(tuple(self._entries[key] for key in keys), self.version)

    def remove_owner(self, owner: int) -> None:
        """Remove the leases and the watches of an owner."""
        for key in sorted(key for key, lease in self._leases.items() if lease.owner == owner):
            self._remove(self._entries[key])
        for number in list(self._watched.get(owner, ())):
            self._remove_watch(owner, number)

    def expire_leases(self, now: float) -> None:
        """Advance the timers of the leases if a tick is due, and remove the expired leases."""
        if self.lease_timers.is_due(now):
            for key in self.lease_timers.tick(now):
                self._remove(self._entries[key])

    # -- watches ------------------------------------------------------------------------------

    def watch(self, watch: Watch) -> WatchResult:
        """Add a watch, unless its prefix has changed already.

        Returns:
            False if the watch was added. If its prefix has changed since `watch.after`, the listing
            if the watch requests one and it is short, else True.

        Raises:
            StoreRejectedError: There are too many watches, or no key can have the prefix.
        """
        # The prefix occupies memory until the watch ends.
        if len(watch.prefix) > MAX_KEY_BYTES:
            raise StoreRejectedError(
                f"a prefix to wait for is at most {MAX_KEY_BYTES} long, got {len(watch.prefix)}"
            )
        if self.has_changed(watch.prefix, watch.after):
            return self._short_listing(watch.prefix) if watch.with_listing else True
        own = self._watched.setdefault(watch.owner, {})
        if len(own) >= MAX_WATCHES_PER_OWNER or watch.number in own:
            raise StoreRejectedError(
                f"a client has at most {MAX_WATCHES_PER_OWNER} waits, each with its own id"
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
        """Remove a watch. Return True if its prefix may have changed.

        If the watch does not exist, its prefix has changed, because a change removes the watch.
        """
        watch = self._remove_watch(owner, number)
        return watch is None or self.has_changed(watch.prefix, watch.after)

    @property
    def has_notifications(self) -> bool:
        """True if there was a change after the last call of `take_notifications`."""
        return self._notified_version != self.version

    def take_notifications(self) -> Sequence[tuple[Watch, WatchResult]]:
        """Remove and return the watches whose prefix has changed, each with its notification.

        All watches of one prefix get the same `Listing` object.
        """
        if not self.has_notifications:
            return []
        prefixes = [p for p in self._watches if self.has_changed(p, self._notified_version)]
        self._notified_version = self.version
        notifications: list[tuple[Watch, WatchResult]] = []
        for prefix in prefixes:
            listing: WatchResult = False
            for watch in list(self._watches[prefix].values()):
                # A watch that was added after the change stays.
                if not self.has_changed(prefix, watch.after):
                    continue
                self._remove_watch(watch.owner, watch.number)
                if watch.with_listing and listing is False:
                    listing = self._short_listing(prefix)
                notifications.append((watch, listing if watch.with_listing else True))
        return notifications

    def _short_listing(self, prefix: str) -> WatchResult:
        """Return the listing if it is short enough for a notification, else True."""
        listing = self.list(prefix)
        return listing if listing.size <= MAX_NOTIFICATION_BYTES else True

    def _remove_watch(self, owner: int, number: int) -> Watch | None:
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

    # -- entries ------------------------------------------------------------------------------

    def _check_limits(self, entry: Entry, total: int, *, is_new: bool) -> None:
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
        del self._sorted_keys[bisect.bisect_left(self._sorted_keys, entry.key)]
        self._total_bytes -= entry.size
        self._end_lease(entry.key)
        self.record(entry.key)

    def _end_lease(self, key: str) -> None:
        if self._leases.pop(key, None) is not None:
            self.lease_timers.remove(key)
