"""The checkpoints in a folder, as anybody may read them; nothing here changes anything.

A checkpoint is what a whole manifest names. Its data are summed when they are read: what is
damaged is found out before it is used.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from ..errors import CheckpointCorrupt, CheckpointError, Unreadable
from . import manifest as manifests
from .local import CHUNK, LocalPlace, NotAFile, Place
from .manifest import Health, Manifest, OtherFormat, best_of
from .pack_head import HEAD_BYTES, size_of
from .remote import RemotePlace
from .summing import new_memory, no_news, read_summed

if TYPE_CHECKING:
    from .storages import MapLocation

log = logging.getLogger("elasticlib.checkpoint")
T = TypeVar("T")


def open_place(folder: str | os.PathLike[str] | Place) -> Place:
    """The place that a path or URL names, or is. Raises CheckpointError."""
    if isinstance(folder, Place):
        return folder
    text = os.fspath(folder)
    scheme, found, path = text.partition("://")
    if not found:
        return LocalPlace(text)
    return LocalPlace(path) if scheme in ("file", "local") else RemotePlace(text)


@attrs.frozen
class Found:
    """A step's folder: what its manifest says, or why it is no checkpoint (any more).

    unread: whether that is because it could not be read: then it may be one all the same.
    """

    step: int
    manifest: Manifest | None
    flaw: str = ""
    unread: bool = False

    @property
    def trouble(self) -> str:
        """What is wrong, in words."""
        return f"cannot be read: {self.flaw}" if self.unread else f"is damaged: {self.flaw}"


class CheckpointFolder:
    """Reads the checkpoints in one place.

    passed_over: why the last `load`, `latest` or `best` did not take those before, by step.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.passed_over: dict[int, str] = {}
        self._known: dict[int, tuple[Manifest, Health]] = {}

    # -- what there is ------------------------------------------------------------------------

    def found(self) -> list[Found]:
        """All that is there, newest first, judged by manifests and sizes alone.

        A folder without a manifest is of a save that was never finished, or of a checkpoint that
        was deleted: it is passed over in silence.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        try:
            steps = [manifests.step_of(name) for name in self.place.folders()]
        except OSError as error:
            raise CheckpointError(f"{self.place.name} cannot be read: {error}") from error
        known = sorted((step for step in steps if step is not None), reverse=True)
        return [found for step in known if (found := self.look(step))]

    def look(self, step: int) -> Found | None:
        """One step's; None if there is no such checkpoint."""
        folder = manifests.folder_of(step)
        try:
            data = self.place.read(f"{folder}/{manifests.NAME}")
            if data is None:
                return None
            manifest = manifests.decode(data)
            if manifest.step != step:
                return Found(step, None, f"its manifest is of step {manifest.step}")
            flaw = manifests.flaw(manifest, self.place.files(folder))
            if flaw and self.place.read(f"{folder}/{manifests.NAME}") != data:
                # It was replaced or deleted meanwhile, and its files were no longer wanted.
                return self.look(step)
        except OtherFormat as error:
            return Found(step, None, str(error), unread=True)
        except NotAFile as error:
            return Found(step, None, f"its manifest cannot be: {error}")
        except OSError as error:
            if not self.place.is_linked(folder):
                return Found(step, None, str(error), unread=True)
            # Ours have no links: nobody waits for what somebody else has led away.
            return Found(step, None, f"it is a link to what cannot be read: {error}")
        except CheckpointCorrupt as error:
            return Found(step, None, str(error))
        return Found(step, None if flaw else manifest, flaw or "")

    def describe(self, step: int) -> str:
        """A checkpoint, for messages."""
        return f"checkpoint {self.place.name}/{manifests.folder_of(step)}"

    # -- whether it is whole ------------------------------------------------------------------

    def know(self, manifest: Manifest, health: Health) -> None:
        """Every byte of this checkpoint was written or checked here, and it is so."""
        self._known[manifest.step] = (manifest, health)

    def health(self, manifest: Manifest) -> Health:
        """What is known of the checkpoint that this describes."""
        known, health = self._known.get(manifest.step, (None, Health.UNKNOWN))
        return health if known == manifest else Health.UNKNOWN

    def check(self, manifest: Manifest, seen: Callable[[memoryview], None] = no_news) -> int:
        """Its step, if it is whole. It is read unless it is known to be good.

        Raises:
            CheckpointCorrupt: it is damaged. Unreadable: it cannot be read; nothing is known of it.
        """
        if self.health(manifest) is not Health.GOOD:
            reason = self.flaw(manifest, seen)
            self.know(manifest, Health.BAD if reason else Health.GOOD)
            if reason:
                raise self._damaged(manifest, reason)
        return manifest.step

    def flaw(self, manifest: Manifest, seen: Callable[[memoryview], None] = no_news) -> str | None:
        """What is wrong with a checkpoint, having read every byte of it; None if nothing.

        Raises:
            Unreadable: it cannot be read.
        """
        numbers = range(len(manifest.files))
        sizes = (self._size_flaw(manifest, number) for number in numbers)
        sums = (self._sum_flaw(manifest, number, None, seen) for number in numbers)
        return next(filter(None, sizes), None) or next(filter(None, sums), None)

    def verified(self, found: Found, seen: Callable[[memoryview], None] = no_news) -> Found:
        """The same with what is found wrong with it when every byte is read."""
        if found.manifest is None:
            return found
        try:
            return attrs.evolve(found, flaw=self.flaw(found.manifest, seen) or "")
        except Unreadable as error:
            return attrs.evolve(found, flaw=str(error.__cause__), unread=True)

    def verify(self, step: int | None = None) -> dict[int, str]:
        """See `CheckpointManager.verify`."""
        found = self.found() if step is None else [self._only(step)]
        flaws = {one.step: self.verified(one).flaw for one in found}
        return {step: flaw for step, flaw in sorted(flaws.items()) if flaw}

    # -- its bytes ----------------------------------------------------------------------------

    def read(self, manifest: Manifest, number: int = 0) -> mmap.mmap:
        """One file of a checkpoint, checked, in memory of its own.

        Raises:
            CheckpointCorrupt: it is damaged. Unreadable: it cannot be read.
        """
        reason = self._size_flaw(manifest, number)
        if reason:
            raise self._damaged(manifest, reason)
        size = manifest.files[number].size
        try:
            memory = new_memory(max(1, size))
        except (OSError, OverflowError) as error:
            # It may be whole: to go on from an older one, on a machine that is too small, loses it.
            what = self.describe(manifest.step)
            raise Unreadable(f"{what} needs {size} bytes of memory: {error}") from error
        reason = self._sum_flaw(manifest, number, memoryview(memory))
        if reason:
            raise self._damaged(manifest, reason)
        return memory

    def head(self, manifest: Manifest, number: int = 0) -> bytes:
        """The first bytes of one file, up to the elements of its pack; not checked.

        Raises:
            CheckpointCorrupt: the file is not there. Unreadable: it cannot be read.
        """
        _, size = size_of(self._first(manifest, number, HEAD_BYTES))
        return self._first(manifest, number, size)

    def _first(self, manifest: Manifest, number: int, count: int) -> bytes:
        """So many bytes of one file, or all that it has; see `head`."""
        file = manifest.files[number]
        buffer = bytearray(min(count, file.size))
        try:
            with self._reading(manifest):
                done = self.place.read_into(_path(manifest, number), memoryview(buffer))
        except FileNotFoundError:
            raise self._damaged(manifest, f"{file.name} is missing") from None
        return bytes(buffer[:done])

    def _damaged(self, manifest: Manifest, reason: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.describe(manifest.step)} is damaged: {reason}")

    def _size_flaw(self, manifest: Manifest, number: int) -> str | None:
        """What is wrong with the size of a large file, by its first bytes; None if nothing.

        Nobody asks for memory, or reads for an hour, for a file that was made long of nothing. What
        is small is soon summed.
        """
        file = manifest.files[number]
        if file.size <= CHUNK:
            return None
        try:
            size, _ = size_of(self._first(manifest, number, HEAD_BYTES))
        except CheckpointCorrupt as error:
            return f"{file.name}: {error}"
        return None if size == file.size else f"{file.name} is a pack of {size} bytes"

    def _sum_flaw(
        self,
        manifest: Manifest,
        number: int,
        into: memoryview | None,
        seen: Callable[[memoryview], None] = no_news,
    ) -> str | None:
        """What is wrong with a file, having read every byte of it; None if nothing."""
        file, path = manifest.files[number], _path(manifest, number)

        def fill(start: int, buffer: memoryview, piece: Callable[[memoryview], None]) -> int:
            return self.place.read_into(path, buffer, start=start, seen=piece)

        try:
            with self._reading(manifest):
                threads = self.place.readers
                count, summed = read_summed(fill, file.size, into, threads=threads, seen=seen)
        except FileNotFoundError:
            return f"{file.name} is missing"
        if count != file.size:
            return f"{file.name} has {count} of {file.size} bytes"
        if summed != file.crc32:
            return f"{file.name} should have CRC-32 {file.crc32:08x}, its bytes give {summed:08x}"
        return None

    @contextlib.contextmanager
    def _reading(self, manifest: Manifest) -> Iterator[None]:
        """Whatever the place answers says nothing of the data, but that a file is not there."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            what = self.describe(manifest.step)
            raise Unreadable(f"{what} cannot be read: {error}") from error

    # -- which one, and its state --------------------------------------------------------------

    def load(
        self, step: int | None, *, like: object = None, map_location: MapLocation = "cpu"
    ) -> Any:
        """See `CheckpointManager.load`."""
        read = partial(self._state, like=like, map_location=map_location)
        if step is not None:
            return read(self._whole(self._only(manifests.check_step(step))))
        return self._take_first(self.found(), read)

    def latest(self) -> int | None:
        """See `CheckpointManager.latest`."""
        with contextlib.suppress(FileNotFoundError):
            return self._take_first(self.found(), self.check)
        return None

    def best(self, metric: str, order: str) -> int | None:
        """See `CheckpointManager.best`."""
        found = {one.step: one for one in self.found()}
        for one in found.values():
            if one.unread:
                self._whole(one)  # raises: it may be better than all others
        metrics = {step: one.manifest.metrics for step, one in found.items() if one.manifest}
        best = [found[step] for step in best_of(metrics, metrics, metric, order)]
        with contextlib.suppress(FileNotFoundError):
            return self._take_first(best, self.check)
        return None

    def _take_first(self, candidates: Iterable[Found], take: Callable[[Manifest], T]) -> T:
        """What `take` gives for the first of these that it does not raise for.

        Raises:
            FileNotFoundError: there is none. Unreadable: an earlier one may be whole, and to take
                a later one in its place would be a loss.
        """
        self.passed_over = {}
        for found in candidates:
            try:
                return take(self._whole(found))
            except Unreadable:
                raise
            except CheckpointError as error:
                self.passed_over[found.step] = str(error)
                log.warning("checkpoint passed over: %s", error)
        raise FileNotFoundError(f"there is no whole checkpoint in {self.place.name}")

    def _only(self, step: int) -> Found:
        found = self.look(step)
        if found is None:
            raise FileNotFoundError(f"there is no {self.describe(step)}")
        return found

    def _whole(self, found: Found) -> Manifest:
        if found.manifest is None:
            kind = Unreadable if found.unread else CheckpointCorrupt
            raise kind(f"{self.describe(found.step)} {found.trouble}")
        return found.manifest

    def _state(self, manifest: Manifest, *, like: object, map_location: MapLocation) -> Any:
        # Torch takes its time to import, and who looks at a folder does not need it.
        from .pack import unpack

        try:
            if manifest.parts:
                return self._sharded_state(manifest, like, map_location)
            memory = memoryview(self.read(manifest))
            # The memory is the tensors' own: nobody else has it.
            state = unpack(memory, map_location=map_location, copy=False)
        except CheckpointCorrupt:
            self.know(manifest, Health.BAD)
            raise
        self.know(manifest, Health.GOOD)
        return state

    def _sharded_state(self, manifest: Manifest, like: object, map_location: MapLocation) -> Any:
        from .sharded import load_parts

        heads = [self.head(manifest, number) for number in range(manifest.parts)]
        return load_parts(
            heads,
            lambda number: memoryview(self.read(manifest, number)),
            like,
            map_location=map_location,
        )


def _path(manifest: Manifest, number: int) -> str:
    return f"{manifests.folder_of(manifest.step)}/{manifest.files[number].name}"
