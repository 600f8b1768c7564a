"""Catalog of the checkpoints in a directory: lists, verifies and reads them, and changes nothing.

Each save has a folder of its own, which is written once and then only deleted. It is a checkpoint
once its manifest, which is written last, is in place. The manifest names the data files with their
sizes and checksums, and has a checksum of its own. Sizes are compared when checkpoints are listed;
every byte of a data file is verified before a state is loaded from it.

`refs` decides which checkpoint is the newest and which are kept. `commit` writes and deletes them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from ..codec import from_json, to_json
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError
from ..untrusted import IrregularFileError, open_regular_file, read_object
from .refs import (
    MAX_STEP,
    Branch,
    Fence,
    Integrity,
    Line,
    StateRef,
    Writer,
    at_step,
    check_step,
    line_now,
    on_line,
    parse_folder_name,
    position,
)
from .safetensors_header import read_head, read_size
from .storage import (
    CHECKSUM_BYTES,
    SEGMENT_BYTES,
    CheckpointStorage,
    Checksum,
    FileTooLargeError,
    OnChunk,
    encode_checksum,
    ignore_chunk,
    new_memory,
    read_with_checksum,
)

if TYPE_CHECKING:
    from .tensor_layout import MapLocation

log = logging.getLogger("elasticlib.checkpoint")
T = TypeVar("T")

MANIFEST_NAME, FENCE_NAME = "manifest.json", "fence.json"
PIN_NAME = "pinned"  # an empty file in the folder of a checkpoint that is never deleted
MANIFEST_FORMAT, FENCE_FORMAT = 5, 3
MAX_FILE_BYTES = MAX_STEP

_FILE_NAME = re.compile(r"[^/\0]+")
_CHECKSUM_LINE = b"\ncrc32 %08x\n"
_MAX_SAVED_AT = 253402300800  # the year 10000, which no calendar of Python can show


# -- small files: pure -----------------------------------------------------------------------------


class UnknownFormatError(CheckpointCorruptError):
    """The manifest is intact, but a version of elasticlib with another format wrote it.

    The checkpoint is not deleted, and no older checkpoint is restored in its place.
    """


@attrs.frozen
class DataFile:
    """A data file of a checkpoint."""

    name: str  # in the folder of the checkpoint
    size: int  # bytes
    checksum: int  # of all but the last 8 bytes, see `storage.checksum`


@attrs.frozen
class Manifest:
    """The description of one checkpoint. A data file that no manifest names is not used."""

    step: int  # The state is the one after this step.
    branch: str  # see `refs.Branch`
    line: Line
    files: tuple[DataFile, ...]
    parts: int = 0  # files of a sharded state, one of each rank; 0 for an unsharded state
    writer: Writer = attrs.field(factory=Writer)
    epoch: int = 0  # of the fence when it was committed
    saved_at: float = 0.0  # Unix time of the writer's clock, for display
    world_size: int = 0  # ranks of the job; 0 if it is unknown
    metrics: Mapping[str, float] = attrs.field(factory=dict)  # for the rule `KeepBest`

    @property
    def size(self) -> int:
        """The bytes of all data files."""
        return sum(file.size for file in self.files)


def append_checksum(body: bytes) -> bytes:
    """Return the body of a small file, followed by a line with the CRC-32 of the body."""
    return body + _CHECKSUM_LINE % zlib.crc32(body)


def strip_checksum(data: bytes) -> bytes | None:
    """Return a small file without its checksum line, or None if the checksum does not match."""
    body = data[: -len(append_checksum(b""))]
    return body if append_checksum(body) == data else None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the contents of a manifest's file: a line of JSON and a line with its checksum."""
    fields = {"format": MANIFEST_FORMAT, **to_json(manifest)}
    return append_checksum(json.dumps(fields, separators=(",", ":")).encode("ascii"))


