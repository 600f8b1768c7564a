"""Slots: memory for copies of a state, which snapshots and saves of one worker share.

Each writer has files of its own in its agent's shared memory, its slots. The first pages of a slot
is the header of the snapshot that follows. The header is cleared before the bytes after it are
changed, and is written last. So a reader sees a complete snapshot or none, whenever a writer is
killed. Writer and reader lock the slot that they use, and neither waits for the other.

A save copies the state into a slot, too, and reserves it until it is written to the disk. The slot
has no header unless the copy is also a snapshot. Without an agent, or if its memory is full, the
slot of a save is private memory of the process.

A worker's snapshots outlive it in the directory of its attempt (one start of an agent's workers).
Bytes in this memory have no checksum: they get one when they are sent or written to a disk.

Agents import this module, so it does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import attrs

from ..clock import monotonic
from ..codec import from_json, to_json
from ..errors import CheckpointError, require_not_none
from ..untrusted import open_regular_file, read_json
from .refs import (
    MEMORY,
    REPLICA,
    Line,
    StateRef,
    Writer,
    may_free,
    num_retained,
    without_old_copies,
)
from .safetensors_header import round_up
from .storage import new_memory

log = logging.getLogger("elasticlib.checkpoint")

LOCAL_PREFIX = "own"  # file names of this node's snapshots
REPLICA_PREFIX = "from"  # file names of replicas of another node's snapshots
WAKEUP_PIPE = "news"  # A worker writes here to wake the agent that looks after its snapshots.
WAKEUP_RETRY_S = (
    1.0  # An agent that polls every two seconds creates the pipe again if it is removed.
)

# Whole pages, so that the tensors in the snapshot are aligned. The longest path takes one of them.
HEADER_BYTES = 8192
MAX_OVERSIZE_FACTOR = 2  # A slot is at most so many times as large as the snapshot in it.
CHUNK_BYTES = 4 << 20  # Memory is populated in chunks, so that a snapshot waits for one at most.
# A slot has room for a state that grows by this fraction. The room takes no memory until then.
SPARE_FRACTION = 16

_MAGIC = b"ELSLOT4\n"
_HEAD = struct.Struct("<8sII")  # magic, size of the JSON text, its CRC-32
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
_MADV_POPULATE_WRITE = 23  # Linux 5.14


# -- headers: pure ---------------------------------------------------------------------------------


@attrs.frozen
class SnapshotHeader:
    """The description of a snapshot in the first pages of its slot."""

    name: str  # of the kind of snapshot, if a program has several managers
    step: int
    sequence: int  # number of the snapshot, counted from 1 by its writer
    size: int  # of the pack after the header, in bytes
    writer: Writer
    line: Line  # the newest branches; the last one is that of the snapshot
    part: int = 0  # number of the rank's part, if the state is sharded
    parts: int = 1  # number of the parts of the state
    folder: str = ""  # where the snapshot is written when the job ends without it; empty: nowhere
    sharded: bool = False  # whether the pack is a rank's part of a sharded state, even the only one
    # Digest of the values that rank 0 would save for all ranks; empty if the pack lacks them, or
    # has those of one rank.
    values: str = ""
    saved_at: float = 0.0  # Unix time of the writer's clock, for display
    copy: int = 0  # of a part that several ranks have (HSDP): numbers these ranks

    @property
    def num_retained(self) -> int:
        """The number of complete snapshots that stay while another one is written."""
        return num_retained(self.parts)

    def ref(self, place: str) -> StateRef:
        """Return the state in a slot with this header.

        Args:
            place: the path of the slot in the agent's memory.
        """
        is_own = place.rpartition("/")[2].startswith(f"{LOCAL_PREFIX}.")
        return StateRef(
            branch=self.line[-1].id,
            step=self.step,
            name=self.name,
            parts=self.parts if self.sharded else 0,
            part=self.part if self.sharded else None,
            copy=self.copy,
            writer=self.writer,
            line=self.line,
            tier=MEMORY if is_own else REPLICA,
            place=place,
            number=self.sequence,
            size=self.size,
            saved_at=self.saved_at,
            values=self.values,
        )


@lru_cache(maxsize=16)
def _encode_origin(writer: Writer, line: Line) -> str:
    """Return the JSON text of the fields that are equal in many headers."""
    return f'"writer":{_compact(to_json(writer))},"line":{_compact(to_json(line))}'


_FIELDS = tuple(
    field.name for field in attrs.fields(SnapshotHeader) if field.name not in ("writer", "line")
)


def encode_header(header: SnapshotHeader) -> bytes:
    """Encode a header.

    Raises:
        CheckpointError: The header has more than `HEADER_BYTES`.
    """
    fields = _compact({name: getattr(header, name) for name in _FIELDS})
    origin = _encode_origin(header.writer, header.line)
    text = f"{fields[:-1]},{origin}}}".encode(errors="surrogateescape")  # A path may not be UTF-8.
    if _HEAD.size + len(text) > HEADER_BYTES:
        raise CheckpointError(
            f"the header of a snapshot has at most {HEADER_BYTES} bytes, and that of step "
            f"{header.step} has {_HEAD.size + len(text)}: use a shorter path than {header.folder!r}"
        )
    return _HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text


def decode_header(page: bytes | memoryview) -> SnapshotHeader | None:
    """Return the header in the first bytes of a slot, or None if there is no complete one."""
    if len(page) < _HEAD.size:
        return None
    magic, length, crc32 = _HEAD.unpack_from(page)
    text = bytes(page[_HEAD.size : _HEAD.size + length])
    if magic != _MAGIC or len(text) != length or crc32 != zlib.crc32(text):
        return None
    try:
        return header_from_fields(read_json(text.decode(errors="surrogateescape")))
    except ValueError:
        return None


def header_from_fields(fields: Any) -> SnapshotHeader:
    """Return the header with these fields.

    Raises:
        ValueError: A field is missing, unknown, or of another type or range.
    """
    header = from_json(SnapshotHeader, fields)
    is_valid = 0 <= header.part < header.parts and header.size > 0 and header.sequence > 0
    if not is_valid or not header.line:
        raise ValueError(f"these are not the fields of a snapshot: {header!s:.200}")
    return header


# -- choice of slots and snapshots: pure -----------------------------------------------------------


@attrs.define(eq=False)
class Slot:
    """A slot of a writer."""

    capacity: int  # bytes after the header
    header: SnapshotHeader | None = None  # None if the slot contains no complete snapshot
    save: Save | None = None  # the last save that was written to the disk from this slot

    @property
    def is_reserved(self) -> bool:
        """True while a save is being written to the disk from this slot."""
        return self.save is not None and not self.save.is_finished


class Save(Protocol):
    """A save that is written from a slot, see `save_handle.LocalSave`."""

    @property
    def is_finished(self) -> bool: ...

    def settle(self) -> None:
        """Wait until it is finished."""


SlotT = TypeVar("SlotT", bound=Slot)


def choose_slots(
    slots: Sequence[SlotT], size: int, num_retained: int
) -> tuple[list[SlotT], list[SlotT]]:
    """Choose the slots for the next snapshot of `size` bytes.

    Returns:
        Two lists: the slots that can hold the snapshot (empty slots first, then the oldest
        snapshots), and the slots that are too small or too large. The slots of the newest
        `num_retained` complete snapshots and reserved slots are in neither list.
    """
    complete = sorted([slot for slot in slots if slot.header is not None], key=_sequence)
    free = [slot for slot in slots if slot.header is None] + complete[:-num_retained]
    usable: list[SlotT] = []
    useless: list[SlotT] = []
    for slot in free:
        if not slot.is_reserved:
            fits = size <= slot.capacity <= size * MAX_OVERSIZE_FACTOR
            (usable if fits else useless).append(slot)
    return usable, useless


def _sequence(slot: Slot) -> int:
    return slot.header.sequence if slot.header else 0


def era_of(ref: StateRef) -> int:
    """Return the number of the attempt in which a snapshot was put into the memory."""
    return int(ref.place.partition("/")[0])


def kind_of(ref: StateRef) -> tuple[str, int]:
    """Return the name and the number of the part of a snapshot."""
    return (ref.name, ref.part or 0)


# -- writing ---------------------------------------------------------------------------------------


@attrs.define(eq=False, kw_only=True)
class MappedSlot(Slot):
    """A slot that this process writes."""

    memory: mmap.mmap
    path: Path | None = None  # None for private memory of this process
    handle: int = -1
    # The first bytes of the file that have memory. Writing after them could raise SIGBUS.
    allocated: int = 0
    is_used: bool = False  # whether a state was copied here
    is_dropped: bool = False  # whether this process is freeing it
    # The layout of the last state here, and the views of the memory that belong to it.
    views: tuple[Any, list[Any]] | None = None
    page_lock: PageLock | None = None  # set if tensors are copied here from a GPU

    def view(self, size: int) -> memoryview:
        """Return the memory of a pack of this size."""
        return memoryview(self.memory)[HEADER_BYTES : HEADER_BYTES + size]

    def try_lock(self) -> bool:
        """Lock the file for writing. Return False if it is being read."""
        return self.path is None or _try_lock(self.handle, fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Allow others to read the file."""
        if self.path is not None:
            fcntl.flock(self.handle, fcntl.LOCK_UN)

    def allocate(self, end: int) -> None:
        """Allocate memory up to this byte of the file.

        Raises:
            OSError: There is not enough memory.
        """
        if end > self.allocated and self.path is not None:
            os.posix_fallocate(self.handle, self.allocated, end - self.allocated)
            self.allocated = end

    def populate(self, start: int, end: int) -> None:
        """Map the pages of a range of allocated memory, which takes longer than writing to them."""
        end = min(end, len(self.memory))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, start))
        size = ctypes.c_size_t(end - start)
        if _madvise is None or _madvise(ctypes.c_void_p(address), size, _MADV_POPULATE_WRITE):
            self.memory[start:end] = bytes(end - start)  # an older kernel

    def close(self) -> None:
        """Unmap the memory. A file stays where it is. Another call does nothing more."""
        self.is_used = True
        self.views = None
        lock, self.page_lock = self.page_lock, None
        if lock is not None:
            lock.release()
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)
        # A view of the memory, as a save that is being written has it, keeps the memory.
        with contextlib.suppress(BufferError):
            self.memory.close()


