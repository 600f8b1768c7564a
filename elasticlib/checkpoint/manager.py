"""Checkpoints of a training job: saved behind the training step, whole or not at all.

`save` costs the step one copy into memory that is reused; writing, summing and syncing go on in a
thread. What was saved last and is whole is what `load` gives back.
"""

from __future__ import annotations

import atexit
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from ..clock import monotonic
from ..errors import CheckpointError, ConfigError
from . import here as heres
from . import manifest as manifests
from .behind import Behind
from .commit import Committer, TakesNoWrites
from .disk import LocalPlace
from .disk_source import DiskSource
from .folder import CheckpointFolder, open_place
from .here import Here
from .host import HostBuffer
from .interface import Source
from .job_memory import JobMemory
from .outcomes import Outcomes, Restored
from .pack import lay_out
from .part_saver import PartSaver
from .place import Place
from .prune import Retention, Selection
from .put import check_names
from .remote import RemotePlace
from .restore import restore_from
from .state import take_shards, values_of
from .storages import MapLocation

log = logging.getLogger("elasticlib.checkpoint")

WAIT_SECONDS = 1800.0
"""For which a rank waits to hear of a save that another one makes: as long as torch's groups."""


class CheckpointManager:
    """The checkpoints in one folder, as one rank of a job saves and loads them.

    All ranks make the same calls. A state is the same on all ranks, and then one rank writes it;
    or it holds sharded tensors (DTensors, as FSDP2 has them), and then each rank writes its part.

    Args:
        folder: a path, any fsspec URL, or a place of your own.
        keep_last: so many of the newest checkpoints stay when one is saved.
        keep_every: and each whose step this divides; 0 for none.
        shared: whether all nodes see the same folder: the first rank writes. If each node has one
            of its own, the first rank of each node does.
        group: the ranks that share the state; all of the default process group by default. It
            needs one folder for all, and each of its ranks keeps snapshots.
        here: this process's place in the job; by the process group and what the launcher says
            by default.

    Attributes:
        stall: seconds that the last `save` or `snapshot` took of the training step.
        durable: seconds from the last finished save's call until it was on the disk; None before.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Place,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        shared: bool = True,
        group: dist.ProcessGroup | None = None,
        here: Here | None = None,
    ) -> None:
        self.stall = 0.0
        self.durable: float | None = None
        self._folder = folder
        self._spoken = folder.name if isinstance(folder, Place) else os.fspath(folder)
        self._retention = Retention(keep_last, keep_every)
        if group is not None and not shared:
            raise ConfigError(
                "shared=False has the first rank of each node write, which of a group is not "
                "known: give a folder that all its ranks see, or leave group out"
            )
        self._shared = shared
        self._group = group
        self._here = here
        self._opened: CheckpointFolder | None = None
        self._kept: JobMemory | None = None
        self._committer: Committer | None = None
        self._parts: PartSaver | None = None
        self._outcomes: Outcomes | None = None
        self._host = HostBuffer()
        self._behind = Behind()
        self._forget: Callable[[], None] | None = None
        self._closed = False

    # -- saving -------------------------------------------------------------------------------

    def save(self, step: int, state: object) -> None:
        """Save the state after `step`; returns once it is copied, and may be changed again.

        Waits for the save before it, if that is still under way. What was saved of the same step
        before is replaced once the new one is whole.

        Args:
            state: nested containers (dicts, default dicts, lists, tuples, named tuples, deques,
                sets) of tensors, NumPy arrays and numbers, plain values, enums, random states, and
                objects with `state_dict` and `load_state_dict`: modules, optimizers, samplers.
                docs/checkpoints.md has them all.

        Raises:
            CheckpointError: the save before this one failed, and this one was not begun; or the
                state cannot be saved. CheckpointRefused: somebody newer has the folder.
        """
        began = monotonic()
        manifests.check_step(step)
        self._must_be_open()
        self._behind.wait()
        values = values_of(state)
        if take_shards(values)[1]:
            self._start(self._all_ranks().prepare(step, values, self._host), step, began)
        elif self.writes:
            data = self._host.take(lay_out(values, {"step": step}))
            self._start(partial(self._save_for_all, step, data, self._told().began()), step, began)
        else:
            self._told().expect(step)
        self.stall = monotonic() - began

    def snapshot(self, step: int, state: object) -> bool:
        """Keep the state after `step` in memory of this node's agent, which outlives this process.

        One copy, and nothing else; it may be made every step. The next worker goes on from it
        without reading a disk, and the agent writes the newest one to the folder when the job
        drains or fails for good. The last one or two are kept.

        Args:
            state: as of `save`. Of one that is the same on all ranks the first rank of each node
                keeps all, of a sharded one every rank its part, which serves any number of ranks.

        Returns:
            Whether this rank has kept one. No rank does where no agent of ours started it.

        Raises:
            CheckpointError: the state cannot be kept, or there is no memory for it; the earlier
                ones stay.
        """
        manifests.check_step(step)
        self._must_be_open()
        made = self._memory().snapshot(step, state)
        if made is not None:
            self.stall = made.seconds
            heres.worker_context().kept(step)
        return made is not None

    @property
    def writes(self) -> bool:
        """Whether this rank writes states that are the same on all ranks."""
        place = self._place_in_job()
        return not (place.rank if self._shared else place.local_rank)

    def claim(self) -> None:
        """Take the folder for this generation, if this rank writes: older ones cannot commit
        from now on. `save` does so, too, if nobody did before.

        Raises:
            CheckpointRefused: somebody newer has it. CheckpointError: the disk failed.
        """
        self._must_be_open()
        if self.writes:
            self._behind.settle()
            self._commits().claim()

    def wait(self, timeout: float = WAIT_SECONDS) -> None:
        """Wait until what was saved is durable, on whichever rank: then `steps` shows it on all.
        Raises what the last save failed with, once. Not all ranks need to call it.

        Args:
            timeout: seconds; for so long a rank waits to hear of what another one writes.

        Raises:
            CheckpointError: it was not saved; or nothing was heard of it.
        """
        self._behind.wait()
        if self._outcomes is not None and not self._behind.foreign:
            deadline = monotonic() + timeout
            pending = self._outcomes.wait(deadline)
            if pending is not None:
                self._reader().wait_for(pending.step, deadline)

    def close(self) -> None:
        """Wait as `wait` does, and give everything back. Closing twice is harmless."""
        if self._closed or self._behind.foreign:
            return
        self._closed = True
        atexit.unregister(self._behind.last_words)
        if self._forget is not None:
            self._forget()
        try:
            self.wait()
        finally:
            self._host.close()
            if self._kept is not None:
                self._kept.close()
            if self._parts is not None:
                self._parts.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            # The error on its way says more than one of a save beside it, here or elsewhere.
            self._behind.last_words()
            self._outcomes = None
        self.close()

    # -- loading ------------------------------------------------------------------------------

    def restore(
        self, state: dict[str, Any], step: int | None = None, *, strict: bool = True
    ) -> Restored:
        """Bring `state` to the newest one that is whole over all ranks; to be called by all.

        Snapshots and checkpoints of all nodes count: what one node alone has it sends to the
        others, in chunks. What is damaged is passed over by all; the result says why. From then
        on no earlier generation can commit to the folder. (Where it takes no writes, as it is full
        or may only be read, this is not said there: a warning tells so, and `save` says it first.)

        Args:
            state: names to objects with `state_dict` and `load_state_dict`, containers and
                tensors, as they were saved; all are changed in place, see `restore.restore_from`.
            step: to restore this one, and no other. Newer ones stay where they are, and are what
                the next `restore` that names no step goes on from.
            strict: whether names of `state` itself that only one side has are an error.

        Returns:
            Which step it was, and where it came from. It is false, and nothing was changed, if
            there is nothing to go on from.

        Raises:
            FileNotFoundError: no rank has anything of `step`; the message names the steps that
                this rank has. StateMismatch: what was saved does not fit. CheckpointError: it
                could not be read or loaded, that of `step` is damaged, or somebody newer has the
                folder; on some rank, and then all of them raise.
        """
        self._must_be_open()
        if step is not None:
            manifests.check_step(step)
        began = monotonic()
        heres.worker_context().starting()
        kept, place = self._memory(), self._place_in_job()
        if place.world_size > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"restore is agreed by all {place.world_size} ranks, and there is no process "
                "group yet: call torch.distributed.init_process_group before"
            )
        # Taken before it is looked at, and in there, where what fails on one rank fails on all.
        disk = DiskSource(self._reader(), self._claim_to_go_on)
        sources = [disk] if kept.source is None else [kept.source, disk]
        names = check_names(state)
        agreed = restore_from(sources, names, self._group, node=kept.node, step=step, strict=strict)
        found = Restored(agreed.step, agreed.source_for(place.rank), agreed.passed_over)
        if step is not None and not found:
            raise self._not_restored(step, found, sources)
        kept.go_on_from(agreed, names)
        if found:
            seconds = monotonic() - began
            heres.worker_context().restored(found.step, source=found.source, seconds=seconds)
        return found

    def _not_restored(self, step: int, found: Restored, sources: Sequence[Source]) -> Exception:
        """Why there is no restoring a step that was asked for."""
        if found.passed_over:
            return CheckpointError(
                f"step {step} was asked for, and cannot be restored: {'; '.join(found.passed_over)}"
            )
        steps = sorted({held.step for source in sources for held in source.held()})
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is no other either"
        return FileNotFoundError(f"there is no step {step} in {self._name} or in memory; {there}")

    def load(
        self,
        step: int | None = None,
        *,
        like: object = None,
        map_location: MapLocation = "cpu",
    ) -> Any:
        """The newest state that is whole, or that of one step; every byte of it was checked.

        A newer one that is damaged is passed over: a warning and `passed_over` say why. One that
        cannot be read is not.

        Args:
            like: for sharded states: a state with sharded tensors in the same places (or objects
                with such), which say how those of the result are sharded, on however many ranks.
                It is not changed. Without it, sharded tensors are put together whole.
            map_location: where tensors go that are not sharded, as `torch.load` takes it: a
                device; a dict from the device that they were saved from to another; a function of
                a storage and that device; or None for that device.

        Raises:
            FileNotFoundError: there is none. CheckpointCorrupt: that of `step` is damaged.
            CheckpointError: it cannot be read. StateMismatch: `like` is another kind of state.
        """
        return self._reader().load(step, like=like, map_location=map_location)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, every byte of which this manager has written or
        checked; or None. What was damaged since then, `verify` and `load` find.

        Raises:
            CheckpointError: a newer one cannot be read.
        """
        return self._reader().latest()

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in order; by manifests and sizes alone."""
        return self._reader().steps()

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Read every byte of one checkpoint, or of all: what is wrong, by step; empty if nothing.

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """
        return self._reader().verify(step)

    @property
    def passed_over(self) -> dict[int, str]:
        """Why the last `latest` or `load` went past newer checkpoints, by step."""
        return dict(self._reader().passed_over)

    def prune(self) -> Selection:
        """Delete what `keep_last` and `keep_every` do not keep, if this rank writes.

        Raises:
            CheckpointRefused: somebody newer has the folder, or took it over. CheckpointError: the
                disk failed.
        """
        self._must_be_open()
        self._behind.settle()
        return self._commits().prune() if self.writes else Selection((), (), "another rank does")

    def _claim_to_go_on(self) -> None:
        """Claim the folder, or go on without: where it takes no writes there may be a snapshot that
        is newer than all it holds, or somebody only wants to read. Not where there is nothing."""
        try:
            self.claim()
        except TakesNoWrites as error:
            source = self._memory().source
            if not self.steps() and not (source and source.held()):
                raise
            log.warning("%s: it is read all the same, and nothing can be saved there yet", error)

    # -- behind the step ----------------------------------------------------------------------

    def _start(self, task: Callable[[], object], step: int, began: float) -> None:
        def run() -> None:
            task()
            committed = self._commits().committed
            # Where another rank commits, it has when this one hears of it.
            self.durable = (committed if committed > began else monotonic()) - began
            heres.worker_context().saved(step)

        if self._forget is None:
            atexit.register(self._behind.last_words)
            self._forget = heres.worker_context().on_stop(self._behind.settle)
        self._behind.start(run)

    def _save_for_all(self, step: int, data: memoryview, number: int) -> None:
        try:
            self._commits().save(step, data)
        except BaseException as error:
            self._told().tell(number, step, error)
            raise
        self._told().tell(number, step)

    def _told(self) -> Outcomes:
        if self._outcomes is None:
            place = self._place_in_job()
            writer = 0 if self._shared else place.rank - place.local_rank
            self._outcomes = Outcomes(self._group, self._spoken, writer)
        return self._outcomes

    def _all_ranks(self) -> PartSaver:
        if not self._shared:
            raise CheckpointError(
                "sharded state needs one folder that all ranks see, and shared=False says that "
                "each node has one of its own"
            )
        if self._parts is None:
            self._parts = PartSaver(self._commits(), self._group)
        return self._parts

    @property
    def _name(self) -> str:
        return self._reader().place.name

    def _place_in_job(self) -> Here:
        if self._here is None:
            self._here = heres.find_out(self._group)
        return self._here

    def _memory(self) -> JobMemory:
        if self._kept is None:
            place = self._reader().place
            # Of a place of the caller's own an agent knows nothing.
            known = isinstance(place, LocalPlace | RemotePlace)
            folder = place.name if known else ""
            self._kept = JobMemory(
                self._place_in_job(),
                # Two managers in one program must not take each other's for theirs.
                name=f"state-{zlib.crc32(self._spoken.encode()):08x}",
                folder=folder,
                shared=self._shared,
                every=self._group is not None,
            )
        return self._kept

    def _reader(self) -> CheckpointFolder:
        if self._opened is None:
            self._opened = CheckpointFolder(open_place(self._folder))
        return self._opened

    def _commits(self) -> Committer:
        if self._committer is None:
            writer = self._place_in_job().writer()
            self._committer = Committer(self._reader(), writer, self._retention)
        return self._committer

    def _must_be_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the CheckpointManager of {self._name} is closed")
        if self._behind.foreign:
            raise CheckpointError(
                "this process was forked from the one that has the CheckpointManager of "
                f"{self._name}, which alone may save"
            )
