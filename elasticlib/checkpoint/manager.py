"""The CheckpointManager: saves, restores and keeps snapshots of the training state of a job.

`save` copies the state into memory that is reused, and a thread writes the copy while the training
continues. This module coordinates the calls of a rank. `writer` is that thread, `save_handle`
reports results, `commit` writes checkpoints, `catalog` reads them, and `restore` agrees on what is
restored.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from weakref import WeakMethod, finalize

import attrs
import torch
import torch.distributed as dist

from ..clock import monotonic
from ..codec import from_json, to_json
from ..errors import CheckpointError, ConfigError, require_not_none
from ..threads import CallRejectedError, SingleCall
from ..workers.context import context
from .catalog import CheckpointCatalog
from .collectives import PeerGroup
from .commit import Committer, Selection
from .pack import LayoutCache, PackImage
from .per_rank import MissingValue, RankValueEncoder, read_names
from .rank_digests import PartComparison, RankComparison, digest_state
from .refs import (
    MAX_BRANCHES_IN_HEADER,
    MEMORY,
    KeepLast,
    Line,
    Retention,
    StateRef,
    Writer,
    begin,
    check_step,
)
from .reshard import has_own_rest, plan_part_layout
from .restore import DiskSource, IfUnusable, RestoreResult, restore_from
from .restore_plan import check_names
from .save_handle import LocalSave, RemoteSave, SaveHandle, SaveResults, SkippedSave
from .snapshot_slots import MappedSlot, SnapshotSlots
from .snapshot_source import SnapshotSource, snapshot_folder
from .state_search import RestoreAgreement, StateSource, restore_numbers
from .state_tree import FlatState, flatten, reject_state_dicts
from .storage import CheckpointStorage, FsspecStorage, LocalStorage, open_storage, resolve_location
from .tensor_layout import MapLocation
from .writer import RankWriters, WriterThread

log = logging.getLogger("elasticlib.checkpoint")

IfBusy: TypeAlias = Literal["wait", "skip"]

Result = TypeVar("Result")

MAX_REDUNDANT_BYTES = 1 << 20  # A save may write so much more than it must, to copy only once.
MAX_REMOTE_SAVES = 100  # The results of older saves of rank 0 that nothing waited for are dropped.


@attrs.frozen
class RankInfo:
    """The position of this process among the ranks that share the state."""

    rank: int
    local_rank: int  # among the ranks of this node
    world_size: int
    host: str
    writer: Writer  # before any restore

    @classmethod
    def of_this_process(
        cls, group: dist.ProcessGroup | None, local_rank: int | None = None
    ) -> RankInfo:
        """Read the ranks from the process group, or else from the launcher's environment.

        Under a launcher other than elasticrun, or under none, each manager is a launch of its own.

        Args:
            group: the ranks that share the state. The default is the default group.
            local_rank: overrides the launcher's local rank.
        """
        environment, host = os.environ, socket.gethostname()
        has_group = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank(group) if has_group else int(environment.get("RANK", "0"))
        if local_rank is None:
            launcher_rank = environment.get("LOCAL_RANK", rank)
            local_rank = int(environment.get("ELASTICLIB_LOCAL_RANK", launcher_rank))
        world_size = int(environment.get("WORLD_SIZE", "1"))
        if has_group:
            world_size = dist.get_world_size(group)
        incarnation = environment.get("ELASTICLIB_INCARNATION", "")
        writer = Writer(
            run=environment.get("TORCHELASTIC_RUN_ID", ""),
            incarnation=incarnation or secrets.token_hex(8),
            generation=int(environment.get("ELASTICLIB_GENERATION", "0")),
            is_launched=bool(incarnation),
            label=f"process {os.getpid()} on {host}",
        )
        return cls(rank, local_rank, world_size, host, writer)


@attrs.frozen
class _SaveOptions:
    """The options of a call of `save`."""

    is_pinned: bool
    may_skip: bool
    is_snapshot: bool
    metrics: Mapping[str, float]


class CheckpointManager:
    """The checkpoints in one directory, as one rank of a job saves and restores them.

    All ranks make the same calls. A state that is the same on all ranks is written by rank 0. If
    the state has sharded tensors (DTensors, as in FSDP2), each rank writes its part. A rule, which
    keeps the newest checkpoints by default, and pins decide which checkpoints stay.

    The first save or snapshot after a restore begins a branch: the states that were saved after the
    restored one are abandoned. They are restored only if their step is given. They are deleted when
    as many checkpoints were saved after the restore as `Retention.last` of the rule says.

    Calls from several threads need a lock of the caller. The manager belongs to the process that
    created it: in a forked process, `wait` and `close` do nothing, and `save` raises.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | CheckpointStorage,
        *,
        keep_last: int | None = None,
        keep: Retention | None = None,
        group: dist.ProcessGroup | None = None,
        per_rank: Sequence[str] | Mapping[str, MissingValue | None] = (),
    ) -> None:
        """Create the manager. Nothing is read or written before the first call of a method.

        Args:
            folder: a path, an fsspec URL, or a storage of your own. All nodes must reach the same
                directory, which belongs to the job. In a path, `~` is the home directory; a
                relative path is one of the current working directory.
            keep_last: how many of the newest checkpoints are kept. It stands for
                `keep=KeepLast(keep_last)`.
            keep: the rule that selects the checkpoints that are kept, such as
                `any_of(KeepLast(3), KeepEvery(1000), KeepBest("loss"))`. The default is
                `KeepLast(3)`.
            group: the ranks that share the state. The default is the default process group. Each
                rank of a given group keeps snapshots.
            per_rank: names at the top level of the state whose values differ by rank, such as
                generators. Each rank saves and restores its own, and all ranks call `save`
                together. The values are small. With another number of ranks, `restore` raises
                StateMismatchError, unless this is a dict of names and functions. Then ranks that
                have saved a value get it back, and a function returns the value of any other rank,
                given its number.

        Raises:
            ConfigError: `keep_last`, `keep` or `per_rank` is invalid, or both of the first two are
                given.
        """
        self.last_stall_s = 0.0
        """Seconds for which the last `save` or `snapshot` blocked the training."""
        # The script may change its working directory before the first save.
        self._folder, self._group = resolve_location(folder), group
        self._name = folder.name if isinstance(folder, CheckpointStorage) else os.fspath(folder)
        self._retention = _read_rule(keep_last, keep)
        # The writer and the line of the states that are saved next; None before the first of them.
        self._origin: tuple[Writer, Line] | None = None
        self._has_base = False  # this manager has restored or saved a state
        self._has_begun = False  # the directory is acquired for the branch of `_origin`, or will be
        self._per_rank = read_names(per_rank)
        self._rank_values = RankValueEncoder(self._per_rank)
        self._layouts = LayoutCache()
        self._writer = WriterThread(_report_saved)
        # Memory of saves, where no agent has memory for them.
        self._private_slots = SnapshotSlots(None, jobs=self._writer.jobs)
        self._copying = SingleCall()  # a call that copies a state, or frees memory of copies
        # Calls of `save` on this rank that were neither posted to the writer nor have failed.
        self._open_calls: deque[LocalSave] = deque()
        self._remote_saves: deque[RemoteSave] = deque(maxlen=MAX_REMOTE_SAVES)
        self._remove_stop_callback: Callable[[], None] | None = None
        _free_when_dropped(self, self._private_slots)
        self._process = os.getpid()
        self._local_rank: int | None = None  # after a change of the group, see `on_group_changed`
        self._is_closed = False  # no more calls are accepted
        self._is_released = False  # all resources were freed

    # -- saving -------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: object,
        *,
        pin: bool = False,
        if_busy: IfBusy = "wait",
        snapshot: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Save the state after a step. Return once it is copied and may be changed again.

        A thread writes the copy. If the previous save is still being written, the call waits for
        it, or skips this save (see `if_busy`). A checkpoint of the same step counts no more once
        the new one is complete.

        If no thread can be started, as in a function that `atexit` calls, the call returns when the
        checkpoint is durable.

        A signal handler's exception, such as KeyboardInterrupt, may interrupt the call at any line.
        The checkpoint is then written completely or not at all, and later calls work.

        Args:
            step: the number of completed steps, from 0.
            state: nested containers of tensors, NumPy arrays, plain values, and objects with
                `state_dict` and `load_state_dict`; docs/reference/checkpoints.md lists the
                types.
            pin: never delete this checkpoint, whatever the rule is, until `unpin`. All ranks give
                the same value.
            if_busy: what to do while the previous save is still being written. "wait" waits for it.
                "skip" saves nothing and returns at once a handle whose `is_skipped` is true. Rank 0
                decides for all ranks, through the store of the process group. All ranks give the
                same value.
            snapshot: also keep the state as `snapshot` does, before the call waits for a previous
                save, and even if this save is skipped. A rank that does both copies the state once.
                (The part of a sharded state is copied twice if a snapshot of it is larger, because
                other ranks save elements that it also has.)
            metrics: numbers for the rule `KeepBest`, such as the loss of a validation. Those of
                rank 0 count.

        Returns:
            A handle that waits for the save and reports its failure.

        Raises:
            CheckpointError: the state cannot be saved; the previous save failed, no caller has
                checked it, and this one was not started; another call of `save` or `snapshot` is
                still copying a state, in another thread or in code that a signal handler has
                interrupted; `if_busy` is "skip" and the ranks have no process group; there is no
                memory for the snapshot; or the state is sharded and the call failed on any rank.
            CheckpointFencedError: a newer generation or launch writes to the directory, or a job of
                elasticrun does, and this process has no such launcher (see `claim`).
            ConfigError: `if_busy` has another value, or `metrics` has a value that is no finite
                number.
        """
        started_at = monotonic()
        check_step(step)
        if if_busy not in get_args(IfBusy):
            raise ConfigError(f'if_busy must be "wait" or "skip", got {if_busy!r}')
        self._check_open()
        options = _SaveOptions(bool(pin), if_busy == "skip", bool(snapshot), _check(metrics))
        job = LocalSave(
            step,
            self._writer,
            _running_check(self._copying),
            is_pinned=options.is_pinned,
            metrics=options.metrics,
        )
        try:
            return self._copying.run(partial(self._save, job, state, options))
        except CallRejectedError:
            job.fail(self._concurrent_call_error(f"step {step} was not saved"))
            self._count_call(job)
            if self.is_writer:
                self._results.publish_failed_call(job)
            raise require_not_none(job.call_error, "the error") from None
        finally:
            self.last_stall_s = monotonic() - started_at

    def _flatten(self, state: object) -> FlatState:
        """Return the state as tensors and values, without those that are saved by rank."""
        info = self._rank_info
        rest, own = self._rank_values.split(state, info.rank, info.world_size)
        return flatten(rest, reject_state_dicts=True, own=own)

    def _concurrent_call_error(self, what: str) -> CheckpointError:
        """Return the error for a call that is made while another call copies a state."""
        return CheckpointError(
            f"{what}: another call of save() or snapshot() of the CheckpointManager of "
            f"{self._name} is still copying a state. From a signal handler, set a flag, and save "
            "when the step has ended; let several threads save under a lock"
        )

    def _run_exclusively(self, what: str, act: Callable[[], Result]) -> Result:
        try:
            return self._copying.run(act)
        except CallRejectedError:
            raise self._concurrent_call_error(what) from None

    def _save(self, job: LocalSave, state: object, options: _SaveOptions) -> SaveHandle:
        self._count_call(job)
        self._report_failed_calls(interrupted_before=job)
        try:
            return self._start_save(job, state, options)
        except BaseException as error:
            if job.is_copied and self._is_posted(job):
                self._writer.start()  # The copy is complete, so it is written all the same.
            else:
                job.fail(error)
            raise
        finally:
            self._report_failed_calls()

    def _count_call(self, job: LocalSave) -> None:
        """Count a call of `save`. From here on, the other ranks learn whether it fails here."""
        self._open_calls.append(job)
        self._results.count(job)

    def _report_failed_calls(self, interrupted_before: object = None) -> None:
        """Tell the other ranks which calls of `save` have failed on this rank, in their order.

        Args:
            interrupted_before: a call that runs now. Calls before it that have no result were
                interrupted. If this is None, only calls that are known to have failed are reported.
        """
        while self._open_calls and (job := self._open_calls[0]) is not interrupted_before:
            if job.call_error is None and not (job.is_copied and self._is_posted(job)):
                if interrupted_before is None:
                    break
                job.fail(None)
            if not self._is_posted(job):  # Otherwise the writer thread sees the error.
                self._report_failed_call(job)
            self._open_calls.popleft()

    def _report_failed_call(self, job: LocalSave) -> None:
        results = self._results
        if results.is_shared and self.is_writer:
            results.publish_failed_call(job)
        elif results.is_shared and results.number_of(job):
            # The other ranks may wait for this one, if the state is sharded.
            job.mark_checked()  # The call has raised the error.
            self._post(job, self._writers.write_part)

    def _is_posted(self, job: LocalSave) -> bool:
        return job in self._writer.jobs or job.is_finished

    def _post(self, job: LocalSave, work: Callable[[LocalSave], None]) -> bool:
        """Let the writer execute a job. Return False if this call has executed it."""
        job.assign(work)
        self._writer.jobs.append(job)
        return self._writer.start()

    def _is_skip_agreed(self, job: LocalSave) -> bool:
        """Return whether all ranks skip this save, because rank 0 still writes the previous one."""
        last = self._last_save
        is_busy = last is not None and not last.done()
        if is_busy:
            self._writer.start()  # An exception may have interrupted the call that started it.
        if self._rank_info.world_size == 1:
            return is_busy
        return self._results.agree_to_skip(job, is_busy=is_busy)

    def _start_save(self, job: LocalSave, state: object, options: _SaveOptions) -> SaveHandle:
        """Copy the state and start to write the copy, if this rank writes."""
        step, self._has_base = job.step, True
        if options.may_skip and self._is_skip_agreed(job):
            if options.is_snapshot:
                self._keep_snapshot(step, self._flatten(state))
            self._open_calls.remove(job)
            return SkippedSave(step)
        if not options.is_snapshot:
            self._check_last_save()
        flat = self._flatten(state)
        job.mark_sharded(flat.has_parts)
        kept = self._keep_snapshot(step, flat) if options.is_snapshot else None
        self._check_last_save()
        self._check_remote_saves()
        exchange, number = self._results.digests, self._results.number_of(job)
        digest = digest_state(flat) if exchange.is_needed else None
        if not flat.has_parts and not self.is_writer:
            if digest is not None:
                exchange.put(number, digest)
            remote = RemoteSave(step, number, self._results, self._catalog, digest)
            self._remote_saves.append(remote)
            self._open_calls.remove(job)
            return remote
        if flat.has_parts:
            job.compare(PartComparison(step, None if has_own_rest(flat) else digest))
        elif digest is not None:
            exchange.put(number, digest)
            job.compare(RankComparison(exchange, number, step, digest))
        self._wait_at_a_stop()
        self._copy_and_post(job, flat, kept)
        self._open_calls.remove(job)
        if self._snapshots is not None:
            self._snapshots.prepare_next()
        return job

    def _copy_and_post(
        self, job: LocalSave, flat: FlatState, kept: tuple[PackImage, MappedSlot] | None
    ) -> None:
        """Copy the state, unless its snapshot can be written, and let the writer write the copy.

        All ranks agree to save a sharded state before they copy it.

        Args:
            job: the save.
            flat: the state.
            kept: the pack and the slot of the snapshot of this step, if there is one.
        """
        image = self._plan_image(job.step, flat)
        memory = self._private_slots if self._snapshots is None else self._snapshots.slots
        if kept is not None and kept[0].size - image.size <= MAX_REDUNDANT_BYTES:
            image, slot = kept
            job.reserve(slot)
        elif not flat.has_parts:
            slot = memory.copy(image)
            job.reserve(slot)
        else:
            slot = memory.take(image.size)

            def copy() -> None:
                image.copy_to_slot(slot)
                memory.complete(slot)
                job.give(slot.view(image.size))

            job.reserve(slot, copy)
            self._agree_and_copy(job)
            return
        job.give(slot.view(image.size))
        if flat.has_parts:
            self._agree_and_copy(job)
        elif not self._post(job, self._writers.write_whole):
            job.wait()  # No other call may follow that could raise its failure.

    def _agree_and_copy(self, job: LocalSave) -> None:
        if self._rank_info.world_size > 1 and not self._results.is_shared:
            raise CheckpointError(
                "values are saved by rank, which needs a process group of all "
                f"{self._rank_info.world_size} ranks: call torch.distributed.init_process_group"
            )
        is_in_background = self._post(job, self._writers.write_part)
        job.wait_for_agreement()
        if not (job.is_agreed and is_in_background):
            job.wait()
        elif not job.is_copied:
            job.copy()

    def _plan_image(self, step: int, flat: FlatState) -> PackImage:
        if not flat.has_parts:
            return self._layouts.plan(flat, {"step": step})
        return plan_part_layout(
            self._layouts, step, flat, has_rest=self.is_writer, has_copies=False
        )

    def _check_remote_saves(self) -> None:
        """Raise an error if it is known that ranks have given different states to a save."""
        if not self._results.is_reachable:
            return
        for save in tuple(self._remote_saves):
            if not save.done():
                return
            if save.has_unseen_difference:
                self._remote_saves.remove(save)
                save.wait()
            if save.has_succeeded:  # `wait` reports any other failure.
                self._remote_saves.remove(save)

    def _wait_at_a_stop(self) -> None:
        """Wait for the last save before this process stops, if the script keeps the manager."""
        if self._remove_stop_callback is None:
            wait = WeakMethod(self._wait_for_write)

            def call() -> None:
                if (bound := wait()) is not None:
                    bound()

            self._remove_stop_callback = context().on_stop(call)
            finalize(self, self._remove_stop_callback).atexit = False

    def snapshot(self, step: int, state: object) -> bool:
        """Keep the state after a step in memory of this node's agent, which outlives this process.

        The call costs one copy, so it can be made in every step. The next worker resumes from the
        snapshot without reading a disk, and the agent writes the newest snapshot to the directory
        when the job drains or fails for good. The newest one or two snapshots are kept.

        A signal handler's exception, such as KeyboardInterrupt, may interrupt the call at any line.
        The snapshot then exists completely or not at all, and the next call works.

        Args:
            step: the number of completed steps, from 0.
            state: a state as for `save`. The first rank of each node keeps a state that is the same
                on all ranks. Each rank keeps its part of a sharded state, which can be restored on
                any number of ranks.

        Returns:
            Whether this rank has kept a snapshot. No rank does under another launcher.

        Raises:
            CheckpointError: the state cannot be kept, there is not enough memory, or another call
                of `snapshot` is still copying a state, in another thread or in code that a signal
                handler has interrupted. Earlier snapshots remain.
        """
        started_at = monotonic()
        check_step(step)
        self._check_open()
        if self._snapshots is None:
            reject_state_dicts(state)  # as where an agent keeps snapshots
            return False

        def keep() -> bool:
            return self._keep_snapshot(step, self._flatten(state)) is not None

        is_kept = self._run_exclusively(f"step {step} is not kept", keep)
        if is_kept:
            self.last_stall_s = monotonic() - started_at
        return is_kept

    def _keep_snapshot(self, step: int, flat: FlatState) -> tuple[PackImage, MappedSlot] | None:
        """Keep a snapshot. Return its pack and its slot, or None if this rank keeps none."""
        self._has_base = True
        kept = None if self._snapshots is None else self._snapshots.keep_state(step, flat)
        if kept is not None:
            context().report_snapshot(step)
            if not self._has_begun and self.is_writer:
                # The directory must tell the next start which state this branch continues, if the
                # memory of all nodes is lost. Nothing waits for this.
                self._has_begun = True
                self._writer.claim(self._claim_or_warn)
        return kept

    def _claim_or_warn(self) -> None:
        """Acquire the directory for the snapshots of a new branch, in the writer thread."""
        try:
            self._committer.claim()
        except CheckpointError as error:
            log.warning(
                "%s. Snapshots go on. But if the memory of all nodes is lost before a checkpoint "
                "is saved, the next start continues what was saved before this job",
                error,
            )

    def on_group_changed(self, local_rank: int) -> None:
        """Forget what depends on the members of the process group, after they were replaced.

        The results of saves that another rank was writing are not waited for any more.

        Args:
            local_rank: the rank of this process among the members of the group on this node.
        """
        was_writer = "_rank_info" in vars(self) and self.is_writer
        self._local_rank = local_rank
        snapshots = vars(self).pop("_snapshots", None)
        if (results := vars(self).get("_results")) is not None:
            results.cancel()
        for name in ("_rank_info", "_committer", "_writers", "_results"):
            vars(self).pop(name, None)
        if snapshots is not None:
            self._run_exclusively("the memory of snapshots is not freed", snapshots.close)
        last = self._last_save
        if last is not None and last.is_sharded:
            self._log_unseen_failure()  # A save of all ranks may have lost some of them.
        elif was_writer and not self.is_writer:
            self._wait_for_write()  # before the new writer acquires the fence
        self._open_calls.clear()
        self._remote_saves.clear()

    def on_state_broadcast(
        self, step: int, state: dict[str, Any], source: int, peers: PeerGroup, *, keep: bool = True
    ) -> None:
        """Begin a branch with a state that a member of the process group has sent to the others.

        All members call it. With `keep`, a node without a snapshot of the state keeps one.

        Args:
            step: the step of the state.
            state: the state.
            source: the rank that sent it.
            peers: the members.
            keep: whether the job keeps snapshots.
        """
        _, line = self._current_origin
        if len(line) > MAX_BRANCHES_IN_HEADER:
            # Each regroup adds a branch. Those without a state are not needed any more.
            refs = [
                *self._catalog.list_refs(),
                *(self._snapshots.list_states() if self._snapshots else ()),
            ]
            named = {ref.branch for ref in refs}
            line = tuple(b for b in line if b.id in named or b is line[-1])
        number = next(restore_numbers)
        rows = peers.all_gather_json([number, to_json(StateRef(line[-1].id, step, line=line))])
        base = from_json(StateRef, rows[source][1])
        writer = attrs.evolve(self._rank_info.writer, number=rows[0][0])
        self._begin(writer, begin(base, writer))
        if (snapshots := self._snapshots) is not None and keep:
            agreed = RestoreAgreement(
                attrs.evolve(base, tier=MEMORY, name=snapshots.name), source, self._rank_info.rank
            )
            self._run_exclusively(
                f"step {step} is not kept",
                partial(snapshots.adopt_restored_state, agreed, state),
            )

    @property
    def last_durable_s(self) -> float | None:
        """Seconds from the call of the last finished save until it was durable, or None."""
        return self._writer.last_durable_s

    @property
    def per_rank(self) -> tuple[str, ...]:
        """The names of the values that each rank saves and restores for itself."""
        return tuple(self._per_rank)

    @property
    def is_writer(self) -> bool:
        """True if this rank writes states that are the same on all ranks."""
        return self._rank_info.rank == 0

    def claim(self) -> None:
        """Acquire the directory for this process, if this rank writes.

        Other generations and launches cannot commit any more, not even a job of elasticrun that
        this process does not belong to. The first `save` or `snapshot` acquires the directory, too,
        but not from such a job.

        Raises:
            CheckpointFencedError: a newer generation has the directory, or another launch has taken
                it from this one.
            CheckpointError: the disk failed.
        """
        self._check_open()
        if self.is_writer:
            self._wait_for_write()
            self._committer.take_over()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves of this manager are durable, whichever rank writes them.

        Then `steps` finds their checkpoints on all ranks. Ranks may call this independently of each
        other.

        Args:
            timeout: seconds; the default is that of `SaveHandle.wait`.

        Raises:
            CheckpointError: a save failed, and no caller has checked its handle; or a save has not
                finished within the timeout.
        """
        if self._is_fork:
            return
        deadline = None if timeout is None else monotonic() + timeout
        self._report_interrupted_calls()
        last_save = self._last_save
        saves = [save for save in (last_save, *self._remote_saves) if save is not None]
        if last_save is not None:
            last_save.find_late_difference()
        try:
            for save in saves:
                if not save.was_checked:
                    save.wait(None if deadline is None else max(0.0, deadline - monotonic()))
        except CheckpointError:
            self._forget_remote_saves(saves)
            raise
        self._forget_remote_saves(saves)

    def _forget_remote_saves(self, saves: Sequence[SaveHandle]) -> None:
        for save in saves:
            if isinstance(save, RemoteSave) and save in self._remote_saves:
                self._remote_saves.remove(save)

    def close(self) -> None:
        """Wait as `wait` does, and free all resources. Later calls do nothing.

        If a signal handler's exception interrupts the wait, call this method again.

        Raises:
            CheckpointError: see `wait`.
        """
        if self._is_released or self._is_fork:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            # If the wait was interrupted, the writer still needs the resources.
            if all(job.is_finished for job in tuple(self._writer.jobs)):
                self._release()

    def _release(self) -> None:
        if self._remove_stop_callback is not None:
            self._remove_stop_callback()
        self._run_exclusively("the memory of copies is not freed", self._free_slots)
        vars(self).pop("_writers", None)  # It has connections to the other ranks.
        self._is_released = True

    def _free_slots(self) -> None:
        self._private_slots.close()
        if (snapshots := vars(self).get("_snapshots")) is not None:
            snapshots.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            # The exception of the block is raised, so failures of saves are only logged.
            self._log_unseen_failure()
            self._remote_saves.clear()
        self.close()

    @property
    def _last_save(self) -> LocalSave | None:
        """The last save that was posted to the writer. It may be finished."""
        try:
            return self._writer.jobs[-1]
        except IndexError:
            return self._writer.last

    def _check_last_save(self) -> None:
        """Wait for this rank's last save. Raise its failure, unless a caller has checked it."""
        last = self._last_save
        if last is not None:
            last.settle()
            if last.unseen_failure() is not None:
                last.wait()

    def _wait_for_write(self) -> None:
        """Wait for this rank's last save. A failure is kept for `wait`."""
        self._report_interrupted_calls()
        if (last := self._last_save) is not None:
            last.settle()

    def _report_interrupted_calls(self) -> None:
        """Tell the other ranks about calls of `save` that an exception has interrupted anywhere."""
        if self._open_calls and not (self._is_fork or self._copying.is_running):
            with contextlib.suppress(CallRejectedError):
                self._copying.run(partial(self._report_failed_calls, interrupted_before=self))

    def _log_unseen_failure(self) -> None:
        """Wait for this rank's last save, and log a failure, because no other call follows."""
        try:
            if not self._is_fork:
                self._check_last_save()
        except Exception as error:
            log.error("a checkpoint was not saved: %s", error)

    # -- loading ------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        step: int | str | None = None,
        *,
        strict: bool = True,
        if_unusable: IfUnusable = "raise",
        allow_cast: bool = False,
    ) -> RestoreResult:
        """Bring the state of all ranks to the newest usable snapshot or checkpoint.

        All ranks call it. Snapshots and checkpoints of all nodes count: a state that only one node
        has is sent to the others in chunks. All ranks skip a state that is damaged, and the result
        gives the reason. The call writes nothing into the directory; if the newest state came from
        another node's memory, this node keeps a snapshot of it. What is saved or snapshotted next
        continues the restored state, and abandons the states after it.

        Args:
            state: a dict of names to objects with `state_dict` and `load_state_dict`, containers
                and tensors, as they were saved. They are changed in place, see
                `restore.restore_from`.
            step: restore this step and no other. The next `save` or `snapshot` abandons the newer
                steps; before that, a `restore` without a step finds the newest one. A step
                that the job has abandoned can be given, or the name of its folder, if there are
                several of the step.
            strict: whether it is an error if only the state, or only the checkpoint, has a name.
                If false, such names are ignored.
            if_unusable: what to do if there are checkpoints, all that the job has not abandoned are
                damaged, there is no snapshot, and `step` is not given. "raise" raises
                CheckpointCorruptError, so that no training starts from the beginning unnoticed and
                replaces them. "start_over" restores nothing.
            allow_cast: convert tensors of floating types that were saved with another floating type
                than those of `state`, such as float32 to bfloat16. Otherwise another dtype is an
                error. Other types are never converted.

        Returns:
            The step and its source. The result is false, and the state is unchanged, if there is
            nothing to restore.

        Raises:
            FileNotFoundError: no rank has `step`; the message names the steps that this rank has.
            StateMismatchError: the saved state does not fit.
            CheckpointCorruptError: see `if_unusable`.
            CheckpointError: a state could not be read or loaded, or `step` is damaged. An error on
                one rank is raised on all.
        """
        self._check_open()
        if step is not None and not isinstance(step, str):
            check_step(step)
        started_at = monotonic()
        context().report_starting()
        snapshots, rank_info = self._snapshots, self._rank_info
        if rank_info.world_size > 1 and not dist.is_initialized():
            raise CheckpointError(
                f"restore needs a process group of all {rank_info.world_size} ranks: call "
                "torch.distributed.init_process_group first"
            )
        self._wait_for_write()
        disk = DiskSource(self._catalog, self._memory_name)
        sources = [disk] if snapshots is None else [snapshots, disk]
        # Ranks that share the memory of an agent are on one node.
        node = rank_info.host if snapshots is None else f"{rank_info.host}:{snapshots.folder}"
        names = check_names(state)
        reject_state_dicts(names)
        options: Any = {"strict": strict, "if_unusable": if_unusable, "allow_cast": allow_cast}
        options |= {"step": step, "per_rank": self._per_rank, "launch": rank_info.writer.launch}
        # A script that restores in inference mode can train on the state all the same.
        with torch.inference_mode(mode=False):
            agreed = restore_from(sources, names, self._group, node=node, **options)
        result = RestoreResult(agreed.step, agreed.source, agreed.skipped)
        if step is not None and not result:
            raise self._missing_step_error(step, result, sources)
        # The restore of a part does not change what this manager continues.
        if agreed.is_complete or not self._has_base:
            writer = attrs.evolve(rank_info.writer, number=agreed.number)
            self._begin(writer, begin(agreed.base, writer, agreed.with_states))
            self._has_base = True
        # A snapshot of a part is not complete, and one of a chosen step would begin a branch.
        if snapshots is not None and agreed.is_complete and step is None:
            self._run_exclusively(
                f"step {agreed.step} is not kept",
                partial(snapshots.adopt_restored_state, agreed, names),
            )
        if result:
            seconds = monotonic() - started_at
            context().report_restored(result.step, source=result.source, seconds=seconds)
        return result

    def _missing_step_error(
        self, step: int | str, result: RestoreResult, sources: Sequence[StateSource]
    ) -> Exception:
        """Return the error for a given step that was not restored."""
        if result.skipped:
            return CheckpointError(f"step {step} cannot be restored: {'; '.join(result.skipped)}")
        steps = sorted({ref.step for source in sources for ref in source.list_states()})
        others = f"there are {', '.join(map(str, steps))}" if steps else "there is no other step"
        return FileNotFoundError(f"there is no step {step} in {self._name} or in memory; {others}")

    def _begin(self, writer: Writer, line: Line) -> None:
        """Begin another branch with the next save or snapshot."""
        self._origin, self._has_begun = (writer, line), False
        if "_committer" in vars(self):
            self._committer.begin(writer, line)
        if self._snapshots is not None:
            self._snapshots.begin(writer, line)

    def load(
        self,
        step: int | str | None = None,
        *,
        like: object = None,
        map_location: MapLocation = "cpu",
    ) -> Any:
        """Return the state of the newest intact checkpoint, or of one step, with new tensors.

        Every byte is verified. A newer checkpoint that is damaged is skipped: a warning and
        `skipped` give the reason. A newer checkpoint that cannot be read is an error.

        Args:
            step: the step to load, or the name of its folder. The default is the newest intact
                checkpoint that the job has not abandoned.
            like: for a sharded state: a state with sharded tensors (or objects that have them) in
                the same places. The result is sharded as they are, on any number of ranks. It is
                not changed. Without it, the result has full tensors.
            map_location: where tensors that are not sharded are loaded, as for `torch.load`.

        Returns:
            The state.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            CheckpointCorruptError: the checkpoint of `step` is damaged, or all are.
            CheckpointError: a checkpoint cannot be read.
            StateMismatchError: `like` has another structure than the saved state.
        """
        return self._catalog.load(step, like=like, map_location=map_location)

    def latest(self) -> int | None:
        """Return the step of the newest intact checkpoint, or None if there is no checkpoint.

        This manager has written or verified every byte of it. It does not notice damage that
        happened since then; `verify` and `load` do.

        Raises:
            CheckpointError: a newer checkpoint cannot be read, or all checkpoints are damaged.
        """
        return self._catalog.latest()

    def steps(self, *, pinned_only: bool = False) -> list[int]:
        """Return the steps of the checkpoints in order, judged only by manifests and sizes.

        Steps that the job has abandoned are left out; `elasticlib checkpoints` lists them.

        Args:
            pinned_only: return only those that are pinned.
        """
        refs = [ref for ref in self._catalog.live_refs() if ref.is_usable]
        return sorted({ref.step for ref in refs if ref.is_pinned or not pinned_only})

    def path(self, step: int | str) -> str:
        """Return the path or URL of the folder of a checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint of `step`.
            CheckpointError: the storage cannot be read.
        """
        return f"{self._catalog.storage.name}/{self._catalog.find(step).place}"

    def pin(self, step: int | str) -> None:
        """Protect a checkpoint from deletion, until `unpin`. Raise as `path`."""
        self._committer.pin(self._catalog.find(step), pin=True)

    def unpin(self, step: int | str) -> None:
        """Let the retention rule decide on a checkpoint again. Raise as `path`."""
        self._committer.pin(self._catalog.find(step), pin=False)

    def verify(self, step: int | str | None = None) -> dict[int, str]:
        """Read every byte of one checkpoint, or of all.

        Args:
            step: the checkpoint's step or folder. The default is all checkpoints.

        Returns:
            A description of the damage, or of the error of reading, by step. Intact checkpoints are
            left out.

        Raises:
            FileNotFoundError: there is no checkpoint of `step`.
        """
        return self._catalog.verify(step)

    @property
    def skipped(self) -> dict[int, str]:
        """Why the last `latest` or `load` skipped checkpoints, by step."""
        return dict(self._catalog.skipped)

    def prune(self) -> Selection:
        """Delete the checkpoints that the retention rule does not keep, if this rank writes.

        Returns:
            The steps that were kept and deleted. Both are empty on a rank that does not write.

        Raises:
            CheckpointFencedError: a newer generation or launch has the directory.
            CheckpointError: the disk failed.
        """
        self._check_open()
        self._wait_for_write()
        if not self.is_writer:
            return Selection((), (), "rank 0 prunes")
        return self._committer.prune()

    # -- parts, which are created when they are first used ---------------------------------------

    @cached_property
    def _rank_info(self) -> RankInfo:
        return RankInfo.of_this_process(self._group, self._local_rank)

    @cached_property
    def _catalog(self) -> CheckpointCatalog:
        return CheckpointCatalog(open_storage(self._folder))

    @cached_property
    def _committer(self) -> Committer:
        return Committer(self._catalog, *self._current_origin, self._retention, self._note_claim)

    @property
    def _current_origin(self) -> tuple[Writer, Line]:
        if self._origin is None:
            writer = self._rank_info.writer
            self._origin = (writer, begin(None, writer))
        return self._origin

    def _note_claim(self) -> None:
        """Tell the agent which directory to release when the job has ended."""
        storage, folder = self._catalog.storage, snapshot_folder()
        if folder is not None and isinstance(storage, LocalStorage | FsspecStorage):
            name = f"claimed.{zlib.crc32(os.fsencode(storage.name)):08x}"
            with contextlib.suppress(OSError), open(os.path.join(folder, name), "wb") as file:
                file.write(os.fsencode(storage.name))

    @property
    def _memory_name(self) -> str:
        """The name of the states in the agent's memory: several managers have different ones."""
        return f"state-{zlib.crc32(os.fsencode(self._name)):08x}"

    @cached_property
    def _writers(self) -> RankWriters:
        rank_info = self._rank_info
        return RankWriters(self._committer, self._results, rank_info.rank, rank_info.world_size)

    @cached_property
    def _results(self) -> SaveResults:
        group, store = self._group, None
        if dist.is_available() and dist.is_initialized():
            # torch has no public name for the store in which a process group was formed.
            store = dist.distributed_c10d._get_default_store()
        ranks = None if group is None else dist.get_process_group_ranks(group)
        # The numbers of saves start again in each generation, because a rank may be new in it.
        name = f"{self._name}\0{ranks}\0{self._rank_info.writer.generation}"
        return SaveResults(
            store, name, rank=self._rank_info.rank, world_size=self._rank_info.world_size
        )

    @cached_property
    def _snapshots(self) -> SnapshotSource | None:
        """The snapshots in the agent's memory, or None if no agent of elasticlib runs."""
        attempt, rank_info, storage = snapshot_folder(), self._rank_info, self._catalog.storage
        if attempt is None:
            return None
        writer, line = self._current_origin
        source = SnapshotSource(
            attempt,
            writer,
            name=self._memory_name,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            writes=self._group is not None or rank_info.local_rank == 0,
            # An agent cannot write to a storage that the caller has defined.
            folder=storage.name if isinstance(storage, LocalStorage | FsspecStorage) else "",
            layouts=self._layouts,
            thread=self._writer,
        )
        source.begin(writer, line)
        _free_when_dropped(self, source)
        return source

    @property
    def _is_fork(self) -> bool:
        return self._process != os.getpid()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"the CheckpointManager of {self._name} is closed")
        if self._is_fork:
            raise CheckpointError(
                "this process was forked from the one that created the CheckpointManager of "
                f"{self._name}, and only that process may save"
            )