class PageLock(Protocol):
    """The lock of the pages of a slot, see `tensor_layout.lock_pages`."""

    def release(self) -> None: ...


class Image(Protocol):
    """A state that is copied to a slot, see `pack.PackImage`."""

    @property
    def size(self) -> int: ...

    def copy_to_slot(self, slot: MappedSlot) -> None: ...


class SlotWrite:
    """A context manager in which a slot is written: see `SnapshotSlots.open_for_writing`.

    It is a class, not a generator with `contextlib.contextmanager`. If an exception of a signal
    handler prevents `__exit__`, a generator stays suspended until the traceback is deleted. Only
    then would its cleanup run, when another snapshot may use the slot.
    """

    def __init__(self, slots: SnapshotSlots, size: int, header: SnapshotHeader | None) -> None:
        self._slots, self._size, self._header = slots, size, header
        self._text = bytes(_HEAD.size) if header is None else encode_header(header)
        self.slot: MappedSlot | None = None  # within the block

    def __enter__(self) -> memoryview:
        slot = self.slot = self._slots._acquire(self._size, self._header)
        slot.memory[: len(self._text)] = bytes(len(self._text))
        return slot.view(self._size)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        slot = self.slot
        if slot is None:
            return
        # In this order a complete snapshot is never left locked, whichever line an exception
        # interrupts. In between, the slot contains no snapshot, and readers skip it.
        slot.unlock()
        if kind is None and self._header is not None:
            slot.memory[: len(self._text)] = self._text
            slot.header = self._header


