"""The writer thread of a manager, and the ranks that write a checkpoint together.

Whatever can block happens in this thread: claims, writes, commits, pruning, and the collectives of
sharded saves. In idle time it allocates memory for the next snapshot. The calling thread appends a
job and polls its attributes. The two share no lock, so an exception of a signal handler in the
calling thread has nothing to leave locked.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import attrs

from ..clock import monotonic, sleep
from ..errors import CheckpointError, require_not_none
from ..threads import CallRejectedError, SingleCall, daemon_thread, only_logged
from .catalog import DataFile
from .collectives import PeerGroup
from .commit import FOLDERS_IN_PROGRESS, Committer, part_name
from .rank_digests import PartComparison, RankComparison
from .save_handle import EXIT, LocalSave, SaveResults, poll_intervals

log = logging.getLogger("elasticlib.checkpoint")

WRITER_NICENESS = 10  # The thread runs while the training leaves processor time.
CALLER_CHECK_S = 1.0  # how late the writer notices that a signal handler interrupted a call


class WriterThread:
    """Executes the jobs of one manager, in order. The thread ends when there is nothing to do.

    An exception of a signal handler may interrupt the caller of a method at any line; a later call
    of `start` then executes what was posted. If no thread can be started, or Python is shutting
    down, `start` executes the jobs itself. The thread does not refer to the manager.
    """

    def __init__(self, on_saved: Callable[[int], object] = lambda _: None) -> None:
        """Create the writer. `on_saved` gets the step of each save that has succeeded."""
        self._on_saved = on_saved
        self.jobs: deque[LocalSave] = deque()  # The first one may be executing.
        self.last: LocalSave | None = None  # the job that was executed last
        self.last_durable_s: float | None = None  # of the last save that succeeded
        # Memory is allocated in steps, between which jobs are executed. A later request replaces
        # an earlier one.
        self.idle_work: deque[Iterable[None]] = deque(maxlen=1)
        self._claims: deque[Callable[[], object]] = deque(maxlen=1)
        self._work = SingleCall()
        self._process = os.getpid()
        _writers.add(self)

    def start(self) -> bool:
        """Start the thread if there are jobs and it does not run.

        Returns:
            False if this call has executed the jobs itself.

        Raises:
            BaseException: this call executes the jobs, and a signal handler has interrupted it.
        """
        if not self.jobs or self._work.is_running:
            return True
        if not EXIT.has_begun:
            try:
                self._start_thread()
                return True
            except (RuntimeError, MemoryError) as error:
                log.warning(
                    "cannot start a thread that writes step %d (%s): save() waits until it is "
                    "written",
                    self.jobs[0].step,
                    error,
                )
        self._execute()
        return False

    def prepare(self, work: Iterable[None]) -> None:
        """Execute steps of work in idle time, or never if no thread can be started."""
        self.idle_work.append(work)
        self._start_idle_work()

    def _start_idle_work(self) -> None:
        if not (self._work.is_running or EXIT.has_begun):
            with contextlib.suppress(RuntimeError, MemoryError):
                self._start_thread()

    def claim(self, act: Callable[[], object]) -> None:
        """Acquire a directory for which no save waits, unless no thread can be started."""
        self._claims.append(act)
        if not self.idle_work:  # The thread looks for claims after it has taken any idle work.
            self.idle_work.append(())
        self._start_idle_work()

    @property
    def is_interrupted(self) -> bool:
        """True if the calling thread executes a job, and is in a signal handler now."""
        return self._work.is_interrupted

    def drain(self) -> None:
        """Wait until all jobs are executed, and log a failure that no caller has seen."""
        if self._process != os.getpid():
            return
        for pause_s in poll_intervals():
            if not self.jobs or self._work.is_interrupted:
                break
            self.start()
            sleep(pause_s)
        if self.last is not None and (failure := self.last.unseen_failure()) is not None:
            log.error("a checkpoint was not saved: %s", failure)

    def _start_thread(self) -> None:
        # A thread starts the thread, because signal handlers run in the main thread. An exception
        # of one of them in `Thread.start` can leave a lock of `threading` locked.
        _thread.start_new_thread(self._start_named_thread, ())

    def _start_named_thread(self) -> None:
        try:
            daemon_thread(self._run, "elasticlib-save", only_logged).start()
        except (RuntimeError, MemoryError):
            self._run()  # This thread can do the work, too.

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        # A job that is posted while the last call ends finds that call running, and starts no
        # other thread.
        while self.jobs or self.idle_work:
            if not self._execute(self.idle_work):
                break  # Another thread works.

    def _execute(self, idle_work: deque[Iterable[None]] | None = None) -> bool:
        """Execute what there is to do. Return False if another call does."""

        def work() -> None:
            self._execute_jobs()
            while idle_work:
                with contextlib.suppress(IndexError):  # Another call replaced it.
                    steps = idle_work.popleft()
                    while self._claims:
                        self._claims.popleft()()
                        self._execute_jobs()
                    for _ in steps:
                        self._execute_jobs()

        try:
            self._work.run(work)
        except CallRejectedError:
            return False
        return True

    def _execute_jobs(self) -> None:
        while self.jobs:
            job = self.jobs[0]
            job.run()  # does nothing if the job is finished already, as after an interruption
            self.last = job
            if job.durable_s is not None:
                self.last_durable_s = job.durable_s
                self._on_saved(job.step)
            self.jobs.popleft()


_writers: WeakSet[WriterThread] = WeakSet()


def _drain_at_exit() -> None:
    EXIT.begin()
    for writer in list(_writers):
        writer.drain()


def _register() -> None:
    # `atexit` is too late: Python starts no threads then. It is also not called in a process of
    # `multiprocessing`. This has no public name; `concurrent.futures` uses it in the same way.
    register: Callable[..., Any] = threading._register_atexit  # type: ignore[attr-defined]
    try:
        register(_drain_at_exit)
    except RuntimeError:
        EXIT.begin()  # This module is imported while Python is shutting down.


_register()


class RankWriters:
    """The ranks that write the saves of a manager, as the writer thread of one of them sees them.

    A state that is the same on all ranks is written by rank 0 alone. For a sharded state there are
    three collectives: an agreement before the copy, the files of all ranks, and the result of rank
    0's commit. A failure on one rank fails the save on all ranks.

    Args:
        committer: commits the files, on rank 0.
        results: the rows of the saves in the store of the ranks.
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(
        self, committer: Committer, results: SaveResults, rank: int, world_size: int
    ) -> None:
        self._committer, self._results = committer, results
        self._rank, self._world_size = rank, world_size
        self._peers: PeerGroup | None = None  # connected by the first sharded save of all ranks

    def write_whole(self, job: LocalSave) -> None:
        """Write and commit a state that is the same on all ranks, and publish the result."""
        committer, comparison = self._committer, job.comparison
        try:
            write_alone(
                committer,
                job.step,
                require_not_none(job.data, "the copy of the state"),
                world_size=self._world_size,
                is_pinned=job.is_pinned,
                metrics=job.metrics,
                check=comparison.check if isinstance(comparison, RankComparison) else None,
            )
        except BaseException as error:
            self._results.publish(job, error)
            raise
        is_compared = not isinstance(comparison, RankComparison) or comparison.is_complete
        self._results.publish(job, is_compared=is_compared)
        job.mark_committed(committer.committed_at)

    def write_part(self, job: LocalSave) -> None:
        """Write this rank's part of a sharded state, and commit the parts of all ranks.

        A call of `save` that failed on this rank, perhaps before it was known whether the state is
        sharded, takes part if the ranks save a sharded state.
        """
        number = self._results.join_sharded_save(job)
        if number is None:
            raise require_not_none(job.call_error, "the error of the call")
        peers = self._connect(number)
        folder = self._agree(peers, job, number)
        job.agree()
        name = part_name(self._rank)
        with _discarded_on_error(self._committer, folder, name):
            self._write_and_commit(peers, job, folder, name)
        # Where another rank commits, the commit has happened just before this.
        job.mark_committed(self._committer.committed_at)

    def _connect(self, number: int) -> PeerGroup:
        if self._peers is None:
            self._peers = self._results.connect(self._world_size, number)
        return self._peers

    def _agree(self, peers: PeerGroup, job: LocalSave, number: int) -> str:
        """Return the folder of the save once all ranks are ready to copy, or raise on all."""

        def vote() -> list[Any]:
            if job.call_error is not None:
                raise job.call_error
            if self._rank:
                return [number, job.step, ""]
            self._committer.claim()
            return [number, job.step, self._committer.new_folder(job.step)]

        votes = peers.gather_results(vote, f"could not save step {job.step}")
        for rank, (other, step, _) in enumerate(votes):
            if [other, step] != votes[0][:2]:
                raise CheckpointError(
                    f"rank 0 called save for step {votes[0][1]}, and rank {rank} for step {step}: "
                    "all ranks must make the same calls"
                )
        return str(votes[0][2])

    def _write_and_commit(self, peers: PeerGroup, job: LocalSave, folder: str, name: str) -> None:
        comparison = job.comparison
        summary = comparison.summary if isinstance(comparison, PartComparison) else ""
        failure = f"could not save step {job.step}"

        def write() -> tuple[Any, str]:
            file = self._committer.write(folder, name, _wait_for_copy(job))
            return attrs.astuple(file), summary

        rows = peers.gather_results(write, failure)
        if isinstance(comparison, PartComparison):
            comparison.check(peers, [summary for _, summary in rows])
        commit = partial(
            self._committer.commit,
            folder,
            tuple(DataFile(*file) for file, _ in rows),
            parts=len(rows),
            world_size=self._world_size,
            metrics=job.metrics,
            pin=job.is_pinned,
        )
        peers.gather_results(commit if self._rank == 0 else lambda: None, failure)


