"""A worker's snapshots, in memory that its agent owns and that outlives it.

A snapshot costs one copy of the state, into memory that is there already and stays; the newest
whole one is found at whatever moment the worker is killed.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import attrs
import torch

from ..clock import monotonic
from ..errors import CheckpointCorrupt, CheckpointError
from ..threads import CallRejected, ExclusiveCall, Latch, helper
from ..workers.spec import SNAPSHOTS
from . import memory
from .memory import (
    CHUNK,
    SUMS,
    Found,
    Record,
    Slots,
    given_up,
    newest_in,
    tell,
    that_count,
    word_sum,
)
from .pack import Layout, fill, lay_out
from .pack_head import HEAD_BYTES, size_of
from .peers import MEMORY, Agreed, Held, Source
from .sharded import lay_out_part
from .state import is_sharded_kind, take_shards, values_of

log = logging.getLogger("elasticlib.checkpoint")

Result = TypeVar("Result")


@attrs.frozen
class AgentMemory:
    """Where an agent has its worker leave snapshots.

    folder: in the agent's memory, for this start of its workers. run, generation, launch: the
    worker's own; see `commit.Writer`.
    """

    folder: str
    run: str
    generation: int
    launch: str = ""


def agent_memory() -> AgentMemory | None:
    """This worker's; None in a process that no agent with a memory has started."""
    folder = os.environ.get(SNAPSHOTS, "")
    generation = os.environ.get("ELASTICLIB_GENERATION", "")
    if not folder or not generation.isdecimal() or not os.path.isdir(folder):
        return None
    run, launch = (os.environ.get(n, "") for n in ("TORCHELASTIC_RUN_ID", "ELASTICLIB_INCARNATION"))
    return AgentMemory(folder, run, int(generation), launch)


@attrs.frozen
class Snapshot:
    """Cost of a snapshot."""

    step: int
    seconds: float  # how long the caller waited


def is_cut(value: Any) -> bool:
    """Whether ranks have different elements of a tensor."""
    placements = value.placements if is_sharded_kind(value) else ()
    return not all(placement.is_replicate() for placement in placements)