class SnapshotSlots:
    """The slots of one writer in the directory of an attempt. No two writers share a slot.

    An exception of a signal handler may interrupt a method at any line: its complete snapshots stay
    as they are, and all methods can be called again. No method may be called by a signal handler
    while another one runs in its thread: `CheckpointManager` prevents that.

    Args:
        folder: The directory of the attempt. Without it, the slots are private memory of this
            process and only saves use them.
        owner: The node that sends the snapshots; empty for a worker's own.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, owner: str = "") -> None:
        self._folder = None if folder is None else Path(folder)
        kind = f"{REPLICA_PREFIX}.{owner}" if owner else LOCAL_PREFIX
        self._prefix = f"{kind}.{secrets.token_hex(4)}"
        self._num_created = 0
        self._slots: list[MappedSlot] = []
        self._lock = threading.Lock()  # One thread writes, and another one allocates memory.

    def open_for_writing(self, header: SnapshotHeader) -> SlotWrite:
        """Return a context manager with the memory for a pack of `header.size` bytes.

        The caller writes all of these bytes. The snapshot is complete when the block
        ends without an error. The last `header.num_retained` complete snapshots stay until then,
        and if the block fails.

        Raises:
            CheckpointError: There is not enough memory.
        """
        return SlotWrite(self, header.size, header)

    def copy(self, image: Image, header: SnapshotHeader | None = None) -> MappedSlot:
        """Copy a state to a slot.

        Args:
            image: The state.
            header: Makes the copy a snapshot. Without it, the copy is for a save: the caller sets
                `save` of the slot, which reserves it.

        Raises:
            CheckpointError: There is not enough memory.
        """
        write = SlotWrite(self, image.size, header)
        with write:
            slot = require_not_none(write.slot, "the slot")
            image.copy_to_slot(slot)
        return slot

    def has_free_slot(self, size: int, num_retained: int) -> bool:
        """Return whether the next snapshot of this size needs no new slot."""
        files = [slot for slot in self._slots if slot.path is not None]
        return bool(choose_slots(files, size, num_retained)[0])

    def preallocate(
        self,
        header: SnapshotHeader,
        may_continue: Callable[[], bool],
        lock_pages: Callable[[MappedSlot], None] | None = None,
    ) -> None:
        """Create a slot for the next snapshot, unless a slot is free or memory is short.

        The pages of the slot are populated in chunks, which takes several times as long as writing
        into them. A writer that needs the slot earlier uses it with the pages that it has by then.

        Args:
            header: The header of a snapshot of the same size.
            may_continue: Called before each chunk. It waits while the training must not be
                disturbed, and returns whether to go on.
            lock_pages: Called with the populated slot.
        """
        folder, end = self._folder, HEADER_BYTES + header.size
        if folder is None or not may_continue():
            return
        with self._lock:
            if self.has_free_slot(header.size, header.num_retained):
                return
            try:
                if shutil.disk_usage(folder).free < header.size * MAX_OVERSIZE_FACTOR:
                    return
                slot = self._create_file(folder, header.size)
            except (CheckpointError, OSError):
                return  # The next snapshot raises the error.
            slot.unlock()
        for start in range(0, end, CHUNK_BYTES):
            if not may_continue():
                return
            with self._lock:
                if slot.is_used:
                    return
                try:
                    slot.allocate(min(start + CHUNK_BYTES, end))
                except OSError:
                    self._drop([slot])
                    return
                slot.populate(start, min(start + CHUNK_BYTES, end))
        if lock_pages is not None and may_continue():
            with self._lock:
                if not slot.is_used:
                    lock_pages(slot)

    def make_folder(self) -> None:
        """Create the directory if another program removed it. A failure shows when it is used."""
        if self._folder is not None:
            for folder in (self._folder.parent, self._folder):
                with contextlib.suppress(OSError):
                    folder.mkdir(0o700)

    def close(self) -> None:
        """Unmap all slots. Complete snapshots stay where they are, all other slots are freed."""
        with self._lock:
            self._drop([slot for slot in self._slots if slot.header is None])
            for slot in self._slots:
                slot.close()
            self._slots.clear()

    def _acquire(self, size: int, header: SnapshotHeader | None) -> MappedSlot:
        """Return a locked slot for a pack of `size` bytes, which contains no snapshot any more."""
        with self._lock:
            slot = self._find_slot(size, header)
            slot.header = None
            slot.is_used = True
        return slot

    def _find_slot(self, size: int, header: SnapshotHeader | None) -> MappedSlot:
        """Return a locked slot, whatever it takes: private memory, or the slot of a save.

        Args:
            size: the size of the pack.
            header: the header if the pack is a snapshot, which cannot use private memory. A
                snapshot waits for a save that uses a slot if there is no other memory.
        """
        self._drop([slot for slot in self._slots if slot.is_dropped])
        try:
            slot = self._lock_slot(size, header)
            if slot.path is None or os.fstat(slot.handle).st_nlink:
                return slot
            # No reader would find a snapshot in a file that was removed.
            self._drop_removed()
            return self._lock_slot(size, header)
        except CheckpointError:
            # A save does not need the agent's memory. A snapshot can wait for the slot of a save.
            if header is None and self._folder is not None:
                return self._create_private(size)
            saves = [slot.save for slot in self._slots if slot.save and slot.is_reserved]
            if not saves:
                raise
            for save in saves:
                save.settle()
            return self._lock_slot(size, header)

    def _lock_slot(self, size: int, header: SnapshotHeader | None) -> MappedSlot:
        """Lock a usable slot, or create one. Free the slots of another size.

        Raises:
            CheckpointError: there is not enough memory.
        """
        slots = self._slots
        if header is not None:
            slots, num_retained = [s for s in slots if s.path is not None], header.num_retained
        else:
            num_retained = max((s.header.num_retained for s in slots if s.header), default=1)
        usable, useless = choose_slots(slots, size, num_retained)
        # These are freed first, so that a larger state needs no memory in addition to them.
        self._drop(useless)
        slot = next((slot for slot in usable if slot.try_lock()), None)
        if self._folder is None:
            return slot or self._create_private(size)
        slot = slot or self._create_file(self._folder, size)
        try:
            slot.allocate(HEADER_BYTES + size)  # fails here, not while the memory is written
        except OSError as error:
            self._drop([slot])
            raise self._out_of_memory(size, error) from error
        return slot

    def _drop_removed(self) -> None:
        """Drop the slots whose files another program has removed, and log a warning."""
        files = [slot for slot in self._slots if slot.path is not None]
        self._drop([slot for slot in files if not os.fstat(slot.handle).st_nlink])
        what = "snapshots in %s were removed by another program; the next steps are kept again"
        log.warning(what, self._folder)

    def _drop(self, slots: list[MappedSlot]) -> None:
        """Remove the files of slots, unmap their memory, and forget the slots."""
        for slot in slots:
            # If an exception interrupts this before the slot is removed from the list,
            # `_find_slot` drops it again. An open file that is not in the list would keep its
            # memory.
            slot.is_dropped = True
            if slot.path is not None:
                slot.path.unlink(missing_ok=True)
            slot.close()
            self._slots.remove(slot)

    def _create_private(self, size: int) -> MappedSlot:
        """Create a slot for saves in the memory of this process."""
        try:
            memory = new_memory(HEADER_BYTES + _capacity(size))
        except OSError as error:
            raise CheckpointError(
                f"no memory for a copy of {size} bytes: {error.strerror}"
            ) from error
        slot = MappedSlot(_capacity(size), memory=memory)
        self._slots.append(slot)
        return slot

    def _create_file(self, folder: Path, size: int) -> MappedSlot:
        """Create a slot, locked, without memory yet."""
        self._num_created += 1
        path = folder / f"{self._prefix}.{self._num_created}"
        self.make_folder()
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CheckpointError(
                f"the agent's memory at {folder} cannot hold snapshots: {error.strerror}"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.ftruncate(handle, HEADER_BYTES + _capacity(size))
            # Pages are mapped when they are first written, which is faster here than MAP_POPULATE.
            mapped = mmap.mmap(handle, HEADER_BYTES + _capacity(size))
            slot = MappedSlot(_capacity(size), path=path, handle=handle, memory=mapped)
            self._slots.append(slot)
        except BaseException as error:
            # An exception of a signal handler can arrive when the slot is in the list already.
            self._slots[:] = [slot for slot in self._slots if slot.handle != handle]
            os.close(handle)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._out_of_memory(size, error) from error
            raise
        return slot

    def _out_of_memory(self, size: int, error: OSError) -> CheckpointError:
        text = f"no memory for a snapshot of {size} bytes at {self._folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.ENOMEM) and self._folder is not None:
            free = shutil.disk_usage(self._folder).free
            text += f", {free} bytes are free; give /dev/shm more (docker: --shm-size)"
        return CheckpointError(text)


def _capacity(size: int) -> int:
    """Return the capacity of a new slot for a pack of this size."""
    return round_up(size + size // SPARE_FRACTION, HEADER_BYTES)


def _try_lock(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class AgentWaker:
    """Wakes the agent that looks after the snapshots of an attempt, through a pipe.

    The pipe stays open between calls, because opening it takes longer than all other system calls
    of a small snapshot together. If its reader has closed it, it is opened again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = os.path.join(folder, WAKEUP_PIPE)
        self._handle: int | None = None
        self._next_try = float("-inf")  # when to look for the pipe again, by `monotonic`

    def wake(self) -> bool:
        """Wake the agent. Return False if no agent looks after the snapshots."""
        if self._handle is not None and not self._write(self._handle):
            self.close()
        if self._handle is None:
            if (now := monotonic()) < self._next_try:
                return False
            self._next_try = now + WAKEUP_RETRY_S
            try:
                self._handle = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                return False
            self._write(self._handle)
        return True

    def close(self) -> None:
        """Close the pipe. It is opened again by `wake`."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _write(self, handle: int) -> bool:
        """Write a byte. Return False if the pipe has no reader."""
        try:
            os.write(handle, b"\n")
        except BlockingIOError:
            return True  # The pipe is full: the agent has not read the last bytes yet.
        except OSError:
            return False
        return True


def wake_agent(folder: str | os.PathLike[str]) -> bool:
    """Wake the agent that looks after an attempt's snapshots. Return False if there is none."""
    waker = AgentWaker(folder)
    try:
        return waker.wake()
    finally:
        waker.close()