def write_alone(
    committer: Committer,
    step: int,
    data: memoryview,
    *,
    world_size: int = 0,
    is_pinned: bool = False,
    metrics: Mapping[str, float] | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Write and commit a checkpoint of one file.

    Args:
        committer: commits it.
        step: the step.
        data: the pack.
        world_size: see `Manifest`.
        is_pinned: never delete the checkpoint.
        metrics: see `Manifest`.
        check: called before the commit. If it raises, nothing is committed.

    Raises:
        CheckpointError: see `Committer`.
    """
    committer.claim()
    folder, name = committer.new_folder(step), part_name(None)
    with _discarded_on_error(committer, folder, name):
        file = committer.write(folder, name, data)
        if check is not None:
            check()
        committer.commit(folder, (file,), world_size=world_size, metrics=metrics, pin=is_pinned)


@contextlib.contextmanager
def _discarded_on_error(committer: Committer, folder: str, name: str) -> Iterator[None]:
    FOLDERS_IN_PROGRESS.add(folder)
    try:
        yield
    except BaseException:
        committer.discard(folder, name)
        raise
    finally:
        FOLDERS_IN_PROGRESS.discard(folder)


def _wait_for_copy(job: LocalSave) -> memoryview:
    """Return the copy of the state, which the calling thread makes after the agreement.

    Raises:
        Exception: the call has failed or was interrupted.
    """
    if job.is_run_by_caller:
        job.copy()
    next_check, intervals = monotonic() + CALLER_CHECK_S, poll_intervals()
    while job.data is None:
        if job.call_error is not None:
            raise job.call_error
        if monotonic() > next_check:
            next_check = monotonic() + CALLER_CHECK_S
            if not job.is_call_running() and job.data is None:
                job.fail(None)
        sleep(next(intervals))
    return job.data