def decode_manifest(data: bytes) -> Manifest:
    """Return the manifest from the contents of its file.

    Raises:
        CheckpointCorruptError: the contents are damaged.
        UnknownFormatError: a version with another format wrote them.
    """
    body = strip_checksum(data)
    if body is None:
        raise CheckpointCorruptError("its manifest was changed or truncated")
    try:
        fields = read_object(body)
        found = fields.pop("format", None)
        if type(found) is not int:
            raise ValueError(f"its format must be {MANIFEST_FORMAT}, got {found!r:.80}")
        unknown = fields.keys() - attrs.fields_dict(Manifest).keys()
        if found != MANIFEST_FORMAT or unknown:
            is_other = found != MANIFEST_FORMAT
            other = f"format {found}" if is_other else f"the field {min(unknown)!r:.80}"
            raise UnknownFormatError(
                f"its manifest has {other}, this version reads format {MANIFEST_FORMAT}"
            )
        manifest = from_json(Manifest, fields)
        if reason := _find_invalid_value(manifest):
            raise ValueError(reason)
    except ValueError as error:
        raise CheckpointCorruptError(f"its manifest is invalid: {error}") from error
    return manifest


def _find_invalid_value(manifest: Manifest) -> str | None:
    """Describe the first value of a manifest that is invalid. Return None if all are valid."""
    files, line = manifest.files, manifest.line
    for name in ("step", "parts", "epoch", "world_size"):
        if not 0 <= getattr(manifest, name) <= MAX_STEP:
            return f"{name} is {getattr(manifest, name)}"
    if not line or line[-1] != Branch(manifest.branch) or len(line) > len({b.id for b in line}):
        return f"its line does not end with the branch {manifest.branch!r:.40}"
    if not 0 <= manifest.saved_at < _MAX_SAVED_AT:
        return f"saved_at is {manifest.saved_at}"
    if len(files) != max(1, manifest.parts):
        return f"{len(files)} files for {manifest.parts} parts"
    if len({file.name for file in files}) < len(files):
        return "two files have the same name"
    for file in files:
        if not _FILE_NAME.fullmatch(file.name) or file.name in (".", "..", MANIFEST_NAME):
            return f"{file.name!r:.80} is not the name of a data file"
        if not (0 <= file.size <= MAX_FILE_BYTES and 0 <= file.checksum < 1 << 32):
            return f"{file.name} has {file.size} bytes and the checksum {file.checksum:x}"
    return None


def find_size_mismatch(files: Sequence[DataFile], sizes: Mapping[str, int]) -> str | None:
    """Describe the first data file that is missing or has not its size.

    Args:
        files: the data files of a checkpoint.
        sizes: the size in bytes of each file in the folder of the checkpoint.

    Returns:
        The description, or None if all sizes are as in the manifest.
    """
    for file in files:
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{file.name} must have {file.size} bytes, but has {sizes[file.name]}"
    return None


def encode_fence(fence: Fence) -> bytes:
    """Return the contents of the fence file: a line of JSON and a line with its checksum."""
    return append_checksum(json.dumps({"format": FENCE_FORMAT, **to_json(fence)}).encode("ascii"))


def decode_fence(data: bytes) -> Fence:
    """Return the fence from the contents of its file.

    Raises:
        CheckpointCorruptError: the contents are damaged, or have another format.
    """
    body = strip_checksum(data)
    try:
        if body is None:
            raise ValueError("it was changed or truncated")
        fields = read_object(body)
        found = fields.pop("format", None)
        if found != FENCE_FORMAT:
            raise ValueError(f"format {found!r:.80}, but this version reads {FENCE_FORMAT}")
        return from_json(Fence, fields)
    except ValueError as error:
        raise CheckpointCorruptError(f"{FENCE_NAME} cannot be read: {error}") from error


# -- the catalog -----------------------------------------------------------------------------------


