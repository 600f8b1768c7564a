"""Snapshots in an agent's memory: what a slot says, which count, and how they are written and read.

Each writer has files of its own, its slots. A slot's first page holds the record of the snapshot
that follows, with a sum of its own. The record is cleared before the bytes behind it are touched
and written when they are all there, so a reader sees a whole snapshot or none, whenever a writer is
killed. Writer and reader lock the slot that they use, and neither waits for the other.

Behind the training the words of a snapshot are summed, and the sum (its seal) is written into the
same page. It shows a byte of shared memory that has changed since then. A snapshot whose worker was
killed before it was sealed is used as it is.

Agents import this, so torch is imported only to sum what is so large that it pays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from ..errors import CheckpointError
from ..foreign import opened, read_fields, read_file, read_json

log = logging.getLogger("elasticlib.checkpoint")

OWN = "own"
FROM = "from"
NEWS = "news"
"""A pipe in an era's folder by which workers wake an agent that looks after their snapshots."""

RECORD_BYTES = 4096
"""Of a slot, before the snapshot's own bytes: a page, so that the tensors are aligned."""
SEAL_AT = RECORD_BYTES - 64
ROOMY = 2
"""A slot is at most so many times as large as the snapshot in it."""

SUMS = 1 << 64
CHUNK = 4 << 20
"""Bytes that are summed or made between two looks whether a copy has begun."""
TORCH_PAYS_BYTES = 512 << 20
"""Torch sums a hundred times as fast as Python: for so many bytes it is worth importing."""
_SERIAL = 24576
"""So few words torch sums in the calling thread, and leaves its others to the training."""

MAGIC = b"ELSLOT1\n"
_HEAD = struct.Struct("<8sII")
_SEAL_MAGIC = b"ELSEAL1\n"
_SEAL = struct.Struct("<8sQI")


# -- what a slot's first page says: pure -----------------------------------------------------------


@attrs.frozen
class Record:
    """What a slot holds.

    name: of the snapshots, where a program has several kinds. sequence: counted from 1 by its
    writer. size: of the pack behind the record, in bytes. part, parts: as `Held` has them. folder:
    where it is written when the job ends without it; empty for nowhere. run, launch, generation:
    see `commit.Writer`. sharded: whether it is a rank's part of a sharded state (see
    `sharded.lay_out_part`), be it the only one.
    """

    name: str
    step: int
    sequence: int
    size: int
    run: str
    generation: int
    part: int = 0
    parts: int = 1
    folder: str = ""
    launch: str = ""
    sharded: bool = False

    @property
    def keep(self) -> int:
        """How many whole snapshots stay while another is written.

        One that is the same on all ranks: any rank's will do. Of a state in parts, two: a rank
        begins to write step n + 1 when it has entered that step's collective; another rank, whose
        GPU has not come out of it yet, may still be writing step n, and hold n - 1 only. No rank is
        further ahead: it has come out of the collective of n + 1, so all ranks have n whole.
        """
        return 2 if self.parts > 1 else 1


def encode(record: Record) -> bytes:
    """The first bytes of a slot. Raises CheckpointError: its names are too long for a page."""
    text = json.dumps(attrs.asdict(record), separators=(",", ":")).encode()
    if _HEAD.size + len(text) > SEAL_AT:
        raise CheckpointError(
            f"a snapshot's record has at most {SEAL_AT} bytes, and that of step "
            f"{record.step} has {_HEAD.size + len(text)}: use a shorter path than {record.folder!r}"
        )
    return _HEAD.pack(MAGIC, len(text), zlib.crc32(text, len(text))) + text


def decode(page: bytes | memoryview) -> Record | None:
    """The record that the first bytes of a slot hold; None if that is not a whole one."""
    if len(page) < _HEAD.size:
        return None
    magic, length, summed = _HEAD.unpack_from(page)
    text = bytes(page[_HEAD.size : _HEAD.size + length])
    if magic != MAGIC or len(text) != length or summed != zlib.crc32(text, length):
        return None
    try:
        return read_record(read_json(text))
    except ValueError:
        return None


