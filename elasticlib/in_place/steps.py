"""The training loop of a worker that outlives its group: one attempt of one step after another.

    elasticlib.init_process_group("gloo")
    ...
    for attempt in elasticlib.steps(batches, state, manager=manager, epochs=3, loader=make_loader):
        with attempt as batch:
            if attempt.new_group:
                parallel = DistributedDataParallel(model)
            ...                                     # forward, backward, optimizer.step()
            attempt.report(loss=loss, samples=len(batch))

A step counts once its `with` has ended on this worker. Workers of a group may then be one step
apart when it breaks; in the next group the newest such step is what all go on from.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import attrs
import torch.distributed as dist

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.pack import plan_layout, unpack
from ..checkpoint.peers import givers, peers_of
from ..checkpoint.place import new_memory
from ..checkpoint.restore_plan import check_names, plan_restore
from ..checkpoint.snapshot_source import is_sharded
from ..checkpoint.state_tree import map_leaves, reject_state_dicts, to_plain_values
from ..clock import monotonic
from ..data.batch_sampler import ElasticBatchSampler
from ..data.position import check_int
from ..errors import CheckpointError, ConfigError
from ..logical.workers import LogicalWorkers
from ..workers.context import Stop, context
from .decide import Takeover, Word, choose
from .group import POLL_SECONDS, Group, this_group
from .undo import Undo

log = logging.getLogger("elasticlib.in_place")

WORD_SECONDS = 5.0
"""For which an error that a lost peer may have caused waits for the agent to say so."""
State = dict[str, Any]
Loader = Callable[["Drawn"], Iterable[Any]]


class Attempt:
    """One attempt of one step, to be entered: `with attempt as batch`.

    Attributes:
        step: the number that the step has, from 1, once it is committed.
        epoch: that its batch is of.
        new_group: whether it is the first in this process group: what was made for the group
            before, such as a DistributedDataParallel, is to be made anew.
        batch: what `with` gives.
        state: what `steps` was given as the state, or what the function given has made for this
            group.
        committed: whether the step counts; false until the block has ended, and after one that was
            cut, whose step will be attempted again.
    """

    def __init__(self, loop: Steps, batch: Any, *, new_group: bool) -> None:
        self.step, self.epoch = loop.step + 1, loop.epoch
        self.batch, self.new_group, self.state = batch, new_group, loop.state
        self.committed = self.entered = False
        self.told: dict[str, Any] = {}
        self._loop = loop
        self._position = loop._batches.position

    def report(
        self,
        *,
        loss: float | None = None,
        samples: float | None = None,
        pin: bool = False,
    ) -> None:
        """What is told of this step once it is committed.

        Args:
            loss, samples: as of `elasticlib.context().step`.
            pin: save this step even if `save_every` does not ask for it, and pin the checkpoint as
                `CheckpointManager.save` does. All ranks give the same value.
        """
        self.told = {"loss": loss, "samples": samples, "pin": pin}

    def __enter__(self) -> Any:
        if self.entered:
            raise ConfigError(f"the attempt of step {self.step} was entered already")
        self.entered = True
        return self.batch

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            # This assignment is what makes the step count. If an exception, as of a signal handler,
            # interrupts what follows, `Steps._settle` completes the step later.
            self.committed = True
            self._loop._commit(self)
            return False
        return self._loop._is_cut_by(error)

    def _count(self) -> None:
        """Count the batch as trained on. A second call changes nothing."""
        batches = self._loop._batches
        batches.progress.position = self._position
        batches.advance()


class Drawn:
    """This worker's share of each batch that is left of an epoch: lists of indices, as a
    DataLoader takes them for its `batch_sampler`."""

    def __init__(self, batches: ElasticBatchSampler, logical: LogicalWorkers | None) -> None:
        self._batches, self._logical = batches, logical

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            if self._logical is None:
                yield batch
            else:
                places = self._logical.samples(len(batch))
                yield batch[places.start : places.stop]


def steps(
    batches: ElasticBatchSampler,
    state: State | Callable[[], State],
    *,
    manager: CheckpointManager | None = None,
    epochs: int = 1,
    loader: Loader | None = None,
    logical: LogicalWorkers | None = None,
    snapshot_every: int = 1,
    save_every: int = 0,
) -> Steps:
    """The attempts of all steps that are left, after the state was restored.

    Where `elasticlib.init_process_group` has made a group that can be formed anew, a step that is
    cut as a member is lost or joins is undone, and attempted again by the next group. Elsewhere an
    error is raised as ever, and the agent starts the workers anew.

    A script may catch an exception, such as KeyboardInterrupt, and iterate the same object again.
    A step whose block had ended counts. Another one is undone and attempted again. If its optimizer
    had begun to write, it cannot be undone: then the manager restores the newest saved step.

    Args:
        batches: its rank and world size are set for each group, its epochs named, its steps
            counted. Its position is a part of the state.
        state: as of `CheckpointManager.restore`; all that a worker has to have to go on, the same
            on all ranks. If tensors in it are sharded, a function that makes it anew in each group:
            the manager then restores it there, from snapshots in the agents' memories.
        manager: restores first, and where no living worker has the state whole; keeps snapshots,
            and saves when the loop ends.
        epochs: at the end of which the loop is over.
        loader: called anew for each group and epoch with this worker's lists of indices: what it
            returns is iterated. By default the lists are the batches.
        logical: each worker's share of a batch is that of its logical workers.
        snapshot_every, save_every: steps; 0 for never.

    Raises:
        ConfigError: an argument cannot be, or the state has sharded tensors and is no function.
            While the result is iterated, CheckpointError: an interrupted step cannot be undone, and
            no worker and no manager has the state of a completed step.
    """
    if not isinstance(batches, ElasticBatchSampler):
        raise ConfigError(
            f"steps takes an ElasticBatchSampler, got a {type(batches).__qualname__}: it is what"
            " deals each batch to whatever workers there are"
        )
    for name, value in (("snapshot_every", snapshot_every), ("save_every", save_every)):
        if check_int(name, value) < 0:
            raise ConfigError(f"need {name} >= 0, got {value}")
    if callable(state) and manager is None:
        raise ConfigError("a state that is made for each group is restored there: give a manager")
    loop = Steps(batches, state, manager, logical)
    loop.epochs, loop.loader = check_int("epochs", epochs), loader
    loop.snapshot_every, loop.save_every = snapshot_every, save_every
    if not callable(state):
        loop._take(state)
    return loop


def _refuse_sharded(state: State) -> None:
    def look(_way: object, value: Any) -> Any:
        if is_sharded(value):
            raise ConfigError(
                "the state has sharded tensors, of which a lost worker takes its part along: give"
                " steps a function that makes model and optimizer for the group that there is,"
                " and returns the state"
            )
        return value

    map_leaves(to_plain_values(state), look)


class Steps:
    """What `elasticlib.steps` returns.

    Attributes:
        step: the last one that was committed; 0 before the first.
        stopped: why the loop has ended early, if the agent asked for it; else None.
    """

    def __init__(
        self,
        batches: ElasticBatchSampler,
        state: State | Callable[[], State],
        manager: CheckpointManager | None,
        logical: LogicalWorkers | None,
    ) -> None:
        self.step = 0
        self.state: State = {}
        self.stopped: Stop | None = None
        self.epochs = 1
        self.loader: Loader | None = None
        self.snapshot_every, self.save_every = 1, 0
        self._undo = Undo({})
        self._make = state if callable(state) else None
        self._parts: State = {}
        self._batches, self._manager, self._logical = batches, manager, logical
        self._group: Group | None = this_group()
        self._has_state = self._whole = False
        """Whether there is a state of the job's here, and whether it is just as `step` left it."""
        self._attempt: Attempt | None = None
        """The attempt that has begun, until the step is counted or undone."""
        self._entered = False
        self._saved = 0

    def _take(self, state: State) -> None:
        """This is the state from now on, with where the batches stand."""
        parts = dict(check_names(state))
        reject_state_dicts(parts)
        if not any(
            part is self._batches or part is self._batches.sampler for part in parts.values()
        ):
            parts["batches"] = self._batches
        if self._logical is not None and not any(one is self._logical for one in parts.values()):
            parts["logical"] = self._logical
        if self._make is None:
            _refuse_sharded(parts)
            self._undo = Undo(parts)
        self.state, self._parts = state, parts

    @property
    def epoch(self) -> int:
        """In which the job stands."""
        return self._batches.sampler.epoch

    def __iter__(self) -> Iterator[Attempt]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._undo.watching())
            if self._group is not None:
                context().can_keep()
                # The watch ends first, so that nothing cuts what the script does afterwards.
                stack.callback(self._group.close)
                stack.enter_context(self._group.watched())
            self._settle()
            self._begin_group()
            while not (yield from self._in_this_group()):
                self._begin_group()
        if self._manager is not None and self._saved != self.step:
            self._save()

    # -- in one group -----------------------------------------------------------------------------

    def _in_this_group(self) -> Generator[Attempt, None, bool]:
        """Its attempts; whether the loop is over when it is."""
        new = True
        self._undo.look()
        for epoch in range(self.epoch, self.epochs):
            self._batches.set_epoch(epoch)
            if not len(self._batches):
                continue  # a script that iterates this object again may have used the epoch up
            drawn = Drawn(self._batches, self._logical)
            for batch in drawn if self.loader is None else self.loader(drawn):
                if context().must_leave:
                    return False
                self._undo.begin()
                self._attempt = attempt = Attempt(self, batch, new_group=new)
                yield attempt
                new = False
                self._settle()
                if not attempt.entered:
                    raise ConfigError("each attempt is to be entered: `with attempt as batch`")
                if not attempt.committed or self._leaves_for_more():
                    return False
                if self.stopped is not None:
                    return True
        return self._end_together()

    def _settle(self) -> None:
        """Complete the attempt that began last, if it was committed, or else undo it.

        An exception may interrupt this method at any line: the next call does the rest.
        """
        attempt = self._attempt
        if attempt is None:
            return
        if attempt.committed:
            attempt._count()
            self.step = attempt.step
        else:
            # What a function makes is made anew for the next group, so it is not undone.
            self._whole = self._undo.back() and self._make is None
        self._attempt = None

    def _commit(self, attempt: Attempt) -> None:
        self._settle()
        told, manager = dict(attempt.told), self._manager
        pin = told.pop("pin", False)
        context().step(self.step, **told)
        if manager is not None and _is_due(self.step, self.snapshot_every):
            manager.snapshot(self.step, self._parts)
        if pin or _is_due(self.step, self.save_every):
            try:
                self._save(pin=pin)
            except Exception as error:
                # To save a sharded state takes all ranks.
                if not self._is_of_group(error):
                    raise

    def _save(self, *, pin: bool = False) -> None:
        if self._manager is not None:
            self._manager.save(self.step, self._parts, pin=pin)
            self._saved = self.step

    def _leaves_for_more(self) -> bool:
        """Whether all leave this group after this step for one of another size. What else the
        agent asks for ends the loop."""
        stop = context().should_stop()
        if stop is not None and stop.reason == "resize" and self._group is not None:
            return True
        self.stopped = stop
        return False

    def _end_together(self) -> bool:
        """Whether all have come to the end; else one was lost before, and may need this state."""
        if self._group is None:
            return True
        try:
            dist.barrier()
        except Exception as error:
            if not self._is_of_group(error):
                raise
            return False
        return True

    # -- what a lost member breaks ----------------------------------------------------------------

    def _is_cut_by(self, error: BaseException) -> bool:
        """Whether what an attempt raised comes of its group's end; then it is undone."""
        if not self._is_of_group(error):
            return False
        self._settle()
        done = "is undone" if self._whole else "had been applied in part: the state is taken anew"
        log.info("the attempt of step %d was cut, and %s: %s", self.step + 1, done, error)
        return True

    def _is_of_group(self, error: BaseException) -> bool:
        """Whether the group is over. The agent says so, sooner or later than a lost peer is seen,
        and the error that is seen may be any."""
        if self._group is None or not isinstance(error, Exception):
            return False
        context().group_broke()
        alone = len(self._group.words) == 1
        patient = isinstance(error, RuntimeError | TimeoutError | CheckpointError) and not alone
        deadline = monotonic() + (WORD_SECONDS if patient else 0)
        pause = threading.Event()
        while not context().must_leave:
            if monotonic() > deadline:
                return False
            pause.wait(POLL_SECONDS)
        return True

    # -- from group to group ----------------------------------------------------------------------

    def _begin_group(self) -> None:
        """Come to a group of which all members have the state of one step."""
        while True:
            try:
                self._enter_group()
                return self._agree()
            except Exception as error:
                if not self._is_of_group(error):
                    raise
                log.info("the group was over before it began: %s", error)

    def _enter_group(self) -> None:
        group = self._group
        if group is not None:
            if self._entered or not group.words:
                group.leave()
                group.meet(attrs.asdict(self._word()))
            self._entered = True
            if not group.connected:
                group.connect()
        joined = dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        sampler = self._batches.sampler
        # Logical workers find their samples in the whole batch, of which each rank has its own.
        sampler.rank, sampler.num_replicas = (0, 1) if self._logical else (rank, world)
        if self._make is not None:
            self.state, self._parts = {}, {}  # what was sharded is not to be there twice
            self._take(self._make())
        if group is not None:
            nodes = [word["node"] for word in group.words]
            if self._logical is not None:
                self._logical.regrouped()
            if self._manager is not None:
                self._manager.regrouped(local_rank=nodes[:rank].count(nodes[rank]))

    def _word(self) -> Word:
        """Return what this worker says about its state."""
        whole = self._whole and self._make is None
        return Word(self.step if self._has_state else None, whole, ready=True)

    def _agree(self) -> None:
        """Have the newest committed state: this worker's own, another's, or the manager's."""
        if self._group is None:
            words = [self._word()]
        else:
            words = [Word.read(word) for word in self._group.words]
        found = choose(words, any_step=self._manager is None)
        if found is None:
            self._restore(words)
        elif self._group is not None:
            self._take_over(found, words)
        self._has_state = self._whole = True

    def _restore(self, words: Sequence[Word]) -> None:
        """Have the newest state that the manager can restore, or begin a job without a state."""
        self._whole = False
        restored = None if self._manager is None else self._manager.restore(self._parts)
        if restored:
            self.step = restored.step
        elif interrupted := [word.step + 1 for word in words if word.step is not None]:
            raise CheckpointError(
                f"step {max(interrupted)} was interrupted after an optimizer had begun to write,"
                " so it cannot be undone; and no worker, snapshot or checkpoint has the state of a"
                " completed step: give steps a manager, and save_every where no agent keeps"
                " snapshots"
            )

    def _take_over(self, found: Takeover, words: Sequence[Word]) -> None:
        """All come to the state of the source, which those that lack it are sent."""
        began = monotonic()
        with peers_of() as peers:
            takes = peers.rank in found.takers
            # What fails here fails on this worker alone: the others go on without it.
            mine = peers.rank == found.source and found.takers
            packs = {0: _packed(self._parts)} if mine else {}
            if found.takers:
                nodes = [word.node for word in words]
                peers.carry(found.step, {0: givers([found.source], nodes, found.takers)}, packs)
        if takes:
            self._whole = False
            plan_restore(self._parts, unpack(packs[0], copy=False))()
            self.step, self._has_state, self._whole = found.step, True, True
        if self._manager is not None and self.snapshot_every:
            self._manager.taken_over(found.step, self._parts, found.source)
        if takes:
            context().restored(found.step, source="peer", seconds=monotonic() - began)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _packed(state: State) -> memoryview:
    """The state as it is now, in memory of its own."""
    image = plan_layout(state)
    memory = memoryview(new_memory(image.size))
    image.copy_to(memory)
    return memory[: image.size]
