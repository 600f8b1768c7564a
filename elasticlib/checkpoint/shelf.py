"""Reading states back from a folder of checkpoints, and going past those that are damaged."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from ..clock import monotonic
from ..errors import CheckpointCorrupt, CheckpointError
from . import manifest as manifests
from .folder import CheckpointFolder, Found
from .interface import Unreadable
from .manifest import Manifest
from .pack import unpack
from .pack_head import HEAD_BYTES, size_of
from .prune import Health
from .state import parameters_in, values_of
from .storages import MapLocation

log = logging.getLogger("elasticlib.checkpoint")

LOOK_SECONDS = 0.1


class Shelf:
    """The states in one folder. passed_over: why newer ones were not taken, by step."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self.passed_over: dict[int, str] = {}

    def load(
        self, step: int | None, *, like: object = None, map_location: MapLocation = "cpu"
    ) -> Any:
        """See `CheckpointManager.load`."""
        if step is not None:
            return self._read(self._only(manifests.check_step(step)), like, map_location)
        self.passed_over = {}
        for found in self.folder.found():
            try:
                return self._read(found, like, map_location)
            except Unreadable:
                raise  # it may be whole: an older one in its place would be a loss
            except CheckpointError as error:
                self._pass_over(found.step, str(error))
        raise FileNotFoundError(f"there is no whole checkpoint in {self.folder.place.name}")

    def latest(self) -> int | None:
        """See `CheckpointManager.latest`."""
        self.passed_over = {}
        for found in self.folder.found():
            what = self.folder.describe(found.step)
            if found.unread:
                raise Unreadable(f"{what} {found.trouble}")
            flaw = self.folder.check(found.manifest) if found.manifest else found.flaw
            if not flaw:
                return found.step
            self._pass_over(found.step, f"{what} is damaged: {flaw}")
        return None

    def steps(self) -> list[int]:
        """See `CheckpointManager.steps`."""
        return sorted(found.step for found in self.folder.found() if found.manifest)

    def wait_for(self, step: int, deadline: float) -> None:
        """Until there is a checkpoint of this step, or `deadline` on our clock. CheckpointError."""
        pause = threading.Event()
        while (found := self.folder.look(step)) is None or found.manifest is None:
            if monotonic() > deadline:
                raise CheckpointError(
                    f"there is no {self.folder.describe(step)}, which another rank was to save"
                )
            pause.wait(LOOK_SECONDS)

    def verify(self, step: int | None = None) -> dict[int, str]:
        """See `CheckpointManager.verify`."""
        found = self.folder.found() if step is None else [self._only(step)]
        flaws = {one.step: self.folder.verified(one).flaw for one in found}
        return {step: flaw for step, flaw in sorted(flaws.items()) if flaw}

    def _only(self, step: int) -> Found:
        found = self.folder.look(step)
        if found is None:
            raise FileNotFoundError(f"there is no {self.folder.describe(step)}")
        return found

    def _read(self, found: Found, like: object, map_location: MapLocation) -> Any:
        manifest = found.manifest
        if manifest is None:
            kind = Unreadable if found.unread else CheckpointCorrupt
            raise kind(f"{self.folder.describe(found.step)} {found.trouble}")
        try:
            state = self._state(manifest, like, map_location)
        except CheckpointCorrupt:
            self.folder.know(manifest, Health.BAD)
            raise
        return state

    def _state(self, manifest: Manifest, like: object, map_location: MapLocation) -> Any:
        if manifest.parts:
            # It takes its time to import, and most states are not sharded.
            from .sharded import Parts, load_parts

            parts = Parts(
                manifest.parts,
                partial(self._head, manifest),
                lambda number: memoryview(self.folder.read(manifest, number)),
            )
            values = None if like is None else values_of(like)
            return load_parts(
                parts, values, parameters=parameters_in(like), map_location=map_location
            )
        memory = memoryview(self.folder.read(manifest))
        # The memory is the tensors' own: nobody else has it.
        state = unpack(memory, map_location=map_location, copy=False)
        self.folder.know(manifest, Health.GOOD)
        return state

    def _head(self, manifest: Manifest, number: int) -> bytes:
        _, size = size_of(self.folder.first(manifest, number, HEAD_BYTES))
        return self.folder.first(manifest, number, size)

    def _pass_over(self, step: int, reason: str) -> None:
        self.passed_over[step] = reason
        log.warning("checkpoint passed over: %s", reason)
