"""The checkpoints in a folder, as anybody may read them; nothing here changes anything.

A checkpoint is what a whole manifest names. Its data are summed when they are read: what is
damaged is found out before it is used.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable

import attrs

from ..errors import CheckpointCorrupt, CheckpointError
from . import manifest as manifests
from .disk import LocalPlace
from .interface import Unreadable
from .manifest import Manifest, OtherFormat
from .pack_head import HEAD_BYTES, size_of
from .place import CHUNK, NotAFile, Place, no_news
from .prune import Health
from .remote import RemotePlace
from .room import room
from .summing import Summing


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
    """Reads the checkpoints in one place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._known: dict[int, tuple[Manifest, Health]] = {}

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

    def know(self, manifest: Manifest, health: Health) -> None:
        """Every byte of this checkpoint was written or checked here, and it is so."""
        self._known[manifest.step] = (manifest, health)

    def health(self, manifest: Manifest) -> Health:
        """What is known of the checkpoint that this describes."""
        known, health = self._known.get(manifest.step, (None, Health.UNKNOWN))
        return health if known == manifest else Health.UNKNOWN

    def check(self, manifest: Manifest, seen: Callable[[memoryview], None] = no_news) -> str | None:
        """What is wrong with it; None if nothing. It is read unless it is known to be good.

        Raises:
            Unreadable: it cannot be read; nothing is known of it.
        """
        if self.health(manifest) is Health.GOOD:
            return None
        reason = self.flaw(manifest, seen)
        self.know(manifest, Health.BAD if reason else Health.GOOD)
        return reason

    def flaw(self, manifest: Manifest, seen: Callable[[memoryview], None] = no_news) -> str | None:
        """What is wrong with a checkpoint, having read every byte of it; None if nothing.

        Raises:
            Unreadable: it cannot be read.
        """
        for number in range(len(manifest.files)):
            reason = self._size_flaw(manifest, number)
            if reason:
                return reason
        most = max(file.size for file in manifest.files)
        with memoryview(bytearray(min(CHUNK, most))) as buffer:
            for file in manifest.files:
                reason = self._flaw_of(manifest, file, buffer, seen)
                if reason:
                    return reason
        return None

    def verified(self, found: Found, seen: Callable[[memoryview], None] = no_news) -> Found:
        """The same with what is found wrong with it when every byte is read."""
        if found.manifest is None:
            return found
        try:
            return attrs.evolve(found, flaw=self.flaw(found.manifest, seen) or "")
        except Unreadable as error:
            return attrs.evolve(found, flaw=str(error.__cause__), unread=True)

    def read(
        self, manifest: Manifest, number: int = 0, seen: Callable[[memoryview], None] = no_news
    ) -> mmap.mmap:
        """One file of a checkpoint, checked, in memory of its own.

        Raises:
            CheckpointCorrupt: it is damaged. Unreadable: it cannot be read.
        """
        file = manifest.files[number]
        what = self.describe(manifest.step)
        reason = self._size_flaw(manifest, number)
        if reason:
            raise CheckpointCorrupt(f"{what} is damaged: {reason}")
        try:
            memory = room(max(1, file.size))
        except (OSError, OverflowError) as error:
            # It may be whole: to go on from an older one, on a machine that is too small, loses it.
            raise Unreadable(f"{what} needs {file.size} bytes of memory: {error}") from error
        try:
            with Summing() as summing:

                def each(chunk: memoryview) -> None:
                    summing.give(chunk)
                    seen(chunk)

                count = self.place.read_into(_path(manifest, file), memoryview(memory), seen=each)
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{what} is damaged: {file.name} is missing") from None
        except OSError as error:
            raise Unreadable(f"{what} cannot be read: {error}") from error
        reason = manifests.sum_flaw(file, summing.result())
        if count != file.size or reason:
            reason = reason or f"{file.name} has {count} of {file.size} bytes"
            raise CheckpointCorrupt(f"{what} is damaged: {reason}")
        return memory

    def first(self, manifest: Manifest, number: int, size: int) -> bytes:
        """The first bytes of one file, so many at most; not checked.

        Raises:
            CheckpointCorrupt: it is not there. Unreadable: it cannot be read.
        """
        file = manifest.files[number]
        data = bytearray(min(size, file.size))
        try:
            count = self.place.read_into(_path(manifest, file), memoryview(data))
        except FileNotFoundError:
            what = self.describe(manifest.step)
            raise CheckpointCorrupt(f"{what} is damaged: {file.name} is missing") from None
        except OSError as error:
            what = self.describe(manifest.step)
            raise Unreadable(f"{what} cannot be read: {error}") from error
        return bytes(data[:count])

    def describe(self, step: int) -> str:
        """A checkpoint, for messages."""
        return f"checkpoint {self.place.name}/{manifests.folder_of(step)}"

    def _size_flaw(self, manifest: Manifest, number: int) -> str | None:
        """What is wrong with the size of a large file, by its first bytes; None if nothing.

        Nobody asks for memory, or reads for an hour, for a file that was made long of nothing. What
        is small is soon summed.
        """
        file = manifest.files[number]
        if file.size <= CHUNK:
            return None
        try:
            size, _ = size_of(self.first(manifest, number, HEAD_BYTES))
        except CheckpointCorrupt as error:
            return f"{file.name}: {error}"
        return None if size == file.size else f"{file.name} is a pack of {size} bytes"

    def _flaw_of(
        self,
        manifest: Manifest,
        file: manifests.DataFile,
        buffer: memoryview,
        seen: Callable[[memoryview], None],
    ) -> str | None:
        summed, start = 0, 0
        try:
            while start < file.size:
                want = buffer[: min(CHUNK, file.size - start)]
                count = self.place.read_into(_path(manifest, file), want, start=start, seen=seen)
                if not count:
                    return f"{file.name} has {start} of {file.size} bytes"
                summed = zlib.crc32(want[:count], summed)
                start += count
        except FileNotFoundError:
            return f"{file.name} is missing"
        except OSError as error:
            what = self.describe(manifest.step)
            raise Unreadable(f"{what} cannot be read: {error}") from error
        return manifests.sum_flaw(file, summed)


def _path(manifest: Manifest, file: manifests.DataFile) -> str:
    return f"{manifests.folder_of(manifest.step)}/{file.name}"
