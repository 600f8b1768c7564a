"""The training loop of a worker that outlives its process group.

    elasticlib.init_process_group("gloo")
    ...
    for attempt in elasticlib.steps(batches, state, manager=manager, epochs=3, loader=make_loader):
        with attempt as batch:
            if attempt.is_new_group:
                parallel = DistributedDataParallel(model)
            ...                                     # forward, backward, optimizer.step()
            attempt.report(loss=loss, samples=len(batch))

A step is committed when its `with` block ends on this worker. If the group breaks, its workers
can be one step apart. In the next group, all of them continue from the newest committed step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..checkpoint.collectives import peer_group
from ..checkpoint.manager import CheckpointManager
from ..checkpoint.pack import plan_layout, unpack
from ..checkpoint.restore_plan import check_names, plan_restore
from ..checkpoint.snapshot_source import is_sharded
from ..checkpoint.state_tree import (
    map_leaves,
    reject_state_dicts,
    to_plain_values,
)
from ..checkpoint.storage import new_memory
from ..clock import monotonic
from ..data.batch_sampler import ElasticBatchSampler
from ..data.position import check_int
from ..errors import CheckpointError, ConfigError, require_not_none
from ..logical.logical_workers import LogicalWorkers
from ..workers.context import StopRequest, context
from .process_group import POLL_INTERVAL_S, RegroupableGroup, current_group
from .rollback import SHARDED_STATE, StateRollback, drop_gradients
from .takeover import BroadcastPlan, MemberStatus, plan_broadcast

log = logging.getLogger("elasticlib.in_place")

GROUP_END_TIMEOUT_S = 5.0  # A worker can see a lost peer this long before the agent ends the group.

TrainingState = dict[str, Any]
LoaderFactory = Callable[["LocalBatches"], Iterable[Any]]


def steps(
    batches: ElasticBatchSampler,
    state: TrainingState | Callable[[], TrainingState],
    *,
    manager: CheckpointManager | None = None,
    epochs: int = 1,
    loader: LoaderFactory | None = None,
    logical_workers: LogicalWorkers | None = None,
    snapshot_every: int = 1,
    save_every: int = 0,
    keep_copy: bool = True,
) -> StepLoop:
    """Return the training loop of this worker: an iterable of step attempts.

    The loop restores the newest state, sets the epochs, counts steps and samples, takes snapshots,
    saves, and reports each step to the agent. It saves once more when it ends.

    If `elasticlib.init_process_group` created a group whose members can be replaced, a step that
    the loss of a member or a resize interrupts is rolled back, and the next group attempts it
    again. Otherwise an error is raised as usual, and the agent restarts the workers.

    A script may catch an exception, such as KeyboardInterrupt, and iterate over the same object
    again. A step whose block was complete stays committed. Any other step is rolled back and
    attempted again.

    Args:
        batches: yields the batches. The loop sets its rank, world size and epoch, and advances it.
            Its position is saved as a part of the state.
        state: names to objects and values, as for `CheckpointManager.restore`: everything that a
            worker needs to continue, the same on all ranks. The script may replace values and
            objects in it. If it contains sharded tensors, give a function that creates the state
            for the current process group. Each group calls it, and the manager restores the state
            from the snapshots in the agents' memory.
        manager: restores the state at the start and if no worker has it complete, takes snapshots,
            and saves.
        epochs: number of the epoch at which the loop ends; epochs are numbered from 0.
        loader: called in each group and epoch with this worker's batches (lists of indices, to be
            used as the `batch_sampler` of a DataLoader). The loop iterates over what it returns. By
            default the loop yields the lists themselves. It must yield one item for each list.
        logical_workers: if given, this worker's part of a batch consists of the samples of its
            logical workers.
        snapshot_every: take a snapshot after this many steps; 0 for never.
        save_every: save after this many steps; 0 for only at the end.
        keep_copy: copy the state at the start of each step, on its devices, so that an interrupted
            step can be rolled back. This takes as much memory as the parameters and the optimizer
            state. If False, a worker whose step was interrupted receives the state from another
            worker that was not interrupted, or else the manager restores the newest step.

    Raises:
        ConfigError: an argument is invalid, or the state has sharded tensors and is not a function.
            While the result is iterated, ConfigError: the loader has yielded more or fewer items
            than there are batches. CheckpointError: an interrupted step cannot be rolled back, and
            neither a worker nor the manager has the state of a completed step.
    """
    if not isinstance(batches, ElasticBatchSampler):
        raise ConfigError(
            f"steps takes an ElasticBatchSampler, got a {type(batches).__qualname__}: only an"
            " ElasticBatchSampler can divide a batch among any number of workers"
        )
    for name, value in (("snapshot_every", snapshot_every), ("save_every", save_every)):
        if check_int(name, value) < 0:
            raise ConfigError(f"need {name} >= 0, got {value}")
    if callable(state) and manager is None:
        raise ConfigError(
            "a state that is created for each group is restored there: give a manager"
        )
    if not keep_copy and manager is None:
        raise ConfigError("without a copy, only a manager can restore a state: give a manager")
    if manager is not None and manager.per_rank:
        raise ConfigError(
            f"steps cannot use a manager with per_rank={manager.per_rank!r}, because a worker that "
            "joins receives the state of another one: seed random numbers for each step instead"
        )
    loop = StepLoop(
        batches,
        state,
        manager=manager,
        epochs=check_int("epochs", epochs),
        loader=loader,
        logical_workers=logical_workers,
        snapshot_every=snapshot_every,
        save_every=save_every,
        keep_copy=keep_copy,
    )
    if not callable(state):
        loop._use_state(state)
    return loop


class StepAttempt:
    """An attempt of a step: a context manager to be entered once, as in `with attempt as batch`."""

    def __init__(self, loop: StepLoop, batch: Any, *, is_new_group: bool) -> None:
        self.step = loop.step + 1
        """The number of the step, from 1."""
        self.epoch = loop.epoch
        """The epoch that the batch belongs to, from 0."""
        self.batch = batch
        """The value of `with`: an item of the loader, or this worker's list of indices."""
        self.is_new_group = is_new_group
        """True for the first attempt in a process group. Objects that were created for the group
        before, such as a DistributedDataParallel, must then be created again."""
        self.state = loop.state
        """The state that `steps` was given, or that the given function has created for the group.
        """
        self.is_committed = False
        """True once the block is complete. If it stays False, the step is attempted again."""
        self._loop = loop
        self._position = loop._batches.position  # before the step
        self._is_entered = False
        self._reported_fields: dict[str, Any] = {}  # keyword arguments of context().step
        self._is_pinned = False  # save this step, and never prune the checkpoint

    def report(
        self,
        *,
        loss: float | None = None,
        samples: float | None = None,
        pin: bool = False,
    ) -> None:
        """Set what is reported about this step once it is committed.

        Args:
            loss: as for `elasticlib.context().step`.
            samples: as for `elasticlib.context().step`.
            pin: save this step even if `save_every` does not require it, and pin the checkpoint as
                `CheckpointManager.save` does. All ranks must pass the same value.
        """
        self._reported_fields = {"loss": loss, "samples": samples}
        self._is_pinned = pin

    def __enter__(self) -> Any:
        if self._is_entered:
            raise ConfigError(f"the attempt of step {self.step} was entered before")
        self._is_entered = True
        return self.batch

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            # This assignment commits the step. If an exception, such as one of a signal handler,
            # interrupts what follows, StepLoop._finish_last_attempt completes the step later.
            self.is_committed = True
            self._loop._on_committed(self)
            return False
        return self._loop._handle_step_error(error)


