"""Commits of checkpoints: the data files first, the manifest last, by one writer at a time.

The fence file of a checkpoint directory names the writer that may commit. A later generation of a
launch takes the fence from an earlier one, and a new launch takes it from the launch before. A
writer that has lost the fence cannot commit any more.

The order of a commit makes it atomic: unique data files, each synced with its directory; the lock;
the check of the fence; the manifest, by a rename. Pruning follows, and deletes the manifest of a
checkpoint before its data. So each checkpoint is complete or absent at any time.

Which ranks write the files of a checkpoint is up to `writer`.

Agents commit the snapshots of their workers with this module, which does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import re
from collections.abc import Container, Iterator, Mapping

import attrs

from ..clock import monotonic, wall
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointFencedError
from ..untrusted import IrregularFileError, read_fields, read_object
from .catalog import (
    MANIFEST_NAME,
    CheckpointCatalog,
    DataFile,
    Integrity,
    Manifest,
    Retention,
    Selection,
    append_checksum,
    encode_manifest,
    find_size_mismatch,
    folder_of,
    select_checkpoints,
    step_of,
    strip_checksum,
)
from .storage import FileTooLargeError, temp_target

log = logging.getLogger("elasticlib.checkpoint")

FENCE_NAME = "fence.json"
_SCRATCH = "final-save."  # see final_save.py
FENCE_FORMAT = 2
MAX_REVOKED_LAUNCHES = 64  # The file stays small, and older launches no longer run.

_DATA_NAME = re.compile(r"(?:state|part-[0-9]+)\.([0-9a-f]{16})\.[0-9]+\.pack")
NOT_WRITABLE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
}


# -- the fence: pure -------------------------------------------------------------------------------


@attrs.frozen
class WriterIdentity:
    """The identity of a writer: one manager in one process, or one agent."""

    run_id: str  # the job's id
    incarnation: str  # distinguishes two launches of a job, whose generations both count from 1
    generation: int
    token: str  # 16 random hex digits, which the names of the writer's files contain
    label: str = ""  # names the process, for messages

    def __str__(self) -> str:
        if not self.run_id:
            job = "a process"
        else:
            job = f"generation {self.generation} of run {self.run_id!r}"
        return f"{job} ({self.label})" if self.label else job

    @property
    def launch_key(self) -> str:
        """The identity of the launch, which is unique among the launches of all runs."""
        return f"{self.run_id}/{self.incarnation}"

    def has_same_generation(self, other: WriterIdentity) -> bool:
        """Return whether both writers belong to the same generation of the same launch."""
        return (self.launch_key, self.generation) == (other.launch_key, other.generation)


@attrs.frozen
class Fence:
    """The writer that may commit to a directory, and the launches that may not any more."""

    holder: WriterIdentity
    # Launches that lost the fence to a newer launch. A later generation of such a launch must not
    # take it back, so an epoch number would not be enough.
    revoked_launches: tuple[str, ...] = ()


def acquire_fence(
    fence: Fence | None, writer: WriterIdentity, *, allow_concurrent_writer: bool = False
) -> Fence | str:
    """Return the fence after a writer has requested it. A newer writer keeps the fence.

    Args:
        fence: the present fence, or None if the directory has none.
        writer: the writer that requests the fence.
        allow_concurrent_writer: return the present fence if its holder is of the same generation.

    Returns:
        The new fence, or the reason why the writer does not get it.
    """
    if fence is None:
        return Fence(writer)
    holder, revoked = fence.holder, fence.revoked_launches
    if writer.launch_key != holder.launch_key:
        if writer.launch_key in revoked:
            return f"{holder} took this directory over from the launch of {writer}"
        return Fence(writer, (*revoked, holder.launch_key)[-MAX_REVOKED_LAUNCHES:])
    if writer.generation < holder.generation:
        return f"{holder} writes here, and {writer} is older"
    if allow_concurrent_writer and writer.has_same_generation(holder):
        return fence
    return Fence(writer, revoked)


def commit_denied_reason(
    fence: Fence | None, writer: WriterIdentity, *, allow_concurrent_writer: bool = False
) -> str:
    """Return why a writer must not commit, or an empty string if it may.

    Args:
        fence: the present fence. None denies the commit, because the writer's fence was deleted.
        writer: the writer that wants to commit, and has acquired the fence before.
        allow_concurrent_writer: permit the commit also if another writer of the same generation has
            the fence.
    """
    if fence is None:
        return f"its {FENCE_NAME} was deleted"
    holder = fence.holder
    if holder.token == writer.token:
        return ""
    if allow_concurrent_writer and writer.has_same_generation(holder):
        return ""
    return f"{holder} took the directory over from {writer}"


def encode_fence(fence: Fence) -> bytes:
    """Return the contents of the fence file: a line of JSON and a line with its checksum."""
    fields = {"format": FENCE_FORMAT, **attrs.asdict(fence)}
    return append_checksum(json.dumps(fields).encode("ascii"))


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
        if fields.get("format") != FENCE_FORMAT:
            found = fields.get("format")
            raise ValueError(f"format {found!r:.80}, but this version reads {FENCE_FORMAT}")
        revoked = fields.get("revoked_launches")
        if type(revoked) is not list or not all(type(launch) is str for launch in revoked):
            raise ValueError(f"revoked_launches must be a list of strings, got {revoked!r:.80}")
        return Fence(read_fields(WriterIdentity, fields.get("holder")), tuple(revoked))
    except ValueError as error:
        raise CheckpointCorruptError(f"{FENCE_NAME} cannot be read: {error}") from error


def data_name(kind: str, token: str, number: int) -> str:
    """Return the name of a data file, which no other writer and no other save uses.

    Args:
        kind: `state`, or `part-<rank>` for a rank's part of a sharded state.
        token: the token of the writer that commits the file.
        number: the number of the save.
    """
    return f"{kind}.{token}.{number}.pack"


def scratch_prefix(writer: WriterIdentity) -> str:
    """Return the prefix of the scratch directories of the final save of the writer's generation."""
    generation = f"{writer.launch_key}/{writer.generation}"
    return f"{_SCRATCH}{hashlib.sha256(generation.encode()).hexdigest()[:16]}"


