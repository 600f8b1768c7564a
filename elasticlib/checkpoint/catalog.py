"""Catalog of the checkpoints in a directory: lists, verifies and reads them, and changes nothing.

A checkpoint exists once its manifest, which is written last, is in place. The manifest names the
data files with their sizes and checksums, and has a checksum of its own. Sizes are compared when
checkpoints are listed; every byte of a data file is verified before a state is loaded from it.

`select_checkpoints` decides which checkpoints are kept. `commit` writes and deletes them.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import mmap
import os
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from ..errors import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError, ConfigError
from ..untrusted import IrregularFileError, open_regular_file, read_fields, read_object
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

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 4
MAX_STEP = MAX_FILE_BYTES = 2**63 - 1

_FOLDER_NAME = re.compile(r"step-([0-9]{10,19})")
_FILE_NAME = re.compile(r"[^/\0]+")
_CHECKSUM_LINE = b"\ncrc32 %08x\n"
_MAX_SAVED_AT = 253402300800  # the year 10000, which no calendar of Python can show


# -- manifests: pure -------------------------------------------------------------------------------


class UnknownFormatError(CheckpointCorruptError):
    """The manifest is intact, but a version of elasticlib with another format wrote it.

    The checkpoint is not deleted, and no older checkpoint is restored in its place.
    """


@attrs.frozen
class DataFile:
    """A data file of a checkpoint."""

    name: str  # in the checkpoint's directory
    size: int  # bytes
    checksum: int  # of all but the last 8 bytes, see `storage.checksum`


@attrs.frozen
class Manifest:
    """The description of one checkpoint. A data file that no manifest names is not used."""

    step: int  # The state is the one after this step.
    files: tuple[DataFile, ...]
    num_parts: int = 0  # files of a sharded state, one of each rank; 0 for an unsharded state
    run_id: str = ""  # this and the three fields below: see `commit.WriterIdentity`
    incarnation: str = ""
    generation: int = 0
    writer_token: str = ""
    saved_at: float = 0.0  # Unix time of the writer's clock, for display
    world_size: int = 0  # ranks of the job; 0 if it is unknown
    is_pinned: bool = False  # The retention rule never deletes it.

    @property
    def size(self) -> int:
        """The bytes of all data files."""
        return sum(file.size for file in self.files)


def check_step(step: object) -> int:
    """Return `step` if it is a valid number of a step.

    Raises:
        CheckpointError: `step` is not an integer in the valid range.
    """
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"step must be an int from 0 to {MAX_STEP}, got {step!r}")
    return step


def folder_of(step: int) -> str:
    """Return the name of a step's directory. Below step 10^10, names sort in the order of steps."""
    return f"step-{step:010d}"


def step_of(folder: str) -> int | None:
    """Return the step of a directory with this name, or None if it is not a step's directory."""
    match = _FOLDER_NAME.fullmatch(folder)
    step = int(match[1]) if match else -1
    return step if 0 <= step <= MAX_STEP and folder_of(step) == folder else None


def append_checksum(body: bytes) -> bytes:
    """Return the body of a small file, followed by a line with the CRC-32 of the body."""
    return body + _CHECKSUM_LINE % zlib.crc32(body)


def strip_checksum(data: bytes) -> bytes | None:
    """Return a small file without its checksum line, or None if the checksum does not match."""
    body = data[: -len(append_checksum(b""))]
    return body if append_checksum(body) == data else None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the contents of a manifest's file: a line of JSON and a line with its checksum."""
    fields = {"format": MANIFEST_FORMAT, **attrs.asdict(manifest)}
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
        rows = fields.pop("files", None)
        if type(rows) is not list:
            raise ValueError(f"files must be a list, got {rows!r:.80}")
        files = tuple(read_fields(DataFile, row) for row in rows)
        manifest = read_fields(Manifest, fields, files=files)
        if reason := _find_invalid_value(manifest):
            raise ValueError(reason)
    except ValueError as error:
        raise CheckpointCorruptError(f"its manifest is invalid: {error}") from error
    return manifest


def _find_invalid_value(manifest: Manifest) -> str | None:
    """Describe the first value of a manifest that is invalid. Return None if all are valid."""
    files = manifest.files
    numbers = ("step", "num_parts", "generation", "world_size")
    for name in numbers:
        if not 0 <= getattr(manifest, name) <= MAX_STEP:
            return f"{name} is {getattr(manifest, name)}"
    if not 0 <= manifest.saved_at < _MAX_SAVED_AT:
        return f"saved_at is {manifest.saved_at}"
    if len(files) != max(1, manifest.num_parts):
        return f"{len(files)} files for {manifest.num_parts} parts"
    if len({file.name for file in files}) < len(files):
        return "two files have the same name"
    for file in files:
        if not _FILE_NAME.fullmatch(file.name) or file.name in (".", "..", MANIFEST_NAME):
            return f"{file.name!r:.80} is not the name of a data file"
        if not (0 <= file.size <= MAX_FILE_BYTES and 0 <= file.checksum < 1 << 32):
            return f"{file.name} has {file.size} bytes and the checksum {file.checksum:x}"
    return None


