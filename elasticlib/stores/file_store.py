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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import filelock

from ..clock import monotonic
from ..errors import (
    ConfigError,
    StoreConnectionError,
    StoreError,
    StoreRejectedError,
    StoreTimeoutError,
)
from ..hard_lock import hard_lock
from ..threads import ForkAware
from .interface import ABSENT, CompareSetResult, Entry, Listing, Store, check_key, check_ttl
from .key_space import ChangeLog, LeaseTimers, check_lease, lost_lease

LONGEST_PAUSE = 0.5
"""Seconds after which to look again for leases that are new, at the latest."""
LOCK_POLL = 0.003
WAIT_POLL_S = 0.02  # interval at which `wait` looks at the folder
REMEMBERED = 256
"""How many changes are remembered; a waiter that is further behind is woken without a cause."""

CHANGES_FILE = "changes"
KEY_PREFIX = "k."
LONGEST_QUOTED = 200
_MAGIC = "elasticlib store 1"
_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_LASTING = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOTDIR", "EEXIST", "ENAMETOOLONG", "ELOOP"),
        *("EINVAL", "ENOSYS", "EOPNOTSUPP"),
    )
)
"""Errors that no later try mends, before a client has written to the folder."""
_Value = TypeVar("_Value")

# -- what stands in the files ------------------------------------------------------------------


