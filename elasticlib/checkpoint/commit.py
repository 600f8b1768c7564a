"""Writing checkpoints into a folder: data first, the manifest last, by one writer at a time.

The folder says who has it, in its fence. A later generation of a launch takes it from an earlier
one, and a new launch from the one before; whom it was taken from cannot commit any more, nor take
it back. The data of each save have names of their own, so nothing that counts is ever overwritten.
What nobody needs any more is deleted manifest first: a checkpoint is there whole, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType

import attrs

from ..clock import monotonic, wall
from ..errors import CheckpointCorrupt, CheckpointError, CheckpointRefused, Unreadable
from ..foreign import read_fields, read_object
from . import manifest as manifests
from .folder import CheckpointFolder
from .local import NotAFile
from .manifest import DataFile, Health, Manifest, Retention, Selection, select, target_of
from .summing import crc32_beside, no_news

log = logging.getLogger("elasticlib.checkpoint")

FENCE = "fence.json"
_FORMAT = 1
_LOST_KEPT = 64
"""So many launches that lost the folder are refused by name; it is small, and they are few."""

_DATA = re.compile(r"(?:state|part-[0-9]+)\.([0-9a-f]{16})\.[0-9]+\.pack")
_NO_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


# -- who may write: pure ---------------------------------------------------------------------------


@attrs.frozen
class Writer:
    """Who writes.

    run: the job's id. launch: tells apart two starts of one job, whose generations both count
    from 1. token: 16 hex digits, of one manager in one process. label: for people: which process.
    """

    run: str
    launch: str
    generation: int
    token: str
    label: str = ""

    def __str__(self) -> str:
        job = f"generation {self.generation} of run {self.run!r}" if self.run else "a process"
        return f"{job} ({self.label})" if self.label else job

    @property
    def start(self) -> str:
        """The launch, as one that another run may not have."""
        return f"{self.run}/{self.launch}"


@attrs.frozen
class Fence:
    """Who has the folder, and which launches had it before."""

    holder: Writer
    lost: tuple[str, ...] = ()


def claim_fence(fence: Fence | None, writer: Writer, *, beside: bool = False) -> Fence | str:
    """Give the folder to `writer`, unless somebody newer has it: the fence then, or why not.

    Args:
        beside: whether it is not taken from another of the same generation, who may be at work.
    """
    if fence is None:
        return Fence(writer)
    holder = fence.holder
    if writer.start != holder.start:
        if writer.start in fence.lost:
            return f"{holder} took this folder over from the launch of {writer}"
        return Fence(writer, (*fence.lost, holder.start)[-_LOST_KEPT:])
    if writer.generation < holder.generation:
        return f"{holder} writes here, and {writer} is older"
    if beside and writer.generation == holder.generation:
        return fence
    return Fence(writer, fence.lost)


def why_not(fence: Fence | None, writer: Writer, *, beside: bool = False) -> str:
    """Why `writer` must not commit; nothing if it may.

    Args:
        beside: whether it may while another of the same generation has the folder.
    """
    if fence is None:
        return f"{FENCE} is gone from it"
    holder = fence.holder
    if holder.token == writer.token:
        return ""
    if beside and (holder.start, holder.generation) == (writer.start, writer.generation):
        return ""
    return f"{holder} has taken it over from {writer}"


def encode_fence(fence: Fence) -> bytes:
    """One line of JSON, and one with its sum."""
    body = json.dumps({"format": _FORMAT, **attrs.asdict(fence)}).encode("ascii")
    return manifests.summed(body, b"")


def decode_fence(data: bytes) -> Fence:
    """The fence again. Raises CheckpointCorrupt."""
    body = manifests.body_of(data, b"")
    try:
        if body is None:
            raise ValueError("it was changed or cut short")
        fields = read_object(body)
        if fields.get("format") != _FORMAT:
            raise ValueError(f"format {fields.get('format')!r:.80}, this version reads {_FORMAT}")
        lost = fields.get("lost")
        if type(lost) is not list or not all(type(start) is str for start in lost):
            raise ValueError(f"lost is {lost!r:.80}, must be a list of names")
        return Fence(read_fields(Writer, fields.get("holder")), tuple(lost))
    except ValueError as error:
        raise CheckpointCorrupt(f"{FENCE} cannot be read: {error}") from error


def data_name(kind: str, token: str, number: int) -> str:
    """The name of a data file, `kind` being `state` or `part-<rank>`: no other writer's has it."""
    return f"{kind}.{token}.{number}.pack"