class LocalBatches:
    """This worker's parts of the remaining batches of an epoch, as lists of indices."""

    def __init__(
        self, batches: ElasticBatchSampler, logical_workers: LogicalWorkers | None
    ) -> None:
        self._batches = batches
        self._logical_workers = logical_workers

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            if self._logical_workers is None:
                yield batch
            else:
                local = self._logical_workers.samples(len(batch))
                yield batch[local.start : local.stop]


class StepLoop:
    """The training loop that `elasticlib.steps` returns. Iterate over it to get the attempts."""

    def __init__(
        self,
        batches: ElasticBatchSampler,
        state: TrainingState | Callable[[], TrainingState],
        *,
        manager: CheckpointManager | None,
        epochs: int,
        loader: LoaderFactory | None,
        logical_workers: LogicalWorkers | None,
        snapshot_every: int,
        save_every: int,
        keep_copy: bool,
    ) -> None:
        self.step = 0
        """The last committed step; 0 before the first."""
        self.state: TrainingState = {}
        """The state that the script has given, or created for the current group."""
        self.stop_request: StopRequest | None = None
        """The agent's request that stopped the loop early, or None."""
        self._create_state = state if callable(state) else None
        self._batches = batches
        self._manager = manager
        self._epochs = epochs
        self._loader = loader
        self._logical_workers = logical_workers
        self._snapshot_every, self._save_every = snapshot_every, save_every
        # A state that a function creates is created again for the next group instead.
        self._can_roll_back = keep_copy and not callable(state)
        self._rollback = StateRollback()
        self._obstacle = ""  # why the last interrupted attempt could not be rolled back
        self._attempt: StepAttempt | None = None  # the last one, until it is counted or rolled back
        self._has_state = False  # the state belongs to the job, not only to this process
        self._is_complete = False  # the state is exactly that of `step`
        self._saved_step = 0
        self._group: RegroupableGroup | None = current_group()
        self._has_entered_group = False  # this loop was in a group before

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._batches.sampler.epoch

    def __iter__(self) -> Iterator[StepAttempt]:
        with contextlib.ExitStack() as stack:
            if self._group is not None:
                context().set_can_regroup()
                # Collectives that the script calls after the loop must not be aborted, so the
                # watcher stops before the group is closed.
                stack.callback(self._group.close)
                stack.enter_context(self._group.abort_on_group_end())
            self._finish_last_attempt()
            self._join_group()
            while not (yield from self._attempts_in_group()):
                self._join_group()
        if self._manager is not None and self._saved_step != self.step:
            self._save()

    # -- Steps within one group --------------------------------------------------------------------

    def _attempts_in_group(self) -> Generator[StepAttempt, None, bool]:
        """Yield attempts until this group or the loop ends. Return True if the loop ends."""
        is_new_group = True
        for epoch in range(self.epoch, self._epochs):
            self._batches.set_epoch(epoch)
            if not len(self._batches):
                continue  # An earlier iteration over this object may have finished the epoch.
            local = LocalBatches(self._batches, self._logical_workers)
            for batch in local if self._loader is None else self._loader(local):
                if context().should_leave_group():
                    return False
                if not len(self._batches):
                    raise ConfigError(
                        f"the loader has yielded more items in epoch {epoch} than there are"
                        " batches: yield one item for each list of indices that it is given"
                    )
                self._rollback.begin(*self._rollback_values())
                self._attempt = attempt = StepAttempt(self, batch, is_new_group=is_new_group)
                yield attempt
                is_new_group = False
                self._finish_last_attempt()
                if not attempt._is_entered:
                    raise ConfigError("each attempt must be entered: `with attempt as batch`")
                if not attempt.is_committed or self._should_leave_for_resize():
                    return False
                if self.stop_request is not None:
                    return True
            if remaining := len(self._batches):
                raise ConfigError(
                    f"the loader has ended {remaining} batches before the end of epoch {epoch}, and"
                    " their samples would be skipped: yield one item for each list of indices that"
                    " it is given"
                )
        return self._wait_until_all_finish()

    def _finish_last_attempt(self) -> None:
        """Count the last attempt if it was committed; otherwise roll it back.

        An exception may interrupt this method at any line. The next call does the rest.
        """
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.is_committed:
            # An interrupted call may have advanced the position, so it is set first.
            self._batches.progress.set_position(attempt._position)
            self._batches.advance()
            self.step = attempt.step
        else:
            self._is_complete = False
            self._obstacle = self._rollback.roll_back()
            drop_gradients(self.state)
            self._is_complete = self._can_roll_back and not self._obstacle
        self._attempt = None

    def _rollback_values(self) -> Sequence[object]:
        """Return what is copied at the start of an attempt."""
        return (self.state, self._batches) if self._can_roll_back else ()

    def _on_committed(self, attempt: StepAttempt) -> None:
        """Count and report the step, and take a snapshot and save if they are due."""
        self._finish_last_attempt()
        context().step(self.step, **attempt._reported_fields)
        is_snapshot_due = _is_due(self.step, self._snapshot_every)
        if attempt._is_pinned or _is_due(self.step, self._save_every):
            try:
                self._save(pin=attempt._is_pinned, snapshot=is_snapshot_due)
            except Exception as error:
                # All ranks take part in saving a sharded state, so a lost member is an error here.
                if not self._is_group_failure(error):
                    raise
        elif self._manager is not None and is_snapshot_due:
            self._manager.snapshot(self.step, self._parts())

    def _save(self, *, pin: bool = False, snapshot: bool = False) -> None:
        if self._manager is not None:
            self._manager.save(self.step, self._parts(), pin=pin, snapshot=snapshot)
            self._saved_step = self.step

    def _should_leave_for_resize(self) -> bool:
        """Return True if all ranks leave this group after this step, because nodes join or leave.

        Any other request of the agent to stop is kept in `stop_request`.
        """
        stop = context().should_stop()
        if stop is not None and stop.reason == "resize" and self._group is not None:
            return True
        self.stop_request = stop
        return False

    def _wait_until_all_finish(self) -> bool:
        """Wait for all ranks. Return False if the group ends; the next one may need this state."""
        if self._group is None:
            return True
        try:
            dist.barrier()
        except Exception as error:
            if not self._is_group_failure(error):
                raise
            return False
        return True

    # -- Errors of a group -------------------------------------------------------------------------

    def _handle_step_error(self, error: BaseException) -> bool:
        """Roll the step back if the group has ended. Return False for an error of the script."""
        if not self._is_group_failure(error):
            return False
        self._finish_last_attempt()
        outcome = "it was rolled back"
        if not self._is_complete:
            outcome = "the state of another worker, or a saved one, replaces that of this worker"
        log.info("the group ended in step %d, %s: %s", self.step + 1, outcome, error)
        return True

    def _is_group_failure(self, error: BaseException) -> bool:
        """Report an error to the agent, and return True if the agent stops the generation.

        The error that the loss of a member causes can have any type, so the agent decides whether
        `error` is one. It may notice the loss later than this worker, so this method waits for its
        notice, up to GROUP_END_TIMEOUT_S, unless the loss of a member cannot cause `error`.
        """
        if self._group is None or not isinstance(error, Exception):
            return False
        context().report_group_failure()
        is_only_member = len(self._group.members) == 1
        is_plausible = isinstance(error, RuntimeError | TimeoutError | CheckpointError)
        timeout_s = GROUP_END_TIMEOUT_S if is_plausible and not is_only_member else 0
        deadline, pause = monotonic() + timeout_s, threading.Event()
        while not context().should_leave_group():
            if monotonic() > deadline:
                return False
            pause.wait(POLL_INTERVAL_S)
        return True

    # -- From one group to the next ----------------------------------------------------------------

    def _join_group(self) -> None:
        """Join a group in which all members have the state of the same step."""
        while True:
            try:
                self._enter_group()
                return self._synchronize_state()
            except Exception as error:
                if not self._is_group_failure(error):
                    raise
                log.info("the group ended before its first step, waiting for the next: %s", error)

    def _enter_group(self) -> None:
        """Connect to the members of the next group, and update all objects that depend on it."""
        group = self._group
        if group is not None:
            if self._has_entered_group or not group.members:
                group.leave_and_wait()
                group.exchange_status(self._status())
            self._has_entered_group = True
            if not group.is_connected:
                group.connect()
        is_distributed = dist.is_initialized()
        rank = dist.get_rank() if is_distributed else 0
        world_size = dist.get_world_size() if is_distributed else 1
        sampler = self._batches.sampler
        # With logical workers, each rank takes its part from the whole batch.
        has_whole_batches = self._logical_workers is not None
        sampler.set_rank(*((0, 1) if has_whole_batches else (rank, world_size)))
        if self._create_state is not None:
            self.state = {}  # Free the memory of the old state first.
            self._use_state(self._create_state())
        if group is not None:
            if self._logical_workers is not None:
                self._logical_workers.on_group_changed()
            if self._manager is not None:
                nodes = [member.node for member in group.members]
                self._manager.on_group_changed(local_rank=nodes[:rank].count(nodes[rank]))

    def _use_state(self, state: TrainingState) -> None:
        """Train `state` from now on."""
        self.state = check_names(state)
        reject_state_dicts(state)
        parts = self._parts()
        if self._create_state is None:
            _reject_sharded(parts)

    def _parts(self) -> TrainingState:
        """Return what is saved now: the state, and the position of the batches.

        The script may have replaced values and objects in the state.
        """
        parts = dict(self.state)
        sources = (self._batches, self._batches.sampler)
        if not any(part is source for part in parts.values() for source in sources):
            _add_part(parts, "batches", self._batches)
        logical_workers = self._logical_workers
        if logical_workers is not None and all(p is not logical_workers for p in parts.values()):
            _add_part(parts, "logical", logical_workers)
        return parts

    def _put(self, parts: TrainingState) -> None:
        """Put restored values into the state of the script."""
        self.state.update((name, parts[name]) for name in self.state)

    def _status(self) -> MemberStatus:
        return MemberStatus(
            step=self.step if self._has_state else None,
            is_complete=self._is_complete and self._create_state is None,
            is_in_step_loop=True,
        )

    def _synchronize_state(self) -> None:
        """Bring all members to the newest committed step: from a member, or from the manager."""
        members = [self._status()] if self._group is None else self._group.members
        plan = plan_broadcast(members, allow_older_step=self._manager is None)
        if plan is None:
            self._restore(members)
        elif self._group is not None:
            self._broadcast_state(plan)
        self._has_state = self._is_complete = True

    def _restore(self, members: Sequence[MemberStatus]) -> None:
        """Restore the newest state that the manager finds.

        If there is none, or no manager, the initial state is kept.

        Raises:
            CheckpointError: there is none, although a member has committed a step.
        """
        self._is_complete = False
        parts = self._parts()
        result = None if self._manager is None else self._manager.restore(parts)
        if result:
            self._put(parts)
            self.step = result.step
            if result.source == "disk":
                self._saved_step = result.step  # A finished job that runs again saves nothing.
            return
        committed = [member.step for member in members if member.step is not None]
        if committed:
            reason = f", because {self._obstacle}" if self._obstacle else ""
            raise CheckpointError(
                f"step {max(committed) + 1} was interrupted and cannot be rolled back{reason}, and"
                " no worker, snapshot or checkpoint has the state of a completed step: give steps a"
                " manager, and also save_every if no agent keeps snapshots"
            )

    def _broadcast_state(self, plan: BroadcastPlan) -> None:
        """Send the state of the source to the receivers. Every member must call this."""
        started, parts = monotonic(), self._parts()
        with peer_group() as peers:
            is_receiver = peers.rank in plan.receivers
            if plan.receivers:
                # If packing fails here, only this worker fails, and the others continue without it.
                pack = _pack_state(parts) if peers.rank == plan.source else None
                pack = peers.broadcast_pack(plan.step, pack, plan.source, plan.receivers)
            if is_receiver:
                self._is_complete = False
                plan_restore(parts, unpack(require_not_none(pack, "a pack"), copy=False))()
                self._put(parts)
                self.step, self._has_state, self._is_complete = plan.step, True, True
            if self._manager is not None:
                keep = bool(self._snapshot_every)
                self._manager.on_state_broadcast(plan.step, parts, plan.source, peers, keep=keep)
        if is_receiver:
            context().report_restored(plan.step, source="peer", seconds=monotonic() - started)


def _add_part(parts: TrainingState, name: str, part: Any) -> None:
    if name in parts:
        raise ConfigError(
            f"the state has another {name!r}, the name under which steps saves the object that it"
            " was given: use another name, or put that object into the state"
        )
    parts[name] = part


def _reject_sharded(state: TrainingState) -> None:
    def visit(_path: object, value: Any) -> Any:
        if is_sharded(value):
            raise ConfigError(SHARDED_STATE)
        return value

    map_leaves(to_plain_values(state), visit)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _pack_state(state: TrainingState) -> memoryview:
    """Return a copy of the state as bytes."""
    image = plan_layout(state)
    memory = memoryview(new_memory(image.size))
    image.copy_to(memory)
    return memory[: image.size]