# -- reading ---------------------------------------------------------------------------------------


def list_snapshots(memory: str | os.PathLike[str]) -> list[StateRef]:
    """Return the complete snapshots in an agent's memory, in no particular order."""
    refs = []
    for path in _slot_paths(memory):
        with contextlib.suppress(OSError), open_regular_file(path) as handle:
            header = _read_header(handle)
            if header is not None:
                refs.append(header.ref(f"{path.parent.name}/{path.name}"))
    return refs


def read_snapshot_header(memory: str | os.PathLike[str], ref: StateRef) -> SnapshotHeader | None:
    """Return the header of a snapshot, or None if it does not exist any more."""
    with contextlib.suppress(OSError), open_regular_file(Path(memory, ref.place)) as handle:
        header = _read_header(handle)
        if header is not None and header.ref(ref.place) == ref:
            return header
    return None


def _slot_paths(memory: str | os.PathLike[str]) -> Iterator[Path]:
    prefixes = (LOCAL_PREFIX, REPLICA_PREFIX)
    for attempt in Path(memory).glob("[0-9]*"):
        if not attempt.name.isdecimal():
            continue
        names: list[str] = []
        # The directory of an earlier attempt may be removed at the same time.
        with contextlib.suppress(OSError), os.scandir(attempt) as files:
            names = [file.name for file in files]
        # Workers may leave other files here.
        yield from (attempt / n for n in names if n.split(".")[0] in prefixes and n.count(".") >= 2)


