"""A store in a folder that all nodes share, for clusters where a file system is all there is.

Writers take turns by a lock and replace whole files, so a crash leaves the old value or the new
one; a lease is a counter that each reader sees move, or not, by its own monotonic clock. One file
holds the version and the latest changes, one file each key with its value, version and lease; a
file that is not whole, or not of the key that its name says, is refused by name, and nothing is
read or written through a link that somebody put there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import filelock

from ..clock import monotonic
from ..errors import ConfigError, StoreError, StoreRefused, StoreTimeout, StoreUnavailable, present
from ..hard_lock import hard_lock
from .interface import ABSENT, CompareSet, Entry, Listing, Store, check_key, check_ttl
from .keyspace import LeaseClock, check_lease, lost_lease
from .sockets import renew_in_children

LONGEST_PAUSE = 0.5
"""Seconds after which to look again for leases that are new, at the latest."""
LOCK_POLL = 0.003
REMEMBERED = 256
"""How many changes are remembered; a waiter that is further behind is woken without a cause."""

CHANGES_FILE = "changes"
KEY_PREFIX = "k."
LONGEST_QUOTED = 200
_MAGIC = "elasticlib store 1"
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_Value = TypeVar("_Value")

# -- what stands in the files ------------------------------------------------------------------


@attrs.frozen
class Lease:
    """Whose key it is, for how many seconds of silence, and the counter that its owner moves."""

    owner: str
    ttl: float
    beat: int = 0


@attrs.frozen
class Record:
    """An entry as it stands in its file: a JSON header of one line, and the value."""

    entry: Entry
    lease: Lease | None = None

    def encode(self) -> bytes:
        header = {
            "format": _MAGIC,
            "key": self.entry.key,
            "version": self.entry.version,
            "size": len(self.entry.value),
            "crc": zlib.crc32(self.entry.value),
            "lease": None if self.lease is None else attrs.asdict(self.lease),
        }
        return json.dumps(header).encode() + b"\n" + self.entry.value

    @classmethod
    def decode(cls, data: bytes) -> Record:
        head, _, value = data.partition(b"\n")
        header = json.loads(head)
        if header["format"] != _MAGIC:
            raise ValueError(f"its format is {header['format']!r}")
        if header["size"] != len(value) or header["crc"] != zlib.crc32(value):
            raise ValueError(f"{header['size']} bytes were written, {len(value)} are there")
        entry = Entry(_of(str, header["key"]), value, _of(int, header["version"]))
        if (lease := header["lease"]) is None:
            return cls(entry)
        beat = _of(int, lease["beat"])
        return cls(entry, Lease(_of(str, lease["owner"]), float(lease["ttl"]), beat))


@attrs.frozen
class Changes:
    """The store's version, and the latest changes as (version, key), oldest first.

    A version is claimed here before the key's file changes. A crash in between leaves a change
    that did not happen: a waiter is woken without a cause, and the number is not used again.
    """

    version: int = 0
    recent: tuple[tuple[int, str], ...] = ()
    forgotten: int = 0

    def claim(self, key: str) -> Changes:
        """The next version, claimed for the key."""
        version = self.version + 1
        kept = (*self.recent, (version, key))
        dropped = kept[:-REMEMBERED]
        forgotten = dropped[-1][0] if dropped else self.forgotten
        return Changes(version, kept[-REMEMBERED:], forgotten)

    def touched(self, prefix: str, after: int) -> bool:
        """Whether anything under the prefix has (or may have) changed past version `after`."""
        if not self.forgotten <= after <= self.version:
            return True
        return any(v > after and key.startswith(prefix) for v, key in reversed(self.recent))

    def encode(self) -> bytes:
        # The version on a line of its own, which is all that most who wait read.
        body = {"forgotten": self.forgotten, "recent": self.recent}
        return f"{_MAGIC} version {self.version}\n{json.dumps(body)}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Changes:
        body = json.loads(data.partition(b"\n")[2])
        recent = tuple((_of(int, number), _of(str, key)) for number, key in body["recent"])
        return cls(cls.decode_version(data), recent, _of(int, body["forgotten"]))

    @staticmethod
    def decode_version(data: bytes) -> int:
        """Of the file's first bytes."""
        head, newline, _ = data.partition(b"\n")
        words = head.decode().rsplit(" ", 2)
        if not newline or words[:2] != [_MAGIC, "version"]:
            raise ValueError(f"it begins with {head[:40]!r}")
        return int(words[2])


