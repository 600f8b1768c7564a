"""What a folder of checkpoints has to offer where all ranks choose what they go on from."""

from __future__ import annotations

import mmap
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import attrs

from ..errors import CheckpointCorrupt, CheckpointError
from .choose import DISK, SHARDED_DISK
from .folder import CheckpointFolder
from .interface import DirectSource, Held, Source, Unreadable
from .manifest import Manifest
from .prune import Health
from .put import fit, put


class DiskSource(DirectSource):
    """Over one folder, as one rank of so many reads it.

    before: called before anything is listed, such as to keep others from changing it.
    rank, world_size: a sharded checkpoint, which all ranks reach, is checked by all of them
    together, each its share of the files.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        before: Callable[[], None] = lambda: None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._folder, self._before = folder, before
        self._rank, self._world_size = rank, world_size
        self._left_out: list[tuple[int, str]] = []
        self._unread: list[tuple[int, str]] = []

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

    def read(self, held: Held) -> Any:
        """A checkpoint that is one pack; see `Source`."""
        manifest = self._manifest(held)
        try:
            pack = self._folder.read(manifest)
        except CheckpointCorrupt:
            self._folder.know(manifest, Health.BAD)
            raise
        self._folder.know(manifest, Health.GOOD)
        return pack

    def check(self, held: Held) -> None:
        """This rank's share of the files of a sharded one."""
        manifest = self._manifest(held)
        mine = manifest.files[self._rank :: self._world_size]
        flaw = self._folder.flaw(attrs.evolve(manifest, files=mine)) if mine else None
        if flaw:
            what = self._folder.describe(held.step)
            raise CheckpointCorrupt(f"{what} is damaged: {flaw}")

    def load(self, held: Held, state: MutableMapping[str, Any], *, strict: bool = True) -> None:
        """A sharded one, on however many ranks."""
        self._manifest(held)
        found = self._folder.load(held.step, like=state)
        fit(state, found, strict=strict)
        put(state, found)

    def _manifest(self, held: Held) -> Manifest:
        found = self._folder.look(held.step)
        if found is not None and found.unread:
            raise Unreadable(f"{self._folder.describe(held.step)} {found.trouble}")
        manifest = None if found is None else found.manifest
        if manifest is None or _held(manifest) != held:
            what = self._folder.describe(held.step)
            raise CheckpointError(f"{what} was replaced or deleted after it was chosen")
        return manifest


class OneStep(DirectSource):
    """What a source has of one step, as if there were no other."""

    def __init__(self, source: Source, step: int) -> None:
        self._source, self._step = source, step

    def held(self) -> Sequence[Held]:
        return [held for held in self._source.held() if held.step == self._step]

    def left_out(self) -> Sequence[tuple[int, str]]:
        return [one for one in self._source.left_out() if one[0] == self._step]

    def unread(self) -> Sequence[tuple[int, str]]:
        return [one for one in self._source.unread() if one[0] == self._step]

    def read(self, held: Held) -> mmap.mmap | bytearray:
        return self._source.read(held)

    def check(self, held: Held) -> None:
        self._direct.check(held)

    def load(self, held: Held, state: MutableMapping[str, Any], *, strict: bool = True) -> None:
        self._direct.load(held, state, strict=strict)

    @property
    def _direct(self) -> DirectSource:
        if not isinstance(self._source, DirectSource):
            raise CheckpointError(f"{type(self._source).__name__} loads nothing by itself")
        return self._source


def _held(manifest: Manifest) -> Held:
    return Held(
        step=manifest.step,
        kind=SHARDED_DISK if manifest.parts else DISK,
        name=manifest.files[0].name,
        run=manifest.run,
        generation=manifest.generation,
    )