def _read_header(handle: int) -> SnapshotHeader | None:
    """Return the header of a slot, or None if it contains no snapshot or was truncated."""
    header = decode_header(os.pread(handle, HEADER_BYTES, 0))
    if header is None or os.fstat(handle).st_size < HEADER_BYTES + header.size:
        return None
    return header


@contextlib.contextmanager
def lock_snapshot(memory: str | os.PathLike[str], ref: StateRef) -> Iterator[int | None]:
    """Lock a snapshot, so that it does not change within the block.

    Yields:
        The descriptor of its file, or None if the snapshot does not exist any more.
    """
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(open_regular_file(Path(memory, ref.place)))
        except OSError:
            yield None
            return
        # The header is read again under the lock, because the slot may contain a later snapshot.
        header = _read_header(handle) if _try_lock(handle, fcntl.LOCK_SH) else None
        yield handle if header is not None and header.ref(ref.place) == ref else None


@contextlib.contextmanager
def map_snapshot(memory: str | os.PathLike[str], ref: StateRef) -> Iterator[memoryview | None]:
    """Map the pack of a snapshot, which does not change within the block.

    Use this only if the writer has exited or is this process. If the writer truncated the file,
    reading it would kill the reader; `iter_chunks` is safe.

    Yields:
        The pack, or None if the snapshot does not exist any more.
    """
    with lock_snapshot(memory, ref) as handle:
        if handle is None:
            yield None
            return
        # The mapping is private: what a reader writes by mistake does not reach the snapshot.
        size = HEADER_BYTES + ref.size
        mapped = mmap.mmap(handle, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        whole = memoryview(mapped)
        view = whole[HEADER_BYTES:]
        try:
            yield view
        finally:
            # The traceback of a reader's error may refer to slices of the view. They keep the
            # memory, and that error must not be replaced by a BufferError.
            for release in (view.release, whole.release, mapped.close):
                with contextlib.suppress(BufferError):
                    release()


def iter_chunks(handle: int, size: int, chunk_bytes: int) -> Iterator[bytes]:
    """Read the pack of a locked snapshot of `size` bytes in chunks.

    Raises:
        CheckpointError: The file was truncated while it was read.
    """
    at = 0
    while at < size:
        data = os.pread(handle, min(chunk_bytes, size - at), HEADER_BYTES + at)
        if not data:
            raise CheckpointError(f"the snapshot was cut to {at} of {size} bytes while it was read")
        yield data
        at += len(data)


def newest_local_snapshots(folder: Path) -> list[StateRef]:
    """Return the last snapshot of each name and part that workers wrote in this attempt."""
    era = int(folder.name)
    local = [r for r in list_snapshots(folder.parent) if era_of(r) == era and r.tier == MEMORY]
    return list({kind_of(ref): ref for ref in sorted(local, key=lambda ref: ref.number)}.values())


def remove_snapshots(memory: str | os.PathLike[str], refs: Iterable[StateRef]) -> None:
    """Free the memory of snapshots. A process that has mapped one keeps it until it unmaps it."""
    for ref in refs:
        with contextlib.suppress(OSError):
            Path(memory, ref.place).unlink()


def remove_superseded(memory: str | os.PathLike[str], refs: Sequence[StateRef], era: int) -> bool:
    """Free the snapshots of attempts before `era`, this attempt, that are not needed any more.

    Returns:
        True if `refs` has no other snapshots of attempts before `era`.
    """
    earlier = {ref.place for ref in refs if era_of(ref) < era}
    for name in {ref.name for ref in refs}:
        of_name = [ref for ref in refs if ref.name == name]
        own = [ref for ref in of_name if ref.tier == MEMORY and ref.place not in earlier]
        newest = max(own, key=lambda ref: (ref.writer.order, ref.number), default=None)
        freed = may_free(of_name, newest.line if newest else (), earlier)
        remove_snapshots(memory, freed)
        earlier -= {ref.place for ref in freed}
    return not earlier


def remove_incomplete(memory: str | os.PathLike[str], era: int) -> None:
    """Free the slots of earlier attempts whose writers were killed in the middle of a snapshot."""
    for path in _slot_paths(memory):
        if int(path.parent.name) >= era:
            continue
        with contextlib.suppress(OSError), open_regular_file(path) as handle:
            # A writer that has the lock is still writing.
            is_locked = _try_lock(handle, fcntl.LOCK_EX)
            if is_locked and decode_header(os.pread(handle, HEADER_BYTES, 0)) is None:
                path.unlink()


def remove_old_copies(memory: str | os.PathLike[str]) -> None:
    """Free the snapshots that nobody needs when workers start again."""
    remove_snapshots(memory, without_old_copies(list_snapshots(memory)))