def find_size_mismatch(manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Describe the first data file that is missing or has not the size in the manifest.

    Args:
        manifest: the manifest of the checkpoint.
        sizes: the size in bytes of each file in the checkpoint's directory.

    Returns:
        The description, or None if all sizes are as in the manifest.
    """
    for file in manifest.files:
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.size:
            return f"{file.name} must have {file.size} bytes, but has {sizes[file.name]}"
    return None


# -- retention: pure -------------------------------------------------------------------------------


class Integrity(enum.Enum):
    """Integrity of the bytes of a checkpoint, as far as this process knows it."""

    VERIFIED = "verified"  # Every byte was written or verified here.
    UNKNOWN = "unknown"  # They have not been read.
    UNREADABLE = "unreadable"  # Reading them failed, so they may be intact.
    CORRUPT = "corrupt"  # They were read and are damaged.


@attrs.frozen
class Retention:
    """The rule that selects the checkpoints that are kept."""

    keep_last: int = 3  # number of newest checkpoints
    keep_every: int = 0  # also keep steps that are a multiple of this; 0: none

    def __attrs_post_init__(self) -> None:
        for name, minimum in (("keep_last", 1), ("keep_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < minimum:
                raise ConfigError(f"{name} must be an int >= {minimum}, got {value!r}")


@attrs.frozen
class Selection:
    """The steps that are kept and deleted, in ascending order."""

    kept: tuple[int, ...]
    deleted: tuple[int, ...]
    reason: str = ""  # why nothing is deleted, if a rule prevents it


def select_checkpoints(
    integrity: Mapping[int, Integrity],
    retention: Retention,
    just_written: int | None = None,
    pinned: Container[int] = (),
) -> Selection:
    """Decide which checkpoints are kept.

    Nothing is deleted until one checkpoint is verified, and the newest verified one is kept.
    Unreadable checkpoints are kept, because they may be intact. Corrupt ones are kept if they are
    newer than all verified ones. Unreadable and corrupt checkpoints do not count for `keep_last`.

    Args:
        integrity: the integrity of each step's checkpoint.
        retention: the rule.
        just_written: a step that was saved just now. It is kept even if its number is low, as
            after a return to an earlier step.
        pinned: steps that are never deleted.
    """
    steps = sorted(integrity)
    unreadable = [step for step in steps if integrity[step] is Integrity.UNREADABLE]
    verified = [step for step in steps if integrity[step] is Integrity.VERIFIED]
    usable = [step for step in steps if integrity[step] in (Integrity.VERIFIED, Integrity.UNKNOWN)]
    if not verified:
        return Selection(tuple(steps), (), "no checkpoint is known to be intact")
    # A corrupt checkpoint is kept until there is a newer verified one: it may be the only trace of
    # the steps that were trained, and a person may be able to repair it.
    corrupt = [
        step for step in steps if integrity[step] is Integrity.CORRUPT and step > verified[-1]
    ]
    kept = {*usable[-retention.keep_last :], verified[-1], *unreadable, *corrupt}
    if retention.keep_every:
        kept |= {step for step in usable if step % retention.keep_every == 0}
    kept |= {step for step in steps if step in pinned or step == just_written}
    return Selection(tuple(sorted(kept)), tuple(step for step in steps if step not in kept))


# -- the catalog -----------------------------------------------------------------------------------


@attrs.frozen
class CheckpointEntry:
    """The checkpoint in a step's directory, or the reason why it cannot be used."""

    step: int
    manifest: Manifest | None  # None if the checkpoint is corrupt or cannot be read
    corruption: str = ""
    is_unreadable: bool = False  # Reading it failed, so it may be intact.
    is_pinned: bool = False  # by the manifest, even if data files are missing

    @property
    def problem(self) -> str:
        """The end of an error message about this checkpoint, such as `is corrupt: ...`."""
        kind = "cannot be read" if self.is_unreadable else "is corrupt"
        return f"{kind}: {self.corruption}"


class CheckpointCatalog:
    """The checkpoints in a storage, as a reader sees them. Not thread-safe."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self.storage = storage
        self.skipped: dict[int, str] = {}  # why the last `load` or `latest` skipped a step
        self._integrity: dict[int, tuple[Manifest, Integrity]] = {}

    # -- listing --------------------------------------------------------------------------------

    def list_entries(self) -> list[CheckpointEntry]:
        """Return all checkpoints, newest first, judged only by manifests and sizes.

        Directories without a manifest are left out: their saves were interrupted, or they are being
        deleted.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        try:
            steps = [step_of(name) for name in self.storage.list_folders()]
        except OSError as error:
            raise CheckpointError(f"{self.storage.name} cannot be read: {error}") from error
        newest_first = sorted((step for step in steps if step is not None), reverse=True)
        return [entry for step in newest_first if (entry := self.read_entry(step))]

    def read_entry(self, step: int) -> CheckpointEntry | None:
        """Return the entry of a step, even if it is corrupt, or None if none is committed."""
        folder = folder_of(step)
        try:
            data = self.storage.read(f"{folder}/{MANIFEST_NAME}")
            if data is None:
                return None
            manifest = decode_manifest(data)
            if manifest.step != step:
                return CheckpointEntry(step, None, f"its manifest is of step {manifest.step}")
            mismatch = find_size_mismatch(manifest, self.storage.list_files(folder))
            if mismatch and self.storage.read(f"{folder}/{MANIFEST_NAME}") != data:
                # A writer replaced or deleted the checkpoint while it was read.
                return self.read_entry(step)
        except UnknownFormatError as error:
            return CheckpointEntry(step, None, str(error), is_unreadable=True)
        except (FileTooLargeError, IrregularFileError) as error:
            return CheckpointEntry(step, None, f"its manifest cannot be read: {error}")
        except OSError as error:
            return CheckpointEntry(step, None, str(error), is_unreadable=True)
        except CheckpointCorruptError as error:
            return CheckpointEntry(step, None, str(error))
        shown = None if mismatch else manifest
        return CheckpointEntry(step, shown, mismatch or "", is_pinned=manifest.is_pinned)

    def committed_file_names(self, step: int) -> set[str] | None:
        """Return the names of a step's manifest and of the files that the manifest names.

        The set is empty if there is no manifest. The result is None if the manifest is corrupt or
        cannot be read.
        """
        try:
            data = self.storage.read(f"{folder_of(step)}/{MANIFEST_NAME}")
            if data is None:
                return set()
            return {file.name for file in decode_manifest(data).files} | {MANIFEST_NAME}
        except (CheckpointCorruptError, OSError):
            return None

    def describe(self, step: int) -> str:
        """Return a name of a step's checkpoint for messages."""
        return f"checkpoint {self.storage.name}/{folder_of(step)}"

    # -- verification ---------------------------------------------------------------------------

    def record_integrity(self, manifest: Manifest, integrity: Integrity) -> None:
        """Remember what is known about the bytes of a checkpoint."""
        self._integrity[manifest.step] = (manifest, integrity)

    def integrity(self, manifest: Manifest) -> Integrity:
        """Return the integrity that is recorded for this manifest, or UNKNOWN if none is."""
        known, integrity = self._integrity.get(manifest.step, (None, Integrity.UNKNOWN))
        return integrity if known == manifest else Integrity.UNKNOWN

    def check(self, manifest: Manifest) -> int:
        """Verify every byte of a checkpoint, unless it was verified before. Return its step.

        Raises:
            CheckpointCorruptError: the checkpoint is corrupt.
            CheckpointUnreadableError: the checkpoint cannot be read, and may be intact.
        """
        if self.integrity(manifest) is not Integrity.VERIFIED:
            if reason := self.find_corruption(manifest):
                raise self._mark_corrupt(manifest, reason)
            self.record_integrity(manifest, Integrity.VERIFIED)
        return manifest.step

    def check_file(self, manifest: Manifest, number: int) -> None:
        """Verify every byte of one data file, even if it was verified before. Raise as `check`."""
        reason = self._find_implausible_size(manifest, number)
        if reason := reason or self._find_file_corruption(manifest, number, None):
            raise self._mark_corrupt(manifest, reason)

    def find_corruption(self, manifest: Manifest, on_chunk: OnChunk = ignore_chunk) -> str | None:
        """Read every byte of a checkpoint, up to the first corrupt file. Describe the corruption.

        Args:
            manifest: the manifest of the checkpoint.
            on_chunk: receives each chunk that was read.

        Returns:
            A description of the corruption, or None if the checkpoint is intact.

        Raises:
            CheckpointUnreadableError: the checkpoint cannot be read.
        """
        numbers = range(len(manifest.files))
        sizes = (self._find_implausible_size(manifest, number) for number in numbers)
        sums = (self._find_file_corruption(manifest, at, None, on_chunk) for at in numbers)
        return next(filter(None, sizes), None) or next(filter(None, sums), None)

    def verify_until_intact(self) -> set[int]:
        """Verify checkpoints from the newest on, until one is intact.

        Returns:
            The steps whose data files could not be read.
        """
        unreadable = set()
        for entry in self.list_entries():
            try:
                if entry.manifest:
                    self.check(entry.manifest)
                    break
            except CheckpointCorruptError:
                continue
            except CheckpointUnreadableError as error:
                log.warning("a checkpoint that cannot be read is not deleted: %s", error)
                unreadable.add(entry.step)
        return unreadable

    def verified(self, entry: CheckpointEntry, on_chunk: OnChunk = ignore_chunk) -> CheckpointEntry:
        """Read every byte of a checkpoint, and return its entry with the problem that was found.

        An entry without a manifest is returned unchanged.
        """
        if entry.manifest is None:
            return entry
        try:
            corruption = self.find_corruption(entry.manifest, on_chunk)
        except CheckpointUnreadableError as error:
            reason = str(error.__cause__ or error)
            return attrs.evolve(entry, corruption=reason, is_unreadable=True)
        return attrs.evolve(entry, corruption=corruption or "")

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Implement `CheckpointManager.verify`."""
        entries = self.list_entries() if step is None else [self._require_entry(step)]
        found = {entry.step: self.verified(entry).corruption for entry in entries}
        return {step: corruption for step, corruption in sorted(found.items()) if corruption}

    # -- reading --------------------------------------------------------------------------------

    def read(self, manifest: Manifest, number: int = 0) -> mmap.mmap:
        """Return the verified bytes of a data file, in new memory.

        Args:
            manifest: the manifest of the checkpoint.
            number: the number of the file.

        Raises:
            CheckpointCorruptError: the file is corrupt.
            CheckpointUnreadableError: the file cannot be read.
        """
        if reason := self._find_implausible_size(manifest, number):
            raise self._mark_corrupt(manifest, reason)
        size = manifest.files[number].size
        try:
            memory = new_memory(max(1, size))
        except (OSError, OverflowError) as error:
            # An older checkpoint is no substitute: this one may be intact.
            what = self.describe(manifest.step)
            raise CheckpointUnreadableError(
                f"{what} needs {size} bytes of memory: {error}"
            ) from error
        if reason := self._find_file_corruption(manifest, number, memoryview(memory)):
            raise self._mark_corrupt(manifest, reason)
        if len(manifest.files) == 1:
            self.record_integrity(manifest, Integrity.VERIFIED)
        return memory

    def map_file(self, manifest: Manifest, number: int) -> mmap.mmap:
        """Map a data file of a `LocalStorage` into memory, copy-on-write and not verified.

        Raises:
            CheckpointCorruptError: the file is missing or truncated.
            CheckpointUnreadableError: the file cannot be read.
        """
        file = manifest.files[number]
        path = os.path.join(self.storage.name, _path(manifest, number))
        try:
            with (
                self._translate_read_errors(manifest),
                open_regular_file(path, follow_link=True) as handle,
            ):
                access = mmap.PROT_READ | mmap.PROT_WRITE
                return mmap.mmap(handle, file.size, mmap.MAP_PRIVATE, access)
        except (FileNotFoundError, ValueError) as error:
            raise self._mark_corrupt(manifest, f"{file.name}: {error}") from error

    def read_header(self, manifest: Manifest, number: int = 0) -> bytes:
        """Return the encoded header of a data file, which is not verified.

        Raises:
            CheckpointCorruptError: the file is missing, or does not begin like a pack.
            CheckpointUnreadableError: the file cannot be read.
        """
        return read_head(partial(self._read_start, manifest, number))

    def _read_start(self, manifest: Manifest, number: int, size: int) -> bytes:
        """Return the first `size` bytes of a data file, or fewer if it is shorter."""
        file = manifest.files[number]
        buffer = bytearray(min(size, file.size))
        try:
            with self._translate_read_errors(manifest):
                count = self.storage.read_into(_path(manifest, number), memoryview(buffer))
        except FileNotFoundError:
            raise self._mark_corrupt(manifest, f"{file.name} is missing") from None
        return bytes(buffer[:count])

    def _mark_corrupt(self, manifest: Manifest, reason: str) -> CheckpointCorruptError:
        """Record that a checkpoint is corrupt, and return the error for the caller to raise."""
        self.record_integrity(manifest, Integrity.CORRUPT)
        return CheckpointCorruptError(f"{self.describe(manifest.step)} is corrupt: {reason}")

    def _find_implausible_size(self, manifest: Manifest, number: int) -> str | None:
        """Compare the size of a file in the manifest with the size in the file's header.

        This saves memory and time if a file was extended by mistake. A small file is not compared.

        Returns:
            A description of the difference, or None if there is none.
        """
        file = manifest.files[number]
        if file.size <= SEGMENT_BYTES:
            return None
        try:
            size = read_size(self.read_header(manifest, number))
        except CheckpointCorruptError as error:
            return f"{file.name}: {error}"
        return None if size == file.size else f"the header of {file.name} says {size} bytes"

    def _find_file_corruption(
        self,
        manifest: Manifest,
        number: int,
        into: memoryview | None,
        on_chunk: OnChunk = ignore_chunk,
    ) -> str | None:
        """Read every byte of a file. Return how it differs from the manifest, or None."""
        file, path = manifest.files[number], _path(manifest, number)

        def read(buffer: memoryview, start: int, add_chunk: OnChunk) -> int:
            return self.storage.read_into(path, buffer, start=start, on_chunk=add_chunk)

        try:
            with self._translate_read_errors(manifest):
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
    def _translate_read_errors(self, manifest: Manifest) -> Iterator[None]:
        """Raise an OSError as a CheckpointUnreadableError, except FileNotFoundError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            what = self.describe(manifest.step)
            raise CheckpointUnreadableError(f"{what} cannot be read: {error}") from error

    # -- loading --------------------------------------------------------------------------------

    def load(
        self, step: int | None, *, like: object = None, map_location: MapLocation = "cpu"
    ) -> Any:
        """Implement `CheckpointManager.load`."""
        load = partial(self._load_state, like=like, map_location=map_location)
        if step is not None:
            return load(self._require_manifest(self._require_entry(check_step(step))))
        return self._use_first(self.list_entries(), load)

    def latest(self) -> int | None:
        """Implement `CheckpointManager.latest`."""
        with contextlib.suppress(FileNotFoundError):
            return self._use_first(self.list_entries(), self.check)
        return None

    def _use_first(self, entries: Iterable[CheckpointEntry], use: Callable[[Manifest], T]) -> T:
        """Return the result of `use` for the first checkpoint that is not corrupt.

        A checkpoint is skipped if it is corrupt or `use` raises a CheckpointError for it.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorruptError: all checkpoints were skipped.
            CheckpointUnreadableError: a checkpoint cannot be read. It may be intact, so the
                checkpoints after it in `entries` are not tried.
        """
        self.skipped = {}
        for entry in entries:
            try:
                return use(self._require_manifest(entry))
            except CheckpointUnreadableError:
                raise
            except CheckpointError as error:
                self.skipped[entry.step] = str(error)
                log.warning("skipped a checkpoint: %s", error)
        if self.skipped:
            reasons = "; ".join(self.skipped.values())
            raise CheckpointCorruptError(
                f"none of the checkpoints in {self.storage.name} can be used: {reasons}"
            )
        raise FileNotFoundError(f"there is no complete checkpoint in {self.storage.name}")

    def _require_entry(self, step: int) -> CheckpointEntry:
        entry = self.read_entry(step)
        if entry is None:
            raise FileNotFoundError(f"there is no {self.describe(step)}")
        return entry

    def _require_manifest(self, entry: CheckpointEntry) -> Manifest:
        if entry.manifest is None:
            kind = CheckpointUnreadableError if entry.is_unreadable else CheckpointCorruptError
            raise kind(f"{self.describe(entry.step)} {entry.problem}")
        return entry.manifest

    def _load_state(self, manifest: Manifest, *, like: object, map_location: MapLocation) -> Any:
        # This imports torch, which the agent and `elasticlib checkpoints` do not need.
        from .pack import unpack

        def read_part(number: int) -> memoryview:
            return memoryview(self.read(manifest, number))

        try:
            if not manifest.num_parts:
                # The tensors may use this memory, because no other object refers to it.
                return unpack(read_part(0), map_location=map_location, copy=False)
            from .reshard import load_parts

            headers = [self.read_header(manifest, at) for at in range(manifest.num_parts)]
            return load_parts(headers, read_part, like, map_location=map_location)
        except CheckpointCorruptError:
            self.record_integrity(manifest, Integrity.CORRUPT)
            raise


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


def _path(manifest: Manifest, number: int) -> str:
    return f"{folder_of(manifest.step)}/{manifest.files[number].name}"
