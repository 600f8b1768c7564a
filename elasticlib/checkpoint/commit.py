"""Commits of checkpoints: the data files first, the manifest last, by one writer at a time.

The fence file of a checkpoint directory names the writer that may commit, and its line (see
`refs`). A later generation of a launch takes the fence from an earlier one, and a new launch takes
it from the launch before. `claim` takes the fence and begins a branch in one write. Only
`take_over` (`CheckpointManager.claim`) takes the fence and begins no branch: it keeps the line of
the fence.

The order of a commit makes it atomic: a new folder; the data files, each synced with the folder;
the lock; the check of the fence; the manifest, by a rename. A folder without a manifest is no
checkpoint. The next `claim` that takes the fence deletes it.

Old checkpoints are chosen from a listing that is made under the lock of a commit, and deleted after
the lock was released: first the manifest, then the data. So each checkpoint is complete or absent
at any time. Which ranks write the files of a checkpoint is up to `writer`.

Agents commit the snapshots of their workers with this module, which does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from ..clock import monotonic, wall
from ..errors import CheckpointError, CheckpointFencedError
from .catalog import (
    FENCE_NAME,
    MANIFEST_NAME,
    PIN_NAME,
    CheckpointCatalog,
    DataFile,
    Manifest,
    encode_fence,
    encode_manifest,
    find_size_mismatch,
    ref_of,
)
from .refs import (
    MAX_BRANCHES_IN_HEADER,
    Fence,
    Integrity,
    Line,
    Retention,
    StateRef,
    Writer,
    acquire,
    commit_denied_reason,
    folder_name,
    may_delete,
    on_line,
    parse_folder_name,
)
from .storage import CHECKSUM_BYTES, temp_target

log = logging.getLogger("elasticlib.checkpoint")

# The folders that this process is writing. Another manager of it may claim the directory meanwhile.
FOLDERS_IN_PROGRESS: set[str] = set()

_save_numbers = itertools.count(1)  # make the folders of the managers of one process unique

NOT_WRITABLE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
}


@attrs.frozen
class Selection:
    """The steps that were kept and deleted, in ascending order."""

    kept: tuple[int, ...]
    deleted: tuple[int, ...]
    reason: str = ""  # why nothing is deleted, if a rule prevents it


class FileDeletedError(CheckpointError):
    """A data file was deleted before its checkpoint was committed."""


class NotWritableError(CheckpointError):
    """The directory cannot be written: the disk is full or read-only, or permission is missing."""


class Committer:
    """Commits the checkpoints of one writer to one directory. Not thread-safe.

    Args:
        catalog: the directory.
        writer: the writer.
        line: the line of the writer's branch.
        retention: the rule for old checkpoints; None: this writer deletes none, because it is an
            agent, which commits states of its workers.
        on_claimed: is called after the fence was acquired.
    """

    def __init__(
        self,
        catalog: CheckpointCatalog,
        writer: Writer,
        line: Line,
        retention: Retention | None,
        on_claimed: Callable[[], object] = lambda: None,
    ) -> None:
        # A thread may begin another branch while another thread claims the directory for the last
        # one. So both values change at once, and a claim belongs to the values that it has seen.
        self._origin = (writer, line)
        self._claimed: tuple[object, Line] = (None, ())  # the origin, and the line in the fence
        self.committed_at = float("-inf")  # when the last commit became durable, by `monotonic`
        self._catalog, self._storage = catalog, catalog.storage
        self._retention, self._on_claimed = retention, on_claimed
        self._logged: set[str] = set()  # errors of deletions, which are tried after each commit

    def begin(self, writer: Writer, line: Line) -> None:
        """Begin another branch, after a restore. The next save acquires the fence for it."""
        self._origin = (writer, line)

    @property
    def writer(self) -> Writer:
        """The writer of the present branch."""
        return self._origin[0]

    @property
    def line(self) -> Line:
        """The line of the present branch. A claim leaves out branches without a state."""
        origin, line = self._claimed
        return line if origin is self._origin else self._origin[1]

    @property
    def _has_fence(self) -> bool:
        """True if this writer has acquired the fence. Another one may have taken it since then."""
        return self._claimed[0] is self._origin

    def claim(self) -> None:
        """Acquire the fence, and delete the folders of interrupted saves. Later calls do nothing.

        An agent does not take the fence from workers of its generation.

        Raises:
            CheckpointFencedError: another writer keeps the fence.
            NotWritableError: the directory cannot be written.
            CheckpointError: the disk failed.
        """
        origin = self._origin
        if self._has_fence:
            return
        with self._translate_errors("could not be claimed"), self._storage.lock():
            fence = self._catalog.known_fence()
            line = origin[1]
            if not self._is_agent_of(fence):
                line = self._write_fence(self._acquire(fence, *origin))
            self._claimed = (origin, line)
        self._on_claimed()

    def take_over(self) -> None:
        """Take the fence, also from a job that has a launcher, and begin no branch yet.

        So the states that can be restored are those that the job has had until now. Raise as
        `claim`.
        """
        with self._translate_errors("could not be claimed"), self._storage.lock():
            fence = self._catalog.known_fence()
            acquired = self._acquire(fence, *self._origin, force=True)
            if fence is not None:
                acquired = attrs.evolve(acquired, line=fence.line)
            self._storage.replace(FENCE_NAME, encode_fence(acquired))
        self._on_claimed()

    def release(self) -> None:
        """Let any process take the fence, because the launch of this writer has ended.

        Raises:
            CheckpointError: the disk failed.
        """
        with self._translate_errors("could not be released"), self._storage.lock():
            fence = self._catalog.known_fence()
            if fence and fence.writer.launch == self.writer.launch and not fence.is_released:
                released = attrs.evolve(fence, is_released=True)
                self._storage.replace(FENCE_NAME, encode_fence(released))

    def new_folder(self, step: int, number: int | str | None = None) -> str:
        """Return the name of a folder for the next save of a step.

        Args:
            step: the step.
            number: see `refs.folder_name`; the default is the next number of this process.
        """
        number = next(_save_numbers) if number is None else number
        return folder_name(step, self.line[-1].id, number)

    def write(self, folder: str, name: str, data: memoryview) -> DataFile:
        """Write a data file durably. `commit` makes the file part of a checkpoint.

        Raises:
            CheckpointError: the disk failed.
        """
        with self._translate_errors(f"could not be written to {folder}"):
            # The storage writes the checksum in the place of the last entry of the pack.
            checksum = self._storage.write(f"{folder}/{name}", data[:-CHECKSUM_BYTES])
            return DataFile(name, len(data), checksum)

    def put(self, folder: str, name: str, data: memoryview) -> bool:
        """Write a data file durably, unless another agent has it or writes it.

        Returns:
            Whether the file was written.

        Raises:
            CheckpointError: the disk failed.
        """
        with self._translate_errors(f"could not be written to {folder}"):
            return self._storage.put(f"{folder}/{name}", data[:-CHECKSUM_BYTES])

    def commit(
        self,
        folder: str,
        files: tuple[DataFile, ...],
        state: StateRef | None = None,
        *,
        parts: int = 0,
        world_size: int = 0,
        metrics: Mapping[str, float] | None = None,
        pin: bool = False,
    ) -> None:
        """Make the written files of a folder a checkpoint, and prune by the retention rule.

        Args:
            folder: the folder, see `new_folder`.
            files: the data files that `write` returned, on whichever rank.
            state: the snapshot that an agent commits. The default is a state of this branch.
            parts: see `Manifest`.
            world_size: see `Manifest`.
            metrics: see `Manifest`.
            pin: never delete the checkpoint.

        Raises:
            CheckpointFencedError: another writer has taken the fence.
            FileDeletedError: one of the files was deleted.
            CheckpointError: the disk failed.
        """
        named = parse_folder_name(folder)
        if named is None:
            raise CheckpointError(f"{folder!r} is not the name of a folder of a checkpoint")
        obsolete: Sequence[StateRef] = ()
        with self._translate_errors(f"could not commit {folder}"), self._storage.lock():
            fence = self._catalog.read_fence()
            is_agent = self._retention is None
            reason = commit_denied_reason(fence, self.writer, named, is_agent=is_agent)
            if reason or fence is None:
                what = f"step {named.step} was not committed to {self._storage.name}"
                raise CheckpointFencedError(f"{what}: {reason}")
            manifest = Manifest(
                step=named.step,
                branch=named.branch,
                # A restore during this save changes `self.line`. The fence has the line of the
                # folder's branch.
                line=state.line if state else fence.line,
                files=files,
                parts=parts,
                writer=state.writer if state else fence.writer,
                epoch=fence.epoch,
                saved_at=state.saved_at if state else wall(),
                world_size=world_size,
                metrics=metrics or {},
            )
            self._put_manifest(folder, manifest, pin=pin)
            if self._retention is not None:
                with self._log_errors():
                    refs = self._catalog.list_refs(reread=False)
                    obsolete = may_delete(refs, fence.line, self._retention, folder)
        self._delete(obsolete)

    def discard(self, folder: str, name: str) -> None:
        """Delete a data file of a save that failed. An error of the disk is only logged."""
        try:
            # If the commit failed after the rename of the manifest, the checkpoint exists.
            if MANIFEST_NAME not in self._storage.list_files(folder):
                self._storage.remove(f"{folder}/{name}")
                self._storage.remove_folder(folder)
        except OSError as error:
            log.warning("%s: files of a failed save could not be deleted: %s", folder, error)

    def prune(self) -> Selection:
        """Delete the checkpoints that the retention rule does not keep.

        The newest intact checkpoint is read and verified first, because it must be kept.

        Raises:
            CheckpointFencedError: a newer writer has the fence, or has taken it.
            CheckpointError: the disk failed.
        """
        if self._retention is None:
            raise CheckpointError("an agent deletes no checkpoints")
        with self._translate_errors("could not be pruned"):
            with self._storage.lock():
                self._check_may_prune()
            # The verification can take long, so the job that writes here must not wait for it.
            unreadable = self._catalog.verify_until_intact(self._catalog.live_refs())
            with self._storage.lock():
                self._check_may_prune()
                refs = [
                    attrs.evolve(ref, integrity=Integrity.UNREADABLE)
                    if ref.place in unreadable
                    else ref
                    for ref in self._catalog.list_refs()
                ]
                line = self._catalog.line(refs)
            obsolete = may_delete(refs, line, self._retention)
            for error in self._delete(obsolete):
                raise error
        places = {ref.place for ref in obsolete}
        is_anchored = any(r.integrity is Integrity.VERIFIED for r in on_line(line, refs))
        return Selection(
            tuple(sorted(ref.step for ref in refs if ref.place not in places)),
            tuple(sorted(ref.step for ref in obsolete)),
            "" if is_anchored else "no checkpoint is known to be intact",
        )

    def pin(self, ref: StateRef, *, pin: bool) -> None:
        """Write or remove the file that protects a checkpoint from deletion.

        Raises:
            CheckpointError: the disk failed.
        """
        path = f"{ref.place}/{PIN_NAME}"
        with self._translate_errors("could not be pinned"):
            if pin:
                self._storage.replace(path, b"")
            else:
                self._storage.remove(path)

    def was_superseded(self) -> bool:
        """Return whether a later generation of the same launch has the fence.

        Then this writer has nothing left to do, and nothing is lost.
        """
        fence = self._catalog.read_fence()
        holder = fence.writer if fence else self.writer
        return holder.launch == self.writer.launch and holder.generation > self.writer.generation

    def _acquire(
        self, fence: Fence | None, writer: Writer, line: Line, *, force: bool = False
    ) -> Fence:
        acquired = acquire(fence, writer, line, force=force)
        if isinstance(acquired, str):
            name = self._storage.name
            raise CheckpointFencedError(f"{name} must not be written: {acquired}")
        return acquired

    def _is_agent_of(self, fence: Fence | None) -> bool:
        """Return whether this is an agent, and the workers have the fence for its line."""
        if self._retention is not None or fence is None:
            return False
        holder = fence.writer
        return holder.launch == self.writer.launch and holder.order >= self.writer.order

    def _write_fence(self, fence: Fence) -> Line:
        """Write the fence, and delete leftovers. Return its line: branches that have a state."""
        refs = self._catalog.list_refs(reread=False)
        with_states = {ref.branch for ref in refs}
        newest = fence.line[-MAX_BRANCHES_IN_HEADER:]
        line = tuple(b for b in fence.line if b.id in with_states or b in newest)
        fence = attrs.evolve(fence, line=line)
        self._storage.replace(FENCE_NAME, encode_fence(fence))
        with self._log_errors():
            self._delete_leftovers({ref.place for ref in refs})
        return line

    def _delete_leftovers(self, committed: set[str]) -> None:
        """Delete temporary files, and the folders of saves that were interrupted."""
        for name in self._storage.list_files(""):
            if temp_target(name):
                self._storage.remove(name)
        for folder in self._storage.list_folders():
            is_ours = parse_folder_name(folder) is not None
            is_used = folder in committed or folder in FOLDERS_IN_PROGRESS
            if not is_ours or is_used or self._storage.is_link(folder):
                continue
            if MANIFEST_NAME not in self._storage.list_files(folder):
                self._storage.remove_tree(folder, MANIFEST_NAME)

    def _put_manifest(self, folder: str, manifest: Manifest, *, pin: bool) -> None:
        sizes = self._storage.list_files(folder)
        if mismatch := find_size_mismatch(manifest.files, sizes):
            is_missing = any(file.name not in sizes for file in manifest.files)
            kind = FileDeletedError if is_missing else CheckpointError
            raise kind(f"{self._storage.name}/{folder} was not committed: {mismatch}")
        if pin:
            self.pin(ref_of(manifest, folder), pin=True)
        self._storage.replace(f"{folder}/{MANIFEST_NAME}", encode_manifest(manifest))
        self.committed_at = monotonic()
        self._catalog.record_integrity(ref_of(manifest, folder), Integrity.VERIFIED)

    def _check_may_prune(self) -> None:
        """Check that this writer may prune.

        A writer that has never had the fence may prune beside its holder, unless the holder is a
        later generation or launch. A writer that has lost the fence may not.

        Raises:
            CheckpointFencedError: this writer must not prune.
        """
        writer, fence = self.writer, self._catalog.known_fence()
        if fence is None:
            return
        holder, reason = fence.writer, ""
        is_same = (holder.launch, holder.generation) == (writer.launch, writer.generation)
        if writer.launch in fence.revoked or (self._has_fence and not is_same):
            reason = f"{holder} took the directory over from {writer}"
        elif holder.launch == writer.launch and writer.generation < holder.generation:
            reason = f"{holder} writes here, and {writer} is older"
        if reason:
            raise CheckpointFencedError(f"{self._storage.name} was not pruned: {reason}")

    def _delete(self, refs: Iterable[StateRef]) -> list[Exception]:
        """Delete checkpoints, unless they are pinned now. Return the errors, which are logged.

        An error does not prevent the other deletions.
        """
        errors: list[Exception] = []
        for ref in refs:
            with self._log_errors(errors):
                is_pinned = PIN_NAME in self._storage.list_files(ref.place)
                # Behind a link an operator has moved the checkpoint elsewhere, to keep it.
                if not is_pinned and not self._storage.is_link(ref.place):
                    self._storage.remove_tree(ref.place, MANIFEST_NAME)
        return errors

    @contextlib.contextmanager
    def _log_errors(self, errors: list[Exception] | None = None) -> Iterator[None]:
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


def part_name(part: int | None) -> str:
    """Return the name of the data file of a part, or of a state that is the same on all ranks."""
    return "state.safetensors" if part is None else f"part-{part:05d}.safetensors"