class SnapshotMemory(Source):
    """What one worker keeps in its agent's memory, and finds there.

    where: that memory. name: tells apart several kinds of snapshots in one program, as of two
    managers. rank, world_size: of this worker. writes: whether it keeps a state that is the same on
    all ranks, which only one worker of each node has to; of a sharded one each keeps its part.
    folder: where the agent writes the newest snapshot when the job drains or fails for good; empty
    for nowhere.

    All ranks snapshot the same steps, with a collective (such as that of the gradients) in
    between; then of a state in parts there is a step that all ranks hold, whenever they are killed.

    One call at a time may take or give back memory: another one, of a signal handler that
    interrupted it or of another thread, raises CheckpointError. An exception of a signal handler
    may interrupt `snapshot` at any line: the snapshot is then there completely or not at all, the
    ones before it stay, and the next call works.
    """

    def __init__(
        self,
        where: AgentMemory,
        *,
        name: str = "state",
        rank: int = 0,
        world_size: int = 1,
        writes: bool = True,
        folder: str = "",
    ) -> None:
        if not 0 <= rank < world_size:
            raise CheckpointError(f"need 0 <= rank < world_size, got {rank} of {world_size}")
        self._rank, self._world_size = rank, world_size
        self._folder = Path(where.folder)
        self._era, self._memory = int(self._folder.name), self._folder.parent
        self._writes = writes
        self._exclusive = ExclusiveCall()
        self._sequence = 0  # the last number given to a snapshot, even to one that failed
        self._slots = Slots(where.folder)
        self._sealing = Sealing(self._slots)
        self._earlier = True
        self._pins = contextlib.ExitStack()
        self._pinned: dict[str, tuple[Found, memoryview]] = {}
        self._record = Record(
            name=name,
            step=0,
            sequence=0,
            size=0,
            run=where.run,
            generation=where.generation,
            folder=os.path.abspath(folder) if folder and "://" not in folder else folder,
            launch=where.launch,
        )

    @property
    def folder(self) -> str:
        """Where this start of the agent's workers leaves its snapshots."""
        return str(self._folder)

    def snapshot(self, step: int, state: object) -> Snapshot | None:
        """Keep `state`, as `CheckpointManager.save` takes it, as it is after `step`; of one with
        DTensors this rank's part. None where this worker makes none.

        When it returns, the state may change: the snapshot does not. Raises CheckpointError: the
        state cannot be saved, there is no memory for it, or another call is still copying. The
        earlier snapshots stay.
        """
        call = f"step {step} is not kept"
        return self._run_exclusively(call, partial(self._snapshot, step, state))

    def _run_exclusively(self, call: str, act: Callable[[], Result]) -> Result:
        try:
            return self._exclusive.run(act)
        except CallRejected:
            raise CheckpointError(
                f"{call}: another call is still copying a state to this memory. In a signal"
                " handler, set a flag, and call snapshot() when the step has ended; let several"
                " threads call it under a lock"
            ) from None

    def _snapshot(self, step: int, state: object) -> Snapshot | None:
        began = monotonic()
        plain, shards = take_shards(values_of(state))
        if not self._writes and not any(map(is_cut, shards.values())):
            return None
        if shards:
            layout = lay_out_part(step, plain, shards, whole=True, copies=True)
            part, parts = self._rank, self._world_size
        else:
            layout, part, parts = lay_out(plain, {"step": step}), 0, 1
        self.keep(step, layout, part=part, parts=parts, sharded=bool(shards))
        return Snapshot(step, monotonic() - began)

    def keep(
        self, step: int, layout: Layout, *, part: int = 0, parts: int = 1, sharded: bool = False
    ) -> None:
        """Keep what was laid out: see `Record`."""
        self._sequence = (self._sequence or self._made_before(part)) + 1
        record = attrs.evolve(
            self._record,
            step=step,
            sequence=self._sequence,
            size=layout.size,
            part=part,
            parts=parts,
            sharded=sharded,
        )
        try:
            self._sealing.pause()
            with self._slots.writing(record) as view:
                fill(layout, torch.frombuffer(view, dtype=torch.uint8))
            self._record = record
            # What is of no more use goes before memory for the next one is made.
            if not tell(self._folder) and self._earlier and record.sequence >= record.keep:
                self._earlier = not memory.clear_up(self._memory, self._look(), self._era)
        finally:
            self._sealing.resume()
        self._sealing.begin(record)

    def held(self) -> Sequence[Held]:
        """What is in the memory of this worker's agent: its workers' snapshots, and replicas."""
        return [_held(one) for one in self._found()]

    def view(self, held: Held, part: int = 0) -> memoryview:  # noqa: ARG002 - it is one part's
        """The memory itself, pinned until `release`."""
        if held.name not in self._pinned:
            for found in (one for one in self._found() if _held(one) == held):
                view = self._pins.enter_context(memory.pinned(self._memory, found))
                if view is not None:
                    self._pinned[held.name] = found, view
                    break
            else:
                what = f"the snapshot {held.name} of step {held.step}"
                raise CheckpointError(f"{what} is not there any more")
        return self._pinned[held.name][1]

    def check(self, held: Held, part: int = 0) -> None:
        view = self.view(held, part)
        found, _ = self._pinned[held.name]
        flaw = memory.flaw(self._memory, found, view, serial=False)
        if flaw:
            raise CheckpointCorrupt(flaw)
        if size_of(view[:HEAD_BYTES])[0] != found.record.size:
            raise CheckpointCorrupt(f"the snapshot {held.name} is no pack of its size")

    def release(self) -> None:
        self._pinned.clear()
        self._pins.close()

    def go_on_from(self, step: int) -> None:
        """The job goes on from `step`: what workers before these have made after it is given up,
        and all but the last of what they have made before.

        To be called by every rank once it is agreed where to go on and before the first snapshot;
        a later restart else might find parts of one step that were made by two different runs.
        """
        memory.remove(self._memory, given_up(self._look(), self._era, step))

    def _prepare(self, found: Agreed) -> None:
        """Allocate memory in the background for the first snapshot after a restore.

        It is as large as what was restored. If that size is not known here, as of a sharded state
        on a disk, the first snapshot allocates its memory itself.
        """
        part, parts, size = 0, 1, found.size
        for record in (one.record for one in self._found()):
            own = (record.part, record.parts) in ((0, 1), (self._rank, self._world_size))
            if record.step == found.step and own:
                part, parts, size = record.part, record.parts, record.size
        # Without DTensors only some ranks keep a snapshot.
        if size and (self._writes or parts > 1):
            first = attrs.evolve(self._record, size=size, part=part, parts=parts)
            self._sealing.begin(first, seal=False)

    def give_back_unused(self) -> None:
        """Free what a restore prepared for the first snapshot, because the job makes none."""
        if not self._record.sequence:
            self._sealing.forget()
            # A call that is running makes the first snapshot, which needs the memory.
            with contextlib.suppress(CallRejected):
                self._exclusive.run(self._slots.give_back_unused)

    def take_up(self, found: Agreed, state: object) -> None:
        """All ranks have agreed on a step, and have the state: later snapshots count no more.

        What came from another node's memory is kept in this one's as well, as that node may be the
        next to go. Of a sharded state each rank keeps its new part if any rank was sent some of
        it. What is on a disk lasts by itself.
        """
        self.go_on_from(found.step)
        lacks = found.moved or found.step not in [held.step for held in self.held()]
        if found.kind == MEMORY and lacks:
            try:
                self.snapshot(found.step, state)
            except CheckpointError as error:
                # All ranks have what they go on from: one that has no room beside it goes on too.
                log.warning("step %d is not kept on this node: %s", found.step, error)
        else:
            self._prepare(found)

    def close(self) -> None:
        """Let go of the memory; what it holds stays. Raises CheckpointError: a call is running."""
        self._run_exclusively("the memory of the snapshots is not closed", self._close)

    def _close(self) -> None:
        self.release()
        self._sealing.close()
        self._slots.close()

    def _look(self) -> list[Found]:
        """Those of this name."""
        return [one for one in memory.look(self._memory) if one.record.name == self._record.name]

    def _found(self) -> Sequence[Found]:
        return that_count(one for one in self._look() if one.record.run == self._record.run)

    def _made_before(self, part: int) -> int:
        """By this worker with another object of the same name."""
        made = (one.record for one in newest_in(self._folder))
        name = self._record.name
        return max((r.sequence for r in made if (r.name, r.part) == (name, part)), default=0)


