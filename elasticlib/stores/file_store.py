"""A store in a directory that all nodes share, for clusters that only have a file system.

Writers take turns with a lock and replace whole files, so a crash leaves the old value or the new
one. The file `changes` contains the version of the store and the latest changes. Each key has a
file with its value, version and lease. A lease is a counter that its owner increments; each reader
measures with its own monotonic clock how long the counter has not changed.

A file that is incomplete, or that belongs to another key than its name, is rejected by name.
Symbolic links are never followed.
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
from ..file_lock import kernel_file_lock
from ..threads import ForkAware
from .interface import ABSENT, CompareSetResult, Entry, Listing, Store, check_key, check_ttl
from .key_space import ChangeLog, LeaseTimers, check_lease, lost_lease

MAX_TICK_INTERVAL_S = 0.5  # new leases of other clients are found after this time at the latest
LOCK_POLL_INTERVAL_S = 0.003
POLL_INTERVAL_S = 0.02  # of `wait`
MAX_CHANGE_LOG = 256  # a wait for a change after an older version returns True in any case

CHANGES_FILE = "changes"
TEMPORARY_FILE = "aside"
KEY_PREFIX = "k."
MAX_QUOTED_LENGTH = 200  # a longer name is shortened to this many characters and a hash
SHORTENED_LENGTH = 80
_MAGIC = "elasticlib store 1"
_UNQUOTED = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
# A client that has never written to the directory does not retry these errors.
_PERMANENT_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOTDIR", "EEXIST", "ENAMETOOLONG", "ELOOP"),
        *("EINVAL", "ENOSYS", "EOPNOTSUPP"),
    )
)
_Value = TypeVar("_Value")

# -- content of the files ----------------------------------------------------------------------


@attrs.frozen
class StoredEntry:
    """An entry and its lease, as a file contains them: one line with a JSON header, and the value.

    Attributes:
        entry: The entry.
        owner: The client that wrote the lease, or "".
        ttl: Seconds after which the lease expires if `refresh_count` does not change; 0 if the key
            is not a lease.
        refresh_count: The number of refreshes.
    """

    entry: Entry
    owner: str = ""
    ttl: float = 0.0
    refresh_count: int = 0

    def encode(self) -> bytes:
        lease = {"owner": self.owner, "ttl": self.ttl, "refresh_count": self.refresh_count}
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
    def decode(cls, data: bytes) -> StoredEntry:
        head, _, value = data.partition(b"\n")
        header = json.loads(head)
        if header["format"] != _MAGIC:
            raise ValueError(f"its format is {header['format']!r}")
        if header["size"] != len(value) or header["crc"] != zlib.crc32(value):
            raise ValueError(f"{header['size']} bytes were written, {len(value)} are there")
        entry = Entry(_check_type(str, header["key"]), value, _check_type(int, header["version"]))
        if (lease := header["lease"]) is None:
            return cls(entry)
        count = _check_type(int, lease["refresh_count"])
        return cls(entry, _check_type(str, lease["owner"]), float(lease["ttl"]), count)


def encode_changes(log: ChangeLog) -> bytes:
    """Return the content of the file `changes`: a line with the version, and one with the log."""
    first = log.version - len(log.keys)
    body = {"forgotten": first, "recent": list(enumerate(log.keys, first + 1))}
    return f"{_MAGIC} version {log.version}\n{json.dumps(body)}\n".encode()


def decode_changes(data: bytes) -> ChangeLog:
    """Return the version and the latest changes from the content of the file `changes`."""
    head, _, rest = data.partition(b"\n")
    format, _, version = head.decode().rpartition(" version ")
    if format != _MAGIC:
        raise ValueError(f"it begins with {head[:40]!r}")
    body = json.loads(rest)
    keys = [_check_type(str, key) for _, key in body["recent"]]
    if _check_type(int, body["forgotten"]) + len(keys) != int(version):
        raise ValueError(f"it names {len(keys)} changes up to version {version}")
    return ChangeLog(int(version), deque(keys, MAX_CHANGE_LOG))


def _check_type(kind: type[_Value], value: Any) -> _Value:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def file_name(key: str) -> str:
    """Return the name of the key's file, which is unique even if case is ignored."""
    data = key.encode()
    quoted = "".join(chr(byte) if byte in _UNQUOTED else f"%{byte:02x}" for byte in data)
    if len(quoted) > MAX_QUOTED_LENGTH:
        quoted = f"{quoted[:SHORTENED_LENGTH]}.{hashlib.sha256(data).hexdigest()}"
    return KEY_PREFIX + quoted


