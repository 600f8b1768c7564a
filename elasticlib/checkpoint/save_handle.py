"""Handles of saves: what `CheckpointManager.save` returns, and how ranks learn of results.

The attributes of a `LocalSave` are what the calling thread and the writer thread of a save share:
each is written by one of the two, and polled by the other. A `RemoteSave` reads the result of a
save that rank 0 writes. `SaveResults` are the rows about saves that rank 0 puts into the store in
which the ranks' process group was formed. This module does not know how a checkpoint is written.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs

from ..clock import monotonic, sleep
from ..errors import CheckpointError
from .catalog import CheckpointCatalog
from .collectives import PeerGroup
from .rank_digests import (
    DigestExchange,
    PartComparison,
    RankComparison,
    StateDigest,
    StatesDifferError,
    difference_error,
)
from .snapshot_slots import MappedSlot

log = logging.getLogger("elasticlib.checkpoint")

RESULT_TIMEOUT_S = 1800.0  # A rank waits this long for rank 0's result: the default of torch.
EXIT_TIMEOUT_S = 10.0  # the same for a call that has failed, while Python is shutting down
MIN_POLL_S, MAX_POLL_S = 0.001, 0.02
STORAGE_POLL_INTERVAL_S = 0.1  # used without a store; listing a directory is slower
NUM_STORED_ROWS = 1000  # Older rows are deleted from the store.
RESTART_INTERVAL_S = 1.0  # A waiter starts the writer again if a signal handler interrupted it.

_calls: dict[str, list[object]] = {}
"""Objects that stand for the calls of `save`, by the prefix of their keys in the store. The number
of a call is its place. Managers of one directory share them, because the keys of a closed manager
still exist."""


class ExitState:
    """The shutdown of this process, during which no threads can be started."""

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        """Note that the process is shutting down."""
        self.has_begun = True


EXIT = ExitState()


def poll_intervals() -> Iterator[float]:
    """Yield the seconds to sleep between looks at an attribute of another thread, for ever."""
    interval_s = MIN_POLL_S
    while True:
        yield interval_s
        interval_s = min(2 * interval_s, MAX_POLL_S)


class SaveHandle:
    """A save that was started, or skipped. Thread-safe.

    In a process that was forked from the one that writes the save, `done`, `wait` and `error` raise
    CheckpointError.
    """

    is_skipped = False
    """True if nothing was saved, because the previous save was still being written. It is the same
    on all ranks."""

    def __init__(self, step: int) -> None:
        self.step = step  # The saved state is the one after this step.
        self.was_checked = False  # A caller has seen the failure, so that it is not raised again.
        self._failure: BaseException | None = None
        self._process = os.getpid()

    def __repr__(self) -> str:
        if self.is_skipped:
            state = "skipped"
        elif self._process != os.getpid() or not self.done():
            state = "in progress"
        else:
            state = f"failed: {self._failure}" if self._failure else "durable"
        return f"<SaveHandle of step {self.step}: {state}>"

    def done(self) -> bool:
        """Return whether the save is durable, has failed or was skipped. Never waits."""
        return not self._pending_reason(0.0)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable, whichever rank writes it.

        Ranks may call this independently of each other. A skipped save returns at once.

        Args:
            timeout: seconds. The default is unlimited on a rank that writes, and half an hour on a
                rank that waits for another rank's result.

        Raises:
            CheckpointError: the save failed; or it did not finish within the timeout, and the call
                can be repeated.
        """
        if reason := self._pending_reason(timeout):
            raise CheckpointError(reason)
        try:
            if self._failure is not None:
                raise self._failure
        except BaseException as error:
            # A signal handler's exception may interrupt this call before the failure is raised.
            self.was_checked = self.was_checked or error is self._failure
            raise
        self.was_checked = True

    def mark_checked(self) -> None:
        """Note that a caller has seen the failure, so that it is not raised again."""
        self.was_checked = True

    @property
    def error(self) -> BaseException | None:
        """Why the save failed. None if it is durable, skipped or in progress.

        A failure that was read here is not raised again by the manager's next call.
        """
        failure = self._failure if self.done() else None
        self.was_checked = self.was_checked or failure is not None
        return failure

    def _pending_reason(self, timeout: float | None) -> str:
        """Wait for the result of the save. Return an error message after `timeout`, else ''."""
        raise NotImplementedError


