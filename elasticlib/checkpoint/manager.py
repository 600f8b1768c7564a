"""Checkpoints of a training job: saved behind the training step, whole or not at all.

`save` costs the step one copy into memory that is reused; writing, summing and syncing go on in a
thread. What was saved last and is whole is what `load` gives back.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import mmap
import os
import secrets
import socket
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import attrs
import torch
import torch.distributed as dist

from ..clock import monotonic
from ..errors import CheckpointError
from ..threads import CallRejected, ExclusiveCall
from ..workers.context import context
from .collectives import PeerGroup
from .commit import Committer, OthersSave, Outcomes, OwnSave, Save, TakesNoWrites, Writer, Writers
from .folder import CheckpointFolder, Retention, Selection, check_step, open_place
from .pack import LayoutCache, PackImage, PackLayout
from .page_lock import is_page_lockable, lock_pages, unlock_pages
from .place import LocalPlace, Place, RemotePlace, new_memory
from .reshard import plan_part_layout
from .restore import (
    MEMORY,
    DiskSource,
    IfUnusable,
    RestoreAgreement,
    RestoreResult,
    StateSource,
    restore_from,
)
from .restore_plan import check_names
from .snapshot_source import SnapshotSource, snapshot_location
from .state_tree import flatten, reject_state_dicts
from .tensor_layout import MapLocation

log = logging.getLogger("elasticlib.checkpoint")

MAX_EXPECTED = 100
"""So many saves of another rank's that nobody asked for are remembered."""


@attrs.frozen
class RankInfo:
    """A process among those that share the state, on a host of this name, as one that writes."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    writer: Writer

    @classmethod
    def of_this_process(
        cls, group: dist.ProcessGroup | None, local_rank: int | None = None
    ) -> RankInfo:
        """By the process group where there is one, else by what the launcher put in the
        environment. Under another launcher, or none, each process is a launch of its own.

        Args:
            group: the ranks that share the state; all of the default group by default.
            local_rank: among those of this node; by default the launcher's.
        """
        environment, host, token = os.environ, socket.gethostname(), secrets.token_hex(8)
        grouped = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank(group) if grouped else int(environment.get("RANK", "0"))
        if local_rank is None:
            launched = environment.get("LOCAL_RANK", rank)
            local_rank = int(environment.get("ELASTICLIB_LOCAL_RANK", launched))
        world = dist.get_world_size(group) if grouped else int(environment.get("WORLD_SIZE", "1"))
        writer = Writer(
            run=environment.get("TORCHELASTIC_RUN_ID", ""),
            launch=environment.get("ELASTICLIB_INCARNATION", "") or token,
            generation=int(environment.get("ELASTICLIB_GENERATION", "0")),
            token=token,
            label=f"process {os.getpid()} on {host}",
        )
        return cls(rank, local_rank, world, host, writer)


class HostBuffer:
    """Host memory for one state, reused from save to save; not to be copied into while it is read.

    Where tensors lie on a GPU it is page-locked, so that copies run at the bus's full speed. An
    exception from a signal handler may interrupt `take`, which can then be called again.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        # The layout of the last state, and the views of the memory that belong to it.
        self._views: tuple[PackLayout, list[torch.Tensor]] | None = None
        self._is_locked = False
        # Devices whose copies may still arrive, if `take` was interrupted.
        self._copying: set[torch.device] = set()

    def take(self, image: PackImage) -> memoryview:
        """Copy a state here, and wait until it is; its bytes."""
        self._synchronize()
        memory = self._memory
        if memory is None or len(memory) < image.size:
            self.close()
            memory = self._memory = new_memory(image.size)
        if self._views is None or self._views[0] is not image.layout:
            self._views = (image.layout, image.layout.views(memoryview(memory)))
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._copying = {*image.layout.devices}
        if not self._is_locked and is_page_lockable(self._copying):
            self._is_locked = lock_pages(buffer.data_ptr(), buffer.numel())
        view = memoryview(memory)
        image.copy_to(view, self._views[1])
        self._copying = set()
        return view[: image.size]

    def close(self) -> None:
        """Give the memory back."""
        self._synchronize()
        if self._is_locked and self._memory is not None:
            address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            unlock_pages(address)
        self._is_locked = False
        self._memory = self._views = None

    def _synchronize(self) -> None:
        for device in self._copying:
            torch.accelerator.synchronize(device)
        self._copying = set()