def may_have_prefix(name: str, prefix: str) -> bool:
    """Return True unless the name of the file shows that its key does not have the prefix."""
    start = file_name(prefix) if prefix else KEY_PREFIX
    # A shortened name can end within an escape sequence.
    length = min(len(start), len(KEY_PREFIX) + SHORTENED_LENGTH)
    return name[:length] == start[:length]


# -- directory ---------------------------------------------------------------------------------


class _StoreDirectory:
    """The files of one store. The caller of a method that writes owns the lock.

    Each file is written to a temporary file, synchronized and renamed. A reader without the lock
    thus finds the old or the new file. A crash leaves at most one temporary file, which the next
    writer removes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread_lock = threading.Lock()  # excludes the other threads of this process
        self._file_lock: filelock.BaseFileLock | None = None  # excludes other processes
        self._has_written = False  # the directory was usable, so errors may be temporary
        self._max_version = 0  # highest version that was read
        self._decoded: tuple[bytes | None, ChangeLog] = None, ChangeLog()  # last file `changes`

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise errors of the file system as errors of the store, with the directory."""
        try:
            yield
        except StoreError:
            raise
        # filelock raises NotImplementedError where there are no locks.
        except (OSError, NotImplementedError) as error:
            number = getattr(error, "errno", errno.ENOSYS)
            if self._has_written or number not in _PERMANENT_ERRNOS:
                raise StoreConnectionError(f"store folder {self.path}: {error}") from error
            raise StoreRejectedError(
                f"store folder {self.path} cannot be used: {error}; choose a folder that this user "
                "can make, write and lock files in, on every node"
            ) from error

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Exclude other threads and processes, or raise StoreTimeoutError."""
        timeout = StoreTimeoutError(f"could not get the lock of {self.path} within {timeout_s:g} s")
        if not self._thread_lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise timeout
        try:
            self._file_lock = self._file_lock or kernel_file_lock(self.path / "lock")
            try:
                self._file_lock.acquire(timeout=timeout_s, poll_interval=LOCK_POLL_INTERVAL_S)
            except filelock.Timeout:
                raise timeout from None
            try:
                yield
            finally:
                self._file_lock.release()
        finally:
            self._thread_lock.release()

    def changes(self) -> ChangeLog:
        """Return the version and the latest changes. Needs no lock.

        Raises:
            StoreRejectedError: The store was deleted, replaced or damaged.
        """
        max_version = self._max_version  # before another thread reads a later version
        data = self._read_file(CHANGES_FILE)
        before, log = self._decoded
        if data is None:
            log = ChangeLog()
        elif data != before:
            log = self._decode(decode_changes, data, CHANGES_FILE)
            self._decoded = data, log
        if log.version < max_version:
            raise StoreRejectedError(
                f"{self.path} went back from version {max_version} to {log.version}: "
                "the store was deleted or replaced while it was in use"
            )
        self._max_version = max(self._max_version, log.version)
        if data is None:
            names = (name for name in os.listdir(self.path) if name.startswith(KEY_PREFIX))
            name = next(names, None)
            if name is not None and not (self.path / CHANGES_FILE).exists():
                raise StoreRejectedError(f"{self.path} holds {name}, but no file {CHANGES_FILE}")
        return log

    def get(self, key: str) -> StoredEntry | None:
        """Return the entry at the key. Needs no lock."""
        stored = self._read_entry(file_name(key))
        if stored is None:
            self.changes()  # raises an error if the whole store was deleted
        return stored

    def list(self, prefix: str) -> Sequence[StoredEntry]:
        """Return all entries under the prefix, sorted by key."""
        names = [name for name in os.listdir(self.path) if may_have_prefix(name, prefix)]
        entries = [stored for name in names if (stored := self._read_entry(name)) is not None]
        under = (stored for stored in entries if stored.entry.key.startswith(prefix))
        return sorted(under, key=lambda stored: stored.entry.key)

    def allocate_version(self, key: str) -> int:
        """Record a change of the key, and return its version.

        This precedes the change of the key's file. After a crash between the two, a wait
        returns True without a change.
        """
        before = self.changes()
        log = ChangeLog(before.version, deque(before.keys, MAX_CHANGE_LOG))
        version = log.record(key)
        self._write_file(CHANGES_FILE, encode_changes(log))
        self._sync_directory()
        self._max_version = version
        return version

    def put(self, stored: StoredEntry, *, is_durable: bool = True) -> None:
        """Replace the file of the key. If not durable, a crash of the machine can undo that."""
        self._write_file(file_name(stored.entry.key), stored.encode())
        if is_durable:
            self._sync_directory()

    def remove(self, entry: Entry) -> None:
        """Remove the file of the entry, which is a change with a version."""
        self.allocate_version(entry.key)
        os.unlink(self.path / file_name(entry.key))
        self._sync_directory()

    def _read_entry(self, name: str) -> StoredEntry | None:
        data = self._read_file(name)
        if data is None:
            return None
        stored = self._decode(StoredEntry.decode, data, name)
        if file_name(stored.entry.key) != name:
            raise StoreRejectedError(f"{self.path / name} is of key {stored.entry.key!r}")
        return stored

    def _decode(self, decode: Callable[[bytes], _Value], data: bytes, name: str) -> _Value:
        try:
            return decode(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreRejectedError(
                f"{self.path / name} is not a complete file of a FileStore: {error!r}"
            ) from None

    def _read_file(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            # Without O_NONBLOCK, opening a named pipe would block.
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

    def _write_file(self, name: str, data: bytes) -> None:
        temporary = self.path / TEMPORARY_FILE
        temporary.unlink(missing_ok=True)  # a crash may have left it
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)
        self._has_written = True

    def _sync_directory(self) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- store -------------------------------------------------------------------------------------


class FileStore(Store, ForkAware):
    """A client of the store in a directory. Thread-safe.

    In a forked child, the copy is another client.

    Args:
        folder: The directory, in which `~` is expanded. The first operation creates it with its
            parents.
        timeout: Seconds to wait for the lock of the directory.

    Raises:
        ConfigError: The timeout is not positive.
    """

    def __init__(self, folder: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, got {timeout}")
        # The process may change its working directory before the first operation.
        self._path, self._timeout = Path(os.path.expanduser(folder)).absolute(), timeout
        self._closed = threading.Event()  # set by `close`
        self._check_process()

    def _init_process_state(self) -> None:
        self._directory = _StoreDirectory(self._path)
        self._is_created = False  # the directory exists
        self._owner = secrets.token_hex(8)  # owner of this client's leases
        self._has_leased = False  # this client has written a lease
        before, self._closed = self._closed, threading.Event()
        if before.is_set():
            self._closed.set()
        # The leases of all clients, by key, version and refresh count.
        self._timers: LeaseTimers[tuple[str, int, int]] = LeaseTimers()
        self._scanned_version = -1  # version at which all files were read for leases
        self._next_tick_at = 0.0

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._open() as directory:
            stored = directory.get(key)
        return None if stored is None else stored.entry

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        check_key(key)
        check_ttl(ttl)
        with self._exclusive():
            return self._put(key, bytes(value), ttl)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        check_key(key)
        check_ttl(ttl)
        with self._exclusive() as directory:
            current = directory.get(key)
            if expected != (current.entry.version if current else ABSENT):
                return CompareSetResult(False, current.entry if current else None)
            return CompareSetResult(True, self._put(key, bytes(value), ttl))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        check_key(key)
        with self._exclusive() as directory:
            current = directory.get(key)
            if current is None or expected not in (None, current.entry.version):
                return False
            directory.remove(current.entry)
            return True

    def refresh(self, key: str, version: int) -> None:
        check_key(key)
        with self._exclusive() as directory:
            current = directory.get(key)
            found = None if current is None else current.entry.version
            is_leased = current is not None and current.ttl > 0
            check_lease(key, version, found, is_leased=is_leased)
            if current is None or current.owner != self._owner:
                raise lost_lease(key, version, "it belongs to another client")
            count = current.refresh_count + 1
            directory.put(attrs.evolve(current, refresh_count=count), is_durable=False)

    def list(self, prefix: str) -> Listing:
        with self._exclusive() as directory:
            entries = tuple(stored.entry for stored in directory.list(prefix))
            return Listing(entries, directory.changes().version)

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        deadline = monotonic() + timeout
        while True:
            # The change is recorded before its file changes. A reader without the lock can learn of
            # a change too early, and then waits for the lock, but never too late.
            with self._open() as directory:
                if directory.changes().has_changed(prefix, after):
                    return True
            left_s = deadline - monotonic()
            if left_s <= 0:
                return False
            self._closed.wait(min(left_s, POLL_INTERVAL_S))

    def close(self) -> None:
        self._check_process()
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._has_leased:
            return
        directory = self._directory
        with directory.translate_errors(), directory.locked(self._timeout):
            for stored in directory.list(""):
                if stored.owner == self._owner:
                    directory.remove(stored.entry)

    @contextmanager
    def _open(self) -> Iterator[_StoreDirectory]:
        """Yield the directory. Create it if necessary, and expire leases if that is due."""
        self._check_process()
        if self._closed.is_set():
            raise StoreConnectionError(f"this FileStore of {self._path} is closed")
        with self._directory.translate_errors():
            if not self._is_created:
                self._path.mkdir(parents=True, exist_ok=True)
                self._is_created = True
            if monotonic() >= self._next_tick_at:
                # If another client owns the lock, the next operation tries again.
                with contextlib.suppress(StoreTimeoutError), self._directory.locked(0.0):
                    self._expire_leases()
            yield self._directory

    @contextmanager
    def _exclusive(self) -> Iterator[_StoreDirectory]:
        """Yield the directory as `_open` does, with its lock."""
        with self._open() as directory, directory.locked(self._timeout):
            yield directory

    def _put(self, key: str, value: bytes, ttl: float | None) -> Entry:
        entry = Entry(key, value, self._directory.allocate_version(key))
        if ttl is None:
            self._directory.put(StoredEntry(entry))
        else:
            self._has_leased = True
            self._directory.put(StoredEntry(entry, self._owner, float(ttl)))
        return entry

    def _expire_leases(self) -> None:
        """Remove the leases whose counter has not changed for their ttl.

        The caller owns the lock. A time in which no client could get the lock thus counts as one
        tick, and no lease can be refreshed between the read and its removal.
        """
        timers, directory = self._timers, self._directory
        version = directory.changes().version
        if version != self._scanned_version:
            entries = directory.list("")
            self._scanned_version = version
        else:
            # Only the counters of known leases can have changed.
            known = [directory.get(key) for key, _, _ in timers.names]
            entries = [stored for stored in known if stored is not None]
        leases = {(s.entry.key, s.entry.version, s.refresh_count): s for s in entries if s.ttl}
        now = monotonic()
        for name in timers.names - leases.keys():
            timers.remove(name)
        for name in leases.keys() - timers.names:
            timers.restart(name, leases[name].ttl, now)
        for name in timers.tick(now):
            directory.remove(leases[name].entry)
        due_s = timers.until_due(now)
        interval = MAX_TICK_INTERVAL_S if due_s is None else min(due_s, MAX_TICK_INTERVAL_S)
        self._next_tick_at = now + interval
