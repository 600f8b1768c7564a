"""Snapshots of a worker's state, in memory that its agent owns and that outlives the worker.

A snapshot costs the training one copy of the state into memory that is allocated already. The
newest complete snapshot is found whenever the worker is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import CheckpointCorruptError, CheckpointError
from ..workers.spec import SNAPSHOTS_ENV
from .pack import LayoutCache, PackImage
from .reshard import has_own_rest, plan_part_layout
from .restore import MEMORY, RestoreAgreement, StateSource, StoredState
from .safetensors_header import read_header
from .snapshot_slots import (
    AgentWaker,
    MappedSlot,
    SnapshotHeader,
    SnapshotRef,
    SnapshotSlots,
    abandoned_snapshots,
    list_snapshots,
    map_snapshot,
    newest_local_snapshots,
    remove_snapshots,
    remove_superseded,
    valid_snapshots,
)
from .state_tree import FlatState, flatten, is_dtensor
from .tensor_layout import lock_pages
from .writer import Writer

log = logging.getLogger("elasticlib.checkpoint")


@attrs.frozen
class SnapshotLocation:
    """The memory in which an agent's worker leaves snapshots."""

    folder: str  # directory of this attempt (start of the agent's workers) in the agent's memory
    run: str
    generation: int
    incarnation: str = ""


def snapshot_location() -> SnapshotLocation | None:
    """Return the location from the environment, or None if no agent keeps snapshots."""
    folder = os.environ.get(SNAPSHOTS_ENV, "")
    generation = os.environ.get("ELASTICLIB_GENERATION", "")
    if not folder or not generation.isdecimal() or not os.path.isdir(folder):
        return None
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    incarnation = os.environ.get("ELASTICLIB_INCARNATION", "")
    return SnapshotLocation(folder, run, int(generation), incarnation)


@attrs.frozen
class SnapshotCost:
    """Cost of a snapshot."""

    step: int
    seconds: float  # how long the caller waited


def is_sharded(value: Any) -> bool:
    """Return True if `value` is a DTensor of which ranks have different elements."""
    placements = value.placements if is_dtensor(value) else ()
    return not all(placement.is_replicate() for placement in placements)


