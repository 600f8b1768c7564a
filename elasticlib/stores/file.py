"""A store in a folder that all nodes share, for clusters where a file system is all there is.

Writers take turns by a lock and replace whole files, so a crash leaves the old value or the new
one; a lease is a counter that each reader sees move, or not, by its own monotonic clock.
"""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path

from ..clock import monotonic
from ..errors import ConfigError, LeaseLost, StoreUnavailable, present
from .file_format import FileLease, Record
from .folder import Folder
from .forks import renew_in_children
from .interface import ABSENT, CompareSet, Entry, Listing, Store, check_key, check_ttl
from .leases import LeaseClock

LONGEST_PAUSE = 0.5
"""Seconds after which to look again for leases that are new, at the latest."""


class FileStore(Store):
    """A client of the store in `folder`.

    Args:
        folder: made, with its parents, at the first operation.
        timeout: seconds that an operation may wait for the folder's lock.
        poll: seconds between two looks of `wait`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, timeout: float = 60.0, poll: float = 0.02
    ) -> None:
        if not (timeout > 0 and poll > 0):
            raise ConfigError(f"timeout and poll are positive seconds, got {timeout} and {poll}")
        self._path, self._timeout = Path(folder), timeout
        self._poll = poll
        self._closed = threading.Event()
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Be another client, without a lock that a thread may hold; a closed one stays closed."""
        self._folder = Folder(self._path, self._timeout)
        self._owner = secrets.token_hex(8)
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self._closed.set()
        self._owned: dict[str, int] = {}
        self._leases = _LeaseWatch(self._folder)

    def get(self, key: str) -> Entry | None:
        check_key(key)
        self._begin()
        record = self._folder.get(key)
        return None if record is None else record.entry

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        check_ttl(ttl)
        check_key(key)
        self._begin()
        with self._folder.locked():
            return self._put(key, bytes(value), ttl)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        check_ttl(ttl)
        check_key(key)
        self._begin()
        with self._folder.locked():
            current = self._folder.get(key)
            if expected != (current.entry.version if current else ABSENT):
                return CompareSet(False, current.entry if current else None)
            return CompareSet(True, self._put(key, bytes(value), ttl))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        check_key(key)
        self._begin()
        with self._folder.locked():
            current = self._folder.get(key)
            if current is None or expected not in (None, current.entry.version):
                return False
            self._folder.remove(current.entry)
            self._owned.pop(key, None)
            return True

    def refresh(self, key: str, version: int) -> None:
        check_key(key)
        self._begin()
        with self._folder.locked():
            lease = self._own_lease(self._folder.get(key), key, version)
            self._folder.touch(lease)

    def list(self, prefix: str) -> Listing:
        self._begin()
        with self._folder.locked():
            entries = tuple(record.entry for record in self._folder.records(prefix))
            return Listing(entries, self._folder.changes().version)

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        deadline = monotonic() + timeout
        settled: int | None = None
        while True:
            self._begin()
            # A version is claimed, with its key, before its file changes. So what is read here
            # without the lock can be too early for a reader, who then waits for it; never late.
            if self._folder.version() != settled:
                changes = self._folder.changes()
                if changes.touched(prefix, after):
                    return True
                settled = changes.version
            left = deadline - monotonic()
            if left <= 0:
                return False
            self._closed.wait(min(left, self._poll))

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._owned:
            return
        with self._folder.locked():
            for key, version in sorted(self._owned.items()):
                record = self._folder.get(key)
                if record is not None and record.entry.version == version:
                    self._folder.remove(record.entry)
            self._owned.clear()

    def _begin(self) -> None:
        if self._closed.is_set():
            raise StoreUnavailable(f"this FileStore of {self._folder.path} is closed")
        self._folder.make()
        self._leases.look(monotonic())

    def _put(self, key: str, value: bytes, ttl: float | None) -> Entry:
        entry = Entry(key, value, self._folder.claim(key))
        lease = None if ttl is None else FileLease(self._owner, float(ttl))
        self._folder.put(Record(entry, lease))
        if lease is None:
            self._owned.pop(key, None)
        else:
            self._owned[key] = entry.version
        return entry

    def _own_lease(self, record: Record | None, key: str, version: int) -> Record:
        """The record with its counter moved. Raises LeaseLost, saying why it is not ours."""
        lost = f"the lease on {key!r} written at version {version} is lost: "
        if record is None:
            raise LeaseLost(lost + "the key is gone")
        if record.entry.version != version:
            raise LeaseLost(lost + f"the key was written again at version {record.entry.version}")
        if record.lease is None:
            raise LeaseLost(lost + "the key is no lease")
        if record.lease.owner != self._owner:
            raise LeaseLost(lost + "it belongs to another client")
        lease = record.lease
        return Record(record.entry, FileLease(lease.owner, lease.ttl, lease.beat + 1))


class _LeaseWatch:
    """Ends the leases that this reader has seen stand still for their ttl.

    Looks are taken with the lock held, so a time in which nobody could have it counts as one
    look, not as the owners' silence; and what is ended is what was read, at that moment.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._clock = LeaseClock()
        self._seen: dict[str, tuple[int, int]] = {}
        self._scanned = -1
        self._next = 0.0
        self._busy = threading.Lock()

    def look(self, now: float) -> None:
        """Take a look if one is due, and if nobody holds the lock."""
        if now < self._next or not self._busy.acquire(blocking=False):
            return
        try:
            with self._folder.locked_if_free() as had:
                if had:
                    self._look()
                    due = self._clock.until_due(monotonic())
                    pause = LONGEST_PAUSE if due is None else min(due, LONGEST_PAUSE)
                    self._next = monotonic() + pause
        finally:
            self._busy.release()

    def _look(self) -> None:
        records = self._leased()
        for name in self._seen.keys() - records.keys():
            self._clock.forget(name)
            del self._seen[name]
        now = monotonic()
        for key, record in records.items():
            lease = present(record.lease, f"the lease of {key}")
            state = (record.entry.version, lease.beat)
            if self._seen.get(key) != state:
                self._seen[key] = state
                self._clock.hear(key, lease.ttl, now)
        for key in self._clock.look(now):
            self._folder.remove(records[key].entry)

    def _leased(self) -> dict[str, Record]:
        """The leased records by key; only those known are read, unless something has changed."""
        version = self._folder.version()
        if version != self._scanned:
            records = self._folder.records("")
            self._scanned = version
        else:
            records = [r for key in self._seen if (r := self._folder.get(key)) is not None]
        return {r.entry.key: r for r in records if r.lease is not None}