def _held(found: Found) -> Held:
    record = found.record
    parts = record.parts if record.sharded else 0
    name = f"{found.file}:{record.sequence}"
    line = (record.part if parts else 0, parts, record.run, record.generation)
    return Held(record.step, MEMORY, name, *line)


class Sealing:
    """What is done with a worker's slots behind the training: memory is made for the next snapshot
    before that is due, and the last one is summed.

    It is one thread, which stands still during a copy. No step waits for it: the record that makes
    a snapshot count is written before.

    The other methods may be interrupted at any line by an exception of a signal handler. So they
    take no lock, which could then stay locked, and only change one field after another; the thread
    looks at all of them after each change.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._next: deque[tuple[Record, bool]] = deque(maxlen=1)  # a later one replaces it
        self._is_copying = self._is_over = False
        self._changes: SimpleQueue[None] = SimpleQueue()  # wakes the thread
        self._working = ExclusiveCall()
        self._has_ended = Latch()

    def pause(self) -> None:
        """Do nothing until `resume`."""
        self._is_copying = True

    def resume(self) -> None:
        """Go on."""
        self._is_copying = False
        self._changes.put(None)

    def begin(self, record: Record, *, seal: bool = True) -> None:
        """When there is time, make memory for another snapshot like this one, and then sum it; of
        two that wait, the later one."""
        self._next.append((record, seal))
        self._changes.put(None)
        if not (self._working.is_running or self._has_ended.is_set):
            # The thread is started by a thread, because signal handlers run in the main thread. An
            # exception of one of them in `Thread.start` can leave a lock of `threading` locked.
            _thread.start_new_thread(helper(self._run, "elasticlib-seal").start, ())

    def forget(self) -> None:
        """Do nothing of what has not been begun."""
        self._next.clear()

    def close(self) -> None:
        """Do no more."""
        self._is_over = True
        self._changes.put(None)
        if self._working.is_running:
            self._has_ended.wait()

    def _run(self) -> None:
        with contextlib.suppress(CallRejected):  # Another thread was started before.
            self._working.run(self._work)

    def _work(self) -> None:
        try:
            while not self._is_over:
                if not self._next:
                    self._changes.get()
                    continue
                with contextlib.suppress(IndexError):  # `forget` may take it.
                    self._do(*self._next.popleft())
        finally:
            self._has_ended.set()

    def _do(self, record: Record, seal: bool) -> None:
        self._slots.prepare(record, self._may_go_on)
        if seal and (summed := self._sum(record)) is not None:
            self._slots.seal(record, summed)

    def _may_go_on(self) -> bool:
        while self._is_copying and not self._is_over:
            self._changes.get()
        return not self._is_over

    def _sum(self, record: Record) -> int | None:
        summed = 0
        for at in range(0, record.size, CHUNK):
            # Looked for anew each time: the slot may have been given to a later snapshot.
            view = self._slots.view_of(record) if self._may_go_on() else None
            if view is None:
                return None
            with view, view[at : at + CHUNK] as chunk:
                summed += word_sum(chunk)
        return summed % SUMS