class CheckpointManager:
    """The checkpoints in one folder, as one rank of a job saves and loads them.

    All ranks make the same calls. If the state is the same on all ranks, one of them writes it; if
    it has sharded tensors (DTensors, as in FSDP2), each rank writes its part. A checkpoint is kept
    if `keep_last` or `keep_every` keeps it, or if it was saved with `pin=True`.

    Args:
        folder: a path, any fsspec URL, or a place of your own; all nodes must reach the same one.
        keep_last: keep this many of the newest checkpoints.
        keep_every: also keep steps that are a multiple of this; 0: none.
        group: the ranks that share the state; all of the default process group by default. Each of
            its ranks keeps snapshots.

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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.stall = 0.0
        self.durable: float | None = None
        self._folder, self._group = folder, group
        self._name = folder.name if isinstance(folder, Place) else os.fspath(folder)
        self._retention = Retention(keep_last, keep_every)
        self._host = HostBuffer()
        self._layouts = LayoutCache()
        self._writing: dist.ProcessGroup | None = None
        self._saving = ExclusiveCall()
        # It owns the memory of `_host` until it is over, and is set before it begins to write.
        self._last: OwnSave | None = None
        self._expected: deque[OthersSave] = deque(maxlen=MAX_EXPECTED)
        self._forget: Callable[[], None] | None = None
        self._process = os.getpid()
        self._local_rank: int | None = None
        self._closed = False  # no more calls are accepted
        self._released = False  # everything was given back

    # -- saving -------------------------------------------------------------------------------

    def save(self, step: int, state: object, *, pin: bool = False) -> Save:
        """Save the state after `step`; returns once it is copied, and may be changed again.

        Waits for the save before it, if that is still under way. An older checkpoint of the same
        step is replaced once the new one is complete.

        If no thread can be started to write the copy, as after the end of the main thread (in a
        function that `atexit` calls), the call returns when the checkpoint is durable.

        An exception that a signal handler raises, such as KeyboardInterrupt, may interrupt the call
        anywhere. The checkpoint is then either written completely or not begun, and `wait` and
        further saves work as usual.

        Args:
            state: nested containers of tensors, NumPy arrays, plain values, and objects with
                `state_dict` and `load_state_dict`; docs/checkpoints.md lists all that is taken.
            pin: never delete this checkpoint, whatever `keep_last` and `keep_every` say. It stays
                until a person deletes its folder, or until the same step is saved again without
                `pin`. All ranks give the same value.

        Returns:
            A handle: wait for the save, or ask whether it has failed.

        Raises:
            CheckpointError: the save before this one failed, nobody has asked about it, and this
                one was not begun; the state cannot be saved; or another call of `save` is still
                copying a state, in another thread or under the signal handler that calls this one.
                CheckpointRefused: somebody newer has the folder.
        """
        began = monotonic()
        check_step(step)
        self._must_be_open()
        try:
            return self._saving.run(partial(self._save, step, state, began, pinned=bool(pin)))
        except CallRejected:
            raise self._rejected(step) from None
        finally:
            self.stall = monotonic() - began

    def _rejected(self, step: int) -> CheckpointError:
        """Return the error of a call that comes while another one copies, and tell other ranks."""
        error = CheckpointError(
            f"step {step} was not saved: another call of save() of the CheckpointManager of "
            f"{self._name} is still copying a state. From a signal handler, set a flag and save "
            "when the step has ended; let several threads save under a lock"
        )
        self._outcomes.tell(self._outcomes.begin(), step, error)
        return error

    def _save(self, step: int, state: object, began: float, *, pinned: bool) -> Save:
        outcomes, last, number = self._outcomes, self._last, 0
        try:
            # Counted on all ranks alike, whatever comes of it on one of them.
            number = outcomes.begin()
            return self._begin(step, state, number, began, pinned=pinned)
        except BaseException as error:
            if self._last is not None and self._last is not last:
                self._last.begin()  # The copy is complete: it is written although this call raises.
            elif number:
                outcomes.tell(number, step, error)
            raise

    def _begin(self, step: int, state: object, number: int, began: float, *, pinned: bool) -> Save:
        """Copy the state, and start to write the copy, if this rank does."""
        self._wait_for_last()
        if memory := vars(self).get("_memory"):
            memory.free_unused()
        flat = flatten(state, reject_state_dicts=True)
        shards = flat.shards
        if not shards and not self.writes:
            other = OthersSave(step, number, self._outcomes, self._reader)
            self._expected.append(other)
            return other
        writers = self._all_ranks if shards else self._this_rank
        if shards:
            has_rest = writers.rank == 0
            image = plan_part_layout(self._layouts, step, flat, has_rest=has_rest, has_copies=False)
        else:
            image = self._layouts.plan(flat, {"step": step})
        if self._forget is None:
            atexit.register(self._last_words)
            self._forget = context().on_stop(self._settle)
        data = self._host.take(image)
        world_size = self._rank_info.world_size
        write = partial(writers.write, step, data, world_size, pinned=pinned)
        tell = partial(self._outcomes.tell, number, step)
        save = OwnSave(step, partial(self._write, step, write, tell, self._committer, began))
        self._last = save
        save.begin()
        if not save.in_background:
            save.wait()  # Perhaps no other call follows that could raise its failure.
        return save

    def _write(
        self,
        step: int,
        write: Callable[[], None],
        tell: Callable[..., None],
        committer: Committer,
        began: float,
    ) -> None:
        """Behind the training step, and in the terms of the group in which it began."""
        try:
            write()
        except BaseException as error:
            tell(error)
            raise
        tell()
        committed = committer.committed
        # Where another rank commits, it has when this one hears of it.
        self.durable = (committed if committed > began else monotonic()) - began
        context().saved(step)

    def snapshot(self, step: int, state: object) -> bool:
        """Keep the state after `step` in memory of this node's agent, which outlives this process.

        It costs one copy, so you may call it in every step. The next worker resumes from it without
        reading a disk, and the agent writes the newest snapshot to the folder when the job drains
        or fails for good. The last one or two are kept.

        An exception that a signal handler raises, such as KeyboardInterrupt, may interrupt the call
        anywhere. The snapshot is then there completely or not at all, and the next call works.

        Args:
            state: as of `save`. Of one that is the same on all ranks the first rank of each node
                keeps all, of a sharded one every rank its part, which serves any number of ranks.

        Returns:
            Whether this rank has kept one. No rank does where no agent of ours started it.

        Raises:
            CheckpointError: the state cannot be kept, there is no memory for it, or another call of
                `snapshot` is still copying a state, in another thread or under the signal handler
                that calls this one; the earlier ones stay.
        """
        check_step(step)
        self._must_be_open()
        if self._memory is None:
            reject_state_dicts(state)  # as it would be where an agent keeps snapshots
            return False
        made = self._memory.snapshot(step, state)
        if made is not None:
            self.stall = made.seconds
            context().kept(step)
        return made is not None

    def regrouped(self, local_rank: int) -> None:
        """The process group has other members, of another generation: forget what was known of the
        ones before. What another rank was saving is not waited for any more.

        Args:
            local_rank: of this process, among those of the group that are on this node.
        """
        wrote = "_rank_info" in vars(self) and self.writes
        self._local_rank = local_rank
        memory = vars(self).pop("_memory", None)
        for name in ("_rank_info", "_committer", "_this_rank", "_all_ranks", "_outcomes"):
            vars(self).pop(name, None)
        if memory is not None:
            memory.close()
        if self._writing is not None:
            self._last_words()  # of a save that took all ranks, and may have lost some
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(self._writing)
            self._writing = None
        elif wrote and not self.writes:
            self._settle()  # before the one that writes now takes the folder
        self._expected.clear()

    def taken_over(self, step: int, state: dict[str, Any], source: int) -> None:
        """All ranks have the state after `step`, from rank `source`: snapshots after it count no
        more, and a node that has none of it keeps one."""
        if (memory := self._memory) is not None:
            memory.adopt_restored_step(
                RestoreAgreement(step, MEMORY, source, self._rank_info.rank), state
            )

    @property
    def writes(self) -> bool:
        """Whether this rank writes states that are the same on all ranks."""
        return self._rank_info.rank == 0

    def claim(self) -> None:
        """Take the folder for this generation, if this rank writes: from now on, older generations
        cannot commit. `restore` does so, too, and so does the first `save`.

        Raises:
            CheckpointRefused: somebody newer has it. CheckpointError: the disk failed.
        """
        self._must_be_open()
        if self.writes:
            self._settle()
            self._committer.claim()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all that was saved is durable, on whichever rank: then `steps` shows it on
        all. Not all ranks need to call it.

        Args:
            timeout: seconds, as of `Save.wait`.

        Raises:
            CheckpointError: one was not saved, and nobody has asked that save about it; or it is
                not known by then.
        """
        if self._is_fork:
            return
        deadline = None if timeout is None else monotonic() + timeout
        saves = [save for save in (self._last, *self._expected) if save is not None]
        try:
            for save in saves:
                if not save.looked_at:
                    save.wait(None if deadline is None else max(0.0, deadline - monotonic()))
        except CheckpointError:
            self._expect_no_more(saves)
            raise
        self._expect_no_more(saves)

    def _expect_no_more(self, saves: Sequence[Save]) -> None:
        for save in saves:
            if isinstance(save, OthersSave) and save in self._expected:
                self._expected.remove(save)

    def close(self) -> None:
        """Wait as `wait` does, and give everything back. Closing twice is harmless.

        If an exception of a signal handler interrupts the wait, call it again.
        """
        if self._released or self._is_fork:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            # If the wait was interrupted, the writer still needs all this.
            if self._last is None or self._last.done():
                self._release()

    def _release(self) -> None:
        atexit.unregister(self._last_words)
        if self._forget is not None:
            self._forget()
        self._host.close()
        if (memory := vars(self).get("_memory")) is not None:
            memory.close()
        group, self._writing = self._writing, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        self._released = True

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            # The error on its way says more than one of a save beside it, here or elsewhere.
            self._last_words()
            self._expected.clear()
        self.close()

    def _wait_for_last(self) -> None:
        """Until nothing is written any more here; raises a failure that nobody has asked about."""
        if self._last is not None and not self._last.looked_at:
            self._last.wait()

    def _settle(self) -> None:
        """Until nothing is written any more here; a failure is kept."""
        if self._last is not None:
            self._last.settle()

    def _last_words(self) -> None:
        """Wait, and log a failure that nobody has asked about: there will be no next call."""
        try:
            if not self._is_fork:
                self._wait_for_last()
        except Exception as error:
            log.error("a checkpoint was not saved: %s", error)

    # -- loading ------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        strict: bool = True,
        if_unusable: IfUnusable = "raise",
    ) -> RestoreResult:
        """Bring `state` to the newest one that is whole over all ranks; to be called by all.

        Snapshots and checkpoints of all nodes count: if only one node has a state, it sends it to
        the others in chunks. All ranks skip what is damaged; the result says why. From then on no
        earlier generation can commit to the folder (if the folder cannot be written, a warning says
        so).

        Args:
            state: names to objects with `state_dict` and `load_state_dict`, containers and
                tensors, as they were saved; all are changed in place, see `restore.restore_from`.
            step: restore this step and no other. Newer ones are not deleted: the next `restore`
                without a step takes the newest.
            strict: whether names of `state` itself that only one side has are an error.
            if_unusable: what to do without a `step` if there are checkpoints and all of them are
                damaged. "raise" raises CheckpointCorrupt, so that no training starts over
                unnoticed and replaces them. "start_over" restores nothing.

        Returns:
            Which step it was, and where it came from. It is false, and nothing was changed, if
            there is nothing to restore.

        Raises:
            FileNotFoundError: no rank has anything of `step`; the message names the steps that
                this rank has. StateMismatch: what was saved does not fit. CheckpointError: it
                could not be read or loaded, that of `step` is damaged, or somebody newer has the
                folder; on some rank, and then all of them raise.
        """
        self._must_be_open()
        if step is not None:
            check_step(step)
        began = monotonic()
        context().starting()
        memory, rank_info = self._memory, self._rank_info
        if rank_info.world_size > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"restore needs a process group of all {rank_info.world_size} ranks: call "
                "torch.distributed.init_process_group first"
            )
        # Taken before it is looked at, and in there, where what fails on one rank fails on all.
        disk = DiskSource(self._reader, self._claim_to_go_on)
        sources = [disk] if memory is None else [memory, disk]
        # Whoever shares an agent's memory is on one node.
        node = rank_info.host if memory is None else f"{rank_info.host}:{memory.folder}"
        names = check_names(state)
        reject_state_dicts(names)
        options: Any = {"step": step, "strict": strict, "if_unusable": if_unusable}
        agreed = restore_from(sources, names, self._group, node=node, **options)
        found = RestoreResult(agreed.step, agreed.source, agreed.skipped)
        if step is not None and not found:
            raise self._not_restored(step, found, sources)
        if memory is not None:
            memory.adopt_restored_step(agreed, names)
        if found:
            seconds = monotonic() - began
            context().restored(found.step, source=found.source, seconds=seconds)
        return found

    def _not_restored(
        self, step: int, found: RestoreResult, sources: Sequence[StateSource]
    ) -> Exception:
        """Why there is no restoring a step that was asked for."""
        if found.skipped:
            return CheckpointError(
                f"step {step} was asked for, and cannot be restored: {'; '.join(found.skipped)}"
            )
        steps = sorted({stored.step for source in sources for stored in source.list_states()})
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is no other either"
        return FileNotFoundError(f"there is no step {step} in {self._name} or in memory; {there}")

    def load(
        self,
        step: int | None = None,
        *,
        like: object = None,
        map_location: MapLocation = "cpu",
    ) -> Any:
        """The newest complete state, or that of one step; every byte was checked.

        A newer one that is damaged is skipped: a warning and `passed_over` say why. One that cannot
        be read raises.

        Args:
            like: for sharded states: a state with sharded tensors in the same places (or objects
                with such), which say how those of the result are sharded, on however many ranks.
                It is not changed. Without it, sharded tensors are put together whole.
            map_location: where tensors go that are not sharded, as `torch.load` takes it.

        Raises:
            FileNotFoundError: there is none. CheckpointCorrupt: that of `step` is damaged, or all
            are. CheckpointError: it cannot be read. StateMismatch: `like` is another kind of state.
        """
        return self._reader.load(step, like=like, map_location=map_location)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, every byte of which this manager has written or
        checked; None if there is no checkpoint. What was damaged since then, `verify` and `load`
        find.

        Raises:
            CheckpointError: a newer one cannot be read, or there are some and all are damaged.
        """
        return self._reader.latest()

    def steps(self, *, pinned_only: bool = False) -> list[int]:
        """Return the steps of all checkpoints, in order; judged by manifests and sizes alone.

        Args:
            pinned_only: return only those that were saved with `pin=True`.
        """
        found = (one for one in self._reader.found() if one.manifest)
        return sorted(one.step for one in found if one.pinned or not pinned_only)

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Read every byte of one checkpoint, or of all. Returns what is wrong, by step.

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """
        return self._reader.verify(step)

    @property
    def passed_over(self) -> dict[int, str]:
        """Why the last `latest` or `load` skipped checkpoints, by step."""
        return dict(self._reader.passed_over)

    def prune(self) -> Selection:
        """Delete the checkpoints that need not be kept, if this rank writes.

        Raises:
            CheckpointRefused: somebody newer has the folder, or took it over. CheckpointError: the
                disk failed.
        """
        self._must_be_open()
        self._settle()
        return self._committer.prune() if self.writes else Selection((), (), "another rank does")

    def _claim_to_go_on(self) -> None:
        """Claim the folder, or go on without: where it takes no writes there may be a snapshot that
        is newer than all it holds, or somebody only wants to read. Not where there is nothing."""
        try:
            self.claim()
        except TakesNoWrites as error:
            if not self.steps() and not (self._memory and self._memory.list_states()):
                raise
            log.warning("%s: it can be read, but nothing can be saved there yet", error)

    # -- what it is made of, when it is first used ---------------------------------------------

    @cached_property
    def _rank_info(self) -> RankInfo:
        return RankInfo.of_this_process(self._group, self._local_rank)

    @cached_property
    def _reader(self) -> CheckpointFolder:
        return CheckpointFolder(open_place(self._folder))

    @cached_property
    def _committer(self) -> Committer:
        return Committer(self._reader, self._rank_info.writer, self._retention)

    @cached_property
    def _this_rank(self) -> Writers:
        return Writers(self._committer)

    @cached_property
    def _all_ranks(self) -> Writers:
        ranks = None if self._group is None else dist.get_process_group_ranks(self._group)
        self._writing = dist.new_group(ranks, backend="gloo")
        return Writers(self._committer, PeerGroup(self._writing))

    @cached_property
    def _outcomes(self) -> Outcomes:
        group, store = self._group, None
        if dist.is_available() and dist.is_initialized():
            # torch has no public name for the store that a process group met in.
            store = dist.distributed_c10d._get_default_store()
        ranks = None if group is None else dist.get_process_group_ranks(group)
        # Saves are counted anew in each generation: one that joins later has made none of them.
        name = f"{self._name}\0{ranks}\0{self._rank_info.writer.generation}"
        return Outcomes(store, name, mine=self.writes)

    @cached_property
    def _memory(self) -> SnapshotSource | None:
        """What is kept in the agent's memory. Where no agent keeps any there is no memory that
        outlives this process."""
        memory, rank_info, place = snapshot_location(), self._rank_info, self._reader.place
        if memory is None:
            return None
        return SnapshotSource(
            memory,
            # Two managers in one program must not take each other's for theirs.
            name=f"state-{zlib.crc32(self._name.encode()):08x}",
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            writes=self._group is not None or rank_info.local_rank == 0,
            # Of a place of the caller's own an agent knows nothing.
            folder=place.name if isinstance(place, LocalPlace | RemotePlace) else "",
        )

    @property
    def _is_fork(self) -> bool:
        return self._process != os.getpid()

    def _must_be_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the CheckpointManager of {self._name} is closed")
        if self._is_fork:
            raise CheckpointError(
                "this process was forked from the one that has the CheckpointManager of "
                f"{self._name}, which alone may save"
            )