def read_record(fields: Any) -> Record:
    """The record with these fields. Raises ValueError where one is of another type or range."""
    record = read_fields(Record, fields)
    if not (0 <= record.part < record.parts and record.size > 0 and record.sequence > 0):
        raise ValueError(f"no record of a snapshot: {record!s:.200}")
    return record


def encode_seal(record: Record, summed: int) -> bytes:
    """What stands at `SEAL_AT`: the `word_sum` of this snapshot's bytes, and of no other's."""
    seal = _SEAL.pack(_SEAL_MAGIC, summed, zlib.crc32(encode(record)))
    return seal + zlib.crc32(seal).to_bytes(4, "little")


def decode_seal(page: bytes, record: Record) -> int | None:
    """The sum of a snapshot's bytes, by its slot's first page; None if it has none yet."""
    summed = int.from_bytes(page[SEAL_AT + 8 : SEAL_AT + 16], "little")
    seal = encode_seal(record, summed)
    return summed if page[SEAL_AT : SEAL_AT + len(seal)] == seal else None


# -- which slot is written next, and which snapshots count: pure -----------------------------------


@attrs.define(eq=False)
class Slot:
    """One slot of a writer; capacity: bytes behind its record; record: None if it holds nothing."""

    capacity: int
    record: Record | None = None


SlotT = TypeVar("SlotT", bound=Slot)


def usable_slots(slots: Iterable[SlotT], size: int, keep: int) -> tuple[list[SlotT], list[SlotT]]:
    """Which may hold the next snapshot of `size` bytes, the best first, and which are of no more
    use. The newest `keep` whole ones are in neither list."""
    order = sorted(slots, key=lambda slot: slot.record.sequence if slot.record else 0)
    kept = [slot for slot in order if slot.record][-keep:]
    free = [slot for slot in order if slot not in kept]
    use = [slot for slot in free if size <= slot.capacity <= size * ROOMY]
    return use, [slot for slot in free if slot not in use]


Line = tuple[str, str, int, int]
"""The snapshots that replace one another: of one owner, name, part and number of parts."""


@attrs.frozen
class Found:
    """A whole snapshot in an agent's memory.

    era: the number of the start of the agent's workers in which it was put there. owner: empty if
    workers here did, else what names the node that sent it. file: its path in the memory.
    """

    era: int
    owner: str
    file: str
    record: Record

    @property
    def line(self) -> Line:
        return (self.owner, self.record.name, self.record.part, self.record.parts)

    @property
    def order(self) -> tuple[int, int]:
        return (self.era, self.record.sequence)


def that_count(found: Iterable[Found]) -> tuple[Found, ...]:
    """Those that a job may go back to, the newest step first, and of one step our own first.

    A worker that has gone back to an earlier step has given up the later ones: a snapshot counts
    only if all that were made after it in its line are of later steps.
    """
    lowest: dict[Line, int] = {}
    counts = []
    for one in sorted(found, key=lambda one: one.order, reverse=True):
        step = one.record.step
        if step < lowest.get(one.line, step + 1):
            lowest[one.line] = step
            counts.append(one)
    return tuple(sorted(counts, key=lambda one: (-one.record.step, one.owner != "", one.file)))


def outlived(found: Iterable[Found], era: int) -> tuple[Found, ...]:
    """The snapshots of earlier eras that are of no more use, as all ranks have one of this era.

    They have, of each name, once a worker here has made as many in this era as are kept. What it
    makes of a state in parts at a step that earlier eras have here, too, does not count: it is a
    copy of what was restored, and the other ranks may have to go back to that step.
    """
    found = tuple(found)
    before = {(one.record.name, one.record.step) for one in found if one.era < era}
    made: dict[tuple[str, int], list[Record]] = {}
    for one in found:
        restored = one.record.parts > 1 and (one.record.name, one.record.step) in before
        if one.era == era and not one.owner and not restored:
            made.setdefault((one.record.name, one.record.part), []).append(one.record)
    stand = {name for (name, _), records in made.items() if len(records) >= records[0].keep}
    return tuple(one for one in found if one.era < era and one.record.name in stand)