class SnapshotSource(StateSource):
    """The snapshots that one worker writes to its agent's memory, and those that it finds there.

    All ranks snapshot the same steps, with a collective (such as that of the gradients) in between.
    Then there is a step of a sharded state that all ranks have, whenever they are killed.

    Not thread-safe: `CheckpointManager` makes one call at a time. An exception of a signal handler
    may interrupt `snapshot` at any line: the snapshot is then complete or absent, the ones before
    it stay, and the next call works.

    Args:
        location: The memory.
        name: Distinguishes several kinds of snapshots in one program, as of two managers.
        rank: The rank of this worker.
        world_size: The number of ranks.
        writes: Whether this worker keeps a state that is the same on all ranks. One worker of each
            node has to keep it. Each worker keeps its part of a sharded state in any case.
        folder: Where the agent writes the newest snapshot when the job drains or fails for good;
            empty for nowhere.
        layouts: The layouts of the last states.
        writer: Writes saves from the slots, and allocates memory in idle time.
    """

    def __init__(
        self,
        location: SnapshotLocation,
        *,
        name: str = "state",
        rank: int = 0,
        world_size: int = 1,
        writes: bool = True,
        folder: str = "",
        layouts: LayoutCache | None = None,
        writer: Writer | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise CheckpointError(f"need 0 <= rank < world_size, got {rank} of {world_size}")
        self._rank, self._world_size = rank, world_size
        self._folder = Path(location.folder)
        self._era, self._memory = int(self._folder.name), self._folder.parent
        self._writes = writes
        self._layouts = layouts or LayoutCache()
        self._sequence = 0  # the last number given to a snapshot, even to one that failed
        self._writer = writer or Writer()
        self.slots = SnapshotSlots(location.folder, jobs=self._writer.jobs)
        self._waker = AgentWaker(location.folder)
        self._has_earlier = True  # whether snapshots of earlier attempts may be left to remove
        self._maps = contextlib.ExitStack()
        self._mapped: dict[str, tuple[SnapshotRef, memoryview]] = {}
        self._header = SnapshotHeader(
            name=name,
            step=0,
            sequence=0,
            size=0,
            run=location.run,
            generation=location.generation,
            folder=os.path.abspath(folder) if folder and "://" not in folder else folder,
            incarnation=location.incarnation,
        )

    @property
    def folder(self) -> str:
        """The directory of this attempt's snapshots."""
        return str(self._folder)

    def snapshot(self, step: int, state: object) -> SnapshotCost | None:
        """Keep the state after `step`, or this rank's part of the state if it has DTensors.

        When the call returns, the state may change, and the snapshot does not.

        Args:
            step: The step after which the state was taken.
            state: As `CheckpointManager.save` takes it.

        Returns:
            The cost, or None if this worker keeps no snapshot of such a state.

        Raises:
            CheckpointError: The state cannot be saved, there is not enough memory, or another call
                is still copying. The earlier snapshots stay.
        """
        started_at = monotonic()
        kept = self.keep_state(step, flatten(state, reject_state_dicts=True))
        return None if kept is None else SnapshotCost(step, monotonic() - started_at)

    def keep_state(self, step: int, flat: FlatState) -> tuple[PackImage, MappedSlot] | None:
        """Keep a state that was flattened, see `snapshot`.

        Returns:
            The pack and the slot, or None if this worker keeps no snapshot of such a state.
        """
        shards, layouts = flat.shards, self._layouts
        is_own = flat.own is not None or any(map(is_sharded, shards.values()))
        if not (self._writes or is_own):
            return None
        if flat.has_parts:
            # Without DTensors, one rank of each node keeps what is the same on all ranks.
            has_rest = self._writes or bool(shards)
            image = plan_part_layout(layouts, step, flat, has_rest=has_rest, has_copies=True)
            part, parts = self._rank, self._world_size
        else:
            image, part, parts = layouts.plan(flat, {"step": step}), 0, 1
        values = "" if has_own_rest(flat) else image.values_digest
        slot = self.keep(step, image, part=part, parts=parts, sharded=flat.has_parts, values=values)
        return image, slot

    def keep(
        self,
        step: int,
        image: PackImage,
        *,
        part: int = 0,
        parts: int = 1,
        sharded: bool = False,
        values: str = "",
    ) -> MappedSlot:
        """Write a snapshot of a state, and return its slot.

        Then wake the agent, and allocate the next slot in the background if there is none.

        Args:
            step: see `SnapshotHeader`.
            image: the planned pack of the state, see `plan_part_layout`.
            part: see `SnapshotHeader`.
            parts: see `SnapshotHeader`.
            sharded: see `SnapshotHeader`.
            values: see `SnapshotHeader`.

        Raises:
            CheckpointError: there is not enough memory, or the header is too long.
        """
        self._sequence = (self._sequence or self._last_sequence(part)) + 1
        last = self._header  # `attrs.evolve` would take as long as the rest of this method
        header = SnapshotHeader(
            name=last.name,
            step=step,
            sequence=self._sequence,
            size=image.size,
            run=last.run,
            generation=last.generation,
            part=part,
            parts=parts,
            folder=last.folder,
            incarnation=last.incarnation,
            sharded=sharded,
            values=values,
        )
        slot = self.slots.copy(image, header)
        self._header = header
        # Snapshots that are not needed any more are freed before memory is allocated.
        is_due = self._has_earlier and header.sequence >= header.num_retained
        if not self._waker.wake() and is_due:
            self._has_earlier = not remove_superseded(self._memory, self._list(), self._era)
        self.prepare_next()
        return slot

    def prepare_next(self) -> None:
        """Allocate memory in the background if the next snapshot would need a new slot."""
        header = self._header
        if header.sequence and not self.slots.has_free_slot(header.size, header.num_retained):
            self._prepare(header.size, header.num_retained)

    def _prepare(self, size: int, num_retained: int) -> None:
        self._writer.prepare(self.slots.prepare(size, num_retained, lock_pages))

    def list_states(self) -> Sequence[StoredState]:
        """Return the valid snapshots of this run and name, which may be replicas."""
        return [_stored_state(ref) for ref in self._valid()]

    def view(self, stored: StoredState, part: int = 0) -> memoryview:  # noqa: ARG002 - it has one part
        """Return the memory of a snapshot, which does not change until `release`."""
        if stored.name not in self._mapped:
            for ref in (ref for ref in self._valid() if _stored_state(ref) == stored):
                view = self._maps.enter_context(map_snapshot(self._memory, ref))
                if view is not None:
                    self._mapped[stored.name] = ref, view
                    break
            else:
                what = f"the snapshot {stored.name} of step {stored.step}"
                raise CheckpointError(f"{what} is not there any more")
        return self._mapped[stored.name][1]

    def check(self, stored: StoredState, part: int = 0) -> None:
        view = self.view(stored, part)
        ref, _ = self._mapped[stored.name]
        if read_header(view).size != ref.header.size:
            raise CheckpointCorruptError(f"the snapshot {stored.name} is no pack of its size")

    def release(self) -> None:
        self._mapped.clear()
        self._maps.close()

    def resume_from(self, step: int) -> None:
        """Free the snapshots of earlier attempts that are not needed if the job resumes at `step`.

        Every rank calls this when the ranks have agreed on the step, and before the first snapshot.
        Otherwise a later restart could find parts of one step that two different runs have written.
        """
        remove_snapshots(self._memory, abandoned_snapshots(self._list(), self._era, step))

    def _preallocate(self, found: RestoreAgreement) -> None:
        """Allocate memory in the background for the first snapshot after a restore.

        It is as large as what was restored. If that size is not known here, as of a sharded state
        on a disk, the first snapshot allocates its memory itself.
        """
        parts, size = 1, found.pack_bytes
        for header in (ref.header for ref in self._valid()):
            is_own = (header.part, header.parts) in ((0, 1), (self._rank, self._world_size))
            if header.step == found.step and is_own:
                parts, size = header.parts, header.size
        # Without DTensors only some ranks keep a snapshot.
        if size and (self._writes or parts > 1):
            self._prepare(size, attrs.evolve(self._header, parts=parts).num_retained)

    def adopt_restored_step(self, found: RestoreAgreement, state: object) -> None:
        """Prepare for snapshots after all ranks have restored the newest usable state completely.

        Snapshots of later steps from earlier attempts are freed. If the state came from another
        node's memory, this node keeps a snapshot of it, too, because the other node may be lost
        next. If a sharded state came from memory and any rank received a part of it, each rank
        keeps its new part.
        """
        self.resume_from(found.step)
        is_missing = found.was_resharded or found.step not in [
            stored.step for stored in self.list_states()
        ]
        if found.kind == MEMORY and is_missing:
            try:
                self.snapshot(found.step, state)
            except CheckpointError as error:
                # All ranks have restored the state. This one continues without a snapshot of it.
                log.warning(
                    "this node keeps no snapshot of the restored step %d: %s", found.step, error
                )
        else:
            self._preallocate(found)

    def close(self) -> None:
        """Unmap the memory. Its snapshots stay."""
        self.release()
        self.slots.close()
        self._waker.close()

    def free(self) -> None:
        """Do what `close` does when nothing refers to the snapshots any more, without waiting."""
        self.slots.free()
        self._waker.close()

    def _list(self) -> list[SnapshotRef]:
        """Return the complete snapshots of this name in the agent's memory, from all attempts."""
        refs = list_snapshots(self._memory)
        return [ref for ref in refs if ref.header.name == self._header.name]

    def _valid(self) -> Sequence[SnapshotRef]:
        return valid_snapshots(ref for ref in self._list() if ref.header.run == self._header.run)

    def _last_sequence(self, part: int) -> int:
        """Return the number of the last snapshot of this name and part in this attempt, or 0."""
        headers = (ref.header for ref in newest_local_snapshots(self._folder))
        name = self._header.name
        return max((h.sequence for h in headers if (h.name, h.part) == (name, part)), default=0)


def _stored_state(ref: SnapshotRef) -> StoredState:
    header = ref.header
    parts = header.parts if header.sharded else 0
    name = f"{ref.file}:{header.sequence}"
    part = header.part if parts else 0
    return StoredState(
        header.step, MEMORY, name, part, parts, header.run, header.generation, header.values
    )
