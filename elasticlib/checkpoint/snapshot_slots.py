"""Slots: memory for copies of a state, which snapshots and saves of one worker share.

Each writer has files of its own in its agent's shared memory, its slots. The first pages of a slot
are the header of the snapshot that follows. The header is cleared before the bytes after it are
changed, and is written last, by one store. So a reader sees a complete snapshot or none, whenever a
writer is killed or interrupted. Writer and reader lock the slot that they use, and neither waits
for the other.

Only the thread that copies changes the list of slots, so there is no lock. If an exception of a
signal handler interrupted a call, the next one reads the list from the headers again, as a new
process would. If no slot is free for the next snapshot, one is created without memory, and the
writer thread gives it memory in idle time, until a copy uses it.

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
import io
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from ..clock import monotonic, sleep
from ..codec import from_json, to_json
from ..errors import CheckpointError
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

if TYPE_CHECKING:  # Agents import this module, and some of these import torch.
    from .pack import PackImage
    from .save_handle import LocalSave
    from .tensor_layout import CudaPageLock

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
CHUNK_BYTES = 4 << 20  # Memory for the next snapshot is allocated in chunks.
COPY_PAUSE_S = 0.005  # between two chunks, while a copy is under way
CLOSE_POLL_S = 0.001
# A slot has room for a state that grows by this fraction. The room takes no memory until then.
SPARE_FRACTION = 16

_MAGIC = b"ELSLOT4\n"
_HEAD = struct.Struct("<8sII")  # magic, size of the JSON text, its CRC-32
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_OUT_OF_MEMORY = (errno.ENOSPC, errno.ENOMEM)


# -- headers: pure ---------------------------------------------------------------------------------


# The fields of a snapshot that its header has. The others follow from these and from its file.
_IDENTITY = ("name", "step", "part", "parts", "copy", "number")
_FIELDS = (*_IDENTITY, "size", "saved_at", "values", "folder")


@lru_cache(maxsize=16)
def _encode_origin(writer: Writer, line: Line) -> str:
    """Return the JSON text of the fields that are equal in many headers."""
    return f'"writer":{_compact(to_json(writer))},"line":{_compact(to_json(line))}'


def encode_header(snapshot: StateRef) -> bytes:
    """Encode the header of a snapshot. The header of a replica is that of the original.

    Raises:
        CheckpointError: The header has more than `HEADER_BYTES`.
    """
    fields = _compact({name: getattr(snapshot, name) for name in _FIELDS})
    origin = _encode_origin(snapshot.writer, snapshot.line)
    text = f"{fields[:-1]},{origin}}}".encode(errors="surrogateescape")  # A path may not be UTF-8.
    if _HEAD.size + len(text) > HEADER_BYTES:
        raise CheckpointError(
            f"the header of a snapshot has at most {HEADER_BYTES} bytes, and that of step "
            f"{snapshot.step} has {_HEAD.size + len(text)}: use a shorter path than "
            f"{snapshot.folder!r}"
        )
    return _HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text


def decode_header(page: bytes | memoryview, place: str = f"{LOCAL_PREFIX}.") -> StateRef | None:
    """Return the snapshot with the header in the first bytes of a slot, or None if there is none.

    Args:
        page: the first `HEADER_BYTES` of the slot.
        place: the path of the slot in the agent's memory.
    """
    if len(page) < _HEAD.size:
        return None
    magic, length, crc32 = _HEAD.unpack_from(page)
    text = bytes(page[_HEAD.size : _HEAD.size + length])
    if magic != _MAGIC or len(text) != length or crc32 != zlib.crc32(text):
        return None
    try:
        fields = read_json(text.decode(errors="surrogateescape"))
        if not isinstance(fields, dict) or fields.keys() != {*_FIELDS, "writer", "line"}:
            return None
        found = from_json(StateRef, {"branch": "", **fields})
    except ValueError:
        return None
    is_part = found.part is not None and 0 <= found.part < found.parts
    is_valid = (is_part or (found.part, found.parts) == (None, 0)) and found.line
    if not is_valid or found.size <= 0 or found.number <= 0:
        return None
    is_own = place.rpartition("/")[2].startswith(f"{LOCAL_PREFIX}.")
    return attrs.evolve(
        found,
        branch=found.line[-1].id,
        copy=found.copy + (not is_own),
        tier=MEMORY if is_own else REPLICA,
        place=place,
    )


# -- choice of slots and snapshots: pure -----------------------------------------------------------


@attrs.define(eq=False)
class Slot:
    """A slot of a writer."""

    capacity: int  # bytes after the header
    header: StateRef | None = None  # None if the slot contains no complete snapshot


SlotT = TypeVar("SlotT", bound=Slot)


def choose_slots(
    slots: Sequence[SlotT], size: int, num_retained: int, reserved: Collection[SlotT] = ()
) -> tuple[list[SlotT], list[SlotT]]:
    """Choose the slots for the next snapshot of `size` bytes.

    Returns:
        Two lists: the slots that can hold the snapshot (empty slots first, then the oldest
        snapshots), and the slots that are too small or too large. The slots of the newest
        `num_retained` complete snapshots and those in `reserved` are in neither list.
    """
    complete = sorted([slot for slot in slots if slot.header is not None], key=_number)
    free = [slot for slot in slots if slot.header is None] + complete[:-num_retained]
    usable: list[SlotT] = []
    useless: list[SlotT] = []
    for slot in free:
        if slot not in reserved:
            (usable if _fits(slot, size) else useless).append(slot)
    return usable, useless


def _number(slot: Slot) -> int:
    return slot.header.number if slot.header else 0


def _fits(slot: Slot, size: int) -> bool:
    return size <= slot.capacity <= size * MAX_OVERSIZE_FACTOR


def era_of(ref: StateRef) -> int:
    """Return the number of the attempt in which a snapshot was put into the memory."""
    return int(ref.place.partition("/")[0])


def kind_of(ref: StateRef) -> tuple[str, int]:
    """Return the name and the number of the part of a snapshot."""
    return (ref.name, ref.part or 0)


# -- writing ---------------------------------------------------------------------------------------


class _SlotFile(io.FileIO):
    """The file of a slot, which is closed when nothing refers to it any more."""

    __del__ = io.FileIO.close  # without a line of Python that a signal handler could interrupt


@attrs.define(eq=False, kw_only=True)
class MappedSlot(Slot):
    """A slot that this process writes."""

    memory: mmap.mmap
    path: Path | None = None  # None for private memory of this process
    file: _SlotFile | None = None
    # The first bytes of the file that have memory. Writing after them could raise SIGBUS.
    allocated: int = 0
    is_used: bool = False  # A state was copied here, or the slot is closed.
    # The layout of the last state here, and the views of the memory that belong to it.
    views: tuple[Any, list[Any]] | None = None
    page_lock: CudaPageLock | None = None  # set if tensors are copied here from a GPU

    @classmethod
    def open(cls, path: Path, size: int = 0) -> MappedSlot:
        """Map the file of a slot, which is created if `size` is given. It is not locked.

        Raises:
            OSError: it cannot be created or opened.
        """
        file = _SlotFile(path, "x+" if size else "r+")
        try:
            if size:
                os.fchmod(file.fileno(), 0o600)
                os.ftruncate(file.fileno(), HEADER_BYTES + size)
            # Pages are mapped when they are first written, which is faster here than MAP_POPULATE.
            memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        except OSError:
            if size:
                path.unlink(missing_ok=True)
            raise
        except ValueError:  # The call that created the file was interrupted.
            path.unlink(missing_ok=True)
            raise
        slot = cls(len(memory) - HEADER_BYTES, path=path, file=file, memory=memory)
        slot.read_header()
        return slot

    def views_of(self, layout: object, create: Callable[[], list[Any]]) -> list[Any]:
        """Return the views of the memory that belong to a layout.

        Args:
            layout: The layout of a state. The views of the last layout are kept.
            create: Returns the views of this layout.
        """
        if self.views is None or self.views[0] is not layout:
            self.views = (layout, create())
        return self.views[1]

    def keep_page_lock(self, lock: CudaPageLock) -> None:
        """Keep the lock of the pages until the slot is closed."""
        self.page_lock = lock

    def read_header(self) -> None:
        """Read the header, after the call that wrote it was interrupted."""
        # Reading a page of the mapping that has no memory yet raises SIGBUS if there is none left.
        page = os.pread(self.file.fileno(), HEADER_BYTES, 0) if self.file is not None else b""
        self.header = decode_header(page)

    def view(self, size: int) -> memoryview:
        """Return the memory of a pack of this size."""
        return memoryview(self.memory)[HEADER_BYTES : HEADER_BYTES + size]

    @property
    def is_removed(self) -> bool:
        """True if another program has removed the file."""
        return self.file is not None and not os.fstat(self.file.fileno()).st_nlink

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self.memory.closed if self.file is None else self.file.closed

    def try_lock(self) -> bool:
        """Lock the file for writing. Return False if it is being read."""
        return self.file is None or _try_lock(self.file.fileno(), fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Allow others to read the file. A process that was forked from this one may have it."""
        if self.file is not None:
            fcntl.flock(self.file.fileno(), fcntl.LOCK_UN)

    def allocate(self, end: int) -> None:
        """Allocate memory up to this byte of the file.

        Raises:
            OSError: There is not enough memory.
        """
        if end > self.allocated and self.file is not None:
            os.posix_fallocate(self.file.fileno(), self.allocated, end - self.allocated)
            self.allocated = end

    def populate(self, start: int, end: int) -> None:
        """Map the pages of a range of allocated memory, which takes longer than writing to them.

        Their contents stay. Older kernels do nothing.
        """
        start_of_range = ctypes.c_char.from_buffer(self.memory, start)
        size = ctypes.c_size_t(min(end, len(self.memory)) - start)
        if _madvise is not None:
            _madvise(ctypes.c_void_p(ctypes.addressof(start_of_range)), size, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap the memory. A file stays where it is. Another call does nothing more."""
        self.views = None
        lock, self.page_lock = self.page_lock, None
        if lock is not None:
            lock.release()
        if self.file is not None:
            self.file.close()
        # A view of the memory, as a save that is being written has it, keeps the memory.
        with contextlib.suppress(BufferError):
            self.memory.close()


class SnapshotSlots:
    """The slots of one writer in the directory of an attempt. No two writers share a slot.

    One thread calls the methods. Another one may do the steps that `prepare` returns. An exception
    of a signal handler may interrupt them at any line: complete snapshots stay as they are, and all
    methods can be called again. No method may be called while another one runs: `CheckpointManager`
    prevents that.

    Args:
        folder: The directory of the attempt. Without it, the slots are private memory of this
            process and only saves use them.
        owner: The node that sends the snapshots; empty for a worker's own.
        jobs: The saves that are not finished.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, owner: str = "", jobs: Iterable[LocalSave] = ()
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        kind = f"{REPLICA_PREFIX}.{owner}" if owner else LOCAL_PREFIX
        self._prefix = f"{kind}.{secrets.token_hex(4)}"
        self._numbers = count(1)
        self._jobs = jobs
        self._slots: list[MappedSlot] = []
        self._is_settled = True  # False while a slot is taken, and after an interruption
        self._populated: MappedSlot | None = None  # which another thread is changing right now

    @contextlib.contextmanager
    def open_for_writing(self, header: StateRef) -> Iterator[memoryview]:
        """Return a context manager with the memory for a pack of `header.size` bytes.

        The caller writes all of these bytes. The snapshot is complete when the block
        ends without an error. The last `num_retained` complete snapshots stay until then,
        and if the block fails.

        Raises:
            CheckpointError: There is not enough memory.
        """
        text, slot = encode_header(header), self.take(header.size, header)
        try:
            yield slot.view(header.size)
        except BaseException:
            slot.unlock()
            raise
        self.complete(slot, header, text)

    def copy(self, image: PackImage, header: StateRef | None = None) -> MappedSlot:
        """Copy a state to a slot.

        Args:
            image: The state.
            header: Makes the copy a snapshot. Without it, the copy is for a save.

        Raises:
            CheckpointError: There is not enough memory.
        """
        text = b"" if header is None else encode_header(header)
        slot = self.take(image.size, header)
        image.copy_to_slot(slot)
        self.complete(slot, header, text)
        return slot

    def take(self, size: int, header: StateRef | None = None) -> MappedSlot:
        """Return a locked slot for a pack of `size` bytes, which contains no snapshot any more.

        Raises:
            CheckpointError: There is not enough memory.
        """
        self._settle()
        self._is_settled = False
        slot = self._find_slot(size, header)
        slot.header = None
        slot.is_used = True
        slot.memory[: _HEAD.size] = bytes(_HEAD.size)
        return slot

    def complete(self, slot: MappedSlot, header: StateRef | None = None, text: bytes = b"") -> None:
        """Unlock a slot whose pack is complete, and make it a snapshot if a header is given."""
        slot.unlock()
        slot.memory[: len(text)] = text  # From here on, the snapshot exists.
        slot.header = header
        self._is_settled = True

    def prepare(
        self,
        size: int,
        num_retained: int,
        lock_pages: Callable[[MappedSlot], None] | None = None,
    ) -> Iterator[None] | None:
        """Create a slot for the next snapshot, unless one is free or memory is short.

        Args:
            size: the size of the pack.
            num_retained: see `choose_slots`.
            lock_pages: called with the populated slot.

        Returns:
            Steps that allocate and populate the memory of the new slot, for another thread. A copy
            that comes earlier uses the slot with the pages that it has by then.
        """
        self._settle()
        files = [slot for slot in self._slots if slot.path is not None]
        folder = self._folder
        if folder is None or choose_slots(files, size, num_retained, self._reserved())[0]:
            return None
        # An error is raised by the next snapshot.
        with contextlib.suppress(OSError, CheckpointError):
            if shutil.disk_usage(folder).free >= size * MAX_OVERSIZE_FACTOR:
                self._is_settled = False
                slot = self._create_file(folder, size)
                self._is_settled = True
                return self._populate(slot, HEADER_BYTES + size, lock_pages)
        return None

    def _populate(
        self, slot: MappedSlot, end: int, lock_pages: Callable[[MappedSlot], None] | None
    ) -> Iterator[None]:
        """Populate the pages of a slot in chunks, which takes longer than writing into them."""
        try:
            for start in range(0, end, CHUNK_BYTES):
                self._populated = slot
                if slot.is_used:
                    return
                slot.allocate(min(start + CHUNK_BYTES, end))
                slot.populate(start, min(start + CHUNK_BYTES, end))
                self._populated = None
                yield
                if not self._is_settled:
                    sleep(COPY_PAUSE_S)  # A copy of the training's thread is under way.
            self._populated = slot
            if not slot.is_used and lock_pages is not None:
                lock_pages(slot)
        except OSError:
            slot.capacity = 0  # The next copy frees what was allocated.
        finally:
            self._populated = None

    def make_folder(self) -> None:
        """Create the directory if another program removed it. A failure shows when it is used."""
        if self._folder is not None:
            for folder in (self._folder.parent, self._folder):
                with contextlib.suppress(OSError):
                    folder.mkdir(0o700)

    def close(self) -> None:
        """Unmap all slots. Complete snapshots stay where they are, all other slots are freed."""
        self._settle()
        self._is_settled = False
        self._drop([slot for slot in self._slots if slot.header is None])
        self._unmap(self._slots)
        self._slots, self._is_settled = [], True

    def free(self) -> None:
        """Do what `close` does when nothing refers to the slots any more, without waiting."""
        if (slot := self._populated) is not None:
            # It is unmapped when the thread that changes it does not refer to it any more.
            slot.is_used = True
            if slot.path is not None and slot.header is None:
                slot.path.unlink(missing_ok=True)
            self._slots = [other for other in self._slots if other is not slot]
            self._populated = None
        self.close()

    def _settle(self) -> None:
        if not self._is_settled:
            self._read_slots()

    def _read_slots(self) -> None:
        """Read the list of slots from the headers, after a call was interrupted or has failed."""
        # An interrupted call may have closed slots, and left them in the list.
        slots = [slot for slot in self._slots if slot.path is None and not slot.is_closed]
        if self._folder is not None:
            known = {slot.path: slot for slot in self._slots if not slot.is_closed}
            for path in self._folder.glob(f"{self._prefix}.*"):
                with contextlib.suppress(OSError, ValueError):  # A file may be empty.
                    slots.append(known.get(path) or MappedSlot.open(path))
        reserved = self._reserved()
        for slot in slots:
            if slot not in reserved:
                slot.unlock()
                slot.read_header()
        self._unmap([slot for slot in self._slots if slot not in slots])
        self._slots = slots

    def _reserved(self) -> list[MappedSlot]:
        return [job.slot for job in tuple(self._jobs) if job.slot is not None]

    def _find_slot(self, size: int, header: StateRef | None) -> MappedSlot:
        """Return a locked slot, whatever it takes: private memory, or the slot of a save.

        Args:
            size: the size of the pack.
            header: the header if the pack is a snapshot, which cannot use private memory. A
                snapshot waits for a save that uses a slot if there is no other memory.
        """
        try:
            slot = self._lock_slot(size, header)
            if not slot.is_removed:
                return slot
            # No reader would find a snapshot in a file that was removed.
            self._drop_removed()
            return self._lock_slot(size, header)
        except CheckpointError:
            # A save does not need the agent's memory. A snapshot can wait for the slot of a save.
            if header is None and self._folder is not None:
                return self._create_private(size)
            saves = [job for job in tuple(self._jobs) if job.slot in self._slots]
            if not saves:
                raise
            for save in saves:
                save.settle()
            return self._lock_slot(size, header)

    def _lock_slot(self, size: int, header: StateRef | None) -> MappedSlot:
        """Lock a usable slot, or create one. Free the slots of another size.

        Raises:
            CheckpointError: there is not enough memory.
        """
        slots = self._slots
        if header is not None:
            slots, retained = [s for s in slots if s.path is not None], num_retained(header.parts)
        else:
            retained = max((num_retained(s.header.parts) for s in slots if s.header), default=1)
        usable, useless = choose_slots(slots, size, retained, self._reserved())
        # These are freed first, so that a larger state needs no memory in addition to them.
        self._drop(useless)
        slot = next((slot for slot in usable if slot.try_lock()), None)
        if self._folder is None:
            return slot or self._create_private(size)
        if slot is None:
            slot = self._create_file(self._folder, size)
            slot.try_lock()
        try:
            slot.allocate(HEADER_BYTES + size)  # fails here, not while the memory is written
        except OSError as error:
            self._drop([slot])
            raise self._out_of_memory(size, error) from error
        return slot

    def _drop_removed(self) -> None:
        """Drop the slots whose files another program has removed, and log a warning."""
        self._drop([slot for slot in self._slots if slot.is_removed])
        what = "snapshots in %s were removed by another program; the next steps are kept again"
        log.warning(what, self._folder)

    def _drop(self, slots: list[MappedSlot]) -> None:
        """Remove the files of slots, unmap their memory, and forget the slots."""
        for slot in slots:
            if slot.path is not None:
                slot.path.unlink(missing_ok=True)
            self._unmap([slot])
            self._slots.remove(slot)

    def _unmap(self, slots: list[MappedSlot]) -> None:
        for slot in slots:
            slot.is_used = True  # The writer thread leaves it alone, once it sees this.
        while self._populated in slots:
            sleep(CLOSE_POLL_S)
        for slot in slots:
            slot.close()

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
        """Create a slot without memory yet."""
        path = folder / f"{self._prefix}.{next(self._numbers)}"
        self.make_folder()
        try:
            slot = MappedSlot.open(path, _capacity(size))
        except OSError as error:
            if error.errno in _OUT_OF_MEMORY:
                raise self._out_of_memory(size, error) from error
            raise CheckpointError(
                f"the agent's memory at {folder} cannot hold snapshots: {error.strerror}"
            ) from error
        self._slots.append(slot)
        return slot

    def _out_of_memory(self, size: int, error: OSError) -> CheckpointError:
        text = f"no memory for a snapshot of {size} bytes at {self._folder}: {error.strerror}"
        if error.errno in _OUT_OF_MEMORY and self._folder is not None:
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
            refs.append(_read_header(handle, f"{path.parent.name}/{path.name}"))
    return [ref for ref in refs if ref is not None]


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


def _read_header(handle: int, place: str) -> StateRef | None:
    """Return the snapshot in a slot, or None if it contains none or was truncated."""
    found = decode_header(os.pread(handle, HEADER_BYTES, 0), place)
    if found is None or os.fstat(handle).st_size < HEADER_BYTES + found.size:
        return None
    return found


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
        is_locked = _try_lock(handle, fcntl.LOCK_SH)
        yield handle if is_locked and _read_header(handle, ref.place) == ref else None


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


def remove_leftovers(memory: str | os.PathLike[str], era: int) -> None:
    """Free what nobody needs when the workers of the attempt `era` start.

    These are slots of earlier attempts whose writers were killed in the middle of a snapshot, and
    old snapshots.
    """
    remove_snapshots(memory, without_old_copies(list_snapshots(memory)))
    for path in _slot_paths(memory):
        if int(path.parent.name) >= era:
            continue
        with contextlib.suppress(OSError), open_regular_file(path) as handle:
            # A writer that has the lock is still writing.
            is_locked = _try_lock(handle, fcntl.LOCK_EX)
            if is_locked and decode_header(os.pread(handle, HEADER_BYTES, 0)) is None:
                path.unlink()
