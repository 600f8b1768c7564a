"""The folder of a FileStore: whole files only, one writer at a time, whatever crashes.

A file is written aside, synced and renamed into place under the folder's lock, so a reader
without the lock finds the old or the new one, and a crash leaves at most one file aside, which
the next writer takes away. Nothing is read or written through a link that somebody put there.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from ..errors import StoreError, StoreRefused, StoreTimeout, StoreUnavailable
from ..hard_lock import hard_lock
from .file_format import (
    CHANGES_FILE,
    KEY_PREFIX,
    Changes,
    Record,
    decode_changes,
    decode_record,
    decode_version,
    encode_changes,
    encode_record,
    file_name,
    may_be_under,
)
from .interface import Entry

LOCK_POLL = 0.003


class Folder:
    """The files of one store. Methods that write are called with the lock held."""

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
        if not self._threads.acquire(timeout=min(self._timeout, threading.TIMEOUT_MAX)):
            raise self._not_had()
        try:
            with self._reached():
                try:
                    self._processes.acquire(timeout=self._timeout, poll_interval=LOCK_POLL)
                except filelock.Timeout:
                    raise self._not_had() from None
                try:
                    yield
                finally:
                    self._processes.release()
        finally:
            self._threads.release()

    @contextmanager
    def locked_if_free(self) -> Iterator[bool]:
        """The folder to ourselves if nobody else has it; whether we do."""
        if not self._threads.acquire(blocking=False):
            yield False
            return
        try:
            with self._reached():
                try:
                    self._processes.acquire(timeout=0)
                except filelock.Timeout:
                    yield False
                    return
                try:
                    yield True
                finally:
                    self._processes.release()
        finally:
            self._threads.release()

    @property
    def _processes(self) -> filelock.BaseFileLock:
        if self._lock is None:
            self._lock = hard_lock(self.path / "lock")
        return self._lock

    def version(self) -> int:
        """The store's version; cheap, and without the lock."""
        highest = self._highest
        data = self._read(CHANGES_FILE, 100)
        version = 0 if data is None else decode_version(data, str(self.path / CHANGES_FILE))
        return self._grown(version, highest)

    def changes(self) -> Changes:
        """The version and the latest changes."""
        highest = self._highest
        data = self._read(CHANGES_FILE)
        if data is not None:
            changes = decode_changes(data, str(self.path / CHANGES_FILE))
            self._grown(changes.version, highest)
            return changes
        self._grown(0, highest)
        with self._reached():
            stray = next((n for n in os.listdir(self.path) if n.startswith(KEY_PREFIX)), None)
        if stray is not None and not (self.path / CHANGES_FILE).exists():
            raise StoreRefused(f"{self.path} holds {stray}, but no file {CHANGES_FILE}")
        return Changes()

    def get(self, key: str) -> Record | None:
        """What stands at the key; without the lock, too."""
        path = self.path / file_name(key)
        data = self._read(path.name)
        if data is None:
            self.version()  # refuses where the key is gone because the whole store is
            return None
        record = decode_record(data, str(path))
        if record.entry.key != key:
            raise StoreRefused(f"{path} is of key {record.entry.key!r}, not {key!r}")
        return record

    def records(self, prefix: str) -> list[Record]:
        """All that stands under the prefix, sorted by key."""
        with self._reached():
            names = [name for name in os.listdir(self.path) if may_be_under(name, prefix)]
        found = []
        for name in names:
            data = self._read(name)
            if data is None:
                continue
            record = decode_record(data, str(self.path / name))
            if file_name(record.entry.key) != name:
                raise StoreRefused(f"{self.path / name} is of key {record.entry.key!r}")
            if record.entry.key.startswith(prefix):
                found.append(record)
        return sorted(found, key=lambda record: record.entry.key)

    def claim(self, key: str) -> int:
        """The next version, never to be used again, remembered as a change of the key."""
        changes = self.changes().claim(key)
        with self._reached():
            self._write(CHANGES_FILE, encode_changes(changes))
            self._sync()
        return self._grown(changes.version, changes.version)

    def put(self, record: Record) -> None:
        """Put the record in the place of what stands at its key, to stay."""
        self.touch(record)
        with self._reached():
            self._sync()

    def touch(self, record: Record) -> None:
        """Like `put`, but a crash of the machine may bring the old file back."""
        with self._reached():
            self._write(file_name(record.entry.key), encode_record(record))

    def remove(self, entry: Entry) -> None:
        """Take the entry's file away, as a change with a version of its own."""
        self.claim(entry.key)
        with self._reached():
            os.unlink(self.path / file_name(entry.key))
            self._sync()

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

    def _not_had(self) -> StoreTimeout:
        return StoreTimeout(f"the lock of {self.path} was not had within {self._timeout:g} s")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except (OSError, NotImplementedError) as error:  # of filelock, where there are no locks
            raise StoreUnavailable(f"store folder {self.path}: {error}") from error