def _of(kind: type[_Value], value: Any) -> _Value:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def file_name(key: str) -> str:
    """The name of the key's file: readable, safe, and distinct where case does not count."""
    data = key.encode()
    quoted = "".join(chr(byte) if byte in _SAFE else f"%{byte:02x}" for byte in data)
    if len(quoted) > LONGEST_QUOTED:
        quoted = f"{quoted[:80]}.{hashlib.sha256(data).hexdigest()}"
    return KEY_PREFIX + quoted


def may_be_under(name: str, prefix: str) -> bool:
    """Whether the file of that name can be of a key under the prefix; False is certain."""
    start = file_name(prefix) if prefix else KEY_PREFIX
    # A quoted key may be cut at 80, between the characters of an escape even.
    length = min(len(start), len(KEY_PREFIX) + 80)
    return name[:length] == start[:length]


# -- the folder --------------------------------------------------------------------------------


class _Folder:
    """The files of one store. Methods that write are called with the lock held.

    A file is written aside, synced and renamed into place, so a reader without the lock finds the
    old or the new one, and a crash leaves at most one file aside, which the next writer takes away.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self.path = path
        self._timeout = timeout
        self._threads = threading.Lock()
        self._lock: filelock.BaseFileLock | None = None
        self._made = False
        self._highest = 0

    def make(self) -> None:
        """Make the folder and its parents at the first operation."""
        if not self._made:
            with self._reached():
                self.path.mkdir(parents=True, exist_ok=True)
            self._made = True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The folder to ourselves, among threads and processes. Raises StoreTimeout."""
        with self.locked_if_free(self._timeout) as had:
            if not had:
                raise StoreTimeout(
                    f"the lock of {self.path} was not had within {self._timeout:g} s"
                )
            yield

    @contextmanager
    def locked_if_free(self, patience: float = 0.0) -> Iterator[bool]:
        """The folder to ourselves, if nobody else has it for longer; whether we do."""
        with contextlib.ExitStack() as stack:
            had = self._threads.acquire(timeout=min(patience, threading.TIMEOUT_MAX))
            if had:
                stack.callback(self._threads.release)
                stack.enter_context(self._reached())
                if self._lock is None:
                    self._lock = hard_lock(self.path / "lock")
                try:
                    self._lock.acquire(timeout=patience, poll_interval=LOCK_POLL)
                    stack.callback(self._lock.release)
                except filelock.Timeout:
                    had = False
            yield had

    def version(self) -> int:
        """The store's version; cheap, and without the lock."""
        highest = self._highest
        data = self._read(CHANGES_FILE, 100)
        version = 0 if data is None else self._whole(Changes.decode_version, data, CHANGES_FILE)
        return self._grown(version, highest)

    def changes(self) -> Changes:
        """The version and the latest changes."""
        highest = self._highest
        data = self._read(CHANGES_FILE)
        changes = Changes() if data is None else self._whole(Changes.decode, data, CHANGES_FILE)
        self._grown(changes.version, highest)
        if data is None:
            with self._reached():
                stray = next((n for n in os.listdir(self.path) if n.startswith(KEY_PREFIX)), None)
            if stray is not None and not (self.path / CHANGES_FILE).exists():
                raise StoreRefused(f"{self.path} holds {stray}, but no file {CHANGES_FILE}")
        return changes

    def get(self, key: str) -> Record | None:
        """What stands at the key; without the lock, too."""
        record = self._record(file_name(key))
        if record is None:
            self.version()  # refuses where the key is gone because the whole store is
        elif record.entry.key != key:
            path = self.path / file_name(key)
            raise StoreRefused(f"{path} is of key {record.entry.key!r}, not {key!r}")
        return record

    def records(self, prefix: str) -> Sequence[Record]:
        """All that stands under the prefix, sorted by key."""
        with self._reached():
            names = [name for name in os.listdir(self.path) if may_be_under(name, prefix)]
        found = [record for name in names if (record := self._record(name)) is not None]
        under = (record for record in found if record.entry.key.startswith(prefix))
        return sorted(under, key=lambda record: record.entry.key)

    def _record(self, name: str) -> Record | None:
        data = self._read(name)
        if data is None:
            return None
        record = self._whole(Record.decode, data, name)
        if file_name(record.entry.key) != name:
            raise StoreRefused(f"{self.path / name} is of key {record.entry.key!r}")
        return record

    def claim(self, key: str) -> int:
        """The next version, never to be used again, remembered as a change of the key."""
        changes = self.changes().claim(key)
        with self._reached():
            self._write(CHANGES_FILE, changes.encode())
            self._sync()
        return self._grown(changes.version, changes.version)

    def put(self, record: Record, *, durably: bool = True) -> None:
        """Put the record in the place of what stands at its key; unless durably, a crash of the
        machine may bring the old one back."""
        with self._reached():
            self._write(file_name(record.entry.key), record.encode())
            if durably:
                self._sync()

    def remove(self, entry: Entry) -> None:
        """Take the entry's file away, as a change with a version of its own."""
        self.claim(entry.key)
        with self._reached():
            os.unlink(self.path / file_name(entry.key))
            self._sync()

    def _whole(self, decode: Callable[[bytes], _Value], data: bytes, name: str) -> _Value:
        try:
            return decode(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreRefused(
                f"{self.path / name} is no whole file of a FileStore: {error!r}"
            ) from None

    def _grown(self, version: int, highest: int) -> int:
        # `highest` was noted before the version was read, or another thread's could overtake.
        if version < highest:
            raise StoreRefused(
                f"{self.path} went back from version {highest} to {version}: "
                "the store was deleted or replaced while it was in use"
            )
        self._highest = max(self._highest, version)
        return version

    def _read(self, name: str, size: int = -1) -> bytes | None:
        with self._reached():
            path = self.path / name
            try:
                # A pipe would keep who opens it waiting.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                handle = os.open(path, flags)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise StoreRefused(f"{path} is a link, and no file of a FileStore") from None
                raise
            with open(handle, "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise StoreRefused(f"{path} is no file of a FileStore")
                return file.read(size)

    def _write(self, name: str, data: bytes) -> None:
        aside = self.path / "aside"
        # What a crash has left there; whoever makes another meanwhile, we do not write to it.
        aside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(aside, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / name)

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (OSError, NotImplementedError) as error:  # of filelock, where there are no locks
            raise StoreUnavailable(f"store folder {self.path}: {error}") from error


# -- the store ---------------------------------------------------------------------------------


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
        self._folder = _Folder(self._path, self._timeout)
        self._owner = secrets.token_hex(8)
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self._closed.set()
        self._owned: dict[str, int] = {}
        self._leases = _LeaseWatch(self._folder)

    def get(self, key: str) -> Entry | None:
        self._begin(check_key(key))
        record = self._folder.get(key)
        return None if record is None else record.entry

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        check_ttl(ttl)
        self._begin(check_key(key))
        with self._folder.locked():
            return self._put(key, bytes(value), ttl)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        check_ttl(ttl)
        with self._turn(check_key(key)) as current:
            if expected != (current.entry.version if current else ABSENT):
                return CompareSet(False, current.entry if current else None)
            return CompareSet(True, self._put(key, bytes(value), ttl))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        with self._turn(check_key(key)) as current:
            if current is None or expected not in (None, current.entry.version):
                return False
            self._folder.remove(current.entry)
            self._owned.pop(key, None)
            return True

    def refresh(self, key: str, version: int) -> None:
        with self._turn(check_key(key)) as current:
            found = None if current is None else current.entry.version
            lease = None if current is None else current.lease
            check_lease(key, version, found, leased=lease is not None)
            if current is None or lease is None or lease.owner != self._owner:
                raise lost_lease(key, version, "it belongs to another client")
            moved = attrs.evolve(lease, beat=lease.beat + 1)
            self._folder.put(Record(current.entry, moved), durably=False)

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

    def _begin(self, _: str = "") -> None:
        if self._closed.is_set():
            raise StoreUnavailable(f"this FileStore of {self._folder.path} is closed")
        self._folder.make()
        self._leases.look(monotonic())

    @contextmanager
    def _turn(self, key: str) -> Iterator[Record | None]:
        """What stands at the key while nobody else writes."""
        self._begin()
        with self._folder.locked():
            yield self._folder.get(key)

    def _put(self, key: str, value: bytes, ttl: float | None) -> Entry:
        entry = Entry(key, value, self._folder.claim(key))
        lease = None if ttl is None else Lease(self._owner, float(ttl))
        self._folder.put(Record(entry, lease))
        if lease is None:
            self._owned.pop(key, None)
        else:
            self._owned[key] = entry.version
        return entry


class _LeaseWatch:
    """Ends the leases that this reader has seen stand still for their ttl.

    Looks are taken with the lock held, so a time in which nobody could have it counts as one
    look, not as the owners' silence; and what is ended is what was read, at that moment.
    """

    def __init__(self, folder: _Folder) -> None:
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
