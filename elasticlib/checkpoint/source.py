"""The checkpoints in a folder as something that restore chooses among."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from ..errors import CheckpointCorrupt, CheckpointError
from .folder import CheckpointFolder, Found
from .interface import Held, Source
from .prune import Health
from .shelf import Shelf

DISK, SHARDED_DISK = "disk", "sharded disk"


class DiskSource(Source):
    """What one rank can reach in a folder.

    A state that is the same on all ranks is of the kind `disk`, and `read` gives its pack. One
    that is sharded is of the kind `sharded disk`: it has no one pack; each rank that reaches the
    folder gets its share of it from `values`.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._shelf = Shelf(folder)

    def held(self) -> Sequence[Held]:
        """By manifests and sizes, without those that were found to be damaged."""
        return [
            Held(
                step=found.step,
                kind=SHARDED_DISK if found.manifest.parts else DISK,
                name=self._folder.describe(found.step),
            )
            for found in self._folder.found()
            if found.manifest and self._folder.health(found.manifest) is not Health.BAD
        ]

    def read(self, held: Held) -> mmap.mmap:
        manifest = self._look(held).manifest
        assert manifest is not None
        if manifest.parts:
            raise CheckpointError(f"{held.name} is in {manifest.parts} parts: it has no one pack")
        try:
            pack = self._folder.read(manifest)
        except CheckpointCorrupt:
            self._folder.know(manifest, Health.BAD)
            raise
        self._folder.know(manifest, Health.GOOD)
        return pack

    def check(self, held: Held) -> None:
        """Read every byte of it, whichever kind it is of.

        Raises:
            CheckpointCorrupt: it is damaged. CheckpointError: it is not there any more.
        """
        found = self._look(held)
        assert found.manifest is not None
        flaw = self._folder.check(found.manifest)
        if flaw:
            raise CheckpointCorrupt(f"{held.name} is damaged: {flaw}")

    def values(self, held: Held, like: object) -> Any:
        """The state, with sharded tensors as those of `like` are; see `CheckpointManager.load`."""
        return self._shelf.load(held.step, like=like)

    def _look(self, held: Held) -> Found:
        found = self._folder.look(held.step)
        if found is None:
            raise CheckpointError(f"{held.name} is not there any more")
        if found.manifest is None:
            raise CheckpointCorrupt(f"{held.name} is damaged: {found.flaw}")
        return found