class SkippedSave(SaveHandle):
    """A save that was not started, because the previous one was still being written."""

    is_skipped = True

    def _pending_reason(self, timeout: float | None) -> str:  # noqa: ARG002
        return ""


class JobRunner(Protocol):
    """The thread that executes a job, see `writer.WriterThread`."""

    def start(self) -> bool: ...

    @property
    def is_interrupted(self) -> bool: ...


class LocalSave(SaveHandle):
    """A save that the writer thread of this process writes, and the job of that thread.

    Args:
        step: the step.
        writer: executes the job. Each waiter starts it if it does not run.
        is_call_running: whether the call of `save` is still running.
        is_pinned: whether retention keeps the checkpoint.
        metrics: the metrics of the checkpoint.
    """

    def __init__(
        self,
        step: int,
        writer: JobRunner,
        is_call_running: Callable[[], bool],
        *,
        is_pinned: bool,
        metrics: Mapping[str, float],
    ) -> None:
        super().__init__(step)
        self.is_call_running = is_call_running
        self.started_at = monotonic()
        self.is_pinned, self.metrics = is_pinned, metrics
        self._writer = writer
        # The calling thread writes these.
        self.call = object()  # stands for the call of `save`, see `SaveResults.count`
        self.work: Callable[[LocalSave], None] | None = None  # None before the job is posted
        self.caller = 0  # the thread that has posted the job
        self._is_run_by_caller = False
        self.slot: MappedSlot | None = None  # reserved until the job is finished
        self.copy: Callable[[], None] = lambda: None  # copies the state to the slot
        self.data: memoryview | None = None  # the complete copy
        self.is_copied = False
        self.call_error: Exception | None = None  # why the call of `save` failed on this rank
        self.comparison: RankComparison | PartComparison | None = None
        self.is_sharded = False  # False as long as it is not known
        # The writer thread writes these.
        self.is_agreed = False  # All ranks are ready to copy their parts.
        self.is_finished = False
        self.committed_at = 0.0  # by `monotonic`
        self.durable_s: float | None = None  # seconds from the call until the save was durable

    def mark_sharded(self, is_sharded: bool) -> None:
        """Note whether each rank saves a part of the state."""
        self.is_sharded = is_sharded

    def compare(self, comparison: RankComparison | PartComparison) -> None:
        """Let the writer compare the state with those of the other ranks."""
        self.comparison = comparison

    def reserve(self, slot: MappedSlot, copy: Callable[[], None] = lambda: None) -> None:
        """Note the slot of the copy, and the function that copies a sharded state to it."""
        self.slot, self.copy = slot, copy

    def assign(self, work: Callable[[LocalSave], None]) -> None:
        """Note the work of the writer. The thread that calls this posts the job."""
        self.work, self.caller = work, threading.get_ident()

    def agree(self) -> None:
        """Note that all ranks are ready to copy their parts."""
        self.is_agreed = True

    def mark_committed(self, committed_at: float) -> None:
        """Note when the checkpoint was committed, by `monotonic`."""
        self.committed_at = committed_at

    def give(self, data: memoryview) -> None:
        """Note that the copy is complete."""
        self.data = data
        self.is_copied = True

    def fail(self, error: BaseException | None) -> None:
        """Note why the call of `save` failed. None: an exception interrupted it anywhere."""
        if not isinstance(error, Exception):
            name = "an exception of a signal handler" if error is None else type(error).__name__
            error = CheckpointError(f"step {self.step} was not saved: {name} interrupted save()")
        self.call_error = self.call_error or error

    def run(self) -> None:
        """Execute the job, unless it is finished. Only the writer calls this."""
        if self.is_finished:
            return
        if self.work is None:
            # A signal handler has interrupted the job. If that was in the call of `save`, the call
            # has raised its exception.
            self.was_checked = self.was_checked or self._is_run_by_caller
        else:
            self._is_run_by_caller = self.is_run_by_caller
            failure: Exception | None = None
            self._failure = CheckpointError(
                f"step {self.step} was not saved: an exception interrupted the writer"
            )
            try:
                self.work(self)
                is_known = self.committed_at > self.started_at
                self.durable_s = (self.committed_at if is_known else monotonic()) - self.started_at
            except Exception as error:
                failure = error
            finally:
                # These refer to the memory of the copy, which may be freed now, or to the state.
                self.work, self.slot, self.data, self.copy = None, None, None, lambda: None
            self._failure = failure
        self.is_finished = True

    @property
    def is_run_by_caller(self) -> bool:
        """True in the job, if the thread that has posted the job executes it."""
        return self.caller == threading.get_ident()

    def find_late_difference(self) -> bool:
        """Return whether a rank was found to have another state after the save had succeeded.

        The save has failed then, and no caller has seen it.
        """
        comparison = self.comparison
        if not isinstance(comparison, RankComparison) or self._failure or not self.is_finished:
            return False
        self._failure = comparison.find_difference(is_durable=True)
        self.was_checked = self.was_checked and self._failure is None
        return self._failure is not None

    def unseen_failure(self) -> BaseException | None:
        """Return the failure if the save is finished and no caller has seen that it failed."""
        self.find_late_difference()
        return None if self.was_checked else self._failure

    def settle(self) -> None:
        """Wait until the writer has finished. A failure is kept for `wait`."""
        if self._process == os.getpid():
            self._wait_until_finished(None)

    def wait_for_agreement(self) -> None:
        """Wait until all ranks are ready to copy their parts, or the save has failed."""
        self._poll(lambda: self.is_agreed or self.is_finished, None)

    def _wait_until_finished(self, timeout: float | None) -> bool:
        return self._poll(lambda: self.is_finished, timeout)

    def _poll(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        now = next_start = monotonic()
        deadline = None if timeout is None else now + timeout
        for pause_s in poll_intervals():
            if is_done() or (deadline is not None and now >= deadline):
                break
            if now >= next_start:
                if self._writer.is_interrupted:
                    raise CheckpointError(
                        f"step {self.step} is being written by the call that this signal handler "
                        "has interrupted, so it cannot wait for it: return from the handler first"
                    )
                next_start = now + RESTART_INTERVAL_S
                if not self._writer.start():
                    continue
            sleep(pause_s if deadline is None else min(pause_s, deadline - now))
            now = monotonic()
        return is_done()

    def _pending_reason(self, timeout: float | None) -> str:
        if self._process != os.getpid():
            raise CheckpointError(
                f"step {self.step} is saved by the process that this one was forked from, and only "
                "that process knows the result"
            )
        if not self._wait_until_finished(timeout):
            return f"step {self.step} is still being written"
        self.find_late_difference()
        return ""


class RemoteSave(SaveHandle):
    """A save that rank 0 writes.

    Its result is read from the ranks' store. Without a store, or after the store's host has exited,
    its checkpoint, or that of the newest save, shows that the save has succeeded.
    """

    def __init__(
        self,
        step: int,
        number: int,
        results: SaveResults,
        catalog: CheckpointCatalog,
        digest: StateDigest | None = None,
    ) -> None:
        super().__init__(step)
        self._number, self._results, self._catalog = number, results, catalog
        self._digest = digest  # of this rank's state
        self._is_finished = False
        results.newest_step = step

    def _pending_reason(self, timeout: float | None) -> str:
        results, step = self._results, self.step
        deadline = monotonic() + (RESULT_TIMEOUT_S if timeout is None else timeout)
        # This polls, because a wait inside the store's client blocks its other users here.
        intervals = poll_intervals()
        while not self._poll():
            if monotonic() < deadline:
                pause_s = next(intervals)
                sleep(pause_s if results.is_reachable else STORAGE_POLL_INTERVAL_S)
            elif results.is_reachable:
                return (
                    f"rank 0 has not reported the result of saving step {step}: it has exited, is "
                    "still saving, or did not call save"
                )
            else:
                where = self._catalog.storage.name
                return f"rank 0 was to save step {step} in {where}, which does not exist"
        return ""

    @property
    def has_unseen_difference(self) -> bool:
        """True if it is known here that the save has failed because ranks have different states.

        A caller that has checked the handle has seen it.
        """
        return isinstance(self._failure, StatesDifferError) and not self.was_checked

    @property
    def has_succeeded(self) -> bool:
        """True if the result is known here, and is no failure."""
        return self._is_finished and self._failure is None

    def _poll(self) -> bool:
        """Read the result and keep a failure. Return whether the save has finished."""
        results, step = self._results, self.step
        if not self._is_finished and not results.is_reachable:
            # Pruning may have deleted this step after a newer one was committed.
            steps = {step, results.newest_step}
            refs = self._catalog.live_refs()
            self._is_finished = any(ref.step in steps and ref.is_usable for ref in refs)
        elif not self._is_finished and (row := results.read(self._number)) is not None:
            if row.stage == DECIDED:
                return False
            self._is_finished = True
            if row.step != step or row.stage == SHARDED:
                self._failure = CheckpointError(
                    f"rank 0 called save for {row.describe()}, and this rank for step {step}: all "
                    "ranks must make the same calls"
                )
            elif row.error:
                self._failure = row.to_error()
            elif not row.is_compared and self._digest is not None:
                self._failure = self._compare(self._digest)
            self._digest = None
        return self._is_finished

    def _compare(self, digest: StateDigest) -> StatesDifferError | None:
        """Compare this rank's state with that of rank 0, which did not wait for it."""
        exchange = self._results.digests
        table = exchange.read(self._number, 0)
        paths = [] if table is None else digest.find_difference(table)
        if not paths:
            return None
        return difference_error(self.step, exchange.rank, paths, is_durable=True)


DECIDED, SKIPPED, SHARDED, FAILED, FINISHED = "decided", "skipped", "sharded", "failed", "finished"


@attrs.frozen
class SaveRow:
    """A message of rank 0 to the other ranks about one call of `save`.

    The stages are: rank 0 has decided to save or to skip; all ranks write their parts, and meet in
    an agreement; the call has failed on rank 0; what rank 0 has written alone is finished.
    """

    step: int
    stage: str
    error: str = ""  # why the call or the save failed
    differs: bool = False  # because a rank has another state
    is_compared: bool = True  # rank 0 has found the states of all ranks to be equal

    def to_error(self) -> CheckpointError:
        """Return the error for other ranks."""
        kind = StatesDifferError if self.differs else CheckpointError
        return kind(f"step {self.step} was not saved by rank 0: {self.error}")

    def describe(self) -> str:
        """Return what rank 0 saves, for messages."""
        return f"step {self.step}" + (" of a sharded state" if self.stage == SHARDED else "")


class SaveResults:
    """The rows about one manager's saves, which rank 0 writes to the ranks' store.

    All ranks make the same calls of `save`, so the number of a call is the same on all of them.

    Args:
        store: the store in which torch's process group was formed, or None.
        name: identifies the manager. It is the same on all its ranks.
        rank: this rank. Rank 0 writes the rows.
        world_size: the number of ranks.
    """

    def __init__(self, store: Any, name: str, *, rank: int = 0, world_size: int = 1) -> None:
        self.is_reachable = store is not None  # False once the store's host has exited
        self.is_shared = store is not None and world_size > 1
        self.is_cancelled = False  # The process group has other members now.
        self.newest_step = 0  # of the saves that this rank expects from rank 0
        self.store, self._rank = store, rank
        self._num_passed_over = 0  # calls of rank 0 that this rank has not made
        self._prefix = f"elasticlib/saves/{zlib.crc32(os.fsencode(name)):08x}"
        self.digests = DigestExchange(store, self._prefix, rank, world_size)

    def cancel(self) -> None:
        """Stop waiting for other ranks: the process group has other members now."""
        self.is_cancelled = True

    def count(self, job: LocalSave) -> None:
        """Count a call of `save`, in one operation that a signal handler cannot interrupt."""
        _calls.setdefault(self._prefix, []).append(job.call)

    def number_of(self, job: LocalSave) -> int:
        """Return the number of a call, from 1 on rank 0; 0 if it was not counted."""
        calls = _calls.get(self._prefix, [])
        numbers = (at for at in range(len(calls), 0, -1) if calls[at - 1] is job.call)
        number = next(numbers, 0)
        return number and number + self._num_passed_over

    def connect(self, world_size: int, number: int) -> PeerGroup:
        """Connect the ranks, for collectives that never mix with those of the training.

        Args:
            world_size: the number of ranks.
            number: the number of the save for which all ranks do this.
        """
        if not self.is_shared:
            return PeerGroup()
        name = f"{self._prefix}/group/{number}"
        return PeerGroup.connect(self.store, name, self._rank, world_size)

    def publish(
        self, job: LocalSave, error: BaseException | None = None, *, is_compared: bool = True
    ) -> None:
        """Publish the result of a save that rank 0 has written alone.

        Args:
            job: the save.
            error: why it failed, or None.
            is_compared: see `SaveRow`.
        """
        row = SaveRow(job.step, FINISHED, *_describe(error), is_compared=is_compared)
        self._write_or_log(job, row)

    def publish_failed_call(self, job: LocalSave) -> None:
        """Publish that the call of `save` has failed on rank 0."""
        self._write_or_log(job, SaveRow(job.step, FAILED, *_describe(job.call_error)))

    def read(self, number: int) -> SaveRow | None:
        """Return the row of a call, or None if there is none."""
        try:
            if not self.store.check([self._key(number)]):
                return None
            return SaveRow(**json.loads(self.store.get(self._key(number))))
        except RuntimeError as lost:
            log.info("cannot read the result of save %d in the ranks' store: %s", number, lost)
            self.is_reachable = False
            return None

    def agree_to_skip(self, job: LocalSave, *, is_busy: bool) -> bool:
        """Return whether all ranks skip this save: rank 0's `is_busy`, which it publishes.

        Raises:
            CheckpointError: rank 0 did not publish a decision within `RESULT_TIMEOUT_S`, its call
                of `save` failed, or there is no store.
        """
        try:
            if not self.is_reachable:
                raise RuntimeError("there is no process group")
            if self._rank == 0:
                self._write(job, SaveRow(job.step, SKIPPED if is_busy else DECIDED))
                return is_busy
            row = self._wait_for_row(job)
        except (RuntimeError, NotImplementedError) as error:
            raise CheckpointError(
                f"step {job.step} was not saved: with if_busy='skip' on several ranks, rank 0 "
                f"decides for all of them through the store of the process group: {error}"
            ) from error
        if row.stage == FAILED:
            raise row.to_error()
        return row.stage == SKIPPED

    def join_sharded_save(self, job: LocalSave) -> int | None:
        """Return the number of the save if all ranks meet in the agreement of a sharded save.

        Rank 0 decides that, because a call that fails on one rank may not know whether the state is
        sharded. Rank 0 publishes its decision before it waits for the other ranks.

        Returns:
            The number; or None if this rank's call has failed, and no other rank waits for it.

        Raises:
            CheckpointError: the state is sharded, and rank 0 does not save its part.
        """
        if not self.is_shared:
            return None if job.call_error else 1
        if self._rank == 0:
            self._write(job, SaveRow(job.step, SHARDED))
            return self.number_of(job)
        row = self._wait_for_row(job, DECIDED)
        while job.is_sharded and row.stage == FINISHED and row.step != job.step:
            self._num_passed_over += 1  # Rank 0 has saved another state alone.
            row = self._wait_for_row(job, DECIDED)
        if row.stage == SHARDED:
            return self.number_of(job)
        if job.call_error is not None:
            return None
        if row.stage == FAILED:
            raise row.to_error()
        raise CheckpointError(
            f"step {job.step} was not saved: this rank's state has sharded tensors, and that of "
            f"rank 0 at step {row.step} has none"
        )

    def _wait_for_row(self, job: LocalSave, earlier_stage: str = "") -> SaveRow:
        """Wait for the row of a call, of a later stage than the given one.

        Raises:
            CheckpointError: rank 0 does not call `save`.
        """
        started_at = monotonic()
        for pause_s in poll_intervals():
            row = self.read(self.number_of(job))
            if row is not None and row.stage != earlier_stage:
                return row
            is_leaving = job.call_error is not None and EXIT.has_begun
            timeout_s = EXIT_TIMEOUT_S if is_leaving else RESULT_TIMEOUT_S
            if self.is_cancelled or not self.is_reachable or monotonic() > started_at + timeout_s:
                break
            sleep(pause_s)
        raise CheckpointError(
            f"step {job.step} was not saved: rank 0 has exited, or has not called save"
        )

    def _write_or_log(self, job: LocalSave, row: SaveRow) -> None:
        try:
            self._write(job, row)
        except (RuntimeError, NotImplementedError) as lost:
            log.info("cannot publish the result of saving step %d: %s", job.step, lost)

    def _write(self, job: LocalSave, row: SaveRow) -> None:
        number = self.number_of(job)
        if not self.is_reachable or self._rank != 0 or not number:
            return
        self.store.set(self._key(number), json.dumps(attrs.asdict(row)))
        if (old := number - NUM_STORED_ROWS) > 0:
            self.store.delete_key(self._key(old))

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"


def _describe(error: BaseException | None) -> tuple[str, bool]:
    return ("" if error is None else str(error)[:4000]), isinstance(error, StatesDifferError)