def given_up(found: Iterable[Found], era: int, step: int) -> tuple[Found, ...]:
    """The snapshots of earlier eras that are of no more use, as this one goes on from `step`.

    Those that were made after it; and those before the last ones that are kept while another is
    written: so there is room for the new era's first beside what it can go back to.
    """
    earlier = tuple(one for one in found if one.era < era)
    kept: dict[Line, list[Found]] = {}
    for one in that_count(earlier):
        last = kept.setdefault(one.line, [])
        if one.record.step <= step and len(last) < one.record.keep:
            last.append(one)
    gone = (one for one in earlier if one not in kept.get(one.line, []))
    # Killed in between, what was gone back behind must not be all that is left.
    return tuple(sorted(gone, key=lambda one: (-one.record.step, one.order)))


# -- writing ---------------------------------------------------------------------------------------


@attrs.define(eq=False, kw_only=True)
class _File(Slot):
    """A slot that this process writes.

    reserved: so many of the file's first bytes have memory; to write behind them could end the
    process by SIGBUS. is_empty: whether nobody has written there yet. is_dropped: whether this
    process has begun to give it back.
    """

    path: Path
    handle: int
    memory: mmap.mmap
    reserved: int = 0
    is_empty: bool = True
    is_dropped: bool = False

    def view(self, size: int) -> memoryview:
        return memoryview(self.memory)[RECORD_BYTES : RECORD_BYTES + size]

    def reserve(self, end: int) -> None:
        """Have memory up to this byte of the file. Raises OSError: there is too little."""
        if end > self.reserved:
            os.posix_fallocate(self.handle, self.reserved, end - self.reserved)
            self.reserved = end

    def close(self) -> None:
        self.is_empty = False
        os.close(self.handle)
        # What still has a view of it (a tensor) keeps the memory until it goes.
        with contextlib.suppress(BufferError):
            self.memory.close()


class Writing:
    """A snapshot that is being written: see `Slots.writing`.

    It is no generator: Python closes a generator that an exception of a signal handler has left in
    its caller whenever the traceback goes, and another snapshot may have the slot by then.
    """

    def __init__(self, slots: Slots, record: Record) -> None:
        self._slots, self._record, self._text = slots, record, encode(record)
        self._file: _File | None = None

    def __enter__(self) -> memoryview:
        file = self._file = self._slots._begin(self._record)
        file.memory[: len(self._text)] = bytes(len(self._text))
        return file.view(self._record.size)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        file = self._file
        if file is None:
            return
        # In this order a snapshot that counts is never left locked, wherever an exception
        # interrupts this. In between the slot holds no snapshot, and readers pass it over.
        fcntl.flock(file.handle, fcntl.LOCK_UN)
        if kind is None:
            file.memory[: len(self._text)] = self._text
            file.record = self._record


