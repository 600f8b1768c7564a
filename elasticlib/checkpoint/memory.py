"""Snapshots as files in memory that an agent owns: written in slots, pinned by whoever reads.

A writer locks the slot that it writes and a reader the one that it reads, each without waiting,
so neither ever sees the other's half. Without torch: agents use it too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs

from ..errors import CheckpointError
from ..foreign import opened, read_file
from .slot import (
    RECORD_BYTES,
    SEAL_AT,
    Found,
    Record,
    Slot,
    choose,
    decode,
    decode_seal,
    encode,
    encode_seal,
)

log = logging.getLogger("elasticlib.checkpoint")

OWN = "own"
FROM = "from"
NEWS = "news"
"""A pipe in an era's folder by which workers wake an agent that looks after their snapshots."""


@attrs.define(eq=False)
class _File:
    """A slot that this process writes."""

    path: Path
    handle: int
    memory: mmap.mmap
    capacity: int
    record: Record | None = None

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.handle)
        # What still has a view of it (a tensor) keeps the memory until it goes.
        with contextlib.suppress(BufferError):
            self.memory.close()


class Slots:
    """Those of one writer, in the folder of an era.

    owner: of what is written; empty for a worker's own, else what names the node that sent it.
    No two writers share a slot, whoever stood still for however long.
    """

    def __init__(self, folder: str | os.PathLike[str], owner: str = "") -> None:
        self._folder = Path(folder)
        kind = f"{FROM}.{owner}" if owner else OWN
        self._prefix = f"{kind}.{secrets.token_hex(4)}"
        self._made = 0
        self._files: dict[str, _File] = {}
        # Who writes and who sums are two threads.
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def writing(self, record: Record) -> Iterator[memoryview]:
        """The memory for a pack of `record.size` bytes, all of which the caller writes.

        It counts when the block is left without an error; the last `record.keep` whole ones stay
        as they are until then, and after it if it fails.

        Raises:
            CheckpointError: there is no memory for it.
        """
        text = encode(record)
        with self._lock:
            file = self._locked(record.size, record.keep)
            file.record = None
        try:
            file.memory[: len(text)] = bytes(len(text))
            view = memoryview(file.memory)[RECORD_BYTES : RECORD_BYTES + record.size]
            yield view
            file.memory[: len(text)] = text
            file.record = record
        finally:
            fcntl.flock(file.handle, fcntl.LOCK_UN)

    def view_of(self, record: Record) -> memoryview | None:
        """The bytes of a snapshot of ours; None if its slot holds another by now."""
        with self._lock:
            file = self._file_of(record)
            if file is None:
                return None
            return memoryview(file.memory)[RECORD_BYTES : RECORD_BYTES + record.size]

    def seal(self, record: Record, summed: int) -> None:
        """Put the sum of a snapshot of ours beside it, if it is still there."""
        with self._lock:
            file = self._file_of(record)
            if file is not None:
                seal = encode_seal(record, summed)
                file.memory[SEAL_AT : SEAL_AT + len(seal)] = seal

    def _file_of(self, record: Record) -> _File | None:
        return next((file for file in self._files.values() if file.record is record), None)

    def make_folder(self) -> None:
        """Anew, if others have removed it; whoever writes there says why that cannot be."""
        for folder in (self._folder.parent, self._folder):
            with contextlib.suppress(OSError):
                folder.mkdir(0o700)

    def close(self) -> None:
        """Let go of the memory, which stays as it is."""
        with self._lock:
            for file in self._files.values():
                os.close(file.handle)
                with contextlib.suppress(BufferError):
                    file.memory.close()
            self._files.clear()

    def remove(self) -> None:
        """Let go of the memory, and free it."""
        for file in self._files.values():
            file.drop()
        self._files.clear()

    def _locked(self, size: int, keep: int) -> _File:
        self._leave_what_was_removed()
        slots = (Slot(n, file.capacity, file.record) for n, file in self._files.items())
        choice = choose(slots, size, keep)
        # First, so that a larger state need not find room beside those that have become too small.
        for name in choice.drop:
            self._files.pop(name).drop()
        for name in choice.use:
            if _locks(self._files[name].handle, fcntl.LOCK_EX):
                return self._files[name]
        file = self._make(size)
        self._files[file.path.name] = file
        return file

    def _leave_what_was_removed(self) -> None:
        """By others, with the folder: nobody would find what is written there from now on."""
        gone = [name for name, file in self._files.items() if not os.fstat(file.handle).st_nlink]
        for name in gone:
            self._files.pop(name).drop()
        if gone:
            log.warning(
                "snapshots in %s were removed by others; those of the next steps are kept again",
                self._folder,
            )

    def _make(self, size: int) -> _File:
        self._made += 1
        path = self._folder / f"{self._prefix}.{self._made}"
        self.make_folder()
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CheckpointError(
                f"the agent's memory at {self._folder} takes no snapshot: {error.strerror}"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Now, and not as it is filled, when full memory would be answered with SIGBUS.
            os.posix_fallocate(handle, 0, RECORD_BYTES + size)
            # Mapped page by page as it is first written, which is faster here than MAP_POPULATE.
            return _File(path, handle, mmap.mmap(handle, RECORD_BYTES + size), size)
        except OSError as error:
            os.close(handle)
            path.unlink(missing_ok=True)
            raise CheckpointError(_no_room(self._folder, size, error)) from error


def _no_room(folder: Path, size: int, error: OSError) -> str:
    text = f"no memory for a snapshot of {size} bytes at {folder}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        free = shutil.disk_usage(folder).free
        text += f", {free} bytes are free; give /dev/shm more (docker: --shm-size)"
    return text


def _locks(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def look(memory: str | os.PathLike[str]) -> list[Found]:
    """The whole snapshots in an agent's memory, in no order."""
    found = []
    for path in _slots_in(memory):
        _, *owner, _, _ = path.name.split(".")
        record = _record_of(path)
        if record is not None:
            file = f"{path.parent.name}/{path.name}"
            found.append(Found(int(path.parent.name), ".".join(owner), file, record))
    return found


def _slots_in(memory: str | os.PathLike[str]) -> Iterator[Path]:
    for era in Path(memory).glob("[0-9]*"):
        if not era.name.isdecimal():
            continue
        names: list[str] = []
        # An era that is over is removed, perhaps as this looks.
        with contextlib.suppress(OSError), os.scandir(era) as files:
            names = [file.name for file in files]
        yield from (era / name for name in names if _is_slot(name))


def _is_slot(name: str) -> bool:
    """Workers write here, and whatever else they leave is none of ours."""
    return name.partition(".")[0] in (OWN, FROM) and name.count(".") >= 2


def _record_of(path: Path) -> Record | None:
    try:
        with opened(path) as handle:
            return _whole_record(handle)
    except OSError:
        return None


def _whole_record(handle: int) -> Record | None:
    """None if the slot holds no snapshot, or was cut short."""
    record = decode(os.pread(handle, RECORD_BYTES, 0))
    if record is None or os.fstat(handle).st_size < RECORD_BYTES + record.size:
        return None
    return record


@contextlib.contextmanager
def held(memory: str | os.PathLike[str], found: Found) -> Iterator[int | None]:
    """The descriptor of a snapshot's file, which stays as it is within the block; None if it is
    gone."""
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(opened(Path(memory, found.file)))
        except OSError:
            yield None
            return
        # Read again under the lock: the slot may hold a later one by now.
        same = _locks(handle, fcntl.LOCK_SH) and _whole_record(handle) == found.record
        yield handle if same else None


@contextlib.contextmanager
def pinned(memory: str | os.PathLike[str], found: Found) -> Iterator[memoryview | None]:
    """The pack of a snapshot, which stays as it is within the block; None if it is gone.

    Its writer must have ended, or be this process: reading what it cuts meanwhile would end the
    reader. Who reads beside it takes `pieces`.
    """
    with held(memory, found) as handle:
        if handle is None:
            yield None
            return
        # Not shared: what a reader writes by mistake is its own.
        size = RECORD_BYTES + found.record.size
        mapped = mmap.mmap(handle, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        whole = memoryview(mapped)
        view = whole[RECORD_BYTES:]
        try:
            yield view
        finally:
            # The traceback of a reader's error may hold slices of it; they keep the memory until
            # they go, and that error is what is to be told.
            for release in (view.release, whole.release, mapped.close):
                with contextlib.suppress(BufferError):
                    release()


def pieces(handle: int, size: int, piece: int) -> Iterator[bytes]:
    """The pack of a snapshot that is `held`, of `size` bytes, in pieces of at most `piece`.

    Raises:
        CheckpointError: the file was cut short meanwhile.
    """
    at = 0
    while at < size:
        data = os.pread(handle, min(piece, size - at), RECORD_BYTES + at)
        if not data:
            raise CheckpointError(f"the snapshot was cut to {at} of {size} bytes while it was read")
        yield data
        at += len(data)


def sum_of(memory: str | os.PathLike[str], found: Found) -> int | None:
    """The `word_sum` that the bytes of a snapshot had when they were summed; None if they were not.

    To be asked while it is pinned.
    """
    with contextlib.suppress(OSError):
        return decode_seal(read_file(Path(memory, found.file), RECORD_BYTES), found.record)
    return None


def flaw(memory: str | os.PathLike[str], found: Found, sum_now: Callable[[], int]) -> str | None:
    """What is wrong with the bytes of a pinned snapshot; None if nothing, or if it has no sum."""
    expected = sum_of(memory, found)
    if expected is None or (now := sum_now()) == expected:
        return None
    return (
        f"the snapshot of step {found.record.step} was changed in memory: its words' sum was "
        f"{expected:016x}, and is {now:016x}"
    )


def remove(memory: str | os.PathLike[str], found: Iterable[Found]) -> None:
    """Free what these take. Who has one pinned keeps it until it lets go."""
    for one in found:
        with contextlib.suppress(OSError):
            Path(memory, one.file).unlink()


def remove_torn(memory: str | os.PathLike[str], era: int) -> None:
    """Free what writers of earlier eras left of snapshots in the middle of which they ended."""
    for path in _slots_in(memory):
        if int(path.parent.name) >= era:
            continue
        with contextlib.suppress(OSError), opened(path) as handle:
            # Under the lock: who has it is writing still, and will be whole or not.
            locked = _locks(handle, fcntl.LOCK_EX)
            if locked and decode(os.pread(handle, RECORD_BYTES, 0)) is None:
                path.unlink()


def drop(memory: str | os.PathLike[str], useless: Callable[[list[Found]], Iterable[Found]]) -> None:
    """Remove what `useless` says is of no more use."""
    remove(memory, useless(look(memory)))