def _read_rule(keep_last: int | None, keep: Retention | None) -> Retention:
    if keep_last is not None and keep is not None:
        raise ConfigError(
            f"give keep_last={keep_last!r} or keep={keep!r}, not both: keep may be "
            "any_of(KeepLast(3), ...)"
        )
    if keep is None:
        return KeepLast(3 if keep_last is None else keep_last)
    if not isinstance(keep, Retention):
        raise ConfigError(f"keep must be a rule such as KeepLast(3), got {keep!r}")
    return keep


def _check(metrics: Mapping[str, float] | None) -> Mapping[str, float]:
    """Return metrics as floats.

    Raises:
        ConfigError: a value is no finite number.
    """
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError):
            checked[str(name)] = math.nan
        if not math.isfinite(checked[str(name)]):
            raise ConfigError(f"metrics must be finite numbers, got {name!r}: {value!r:.80}")
    return checked


def _report_saved(step: int) -> None:
    context().report_saved(step)


def _running_check(call: SingleCall) -> Callable[[], bool]:
    return lambda: call.is_running


def _free_when_dropped(manager: CheckpointManager, memory: SnapshotSlots | SnapshotSource) -> None:
    """Free the copies of a manager that the script drops without `close`."""
    process = os.getpid()

    def free() -> None:
        if os.getpid() == process:  # The files belong to the process that created the manager.
            memory.free()

    finalize(manager, free).atexit = False
