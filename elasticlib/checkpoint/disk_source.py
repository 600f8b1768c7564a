"""What a folder of checkpoints has to offer where all ranks choose what they go on from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import attrs

from ..errors import CheckpointCorrupt, CheckpointError
from .folder import CheckpointFolder
from .interface import DISK, SHARDED_DISK, Held, Source, Unreadable
from .local import LocalPlace
from .manifest import Health, Manifest, folder_of


class DiskSource(Source):
    """Over one folder. before: called before anything is listed, such as to keep others from
    changing it."""

    def __init__(self, folder: CheckpointFolder, before: Callable[[], None] = lambda: None) -> None:
        self._folder, self._before = folder, before
        self._left_out: list[tuple[int, str]] = []
        self._unread: list[tuple[int, str]] = []
        self._manifests: dict[Held, Manifest] = {}
        self._read: tuple[tuple[Held, int], memoryview, bool] | None = None

    def held(self) -> Sequence[Held]:
        """What manifests and sizes say is whole, newest first."""
        self._before()
        found, self._left_out, self._unread = [], [], []
        for one in self._folder.found():
            if one.manifest and self._folder.health(one.manifest) is not Health.BAD:
                found.append(_held(one.manifest))
                continue
            trouble = one.trouble if one.flaw else "is damaged: it was found so before"
            why = f"{self._folder.describe(one.step)} {trouble}"
            (self._unread if one.unread else self._left_out).append((one.step, why))
        return found

    def left_out(self) -> Sequence[tuple[int, str]]:
        return self._left_out

    def unread(self) -> Sequence[tuple[int, str]]:
        return self._unread

    def view(self, held: Held, part: int = 0) -> memoryview:
        """A part of a sharded one in a folder of this machine's is mapped; all else is read, one
        pack at a time, and checked by that."""
        if self._read is None or self._read[0] != (held, part):
            self._read = None  # first, so that there is never a second pack beside it
            manifest, place = self._manifest(held), self._folder.place
            if held.kind == SHARDED_DISK and isinstance(place, LocalPlace):
                pack, checked = self._mapped(place, manifest, part), False
            else:
                pack, checked = self._checked(manifest, part), True
            self._read = (held, part), memoryview(pack), checked
        return self._read[1]

    def check(self, held: Held, part: int = 0) -> None:
        if self._read is not None and self._read[0] == (held, part) and self._read[2]:
            return
        manifest = self._manifest(held)
        flaw = self._folder.flaw(attrs.evolve(manifest, files=(manifest.files[part],)))
        if flaw:
            self._folder.know(manifest, Health.BAD)
            raise CheckpointCorrupt(f"{self._folder.describe(held.step)} is damaged: {flaw}")

    def head(self, held: Held, part: int = 0) -> bytes:
        return self._folder.head(self._manifest(held), part)

    def release(self) -> None:
        self._read = None
        self._manifests.clear()

    def _checked(self, manifest: Manifest, part: int) -> mmap.mmap:
        try:
            pack = self._folder.read(manifest, part)
        except CheckpointCorrupt:
            self._folder.know(manifest, Health.BAD)
            raise
        if not manifest.parts:
            self._folder.know(manifest, Health.GOOD)
        return pack

    def _mapped(self, place: LocalPlace, manifest: Manifest, part: int) -> mmap.mmap:
        file, what = manifest.files[part], self._folder.describe(manifest.step)
        path = os.path.join(place.name, folder_of(manifest.step), file.name)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                return mmap.mmap(
                    opened.fileno(), file.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (FileNotFoundError, ValueError) as error:
            # It is not there, or shorter than it was.
            raise CheckpointCorrupt(f"{what} is damaged: {file.name}: {error}") from error
        except OSError as error:
            raise Unreadable(f"{what} cannot be read: {error}") from error

    def _manifest(self, held: Held) -> Manifest:
        if held not in self._manifests:
            found = self._folder.look(held.step)
            if found is not None and found.unread:
                raise Unreadable(f"{self._folder.describe(held.step)} {found.trouble}")
            manifest = None if found is None else found.manifest
            if manifest is None or _held(manifest) != held:
                what = self._folder.describe(held.step)
                raise CheckpointError(f"{what} was replaced or deleted after it was chosen")
            self._manifests[held] = manifest
        return self._manifests[held]


def _held(manifest: Manifest) -> Held:
    return Held(
        step=manifest.step,
        kind=SHARDED_DISK if manifest.parts else DISK,
        name=manifest.files[0].name,
        parts=manifest.parts,
        run=manifest.run,
        generation=manifest.generation,
    )