@attrs.frozen
class Record:
    """An entry as it stands in its file: a JSON header of one line, and the value.

    Where it is a lease, it has an owner, the seconds of silence after which it ends, and a counter
    that the owner moves.
    """

    entry: Entry
    owner: str = ""
    ttl: float = 0.0
    beat: int = 0

    def encode(self) -> bytes:
        lease = {"owner": self.owner, "ttl": self.ttl, "beat": self.beat}
        header = {
            "format": _MAGIC,
            "key": self.entry.key,
            "version": self.entry.version,
            "size": len(self.entry.value),
            "crc": zlib.crc32(self.entry.value),
            "lease": lease if self.ttl else None,
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
        return cls(entry, _of(str, lease["owner"]), float(lease["ttl"]), _of(int, lease["beat"]))


def encode_changes(journal: ChangeLog) -> bytes:
    """The version on a line of its own, and behind it the latest changes, oldest first."""
    forgotten = journal.version - len(journal.keys)
    body = {"forgotten": forgotten, "recent": list(enumerate(journal.keys, forgotten + 1))}
    return f"{_MAGIC} version {journal.version}\n{json.dumps(body)}\n".encode()


def decode_changes(data: bytes) -> ChangeLog:
    head, _, rest = data.partition(b"\n")
    format, _, version = head.decode().rpartition(" version ")
    if format != _MAGIC:
        raise ValueError(f"it begins with {head[:40]!r}")
    body = json.loads(rest)
    keys = [_of(str, key) for _, key in body["recent"]]
    if _of(int, body["forgotten"]) + len(keys) != int(version):
        raise ValueError(f"it names {len(keys)} changes up to version {version}")
    return ChangeLog(int(version), deque(keys, REMEMBERED))


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

    def __init__(self, path: Path) -> None:
        self.path = path
        self._threads = threading.Lock()
        self._lock: filelock.BaseFileLock | None = None
        self._written = False
        self._highest = 0
        self._read_last: tuple[bytes | None, ChangeLog] = None, ChangeLog()

    @contextmanager
    def reached(self) -> Iterator[None]:
        """What goes wrong with its files is the store's error, and names the folder. One that we
        have written to may be away for a while."""
        try:
            yield
        except StoreError:
            raise
        except (OSError, NotImplementedError) as error:  # of filelock, where there are no locks
            if self._written or getattr(error, "errno", errno.ENOSYS) not in _LASTING:
                raise StoreConnectionError(f"store folder {self.path}: {error}") from error
            raise StoreRejectedError(
                f"store folder {self.path} cannot be used: {error}; choose a folder that this user "
                "can make, write and lock files in, on every node"
            ) from error

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """The folder to ourselves, among threads and processes. Raises StoreTimeoutError."""
        late = StoreTimeoutError(f"could not get the lock of {self.path} within {seconds:g} s")
        if not self._threads.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise late
        try:
            self._lock = self._lock or hard_lock(self.path / "lock")
            try:
                self._lock.acquire(timeout=seconds, poll_interval=LOCK_POLL)
            except filelock.Timeout:
                raise late from None
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._threads.release()

    def changes(self) -> ChangeLog:
        """The version and the latest changes, as they stand; without the lock, too."""
        highest = self._highest  # before the version is read, or another thread's could overtake
        data = self._read(CHANGES_FILE)
        before, journal = self._read_last
        if data is None:
            journal = ChangeLog()
        elif data != before:
            journal = self._whole(decode_changes, data, CHANGES_FILE)
            self._read_last = data, journal
        if journal.version < highest:
            raise StoreRejectedError(
                f"{self.path} went back from version {highest} to {journal.version}: "
                "the store was deleted or replaced while it was in use"
            )
        self._highest = max(self._highest, journal.version)
        if data is None:
            stray = next((n for n in os.listdir(self.path) if n.startswith(KEY_PREFIX)), None)
            if stray is not None and not (self.path / CHANGES_FILE).exists():
                raise StoreRejectedError(f"{self.path} holds {stray}, but no file {CHANGES_FILE}")
        return journal

    def get(self, key: str) -> Record | None:
        """What stands at the key; without the lock, too."""
        record = self._record(file_name(key))
        if record is None:
            self.changes()  # refuses where the key is gone because the whole store is
        return record

    def records(self, prefix: str) -> Sequence[Record]:
        """All that stands under the prefix, sorted by key."""
        names = [name for name in os.listdir(self.path) if may_be_under(name, prefix)]
        found = [record for name in names if (record := self._record(name)) is not None]
        under = (record for record in found if record.entry.key.startswith(prefix))
        return sorted(under, key=lambda record: record.entry.key)

    def claim(self, key: str) -> int:
        """The next version, never to be used again, remembered as a change of the key.

        It is claimed before the key's file changes. A crash in between leaves a change that did
        not happen: a waiter is woken without a cause.
        """
        before = self.changes()
        journal = ChangeLog(before.version, deque(before.keys, REMEMBERED))
        version = journal.record(key)
        self._write(CHANGES_FILE, encode_changes(journal))
        self._sync()
        self._highest = version
        return version

    def put(self, record: Record, *, durably: bool = True) -> None:
        """Put the record in the place of what stands at its key; unless durably, a crash of the
        machine may bring the old one back."""
        self._write(file_name(record.entry.key), record.encode())
        if durably:
            self._sync()

    def remove(self, entry: Entry) -> None:
        """Take the entry's file away, as a change with a version of its own."""
        self.claim(entry.key)
        os.unlink(self.path / file_name(entry.key))
        self._sync()

    def _record(self, name: str) -> Record | None:
        data = self._read(name)
        if data is None:
            return None
        record = self._whole(Record.decode, data, name)
        if file_name(record.entry.key) != name:
            raise StoreRejectedError(f"{self.path / name} is of key {record.entry.key!r}")
        return record

    def _whole(self, decode: Callable[[bytes], _Value], data: bytes, name: str) -> _Value:
        try:
            return decode(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreRejectedError(
                f"{self.path / name} is not a complete file of a FileStore: {error!r}"
            ) from None

    def _read(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            # A pipe would keep who opens it waiting.
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StoreRejectedError(f"{path} is a link, not a file of a FileStore") from None
            raise
        with open(handle, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise StoreRejectedError(f"{path} is not a file of a FileStore")
            return file.read()

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
        self._written = True

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# -- the store ---------------------------------------------------------------------------------


class FileStore(Store, ForkAware):
    """A client of the store in `folder`.

    Args:
        folder: made, with its parents, at the first operation.
        timeout: seconds that an operation may wait for the folder's lock.
    """

    def __init__(self, folder: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, got {timeout}")
        self._path, self._timeout = Path(folder), timeout
        self._closed = threading.Event()
        self._check_process()

    def _init_process_state(self) -> None:
        self._folder, self._made = _Folder(self._path), False
        self._owner = secrets.token_hex(8)
        self._has_leased = False
        before, self._closed = self._closed, threading.Event()
        if before.is_set():
            self._closed.set()
        # The leases of all, by key, version and beat; how long each has stood still as seen here.
        self._clock: LeaseTimers[tuple[str, int, int]] = LeaseTimers()
        self._scanned, self._look_at = -1, 0.0

    def get(self, key: str) -> Entry | None:
        with self._open(check_key(key)) as folder:
            record = folder.get(key)
        return None if record is None else record.entry

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        check_ttl(ttl)
        with self._alone(check_key(key)):
            return self._put(key, bytes(value), ttl)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        check_ttl(ttl)
        with self._alone(check_key(key)) as folder:
            current = folder.get(key)
            if expected != (current.entry.version if current else ABSENT):
                return CompareSetResult(False, current.entry if current else None)
            return CompareSetResult(True, self._put(key, bytes(value), ttl))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        with self._alone(check_key(key)) as folder:
            current = folder.get(key)
            if current is None or expected not in (None, current.entry.version):
                return False
            folder.remove(current.entry)
            return True

    def refresh(self, key: str, version: int) -> None:
        with self._alone(check_key(key)) as folder:
            current = folder.get(key)
            found = None if current is None else current.entry.version
            check_lease(key, version, found, is_leased=current is not None and current.ttl > 0)
            if current is None or current.owner != self._owner:
                raise lost_lease(key, version, "it belongs to another client")
            folder.put(attrs.evolve(current, beat=current.beat + 1), durably=False)

    def list(self, prefix: str) -> Listing:
        with self._alone() as folder:
            entries = tuple(record.entry for record in folder.records(prefix))
            return Listing(entries, folder.changes().version)

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        deadline = monotonic() + timeout
        while True:
            # A version is claimed, with its key, before its file changes. So what is read here
            # without the lock can be too early for a reader, who then waits for it; never late.
            with self._open() as folder:
                if folder.changes().has_changed(prefix, after):
                    return True
            left = deadline - monotonic()
            if left <= 0:
                return False
            self._closed.wait(min(left, WAIT_POLL_S))

    def close(self) -> None:
        self._check_process()
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._has_leased:
            return
        with self._folder.reached(), self._folder.locked(self._timeout):
            for record in self._folder.records(""):
                if record.owner == self._owner:
                    self._folder.remove(record.entry)

    @contextmanager
    def _open(self, _: str = "") -> Iterator[_Folder]:
        """The folder, which is made where it is not there; leases that are over are gone."""
        self._check_process()
        if self._closed.is_set():
            raise StoreConnectionError(f"this FileStore of {self._path} is closed")
        with self._folder.reached():
            if not self._made:
                self._path.mkdir(parents=True, exist_ok=True)
                self._made = True
            if monotonic() >= self._look_at:
                # Where somebody else has the lock, the next operation tries again.
                with contextlib.suppress(StoreTimeoutError), self._folder.locked(0.0):
                    self._end_silent_leases()
            yield self._folder

    @contextmanager
    def _alone(self, key: str = "") -> Iterator[_Folder]:
        """The folder while nobody else writes."""
        with self._open(key) as folder, folder.locked(self._timeout):
            yield folder

    def _put(self, key: str, value: bytes, ttl: float | None) -> Entry:
        entry = Entry(key, value, self._folder.claim(key))
        if ttl is None:
            self._folder.put(Record(entry))
        else:
            self._has_leased = True
            self._folder.put(Record(entry, self._owner, float(ttl)))
        return entry

    def _end_silent_leases(self) -> None:
        """Look at the leases, and end those that this reader has seen stand still for their ttl.

        Looks are taken with the lock held, so a time in which nobody could have it counts as one
        look, not as the owners' silence; and what is ended is what was read, at that moment.
        """
        clock, folder = self._clock, self._folder
        version = folder.changes().version
        if version != self._scanned:
            records = folder.records("")
            self._scanned = version
        else:
            # Nothing but their counters has changed.
            found = [folder.get(key) for key, _, _ in clock.names]
            records = [record for record in found if record is not None]
        leased = {(r.entry.key, r.entry.version, r.beat): r for r in records if r.ttl}
        now = monotonic()
        for name in clock.names - leased.keys():
            clock.remove(name)
        for name in leased.keys() - clock.names:
            clock.restart(name, leased[name].ttl, now)
        for name in clock.tick(now):
            folder.remove(leased[name].entry)
        due = clock.until_due(now)
        self._look_at = now + (LONGEST_PAUSE if due is None else min(due, LONGEST_PAUSE))
