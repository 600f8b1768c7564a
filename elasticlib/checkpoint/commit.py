"""Writing checkpoints into a folder: data first, the manifest last, and only by who has the folder.

The data of each save have names of their own, so nothing that counts is ever overwritten. What
nobody needs any more is deleted manifest first: a checkpoint is there whole, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType

from ..clock import monotonic, wall
from ..errors import CheckpointCorrupt, CheckpointError, CheckpointRefused, Unreadable
from . import fence as fences
from . import manifest as manifests
from .fence import Fence, Writer
from .folder import CheckpointFolder
from .manifest import DataFile, Manifest
from .place import NotAFile, no_news
from .prune import Health, Retention, Selection, select
from .summing import crc32_beside

log = logging.getLogger("elasticlib.checkpoint")


class ClearedAway(CheckpointError):
    """A file was deleted before it counted, by a writer that may do so."""


class TakesNoWrites(CheckpointError):
    """The folder can be read, but not written: it is full, read-only, or somebody else's."""


_NO_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


class Committer:
    """One writer's access to a folder. One call at a time.

    beside: whether another writer of the same generation may be at work, from which the folder is
    not taken: it commits what it has on its way, and clears up. It may clear away what is written
    beside it, too.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        writer: Writer,
        retention: Retention,
        *,
        beside: bool = False,
    ) -> None:
        self.writer = writer
        self._beside = beside
        self._folder = folder
        self._place = folder.place
        self._retention = retention
        self.committed = float("-inf")
        """When the last one became durable, on this machine's monotonic clock."""
        self._claimed = False
        self._count = 0
        self._warned: set[str] = set()

    def claim(self) -> None:
        """Take the folder, and clear away what crashes of others left; once is enough.

        Raises:
            CheckpointRefused: somebody newer has it. TakesNoWrites: see there. CheckpointError: the
                disk failed.
        """
        if self._claimed:
            return
        with self._at_work("could not be claimed"), self._place.locked():
            fence = self._fence(damaged_is_none=True)
            ours = fences.claim(fence, self.writer, beside=self._beside)
            if isinstance(ours, str):
                raise CheckpointRefused(f"{self._place.name} is not ours to write: {ours}")
            if ours != fence:
                self._place.put(fences.NAME, fences.encode(ours))
                with self._or_it_stays([]):
                    self._sweep()
            self._claimed = True

    def save(
        self,
        step: int,
        data: memoryview,
        *,
        metrics: Mapping[str, float] = MappingProxyType({}),
        world: int = 0,
    ) -> None:
        """Write and commit a checkpoint that is one pack, having claimed the folder.

        Args:
            metrics, world: see `Manifest`.

        Raises:
            CheckpointRefused: somebody newer has it. CheckpointError: the disk failed.
        """
        self.claim()
        self._count += 1
        name = fences.data_name("state", self.writer.token, self._count)
        try:
            file = self.write(step, name, data)
            self.commit(step, (file,), metrics=metrics, world=world)
        except BaseException:
            self.abandon(step, [name])
            raise

    def write(self, step: int, name: str, data: memoryview) -> DataFile:
        """Write a file of a step's checkpoint, durably; it counts once a manifest names it.

        Raises:
            CheckpointError: the disk failed.
        """
        folder = manifests.folder_of(step)
        with self._at_work(f"could not be written to {folder}"):
            summed = crc32_beside(data, lambda: self._place.write(f"{folder}/{name}", data))
            return DataFile(name, len(data), summed)

    def commit(
        self,
        step: int,
        files: tuple[DataFile, ...],
        parts: int = 0,
        *,
        metrics: Mapping[str, float] = MappingProxyType({}),
        world: int = 0,
    ) -> None:
        """Make them count, in place of what there was of this step; then delete what is too old.

        Args:
            parts, metrics, world: see `Manifest`.

        Raises:
            CheckpointRefused: somebody has taken the folder over. CheckpointError: the disk
                failed, or a file of it is gone.
        """
        writer, folder = self.writer, manifests.folder_of(step)
        manifest = Manifest(
            step=step,
            files=files,
            parts=parts,
            run=writer.run,
            launch=writer.launch,
            generation=writer.generation,
            writer=writer.token,
            saved_at=wall(),
            metrics=manifests.check_metrics(metrics),
            world=world,
        )
        with self._at_work(f"could not commit {folder}"), self._place.locked():
            reason = fences.why_not(self._fence(), writer, beside=self._beside)
            if reason:
                raise CheckpointRefused(
                    f"step {step} was not committed to {self._place.name}: {reason}"
                )
            sizes = self._place.files(folder)
            flaw = manifests.flaw(manifest, sizes)
            if flaw:
                gone = any(file.name not in sizes for file in files)
                kind = ClearedAway if gone else CheckpointError
                raise kind(f"{self._place.name}/{folder} was not committed: {flaw}")
            self._place.put(f"{folder}/{manifests.NAME}", manifests.encode(manifest))
            self.committed = monotonic()
            self._folder.know(manifest, Health.GOOD)
            if not self._beside:
                with self._or_it_stays([]):
                    self._sweep(self._select(just=step).deleted)

    def abandon(self, step: int, names: list[str]) -> None:
        """Take away files that were not committed after all, as far as the disk lets us."""
        folder = manifests.folder_of(step)
        try:
            # A commit may have failed once its manifest was in place: then they count.
            named = self._named(step)
            for name in names:
                if named is not None and name not in named:
                    self._place.remove(f"{folder}/{name}")
            # Another's first file may be about to be made in it.
            if not self._beside and not self._place.files(folder):
                self._place.remove_folder(folder)
        except OSError as error:
            log.warning("%s: a save that failed left files: %s", folder, error)

    def prune(self, seen: Callable[[memoryview], None] = no_news) -> Selection:
        """Delete what the retention rule does not keep; and what crashes left.

        The newest checkpoint that turns out whole is read for that, so that one stays.

        Raises:
            CheckpointRefused: somebody newer has the folder, or took it over. CheckpointError: the
                disk failed.
        """
        with self._at_work("could not be pruned"):
            with self._place.locked():
                self._live_beside()
            # Not under the lock, which a job that writes here waits for: it may take long.
            unread = self._look_for_good(seen)
            with self._place.locked():
                live = self._live_beside()
                selection = self._select(unread=unread)
                for error in self._sweep(selection.deleted, live):
                    raise error
        return selection

    def _live_beside(self) -> str:
        """The token of another writer, some of whose files may be on their way; none: "".

        Raises:
            CheckpointRefused: we may not clear up beside it.
        """
        writer, fence = self.writer, self._fence(damaged_is_none=True)
        others = fence is not None and fence.holder.token != writer.token
        # Who never had it may clear up beside its holder, unless that is a newer generation
        # of its own launch, or a newer launch.
        lost = fences.why_not(fence, writer) if self._claimed and others else ""
        answer = lost or fences.claim(fence, writer)
        if isinstance(answer, str):
            raise CheckpointRefused(f"{self._place.name} was not pruned: {answer}")
        return fence.holder.token if fence is not None and others else ""

    def choose(self, seen: Callable[[memoryview], None] = no_news) -> Selection:
        """What `prune` would keep and delete, having looked for the newest whole one."""
        return self._select(unread=self._look_for_good(seen))

    def _sweep(self, doomed: Container[int] = (), live: str = "") -> list[Exception]:
        """Delete these steps, and what belongs to no checkpoint: nobody but `live` can still commit
        such files. What failed of `doomed`; all else is done all the same."""
        failed: list[Exception] = []
        for name in fences.leftovers(self._place.files(""), (), ""):
            with self._or_it_stays([]):
                self._place.remove(name)
        for folder in self._place.folders():
            step = manifests.step_of(folder)
            if step is not None and not self._place.is_linked(folder):
                with self._or_it_stays(failed if step in doomed else []):
                    self._sweep_folder(step, live, doomed=step in doomed)
        return failed

    def _sweep_folder(self, step: int, live: str, *, doomed: bool) -> None:
        folder, named = manifests.folder_of(step), self._named(step)
        if doomed:
            self._place.remove(f"{folder}/{manifests.NAME}")
        elif named is None:
            return
        sizes = self._place.files(folder)
        gone = fences.leftovers(sizes, () if doomed else named or (), live)
        if doomed and named:
            gone += [name for name in fences.leftovers(sizes, gone, "") if name in named]
        for name in gone:
            self._place.remove(f"{folder}/{name}")
        if len(gone) == len(sizes):
            self._place.remove_folder(folder)

    @contextlib.contextmanager
    def _or_it_stays(self, failed: list[Exception]) -> Iterator[None]:
        """What cannot be deleted, as it is another user's, is in nobody's way."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            failed.append(error)
            # At each save it is tried again, and said once.
            if str(error) not in self._warned:
                self._warned.add(str(error))
                what = "what is not needed could not be deleted"
                log.warning("%s: %s: %s", self._place.name, what, error)

    def _look_for_good(self, seen: Callable[[memoryview], None]) -> set[int]:
        """Read from the newest on until one turns out whole; those that could not be read."""
        unread = set()
        for found in self._folder.found():
            try:
                if found.manifest and not self._folder.check(found.manifest, seen):
                    break
            except Unreadable as error:
                log.warning("it stays: %s", error)
                unread.add(found.step)
        return unread

    def _select(self, just: int | None = None, unread: Container[int] = ()) -> Selection:
        rows, metrics = [], {}
        for one in self._folder.found():
            metrics[one.step] = one.manifest.metrics if one.manifest else {}
            # What a link leads to is not ours to delete: it stays as what nobody could look at.
            linked = self._place.is_linked(manifests.folder_of(one.step))
            if one.unread or linked or one.step in unread:
                health = Health.UNREAD
            elif one.manifest is None:
                health = Health.BAD
            else:
                health = self._folder.health(one.manifest)
            rows.append((one.step, health))
        return select(rows, self._retention, just, metrics)

    def _named(self, step: int) -> set[str] | None:
        """The files that a step's manifest names; None if that cannot be read: who knows."""
        try:
            data = self._place.read(f"{manifests.folder_of(step)}/{manifests.NAME}")
            if data is None:
                return set()
            return {file.name for file in manifests.decode(data).files} | {manifests.NAME}
        except (CheckpointCorrupt, OSError):
            return None

    def _fence(self, *, damaged_is_none: bool = False) -> Fence | None:
        try:
            data = self._place.read(fences.NAME)
            return None if data is None else fences.decode(data)
        except (CheckpointCorrupt, NotAFile) as error:
            if not damaged_is_none:
                raise
            log.warning("%s: %s: nobody is known to have it", self._place.name, error)
            return None

    @contextlib.contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        """What the disk answers, as an error of ours that says what was to be done."""
        try:
            yield
        except OSError as error:
            kind: type[CheckpointError] = CheckpointError
            if isinstance(error, FileNotFoundError):
                kind = ClearedAway
            elif error.errno in _NO_WRITES:
                kind = TakesNoWrites
            raise kind(f"{self._place.name} {what}: {error}") from error