class Slots:
    """Those of one writer, in the folder of an era.

    owner: of what is written; empty for a worker's own, else what names the node that sent it.
    No two writers share a slot, whoever stood still for however long.

    An exception of a signal handler may interrupt a method at any line: its whole snapshots stay as
    they are, and all methods can be called again. No method may be called by a signal handler while
    another one runs in its thread: `SnapshotMemory` sees to that.
    """

    def __init__(self, folder: str | os.PathLike[str], owner: str = "") -> None:
        self._folder = Path(folder)
        kind = f"{FROM}.{owner}" if owner else OWN
        self._prefix = f"{kind}.{secrets.token_hex(4)}"
        self._made = 0
        self._files: list[_File] = []
        # Who writes, and who sums and prepares, are two threads.
        self._lock = threading.Lock()

    def writing(self, record: Record) -> Writing:
        """The memory for a pack of `record.size` bytes, all of which the caller writes.

        The snapshot counts when the block is left without an error. The last `record.keep` whole
        ones stay until then, and after it if it fails. Raises CheckpointError: there is no memory.
        """
        return Writing(self, record)

    def _begin(self, record: Record) -> _File:
        with self._lock:
            file = self._locked(record.size, record.keep)
            file.record = None
        return file

    def view_of(self, record: Record) -> memoryview | None:
        """The bytes of a snapshot of ours; None if its slot holds another by now."""
        with self._lock:
            return next((f.view(record.size) for f in self._files if f.record is record), None)

    def seal(self, record: Record, summed: int) -> None:
        """Put the sum of a snapshot of ours beside it, if it is still there."""
        seal = encode_seal(record, summed)
        with self._lock:
            for file in self._files:
                if file.record is record:
                    file.memory[SEAL_AT : SEAL_AT + len(seal)] = seal

    def prepare(self, record: Record, ready: Callable[[], bool]) -> None:
        """Make a slot for the snapshot after this one, if there is none and memory is not short.

        Its pages are made, too, which takes several times as long as to write into them. It is done
        piece by piece, so a writer that needs the slot meanwhile takes it as it is. ready: called
        before each piece; it waits while the training must not be disturbed, and says whether to
        go on.
        """
        if not ready():
            return
        with self._lock:
            if usable_slots(self._files, record.size, record.keep)[0]:
                return
            try:
                if shutil.disk_usage(self._folder).free < record.size * ROOMY:
                    return
                file = self._make(record.size)
            except (CheckpointError, OSError):
                return  # who writes a snapshot says so
            fcntl.flock(file.handle, fcntl.LOCK_UN)
        with open("/dev/zero", "rb", buffering=0) as zeros:
            for at in range(0, RECORD_BYTES + record.size, CHUNK):
                if not ready():
                    return
                with self._lock:
                    if not file.is_empty:
                        return
                    with memoryview(file.memory)[at : at + CHUNK] as piece:
                        try:
                            file.reserve(at + len(piece))
                        except OSError:
                            self._drop([file])
                            return
                        zeros.readinto(piece)

    def make_folder(self) -> None:
        """Make it anew, if others have removed it; whoever writes there says why that fails."""
        for folder in (self._folder.parent, self._folder):
            with contextlib.suppress(OSError):
                folder.mkdir(0o700)

    def give_back_unused(self) -> None:
        """Free what was prepared, and not written yet."""
        with self._lock:
            self._drop([file for file in self._files if file.is_empty])

    def close(self) -> None:
        """Let go of the memory, which stays as it is where there is a snapshot."""
        self.give_back_unused()
        with self._lock:
            for file in self._files:
                file.close()
            self._files.clear()

    def _locked(self, size: int, keep: int) -> _File:
        # Nobody would find what is written from now on into what others removed, with the folder.
        self._drop([file for file in self._files if file.is_dropped])
        gone = [file for file in self._files if not os.fstat(file.handle).st_nlink]
        if gone:
            self._drop(gone)
            what = "snapshots in %s were removed by another program; the next steps are kept again"
            log.warning(what, self._folder)
        use, drop = usable_slots(self._files, size, keep)
        # First, so that a larger state need not find room beside those that have become too small.
        self._drop(drop)
        free = (file for file in use if _locks(file.handle, fcntl.LOCK_EX))
        file = next(free, None) or self._make(size)
        try:
            # Now, and not as it is filled.
            file.reserve(RECORD_BYTES + size)
        except OSError as error:
            self._drop([file])
            raise self._lacks_memory(size, error) from error
        file.is_empty = False
        return file

    def _drop(self, files: list[_File]) -> None:
        for file in files:
            # If an exception interrupts this before the file is removed from the list, `_locked`
            # drops it again.
            file.is_dropped = True
            file.path.unlink(missing_ok=True)
            self._files.remove(file)
            file.close()

    def _make(self, size: int) -> _File:
        """An empty one, locked, without memory yet."""
        self._made += 1
        path = self._folder / f"{self._prefix}.{self._made}"
        self.make_folder()
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CheckpointError(
                f"the agent's memory at {self._folder} cannot hold snapshots: {error.strerror}"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.ftruncate(handle, RECORD_BYTES + size)
            # Mapped page by page as it is first written, which is faster here than MAP_POPULATE.
            mapped = mmap.mmap(handle, RECORD_BYTES + size)
            file = _File(size, path=path, handle=handle, memory=mapped)
            self._files.append(file)
        except BaseException as error:
            os.close(handle)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._lacks_memory(size, error) from error
            raise
        return file

    def _lacks_memory(self, size: int, error: OSError) -> CheckpointError:
        text = f"no memory for a snapshot of {size} bytes at {self._folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            free = shutil.disk_usage(self._folder).free
            text += f", {free} bytes are free; give /dev/shm more (docker: --shm-size)"
        return CheckpointError(text)


def _locks(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def tell(folder: str | os.PathLike[str]) -> bool:
    """Wake the agent that looks after the snapshots in an era's folder; False if none does."""
    try:
        handle = os.open(Path(folder, NEWS), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # full: it has not heard of the last ones yet either
        os.write(handle, b"\n")
    os.close(handle)
    return True


# -- reading ---------------------------------------------------------------------------------------


def look(memory: str | os.PathLike[str]) -> list[Found]:
    """The whole snapshots in an agent's memory, in no order."""
    found = []
    for path in _slots_in(memory):
        _, *owner, _, _ = path.name.split(".")
        with contextlib.suppress(OSError), opened(path) as handle:
            record = _whole_record(handle)
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
        # Workers write here, and whatever else they leave is none of ours.
        yield from (era / n for n in names if n.split(".")[0] in (OWN, FROM) and n.count(".") >= 2)


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

    Only for a writer that has ended, or is this process: if it cut the file meanwhile, reading
    would kill the reader. To read beside a writer that is at work, take `pieces`.
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
    """The pack of a snapshot that is `held`, in pieces of at most `piece` of its `size` bytes.
    Raises CheckpointError: the file was cut short meanwhile."""
    at = 0
    while at < size:
        data = os.pread(handle, min(piece, size - at), RECORD_BYTES + at)
        if not data:
            raise CheckpointError(f"the snapshot was cut to {at} of {size} bytes while it was read")
        yield data
        at += len(data)


def newest_in(folder: Path) -> list[Found]:
    """The last snapshot that each worker here has made in this era, of each name and part."""
    own = [one for one in look(folder.parent) if one.era == int(folder.name) and not one.owner]
    return list({one.line: one for one in sorted(own, key=lambda one: one.order)}.values())


def remove(memory: str | os.PathLike[str], found: Iterable[Found]) -> None:
    """Free what these take. Who has one pinned keeps it until it lets go."""
    for one in found:
        with contextlib.suppress(OSError):
            Path(memory, one.file).unlink()


def clear_up(memory: str | os.PathLike[str], found: Sequence[Found], era: int) -> bool:
    """Free those of them that are `outlived`; whether nothing of earlier eras is left then."""
    useless = outlived(found, era)
    remove(memory, useless)
    return len(useless) == sum(one.era < era for one in found)


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


# -- sums ------------------------------------------------------------------------------------------


def word_sum(data: memoryview, *, serial: bool = True) -> int:
    """What a seal says of these bytes: the sum of their 64-bit words (little-endian) modulo `SUMS`.

    Any one bit that flips changes it, and with torch it costs no more than to read memory. Words
    that trade places do not change it, nor do two changes that make up for each other: those are
    for the CRC-32 of disks and wires. serial: whether this thread alone is to do it.
    """
    whole = len(data) // 8 * 8
    rest = int.from_bytes(data[whole:], "little")
    if not whole or (len(data) < TORCH_PAYS_BYTES and "torch" not in sys.modules):
        return (sum(data[:whole].cast("Q")) + rest) % SUMS
    import torch

    words = torch.frombuffer(data[:whole], dtype=torch.int64)
    at_once = _SERIAL if serial else len(words)
    for at in range(0, len(words), at_once):
        rest += int(words[at : at + at_once].sum())
    return rest % SUMS


def sum_of(memory: str | os.PathLike[str], found: Found) -> int | None:
    """The `word_sum` that the bytes of a snapshot had when they were summed; None if they were not.

    To be asked while it is pinned.
    """
    with contextlib.suppress(OSError):
        return decode_seal(read_file(Path(memory, found.file), RECORD_BYTES), found.record)
    return None


def flaw(
    memory: str | os.PathLike[str], found: Found, view: memoryview, *, serial: bool = True
) -> str | None:
    """What is wrong with the bytes of a pinned snapshot; None if nothing, or if it has no sum."""
    expected = sum_of(memory, found)
    if expected is None or (now := word_sum(view, serial=serial)) == expected:
        return None
    return (
        f"the snapshot of step {found.record.step} was changed in memory: its checksum was "
        f"{expected:016x}, and is {now:016x}"
    )
