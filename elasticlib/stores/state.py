"""What the entries, versions and leases of a store are, and how each operation changes them.

Every change takes the next version and stands in a bounded journal, so `changed` may answer
True without a cause once the journal is too short, but never misses one.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator

import attrs

from ..errors import ConfigError, LeaseLost, StoreRefused
from .leases import LeaseClock

ABSENT = 0
"""The version to expect of a key that is not there."""

MAX_KEY_BYTES = 1024


@attrs.frozen
class Entry:
    """A key, its value, and the version of the store at which it was written."""

    key: str
    value: bytes
    version: int


@attrs.frozen
class CompareSet:
    """The outcome of a conditional write: whether it won, and what stands at the key now."""

    won: bool
    entry: Entry | None


@attrs.frozen
class Listing:
    """All entries under a prefix, sorted by key, and the version that they were read at."""

    entries: tuple[Entry, ...]
    version: int


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


MIB = 1024 * 1024


@attrs.frozen
class Limits:
    """How much a store holds before it refuses."""

    value_bytes: int = 4 * MIB
    total_bytes: int = 256 * MIB
    keys: int = 100_000
    journal: int = 4096


@attrs.frozen
class Lease:
    """Whose key it is, and for how many seconds of silence."""

    owner: int
    ttl: float


def _size(entry: Entry) -> int:
    return len(entry.key.encode()) + len(entry.value)


class KeySpace:
    """Keys, their leases and the journal of changes: single-threaded, told the time."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._entries: dict[str, Entry] = {}
        self._order: list[str] = []
        self._leases: dict[str, Lease] = {}
        self._owned: dict[int, set[str]] = {}
        self._journal: deque[str] = deque(maxlen=self._limits.journal)
        self._bytes = 0
        self.version = 0
        self.clock = LeaseClock()

    def get(self, key: str) -> Entry | None:
        """What stands at the key."""
        return self._entries.get(key)

    def put(self, key: str, value: bytes, lease: Lease | None, now: float) -> Entry:
        """Write, whatever was there, and replace or end the lease on the key."""
        entry = Entry(check_key(key), value, self.version + 1)
        old = self._entries.get(key)
        total = self._bytes + _size(entry) - (_size(old) if old else 0)
        self._check(entry, total, is_new=old is None)
        self._drop_lease(key)
        if old is None:
            bisect.insort(self._order, key)
        self._entries[key] = entry
        self._bytes = total
        if lease is not None:
            self._leases[key] = lease
            self._owned.setdefault(lease.owner, set()).add(key)
            self.clock.hear(key, lease.ttl, now)
        self._record(key)
        return entry

    def compare_set(
        self, key: str, value: bytes, expected: int, lease: Lease | None, now: float
    ) -> CompareSet:
        """Write only over the expected version."""
        current = self._entries.get(key)
        if expected != (current.version if current else ABSENT):
            return CompareSet(False, current)
        return CompareSet(True, self.put(key, value, lease, now))

    def delete(self, key: str, expected: int | None) -> bool:
        """Remove the key, only at version `expected` if given; whether it was removed."""
        current = self._entries.get(key)
        if current is None or expected not in (None, current.version):
            return False
        self._remove(current)
        return True

    def refresh(self, key: str, version: int, owner: int, now: float) -> None:
        """The owner was heard. Raises LeaseLost, saying why it is not its lease."""
        lease = self._leases.get(key)
        current = self._entries.get(key)
        lost = f"the lease on {key!r} written at version {version} is lost: "
        if current is None:
            raise LeaseLost(lost + "the key is gone")
        if current.version != version:
            raise LeaseLost(lost + f"the key was written again at version {current.version}")
        if lease is None:
            raise LeaseLost(lost + "the key is no lease")
        if lease.owner != owner:
            raise LeaseLost(lost + "it belongs to another client, or to a broken connection")
        self.clock.hear(key, lease.ttl, now)

    def list(self, prefix: str) -> Listing:
        """All entries under the prefix, and the version of this moment."""
        start = bisect.bisect_left(self._order, prefix)
        keys = itertools.takewhile(
            lambda key: key.startswith(prefix), itertools.islice(self._order, start, None)
        )
        return Listing(tuple(self._entries[key] for key in keys), self.version)

    def changes(self, after: int) -> Iterator[str] | None:
        """The keys changed past version `after`, newest first; None when that is not known."""
        count = self.version - after
        # A version from the future comes from a store that stood here before this one.
        if not 0 <= count <= len(self._journal):
            return None
        return itertools.islice(reversed(self._journal), count)

    def changed(self, prefix: str, after: int) -> bool:
        """Whether anything under the prefix has (or may have) changed past version `after`."""
        keys = self.changes(after)
        return keys is None or any(key.startswith(prefix) for key in keys)

    def end_leases_of(self, owner: int) -> None:
        """The owner is gone, and its keys with it."""
        for key in sorted(self._owned.get(owner, ())):
            self._remove(self._entries[key])

    def end_silent_leases(self, now: float) -> None:
        """Look at the leases, if a look is due, and end those silent for their ttl."""
        if self.clock.due(now):
            for key in self.clock.look(now):
                self._remove(self._entries[key])

    def _check(self, entry: Entry, total: int, *, is_new: bool) -> None:
        limits = self._limits
        if len(entry.value) > limits.value_bytes:
            raise StoreRefused(
                f"a value is at most {limits.value_bytes} bytes, "
                f"got {len(entry.value)} for key {entry.key!r}"
            )
        if total > limits.total_bytes:
            raise StoreRefused(
                f"the store holds at most {limits.total_bytes} bytes, "
                f"key {entry.key!r} would make it {total}"
            )
        if is_new and len(self._entries) >= limits.keys:
            raise StoreRefused(f"the store holds at most {limits.keys} keys, got {entry.key!r} too")

    def _record(self, key: str) -> None:
        self.version += 1
        self._journal.append(key)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        del self._order[bisect.bisect_left(self._order, entry.key)]
        self._bytes -= _size(entry)
        self._drop_lease(entry.key)
        self._record(entry.key)

    def _drop_lease(self, key: str) -> None:
        lease = self._leases.pop(key, None)
        if lease is None:
            return
        self.clock.forget(key)
        owned = self._owned[lease.owner]
        owned.discard(key)
        if not owned:
            del self._owned[lease.owner]
