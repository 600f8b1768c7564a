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

from ..clock import wall
from ..errors import CheckpointCorruptError, CheckpointError
from ..workers.spec import SNAPSHOTS_ENV
from .pack import LayoutCache, PackImage
from .refs import MAX_BRANCHES_IN_HEADER, Line, StateRef, Writer, begin, num_retained
from .reshard import copy_number, has_own_rest, plan_part_layout
from .safetensors_header import read_header
from .snapshot_slots import (
    AgentWaker,
    MappedSlot,
    SnapshotSlots,
    list_snapshots,
    map_snapshot,
    newest_local_snapshots,
    remove_superseded,
)
from .state_search import RestoreAgreement, StateSource
from .state_tree import FlatState, flatten, is_dtensor
from .tensor_layout import lock_pages
from .writer import WriterThread

log = logging.getLogger("elasticlib.checkpoint")


def snapshot_folder() -> str | None:
    """Return the directory of this attempt in the agent's memory, or None if there is no agent."""
    folder = os.environ.get(SNAPSHOTS_ENV, "")
    generation = os.environ.get("ELASTICLIB_GENERATION", "")
    return folder if folder and generation.isdecimal() and os.path.isdir(folder) else None


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
        attempt: The directory of this attempt (start of the agent's workers) in its memory.
        writer: The writer of the snapshots; `begin` changes it.
        name: Distinguishes several kinds of snapshots in one program, as of two managers.
        rank: The rank of this worker.
        world_size: The number of ranks.
        writes: Whether this worker keeps a state that is the same on all ranks. One worker of each
            node has to keep it. Each worker keeps its part of a sharded state in any case.
        folder: Where the agent writes the newest snapshot when the job drains or fails for good;
            empty for nowhere.
        layouts: The layouts of the last states.
        thread: Writes saves from the slots, and allocates memory in idle time.
    """

    def __init__(
        self,
        attempt: str,
        writer: Writer,
        *,
        name: str = "state",
        rank: int = 0,
        world_size: int = 1,
        writes: bool = True,
        folder: str = "",
        layouts: LayoutCache | None = None,
        thread: WriterThread | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise CheckpointError(f"need 0 <= rank < world_size, got {rank} of {world_size}")
        self._rank, self._world_size = rank, world_size
        self._folder = Path(attempt)
        self._era, self._memory = int(self._folder.name), self._folder.parent
        self._writes = writes
        self._layouts = layouts or LayoutCache()
        self._sequence = 0  # the last number given to a snapshot, even to one that failed
        self._writer = thread or WriterThread()
        self.slots = SnapshotSlots(attempt, jobs=self._writer.jobs)
        self._waker = AgentWaker(attempt)
        self._has_earlier = True  # whether snapshots of earlier attempts may be left to remove
        self._maps = contextlib.ExitStack()
        self._mapped: dict[StateRef, memoryview] = {}
        self._last = StateRef(  # the last snapshot, without its place
            branch=writer.branch,
            step=0,
            name=name,
            writer=writer,
            line=begin(None, writer),
            folder=os.path.abspath(folder) if folder and "://" not in folder else folder,
        )

    def begin(self, writer: Writer, line: Line) -> None:
        """Begin another branch with the next snapshot, after a restore."""
        newest = line[-MAX_BRANCHES_IN_HEADER:]
        self._last = attrs.evolve(self._last, branch=line[-1].id, writer=writer, line=newest)

    @property
    def name(self) -> str:
        """The name of the snapshots."""
        return self._last.name

    @property
    def folder(self) -> str:
        """The directory of this attempt's snapshots."""
        return str(self._folder)

    def snapshot(self, step: int, state: object) -> bool:
        """Keep the state after `step`, or this rank's part of the state if it has DTensors.

        When the call returns, the state may change, and the snapshot does not.

        Args:
            step: The step after which the state was taken.
            state: As `CheckpointManager.save` takes it.

        Returns:
            False if this worker keeps no snapshot of such a state.

        Raises:
            CheckpointError: The state cannot be saved, there is not enough memory, or another call
                is still copying. The earlier snapshots stay.
        """
        return self.keep_state(step, flatten(state, reject_state_dicts=True)) is not None

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
            copy = copy_number(filter(is_sharded, shards.values()))
        else:
            image, part, parts = layouts.plan(flat, {"step": step}), None, 0
            copy = min(self._rank, 1)  # At the end of a job, the node of rank 0 writes first.
        values = "" if has_own_rest(flat) else image.values_digest
        return image, self.keep(step, image, part=part, parts=parts, values=values, copy=copy)

    def keep(
        self,
        step: int,
        image: PackImage,
        *,
        part: int | None = None,
        parts: int = 0,
        values: str = "",
        copy: int = 0,
    ) -> MappedSlot:
        """Write a snapshot of a state, and return its slot.

        Then wake the agent, and allocate the next slot in the background if there is none.

        Args:
            step: see `StateRef`.
            image: the planned pack of the state, see `plan_part_layout`.
            part: see `StateRef`.
            parts: see `StateRef`.
            values: see `StateRef`.
            copy: see `StateRef`.

        Raises:
            CheckpointError: there is not enough memory, or the header is too long.
        """
        self._sequence = (self._sequence or self._last_sequence(part)) + 1
        last = self._last  # `attrs.evolve` would take as long as the rest of this method
        snapshot = StateRef(
            branch=last.branch,
            step=step,
            name=last.name,
            parts=parts,
            part=part,
            copy=copy,
            writer=last.writer,
            line=last.line,
            number=self._sequence,
            size=image.size,
            saved_at=wall(),
            values=values,
            folder=last.folder,
        )
        slot = self.slots.copy(image, snapshot)
        self._last = snapshot
        # Snapshots that are not needed any more are freed before memory is allocated.
        is_due = self._has_earlier and snapshot.number >= num_retained(parts)
        if not self._waker.wake() and is_due:
            self._has_earlier = not remove_superseded(self._memory, self._list(), self._era)
        self.prepare_next()
        return slot

    def prepare_next(self) -> None:
        """Allocate memory in the background if the next snapshot would need a new slot."""
        if self._last.number:
            self._prepare(self._last.size, self._last.parts)

    def _prepare(self, size: int, parts: int) -> None:
        steps = self.slots.prepare(size, num_retained(parts), lock_pages)
        if steps is not None:
            self._writer.prepare(steps)

    def list_states(self) -> Sequence[StateRef]:
        """Return the snapshots of this run and name, which may be replicas, newest first."""
        refs = [ref for ref in self._list() if ref.writer.run == self._last.writer.run]
        return sorted(refs, key=lambda ref: (ref.writer.order, ref.step, ref.number), reverse=True)

    def view(self, ref: StateRef, part: int = 0) -> memoryview:  # noqa: ARG002 - it has one part
        """Return the memory of a snapshot, which does not change until `release`."""
        if ref not in self._mapped:
            view = self._maps.enter_context(map_snapshot(self._memory, ref))
            if view is None:
                what = f"the snapshot {ref.place} of step {ref.step}"
                raise CheckpointError(f"{what} is not there any more")
            self._mapped[ref] = view
        return self._mapped[ref]

    def check(self, ref: StateRef, part: int = 0) -> None:
        if read_header(self.view(ref, part)).size != ref.size:
            raise CheckpointCorruptError(f"the snapshot {ref.place} is no pack of its size")

    def release(self) -> None:
        self._mapped.clear()
        self._maps.close()

    def _preallocate(self, found: RestoreAgreement) -> None:
        """Allocate memory in the background for the first snapshot after a restore.

        It is as large as what was restored. If that size is not known here, as of a sharded state
        on a disk, the first snapshot allocates its memory itself.
        """
        parts, size = 0, found.pack_bytes
        for ref in self.list_states():
            is_own = ref.part is None or (ref.part, ref.parts) == (self._rank, self._world_size)
            if ref.step == found.step and is_own:
                parts, size = ref.parts, ref.size
        # Without DTensors only some ranks keep a snapshot.
        if size and (self._writes or parts > 1):
            self._prepare(size, parts)

    def adopt_restored_state(self, found: RestoreAgreement, state: object) -> None:
        """Prepare for snapshots after all ranks have restored the newest usable state completely.

        If the state came from another node's memory, this node keeps a snapshot of it, too, because
        the other node may be lost next. If a sharded state came from memory and any rank received
        a part of it, each rank keeps its new part.
        """
        base = found.base
        is_here = base is not None and base.state in {ref.state for ref in self.list_states()}
        if found.is_from_memory and (found.was_resharded or not is_here):
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

    def _list(self) -> list[StateRef]:
        """Return the complete snapshots of this name in the agent's memory, from all attempts."""
        return [ref for ref in list_snapshots(self._memory) if ref.name == self._last.name]

    def _last_sequence(self, part: int | None) -> int:
        """Return the number of the last snapshot of this name and part in this attempt, or 0."""
        own = [ref for ref in newest_local_snapshots(self._folder) if ref.name == self._last.name]
        return max((ref.number for ref in own if ref.part == part), default=0)