class CheckpointCatalog:
    """The checkpoints in a storage, as a reader sees them. Not thread-safe.

    A folder is written once and then only deleted. So what was read of it may be used again, as
    long as the folder is there.
    """

    def __init__(self, storage: CheckpointStorage) -> None:
        self.storage = storage
        self.pending: list[StateRef] = []  # what agents have begun to write at the end of a job
        self.skipped: dict[int, str] = {}  # why the last `load` or `latest` skipped a step
        self._manifests: dict[str, Manifest] = {}  # by folder
        self._refs: dict[str, StateRef] = {}  # by folder, as they were listed last
        self._integrity: dict[str, Integrity] = {}  # by folder, what was read and verified

    # -- listing --------------------------------------------------------------------------------

    def list_refs(self, *, reread: bool = True) -> list[StateRef]:
        """Return all checkpoints, judged only by manifests and sizes, in the order of their names.

        Folders without a manifest are left out: their saves were interrupted or go on, or they are
        being deleted.

        Args:
            reread: read all manifests again, and compare the sizes of all files. If False, this is
                done only for checkpoints that were not listed before.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        try:
            names = self.storage.list_folders()
        except OSError as error:
            raise CheckpointError(f"{self.storage.name} cannot be read: {error}") from error
        known = {name: self._refs[name] for name in names if name in self._refs and not reread}
        refs = (known.get(name) or self.read_ref(name) for name in names)
        self._refs = {ref.place: ref for ref in refs if ref is not None}
        others = (parse_folder_name(name) for name in names if name not in self._refs)
        self.pending = [ref for ref in others if ref is not None and ref.number == MAX_STEP]
        for cache in (self._manifests, self._integrity):
            for place in cache.keys() - self._refs.keys():
                cache.pop(place, None)  # The writer thread may list at the same time.
        return [self._with_integrity(ref) for ref in self._refs.values()]

    def read_ref(self, place: str) -> StateRef | None:
        """Return the checkpoint in a folder, even a corrupt one, or None if none is committed."""
        ref = parse_folder_name(place)
        if ref is None:
            return None
        try:
            data = self.storage.read(f"{place}/{MANIFEST_NAME}")
            if data is None:
                return None
            manifest = decode_manifest(data)
            sizes = self.storage.list_files(place)
        except UnknownFormatError as error:
            return _damaged(ref, Integrity.UNREADABLE, str(error))
        except (FileTooLargeError, IrregularFileError) as error:
            return _damaged(ref, Integrity.CORRUPT, f"its manifest cannot be read: {error}")
        except OSError as error:
            return _damaged(ref, Integrity.UNREADABLE, str(error))
        except CheckpointCorruptError as error:
            return _damaged(ref, Integrity.CORRUPT, str(error))
        if MANIFEST_NAME not in sizes:
            return None  # It was deleted meanwhile.
        is_pinned = PIN_NAME in sizes or self.storage.is_link(place)
        ref = attrs.evolve(ref_of(manifest, place), is_pinned=is_pinned)
        if (manifest.step, manifest.branch) != (ref.step, ref.branch):
            return _damaged(ref, Integrity.CORRUPT, f"its manifest is of step {manifest.step}")
        self._manifests[place] = manifest
        mismatch = find_size_mismatch(manifest.files, sizes)
        return _damaged(ref, Integrity.CORRUPT, mismatch) if mismatch else ref

    def manifest(self, ref: StateRef) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointCorruptError: the checkpoint is corrupt.
            CheckpointUnreadableError: it cannot be read.
            CheckpointError: it was deleted.
        """
        manifest = self._manifests.get(ref.place)
        if manifest is None or not ref.is_usable:
            found = self.read_ref(ref.place)
            if found is None:
                raise CheckpointError(f"{self.describe(ref)} was deleted after it was chosen")
            if found.integrity is Integrity.UNREADABLE:
                raise CheckpointUnreadableError(f"{self.describe(ref)} {describe_problem(found)}")
            if found.problem:
                raise CheckpointCorruptError(f"{self.describe(ref)} {describe_problem(found)}")
            manifest = self._manifests[ref.place]
        return manifest

    def read_fence(self) -> Fence | None:
        """Return the fence of the directory, or None if it has none.

        Raises:
            CheckpointCorruptError: the fence is corrupt.
            OSError: it cannot be read.
        """
        try:
            data = self.storage.read(FENCE_NAME)
        except (FileTooLargeError, IrregularFileError) as error:
            raise CheckpointCorruptError(f"{FENCE_NAME} cannot be read: {error}") from error
        return None if data is None else decode_fence(data)

    def known_fence(self) -> Fence | None:
        """Return the fence. If it is corrupt, log a warning and return None."""
        try:
            return self.read_fence()
        except CheckpointCorruptError as error:
            log.warning("%s: the writer is unknown: %s", self.storage.name, error)
            return None

    def line(self, refs: Iterable[StateRef], launch: str = "") -> Line:
        """Return the line that a job in this directory is on.

        Raises:
            CheckpointError: the fence cannot be read.
        """
        try:
            return line_now(self.known_fence(), refs, launch)
        except OSError as error:
            raise CheckpointError(f"{self.storage.name} cannot be read: {error}") from error

    def live_refs(self) -> list[StateRef]:
        """Return the checkpoints of the line, the newest first, whether they are usable or not."""
        refs = self.list_refs()
        return on_line(self.line(refs), refs)

    def describe(self, ref: StateRef) -> str:
        """Return a name of a checkpoint for messages."""
        return f"checkpoint {self.storage.name}/{ref.place}"

    # -- verification ---------------------------------------------------------------------------

    def record_integrity(self, ref: StateRef, integrity: Integrity) -> None:
        """Remember what is known about the bytes of a checkpoint."""
        self._integrity[ref.place] = integrity

    def check(self, ref: StateRef) -> int:
        """Verify every byte of a checkpoint, unless it was verified before. Return its step.

        Raises:
            CheckpointCorruptError: the checkpoint is corrupt.
            CheckpointUnreadableError: the checkpoint cannot be read, and may be intact.
        """
        if self._integrity.get(ref.place) is not Integrity.VERIFIED:
            if reason := self.find_corruption(ref):
                raise self._mark_corrupt(ref, reason)
            self.record_integrity(ref, Integrity.VERIFIED)
        return ref.step

    def check_file(self, ref: StateRef, number: int) -> None:
        """Verify every byte of one data file, even if it was verified before. Raise as `check`."""
        reason = self._find_implausible_size(ref, number)
        if reason := reason or self._find_file_corruption(ref, number, None):
            raise self._mark_corrupt(ref, reason)

    def find_corruption(self, ref: StateRef, on_chunk: OnChunk = ignore_chunk) -> str | None:
        """Read every byte of a checkpoint, up to the first corrupt file. Describe the corruption.

        Args:
            ref: the checkpoint.
            on_chunk: receives each chunk that was read.

        Returns:
            A description of the corruption, or None if the checkpoint is intact.

        Raises:
            CheckpointUnreadableError: the checkpoint cannot be read.
        """
        numbers = range(len(self.manifest(ref).files))
        sizes = (self._find_implausible_size(ref, number) for number in numbers)
        sums = (self._find_file_corruption(ref, at, None, on_chunk) for at in numbers)
        return next(filter(None, sizes), None) or next(filter(None, sums), None)

    def verify_until_intact(self, refs: Iterable[StateRef]) -> set[str]:
        """Verify checkpoints in this order, until one is intact.

        Returns:
            The folders whose data files could not be read.
        """
        unreadable = set()
        for ref in refs:
            try:
                self.check(ref)
                break
            except CheckpointUnreadableError as error:
                log.warning("a checkpoint that cannot be read is not deleted: %s", error)
                unreadable.add(ref.place)
            except CheckpointError:
                continue
        return unreadable

    def verified(self, ref: StateRef, on_chunk: OnChunk = ignore_chunk) -> StateRef:
        """Read every byte of a checkpoint, and return it with the problem that was found.

        A checkpoint whose manifest has a problem is returned unchanged.
        """
        if ref.place not in self._manifests or ref.problem:
            return ref
        try:
            corruption = self.find_corruption(ref, on_chunk)
        except CheckpointUnreadableError as error:
            return _damaged(ref, Integrity.UNREADABLE, str(error.__cause__ or error))
        except CheckpointError as error:
            return _damaged(ref, Integrity.CORRUPT, str(error))
        if corruption:
            return _damaged(ref, Integrity.CORRUPT, corruption)
        return attrs.evolve(ref, integrity=Integrity.VERIFIED)

    def verify(self, step: int | str | None = None) -> dict[int, str]:
        """Implement `CheckpointManager.verify`."""
        refs = self.list_refs() if step is None else [self.find(step)]
        found: dict[int, str] = {}
        for ref in map(self.verified, refs):
            if ref.problem:
                found[ref.step] = "; ".join(filter(None, (found.get(ref.step), ref.problem)))
        return dict(sorted(found.items()))

    # -- reading --------------------------------------------------------------------------------

    def read(self, ref: StateRef, number: int = 0) -> mmap.mmap:
        """Return the verified bytes of a data file, in new memory.

        Args:
            ref: the checkpoint.
            number: the number of the file.

        Raises:
            CheckpointCorruptError: the file is corrupt.
            CheckpointUnreadableError: the file cannot be read.
        """
        if reason := self._find_implausible_size(ref, number):
            raise self._mark_corrupt(ref, reason)
        size = self.manifest(ref).files[number].size
        try:
            memory = new_memory(max(1, size))
        except (OSError, OverflowError) as error:
            # An older checkpoint is no substitute: this one may be intact.
            what = self.describe(ref)
            raise CheckpointUnreadableError(
                f"{what} needs {size} bytes of memory: {error}"
            ) from error
        self.read_into(ref, memoryview(memory), number)
        return memory

    def read_into(self, ref: StateRef, buffer: memoryview, number: int = 0) -> None:
        """Read a data file into a buffer of its size, and verify it. Raise as `read`."""
        if reason := self._find_implausible_size(ref, number):
            raise self._mark_corrupt(ref, reason)
        if reason := self._find_file_corruption(ref, number, buffer):
            raise self._mark_corrupt(ref, reason)
        if len(self.manifest(ref).files) == 1:
            self.record_integrity(ref, Integrity.VERIFIED)

    def map_file(self, ref: StateRef, number: int) -> mmap.mmap:
        """Map a data file of a `LocalStorage` into memory, copy-on-write and not verified.

        Raises:
            CheckpointCorruptError: the file is missing or truncated.
            CheckpointUnreadableError: the file cannot be read.
        """
        file = self.manifest(ref).files[number]
        path = os.path.join(self.storage.name, ref.place, file.name)
        try:
            with (
                self._translate_read_errors(ref),
                open_regular_file(path, follow_link=True) as handle,
            ):
                access = mmap.PROT_READ | mmap.PROT_WRITE
                return mmap.mmap(handle, file.size, mmap.MAP_PRIVATE, access)
        except (FileNotFoundError, ValueError) as error:
            raise self._mark_corrupt(ref, f"{file.name}: {error}") from error

    def read_header(self, ref: StateRef, number: int = 0) -> bytes:
        """Return the encoded header of a data file, which is not verified.

        Raises:
            CheckpointCorruptError: the file is missing, or does not begin like a pack.
            CheckpointUnreadableError: the file cannot be read.
        """
        return read_head(partial(self._read_start, ref, number))

    def _read_start(self, ref: StateRef, number: int, size: int) -> bytes:
        """Return the first `size` bytes of a data file, or fewer if it is shorter."""
        file = self.manifest(ref).files[number]
        buffer = bytearray(min(size, file.size))
        try:
            with self._translate_read_errors(ref):
                path = f"{ref.place}/{file.name}"
                count = self.storage.read_into(path, memoryview(buffer))
        except FileNotFoundError:
            raise self._mark_corrupt(ref, f"{file.name} is missing") from None
        return bytes(buffer[:count])

    def _mark_corrupt(self, ref: StateRef, reason: str) -> CheckpointCorruptError:
        """Record that a checkpoint is corrupt, and return the error for the caller to raise."""
        self.record_integrity(ref, Integrity.CORRUPT)
        return CheckpointCorruptError(f"{self.describe(ref)} is corrupt: {reason}")

    def _with_integrity(self, ref: StateRef) -> StateRef:
        integrity = self._integrity.get(ref.place, Integrity.UNKNOWN)
        if ref.problem or integrity is Integrity.UNKNOWN:
            return ref
        if integrity is Integrity.CORRUPT:
            return _damaged(ref, integrity, "was found to be damaged before")
        return attrs.evolve(ref, integrity=integrity)

    def _find_implausible_size(self, ref: StateRef, number: int) -> str | None:
        """Compare the size of a file in the manifest with the size in the file's header.

        This saves memory and time if a file was extended by mistake. A small file is not compared.

        Returns:
            A description of the difference, or None if there is none.
        """
        file = self.manifest(ref).files[number]
        if file.size <= SEGMENT_BYTES:
            return None
        try:
            size = read_size(self.read_header(ref, number))
        except CheckpointCorruptError as error:
            return f"{file.name}: {error}"
        return None if size == file.size else f"the header of {file.name} says {size} bytes"

    def _find_file_corruption(
        self,
        ref: StateRef,
        number: int,
        into: memoryview | None,
        on_chunk: OnChunk = ignore_chunk,
    ) -> str | None:
        """Read every byte of a file. Return how it differs from the manifest, or None."""
        file = self.manifest(ref).files[number]
        path = f"{ref.place}/{file.name}"

        def read(buffer: memoryview, start: int, add_chunk: OnChunk) -> int:
            return self.storage.read_into(path, buffer, start=start, on_chunk=add_chunk)

        try:
            with self._translate_read_errors(ref):
                return find_difference(
                    file.name,
                    file.size,
                    read,
                    into,
                    expected=file.checksum,
                    max_threads=self.storage.max_readers,
                    on_chunk=on_chunk,
                )
        except FileNotFoundError:
            return f"{file.name} is missing"

    @contextlib.contextmanager
    def _translate_read_errors(self, ref: StateRef) -> Iterator[None]:
        """Raise an OSError as a CheckpointUnreadableError, except FileNotFoundError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            what = self.describe(ref)
            raise CheckpointUnreadableError(f"{what} cannot be read: {error}") from error

    # -- loading --------------------------------------------------------------------------------

    def find(self, step: int | str) -> StateRef:
        """Return the checkpoint that a person names by its step or folder, see `refs.at_step`.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: `step` is no valid step, or names several abandoned checkpoints.
        """
        if not isinstance(step, str):
            check_step(step)
        refs = self.list_refs()
        key = at_step(refs, self.line(refs), step)
        if key is None:
            raise FileNotFoundError(f"there is no checkpoint of step {step} in {self.storage.name}")
        # A step can have been saved several times. A name means one of the folders.
        meant = (ref for ref in refs if ref.state == key and step in (ref.step, ref.place))
        return max(meant, key=lambda ref: ref.number)

    def load(
        self, step: int | str | None, *, like: object = None, map_location: MapLocation = "cpu"
    ) -> Any:
        """Implement `CheckpointManager.load`."""
        load = partial(self._load_state, like=like, map_location=map_location)
        return load(self.find(step)) if step is not None else self._use_first(load)

    def latest(self) -> int | None:
        """Implement `CheckpointManager.latest`."""
        with contextlib.suppress(FileNotFoundError):
            return self._use_first(self.check)
        return None

    def _use_first(self, use: Callable[[StateRef], T]) -> T:
        """Return the result of `use` for the first checkpoint of the line that is not corrupt.

        A checkpoint is skipped if it is corrupt or `use` raises a CheckpointError for it.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorruptError: all checkpoints were skipped.
            CheckpointUnreadableError: a checkpoint cannot be read. It may be intact, so the
                older checkpoints are not tried.
        """
        self.skipped = {}
        for ref in self.live_refs():
            try:
                return use(ref)
            except CheckpointUnreadableError:
                raise
            except CheckpointError as error:
                self.skipped[ref.step] = str(error)
                log.warning("skipped a checkpoint: %s", error)
        if self.skipped:
            reasons = "; ".join(self.skipped.values())
            raise CheckpointCorruptError(
                f"none of the checkpoints in {self.storage.name} can be used: {reasons}"
                f"{describe_abandoned(self.list_refs(), self.line(self.list_refs()))}"
            )
        raise FileNotFoundError(f"there is no complete checkpoint in {self.storage.name}")

    def _load_state(self, ref: StateRef, *, like: object, map_location: MapLocation) -> Any:
        # This imports torch, which the agent and `elasticlib checkpoints` do not need.
        from .pack import unpack

        parts = self.manifest(ref).parts

        def read_part(number: int) -> memoryview:
            return memoryview(self.read(ref, number))

        try:
            if not parts:
                # The tensors may use this memory, because no other object refers to it.
                return unpack(read_part(0), map_location=map_location, copy=False)
            from .reshard import load_parts

            headers = [self.read_header(ref, at) for at in range(parts)]
            return load_parts(headers, read_part, like, map_location=map_location)
        except CheckpointCorruptError:
            self.record_integrity(ref, Integrity.CORRUPT)
            raise


def ref_of(manifest: Manifest, place: str) -> StateRef:
    """Return the state that a manifest in the folder `place` describes."""
    ref = parse_folder_name(place)
    return StateRef(
        branch=manifest.branch,
        step=manifest.step,
        parts=manifest.parts,
        writer=manifest.writer,
        line=manifest.line,
        place=place,
        number=ref.number if ref else 0,
        size=manifest.size,
        metrics=manifest.metrics,
        saved_at=manifest.saved_at,
        world_size=manifest.world_size,
        epoch=manifest.epoch,
    )


def describe_problem(ref: StateRef) -> str:
    """Return the end of an error message about a checkpoint, such as `is corrupt: ...`."""
    kind = "cannot be read" if ref.integrity is Integrity.UNREADABLE else "is corrupt"
    return f"{kind}: {ref.problem}"


def describe_abandoned(refs: Iterable[StateRef], line: Line) -> str:
    """Return the end of an error message that names the usable states off the line, or ''."""
    steps = sorted({ref.step for ref in refs if ref.is_usable and position(line, ref) is None})
    if not steps:
        return ""
    shown = ", ".join(map(str, steps[-3:]))
    return f". The job has abandoned other states, such as step {shown}: name one with step=..."


def _damaged(ref: StateRef, integrity: Integrity, problem: str) -> StateRef:
    return attrs.evolve(ref, integrity=integrity, problem=problem)


def find_difference(
    name: str,
    size: int,
    read: Callable[[memoryview, int, OnChunk], int],
    into: memoryview | None = None,
    *,
    expected: Checksum | None = None,
    max_threads: int = 1,
    on_chunk: OnChunk = ignore_chunk,
) -> str | None:
    """Read a data file and compare it with its expected size and checksum.

    Args:
        name: the name of the file, for the description.
        size: its expected size.
        read: reads a segment; see `storage.read_with_checksum`.
        into: receives the bytes. Without it they are only compared.
        expected: the checksum. If None, only the one at the end of the file is compared.
        max_threads: how many threads read at once.
        on_chunk: receives each chunk that was read.

    Returns:
        A description of the difference, or None if there is none.
    """
    if size <= CHECKSUM_BYTES:
        return f"{name} has {size} bytes, and a data file ends with {CHECKSUM_BYTES} of checksum"
    count, checksum, end = read_with_checksum(
        read, size, into, max_threads=max_threads, on_chunk=on_chunk
    )
    if count != size:
        return f"{name} has {count} of {size} bytes"
    if expected not in (checksum, None):
        return f"{name} must have the checksum {expected:08x}, but its bytes give {checksum:08x}"
    if end != encode_checksum(checksum):
        return f"{name} ends with {end!r}, which is not the checksum {checksum:08x} of its bytes"
    return None