def orphaned_files(sizes: Mapping[str, int], named: Container[str], live_token: str) -> list[str]:
    """Return the data files and temporary files in a directory that are not needed any more.

    Files with other names are never returned.

    Args:
        sizes: the size in bytes of each file in the directory.
        named: the name of the manifest, and the names of the files in the manifest.
        live_token: the token of a writer that may still commit its data files, or ''.
    """
    orphans = []
    for name in sorted(sizes):
        match = _DATA_NAME.fullmatch(name)
        is_data = match is not None and match[1] != live_token
        if name not in named and (is_data or temp_target(name)):
            orphans.append(name)
    return orphans


# -- commits ---------------------------------------------------------------------------------------


class FileDeletedError(CheckpointError):
    """A data file was deleted before its checkpoint was committed, by a writer that may prune."""


class NotWritableError(CheckpointError):
    """The directory cannot be written: the disk is full or read-only, or permission is missing."""


class Committer:
    """Commits the checkpoints of one writer to one directory. Not thread-safe.

    With `allow_concurrent_writer`, another writer of the same generation may still be running. That
    writer keeps the fence, finishes its saves, and prunes; this one does not prune after a commit.
    The other writer can delete files of this writer before they are committed.
    """

    def __init__(
        self,
        catalog: CheckpointCatalog,
        writer: WriterIdentity,
        retention: Retention,
        *,
        allow_concurrent_writer: bool = False,
    ) -> None:
        self.writer = writer
        self.committed_at = float("-inf")  # when the last commit became durable, by `monotonic`
        self._catalog, self._storage = catalog, catalog.storage
        self._retention = retention
        self._is_concurrent = allow_concurrent_writer
        self._has_fence = False  # it was acquired; another writer may have taken it since then
        self._logged: set[str] = set()  # errors of deletions, which are tried after each commit

    def claim(self) -> None:
        """Acquire the fence, and delete the files of interrupted saves. Later calls do nothing.

        Nothing is deleted if a concurrent writer keeps the fence (see `allow_concurrent_writer`).

        Raises:
            CheckpointFencedError: a newer writer has the fence.
            NotWritableError: the directory cannot be written.
            CheckpointError: the disk failed.
        """
        if self._has_fence:
            return
        with self._translate_errors("could not be claimed"), self._storage.lock():
            fence = self._read_fence(corrupt_as_none=True)
            acquired = acquire_fence(
                fence, self.writer, allow_concurrent_writer=self._is_concurrent
            )
            if isinstance(acquired, str):
                raise CheckpointFencedError(f"{self._storage.name} must not be written: {acquired}")
            if acquired != fence:
                self._storage.replace(FENCE_NAME, encode_fence(acquired))
                with self._log_delete_errors():
                    self._delete_orphans()
            self._has_fence = True

    def write(self, step: int, name: str, data: memoryview) -> DataFile:
        """Write a data file of a step durably. `commit` makes the file part of a checkpoint.

        Raises:
            CheckpointError: the disk failed.
        """
        folder = folder_of(step)
        with self._translate_errors(f"could not be written to {folder}"):
            return DataFile(name, len(data), self._storage.write(f"{folder}/{name}", data))

    def commit(
        self,
        step: int,
        files: tuple[DataFile, ...],
        num_parts: int = 0,
        *,
        world_size: int = 0,
        is_pinned: bool = False,
    ) -> None:
        """Make written files the checkpoint of a step, and prune by the retention rule.

        With `allow_concurrent_writer`, nothing is pruned.

        Args:
            step: the step. A checkpoint of the same step is replaced.
            files: the data files that `write` returned, on whichever rank.
            num_parts: see `Manifest`.
            world_size: see `Manifest`.
            is_pinned: see `Manifest`.

        Raises:
            CheckpointFencedError: another writer has taken the fence.
            FileDeletedError: one of the files was deleted.
            CheckpointError: the disk failed.
        """
        writer, folder = self.writer, folder_of(step)
        manifest = Manifest(
            step=step,
            files=files,
            num_parts=num_parts,
            run_id=writer.run_id,
            incarnation=writer.incarnation,
            generation=writer.generation,
            writer_token=writer.token,
            saved_at=wall(),
            world_size=world_size,
            is_pinned=is_pinned,
        )
        with self._translate_errors(f"could not commit {folder}"), self._storage.lock():
            reason = commit_denied_reason(
                self._read_fence(), writer, allow_concurrent_writer=self._is_concurrent
            )
            if reason:
                what = f"step {step} was not committed to {self._storage.name}"
                raise CheckpointFencedError(f"{what}: {reason}")
            sizes = self._storage.list_files(folder)
            if mismatch := find_size_mismatch(manifest, sizes):
                is_missing = any(file.name not in sizes for file in files)
                kind = FileDeletedError if is_missing else CheckpointError
                raise kind(f"{self._storage.name}/{folder} was not committed: {mismatch}")
            self._storage.replace(f"{folder}/{MANIFEST_NAME}", encode_manifest(manifest))
            self.committed_at = monotonic()
            self._catalog.record_integrity(manifest, Integrity.VERIFIED)
            if not self._is_concurrent:
                with self._log_delete_errors():
                    self._delete_orphans(self._select(just_written=step).deleted)

    def discard(self, step: int, name: str) -> None:
        """Delete a data file of a save that failed, unless the manifest names it or is unreadable.

        An empty directory is deleted, too, unless a concurrent writer may use it. An error of the
        disk is only logged.
        """
        folder = folder_of(step)
        try:
            # If the commit failed after the rename of the manifest, the checkpoint exists.
            named = self._catalog.committed_file_names(step)
            if named is not None and name not in named:
                self._storage.remove(f"{folder}/{name}")
            # A concurrent writer may be about to create its first file in the directory.
            if not self._is_concurrent and not self._storage.list_files(folder):
                self._storage.remove_folder(folder)
        except OSError as error:
            log.warning("%s: files of a failed save could not be deleted: %s", folder, error)

    def prune(self) -> Selection:
        """Delete the checkpoints that the retention rule does not keep, and orphaned files.

        The newest intact checkpoint is read and verified first, because it must be kept.

        Raises:
            CheckpointFencedError: a newer writer has the fence, or has taken it.
            CheckpointError: the disk failed.
        """
        with self._translate_errors("could not be pruned"):
            with self._storage.lock():
                self._check_may_prune()
            # The verification can take long, so the job that writes here must not wait for it.
            unreadable = self._catalog.verify_until_intact()
            with self._storage.lock():
                live_token = self._check_may_prune()
                selection = self._select(unreadable=unreadable)
                for error in self._delete_orphans(selection.deleted, live_token):
                    raise error
        return selection

    def was_superseded(self) -> bool:
        """Return whether a later generation of the same launch has the fence.

        Then this writer has nothing left to do, and nothing is lost.
        """
        fence, writer = self._read_fence(), self.writer
        holder = fence.holder if fence else writer
        return holder.launch_key == writer.launch_key and holder.generation > writer.generation

    def is_from_earlier(self, manifest: Manifest, generation: int) -> bool:
        """Return whether a launch or generation before this one has written a checkpoint.

        Args:
            manifest: the manifest of the checkpoint.
            generation: the generation of this launch that it is compared with.
        """
        launch = WriterIdentity(manifest.run_id, manifest.incarnation, 0, "").launch_key
        if launch == self.writer.launch_key:
            return manifest.generation < generation
        fence = self._read_fence(corrupt_as_none=True)
        return fence is not None and launch in fence.revoked_launches

    def _check_may_prune(self) -> str:
        """Check that this writer may prune, and return the token of another fence holder or ''.

        The other holder may still commit its data files, so these must not be deleted.

        Raises:
            CheckpointFencedError: this writer must not prune.
        """
        writer, fence = self.writer, self._read_fence(corrupt_as_none=True)
        has_other_holder = fence is not None and fence.holder.token != writer.token
        # A writer that has never had the fence may prune beside its holder, unless the holder is a
        # newer generation or launch. A writer that has lost the fence may not.
        lost = commit_denied_reason(fence, writer) if self._has_fence and has_other_holder else ""
        answer = lost or acquire_fence(fence, writer)
        if isinstance(answer, str):
            raise CheckpointFencedError(f"{self._storage.name} was not pruned: {answer}")
        return fence.holder.token if fence is not None and has_other_holder else ""

    def _delete_orphans(
        self, steps_to_delete: Container[int] = (), live_token: str = ""
    ) -> list[Exception]:
        """Delete orphaned files, old scratch directories, and the checkpoints of some steps.

        An error does not prevent the other deletions.

        Returns:
            The errors in the directories of `steps_to_delete`. All other errors are only logged.
        """
        errors: list[Exception] = []
        for name in orphaned_files(self._storage.list_files(""), (), ""):
            with self._log_delete_errors():
                self._storage.remove(name)
        for folder in self._storage.list_folders():
            if self._storage.is_link(folder):
                continue  # An operator has moved the checkpoint elsewhere, to keep it.
            step = step_of(folder)
            is_scratch = folder.startswith(_SCRATCH) and not live_token
            if is_scratch and not folder.startswith(scratch_prefix(self.writer)):
                with self._log_delete_errors():
                    for name in self._storage.list_files(folder):
                        self._storage.remove(f"{folder}/{name}")
                    self._storage.remove_folder(folder)
            if step is not None:
                with self._log_delete_errors(errors if step in steps_to_delete else None):
                    self._delete_step_files(
                        step, live_token, with_checkpoint=step in steps_to_delete
                    )
        return errors

    def _delete_step_files(self, step: int, live_token: str, *, with_checkpoint: bool) -> None:
        """Delete the orphaned files of a step, and also its checkpoint if `with_checkpoint`."""
        folder, named = folder_of(step), self._catalog.committed_file_names(step)
        if with_checkpoint:
            self._storage.remove(f"{folder}/{MANIFEST_NAME}")
        elif named is None:
            return
        named, sizes = named or set(), self._storage.list_files(folder)
        names = orphaned_files(sizes, () if with_checkpoint else named, live_token)
        if with_checkpoint:
            names += [name for name in orphaned_files(sizes, names, "") if name in named]
        for name in names:
            self._storage.remove(f"{folder}/{name}")
        if len(names) == len(sizes):
            self._storage.remove_folder(folder)

    def _select(
        self, just_written: int | None = None, unreadable: Container[int] = ()
    ) -> Selection:
        entries = self._catalog.list_entries()
        integrity = {}
        for entry in entries:
            if entry.is_unreadable or entry.step in unreadable:
                integrity[entry.step] = Integrity.UNREADABLE
            elif entry.manifest is None:
                integrity[entry.step] = Integrity.CORRUPT
            else:
                integrity[entry.step] = self._catalog.integrity(entry.manifest)
        pinned = {
            entry.step
            for entry in entries
            if entry.is_pinned or self._storage.is_link(folder_of(entry.step))
        }
        return select_checkpoints(integrity, self._retention, just_written, pinned)

    def _read_fence(self, *, corrupt_as_none: bool = False) -> Fence | None:
        try:
            data = self._storage.read(FENCE_NAME)
            return None if data is None else decode_fence(data)
        except (CheckpointCorruptError, FileTooLargeError, IrregularFileError) as error:
            if not corrupt_as_none:
                raise
            log.warning("%s: the writer is unknown: %s", self._storage.name, error)
            return None

    @contextlib.contextmanager
    def _log_delete_errors(self, errors: list[Exception] | None = None) -> Iterator[None]:
        """Suppress an error of the block: log it once, and add it to `errors`.

        A failed deletion must not fail a save that has succeeded.
        """
        try:
            yield
        except (CheckpointError, OSError) as error:
            if errors is not None:
                errors.append(error)
            if str(error) not in self._logged:
                self._logged.add(str(error))
                log.warning("%s: old files could not be deleted: %s", self._storage.name, error)

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Raise an OSError of the block as a CheckpointError, or a subclass that fits its errno."""
        try:
            yield
        except OSError as error:
            kind: type[CheckpointError] = CheckpointError
            if isinstance(error, FileNotFoundError):
                kind = FileDeletedError
            elif error.errno in NOT_WRITABLE_ERRORS:
                kind = NotWritableError
            raise kind(f"{self._storage.name} {what}: {error}") from error