def leftovers(sizes: Mapping[str, int], named: Container[str], live: str) -> list[str]:
    """Which files in a step's folder nobody will ever need, while nobody else may commit.

    Args:
        sizes: bytes of each file there.
        named: those that its manifest names, and the manifest.
        live: the token of a writer that may be at work: its files are its own affair.
    """
    found = []
    for name in sorted(sizes):
        match = _DATA.fullmatch(name)
        if name not in named and (target_of(name) or (match and match[1] != live)):
            found.append(name)
    return found


# -- writing ---------------------------------------------------------------------------------------


class ClearedAway(CheckpointError):
    """A file was deleted before it counted, by a writer that may do so."""


class TakesNoWrites(CheckpointError):
    """The folder can be read, but not written: it is full, read-only, or somebody else's."""


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
        self.committed = float("-inf")
        """When the last one became durable, on this machine's monotonic clock."""
        self._folder, self._place = folder, folder.place
        self._retention, self._beside = retention, beside
        self._claimed = False
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
            ours = claim_fence(fence, self.writer, beside=self._beside)
            if isinstance(ours, str):
                raise CheckpointRefused(f"{self._place.name} is not ours to write: {ours}")
            if ours != fence:
                self._place.put(FENCE, encode_fence(ours))
                with self._or_it_stays():
                    self._sweep()
            self._claimed = True

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
            metrics=dict(metrics),
            world=world,
        )
        with self._at_work(f"could not commit {folder}"), self._place.locked():
            reason = why_not(self._fence(), writer, beside=self._beside)
            if reason:
                what = f"step {step} was not committed to {self._place.name}"
                raise CheckpointRefused(f"{what}: {reason}")
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
                with self._or_it_stays():
                    self._sweep(self._select(just=step).deleted)

    def abandon(self, step: int, name: str) -> None:
        """Take away a file that was not committed after all, as far as the disk lets us."""
        folder = manifests.folder_of(step)
        try:
            # A commit may have failed once its manifest was in place: then it counts.
            named = self._named(step)
            if named is not None and name not in named:
                self._place.remove(f"{folder}/{name}")
            # Another's first file may be about to be made in it.
            if not self._beside and not self._place.files(folder):
                self._place.remove_folder(folder)
        except OSError as error:
            log.warning("%s: a save that failed left files: %s", folder, error)

    def prune(
        self, seen: Callable[[memoryview], None] = no_news, *, dry_run: bool = False
    ) -> Selection:
        """Delete what the retention rule does not keep, and what crashes left; or only say what of
        the former would go.

        The newest checkpoint that turns out whole is read for that, so that one stays.

        Raises:
            CheckpointRefused: somebody newer has the folder, or took it over. CheckpointError: the
                disk failed.
        """
        if dry_run:
            return self._select(unread=self._look_for_good(seen))
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
        lost = why_not(fence, writer) if self._claimed and others else ""
        answer = lost or claim_fence(fence, writer)
        if isinstance(answer, str):
            raise CheckpointRefused(f"{self._place.name} was not pruned: {answer}")
        return fence.holder.token if fence is not None and others else ""

    def _sweep(self, doomed: Container[int] = (), live: str = "") -> list[Exception]:
        """Delete these steps, and what belongs to no checkpoint: nobody but `live` can still commit
        such files. What failed of `doomed`; all else is done all the same."""
        failed: list[Exception] = []
        for name in leftovers(self._place.files(""), (), ""):
            with self._or_it_stays():
                self._place.remove(name)
        for folder in self._place.folders():
            step = manifests.step_of(folder)
            if step is not None and not self._place.is_linked(folder):
                with self._or_it_stays(failed if step in doomed else None):
                    self._sweep_folder(step, live, doomed=step in doomed)
        return failed

    def _sweep_folder(self, step: int, live: str, *, doomed: bool) -> None:
        folder, named = manifests.folder_of(step), self._named(step)
        if doomed:
            self._place.remove(f"{folder}/{manifests.NAME}")
        elif named is None:
            return
        named, sizes = named or set(), self._place.files(folder)
        gone = leftovers(sizes, () if doomed else named, live)
        if doomed:
            gone += [name for name in leftovers(sizes, gone, "") if name in named]
        for name in gone:
            self._place.remove(f"{folder}/{name}")
        if len(gone) == len(sizes):
            self._place.remove_folder(folder)

    @contextlib.contextmanager
    def _or_it_stays(self, failed: list[Exception] | None = None) -> Iterator[None]:
        """What cannot be deleted, as it is another user's, is in nobody's way."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            if failed is not None:
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
                if found.manifest:
                    self._folder.check(found.manifest, seen)
                    break
            except CheckpointCorrupt:
                continue
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
            data = self._place.read(FENCE)
            return None if data is None else decode_fence(data)
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
