"""Handles of saves: what `CheckpointManager.save` returns, and how ranks learn of results.

`LocalSave` runs the writer thread of a save that this rank writes. `RemoteSave` reads the result of
a save that rank 0 writes, from the store in which the ranks' process group was formed. This module
does not know how a checkpoint is written.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from ..clock import monotonic
from ..errors import CheckpointError
from ..threads import CallRejectedError, ExclusiveCall, Latch
from .catalog import CheckpointCatalog
from .rank_digests import (
    DigestExchange,
    RankComparison,
    StateDigest,
    StatesDifferError,
    difference_error,
)

log = logging.getLogger("elasticlib.checkpoint")

RESULT_TIMEOUT_S = 1800.0  # A rank waits this long for rank 0's result: the default of torch.
STORE_POLL_INTERVAL_S = 0.02
STORAGE_POLL_INTERVAL_S = 0.1  # used without a store; listing a directory is slower
NUM_STORED_RESULTS = 1000  # Older results are deleted from the store.
RECHECK_INTERVAL_S = 1.0  # A wait starts the writer again if a signal handler interrupted it.
WRITER_NICENESS = 10  # The writer thread runs while the training leaves processor time.

_numbers: dict[str, Iterator[int]] = {}
"""Numbers of the next saves, by the prefix of their keys in the store. Managers of one directory
share them, because the keys of a closed manager still exist."""


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


class LocalSave(SaveHandle):
    """A save that a thread of this process writes.

    A signal handler's exception can interrupt the caller of any method at any line. The methods may
    then be called again, and each of them starts the writer if none is running. The process does
    not exit before the thread exits, because the thread is not a daemon.
    """

    def __init__(
        self, step: int, write: Callable[[], None], comparison: RankComparison | None = None
    ) -> None:
        super().__init__(step)
        self._comparison = comparison  # with the states of other ranks
        self.in_background = True  # False if no thread could be started, so that `start` writes
        self._write: Callable[[], None] | None = write  # None once it has returned or raised
        self._call = ExclusiveCall()
        self._finished = Latch()

    def start(self) -> None:
        """Start the writer, unless it runs or has finished.

        If no thread can be started, because there are too many or because Python is shutting down,
        this call writes the checkpoint itself, and sets `in_background` to false.
        """
        while not (self._finished.is_set or self._call.is_running):
            started = Latch()
            try:
                _thread.start_new_thread(self._start_thread, (started,))
            except (RuntimeError, MemoryError) as error:
                self._warn_of_foreground(error)
                try:
                    self._run(started)
                except BaseException:
                    self.was_checked = self._finished.is_set  # This exception reports the failure.
                    raise
            started.wait()

    def _warn_of_foreground(self, error: BaseException) -> None:
        self.in_background = False
        log.warning(
            "cannot start a thread that writes step %d (%s): save() waits until it is written",
            self.step,
            error,
        )

    def _start_thread(self, started: Latch) -> None:
        """Start the writer thread from another thread.

        Signal handlers run in the main thread. If one of them raises in `Thread.start`, it can
        leave locks held that the new thread needs, and `Thread.is_alive` can be wrong.
        """
        try:
            # Python does not wait for threads that start after the main thread has exited.
            if threading.main_thread().is_alive():
                name = "elasticlib-save"
                # This thread is a daemon, and threads inherit that by default.
                threading.Thread(
                    target=self._run_in_thread, args=(started,), name=name, daemon=False
                ).start()
                return
            self.in_background = False
        except (RuntimeError, MemoryError) as error:
            self._warn_of_foreground(error)
        try:
            self._run(Latch())
        finally:
            started.set()

    def _run_in_thread(self, started: Latch) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        self._run(started)

    def _run(self, started: Latch) -> None:
        """Write the checkpoint, unless another thread writes it. `started` is set before that."""
        with contextlib.suppress(CallRejectedError):
            self._call.run(partial(self._write_once, started))
        started.set()

    def _write_once(self, started: Latch) -> None:
        started.set()
        if self._write is None:
            self._finished.set()
            return
        try:
            self._write()
        except Exception as error:
            self._failure = error
        except BaseException as error:
            reason = f"{type(error).__name__} interrupted the writer"
            self._failure = CheckpointError(f"step {self.step} was not saved: {reason}")
            raise
        finally:
            self._write = None  # It refers to the memory of the copy, which may be freed now.
            self._finished.set()

    @property
    def is_finished(self) -> bool:
        """True if the writer has finished, after which the memory of the copy can be used again."""
        return self._finished.is_set

    def find_late_difference(self) -> bool:
        """Return whether a rank was found to have another state after the save had succeeded.

        The save has failed then, and no caller has seen it.
        """
        if self._comparison is None or self._failure is not None or not self._finished.is_set:
            return False
        self._failure = self._comparison.find_difference(is_durable=True)
        self.was_checked = self.was_checked and self._failure is None
        return self._failure is not None

    def settle(self) -> None:
        """Wait until the writer has finished. A failure is kept for `wait`."""
        if self._process == os.getpid():
            self._wait_until_finished(None)

    def _wait_until_finished(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        while not self._finished.is_set:
            left_s = RECHECK_INTERVAL_S if deadline is None else deadline - monotonic()
            if left_s <= 0:
                break
            if self._call.is_interrupted:
                raise CheckpointError(
                    f"step {self.step} is being written by the call that this signal handler has "
                    "interrupted, so it cannot wait for it: return from the handler first"
                )
            self.start()
            self._finished.wait(min(left_s, RECHECK_INTERVAL_S))
        return self._finished.is_set

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
        pause = threading.Event()
        # This polls, because a wait inside the store's client blocks its other users here.
        while not self._poll():
            if monotonic() < deadline:
                has_store = results.is_reachable
                pause.wait(STORE_POLL_INTERVAL_S if has_store else STORAGE_POLL_INTERVAL_S)
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
        elif not self._is_finished and (result := results.read(self._number)) is not None:
            self._is_finished = True
            if result["step"] != step:
                self._failure = CheckpointError(
                    f"rank 0 called save for step {result['step']}, and this rank for step {step}: "
                    "all ranks must make the same calls"
                )
            elif result["error"]:
                kind = StatesDifferError if result["differs"] else CheckpointError
                self._failure = kind(f"step {step} was not saved by rank 0: {result['error']}")
            elif not result["is_compared"] and self._digest is not None:
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


class SaveResults:
    """The results of one manager's saves, which rank 0 publishes in the ranks' store.

    All ranks make the same calls of `save`, so the number of a save is the same on all of them.

    Args:
        store: the store in which torch's process group was formed, or None.
        name: identifies the manager. It is the same on all its ranks.
        rank: this rank. Rank 0 writes the results.
        world_size: the number of ranks.
    """

    def __init__(self, store: Any, name: str, *, rank: int = 0, world_size: int = 1) -> None:
        self.is_reachable = store is not None  # False once the store's host has exited
        self.newest_step = 0  # of the saves that this rank expects from rank 0
        self.store, self._is_publisher = store, rank == 0
        self._prefix = f"elasticlib/saves/{zlib.crc32(os.fsencode(name)):08x}"
        self.digests = DigestExchange(store, self._prefix, rank, world_size)

    def next_number(self) -> int:
        """Count a save, and return its number. Each call returns the next number."""
        # A signal handler cannot interrupt either of the two calls halfway.
        return next(_numbers.setdefault(self._prefix, count(1)))

    def next_group_name(self) -> str:
        """Return a name for a group of this manager's ranks, which no other group has.

        All ranks of the manager make the same calls, whatever other groups they have.
        """
        prefix = f"{self._prefix}/group"
        return f"{prefix}/{next(_numbers.setdefault(prefix, count(1)))}"

    def publish(
        self,
        number: int,
        step: int,
        error: BaseException | None = None,
        *,
        is_compared: bool = True,
    ) -> None:
        """Publish the result of a save, if this is rank 0 and there is a store.

        Args:
            number: the number of the save.
            step: its step.
            error: why it failed, or None.
            is_compared: whether rank 0 has found the states of all ranks to be equal. Otherwise
                each rank compares its own with that of rank 0.
        """
        if not (self.is_reachable and self._is_publisher):
            return
        message = "" if error is None else str(error)[:4000]
        result = {
            "step": step,
            "error": message,
            "differs": isinstance(error, StatesDifferError),
            "is_compared": is_compared,
        }
        try:
            self.store.set(self._key(number), json.dumps(result))
            self._delete_old(number)
        except (RuntimeError, NotImplementedError) as lost:
            log.info("cannot publish the result of saving step %d to other ranks: %s", step, lost)

    def read(self, number: int) -> dict[str, Any] | None:
        """Return the result of a save, with its `step` and `error`, or None if there is none."""
        try:
            if not self.store.check([self._key(number)]):
                return None
            result: dict[str, Any] = json.loads(self.store.get(self._key(number)))
        except RuntimeError as lost:
            log.info("cannot read the result of save %d in the ranks' store: %s", number, lost)
            self.is_reachable = False
            return None
        return result

    def agree_to_skip(self, number: int, step: int, *, is_busy: bool) -> bool:
        """Return whether all ranks skip this save: rank 0's `is_busy`, which it publishes.

        Raises:
            CheckpointError: rank 0 did not publish a decision within `RESULT_TIMEOUT_S`, its call
                of `save` failed, or there is no store.
        """
        try:
            if not self.is_reachable:
                raise RuntimeError("there is no process group")
            if self._is_publisher:
                self.store.set(self._decision_key(number), "skip" if is_busy else "save")
                self._delete_old(number)
                return is_busy
            return self._read_decision(number, step)
        except (RuntimeError, NotImplementedError) as error:
            raise CheckpointError(
                f"step {step} was not saved: with if_busy='skip' on several ranks, rank 0 decides "
                f"for all of them through the store of the process group: {error}"
            ) from error

    def _read_decision(self, number: int, step: int) -> bool:
        key, pause, interval_s = self._decision_key(number), threading.Event(), 0.001
        deadline = monotonic() + RESULT_TIMEOUT_S
        while not self.store.check([key]):
            if (result := self.read(number)) is not None and result["error"]:
                raise CheckpointError(f"step {step} was not saved by rank 0: {result['error']}")
            if monotonic() > deadline:
                raise RuntimeError(f"rank 0 did not call save within {RESULT_TIMEOUT_S:g} s")
            pause.wait(interval_s)
            interval_s = min(2 * interval_s, STORE_POLL_INTERVAL_S)
        return bool(self.store.get(key) == b"skip")

    def _delete_old(self, number: int) -> None:
        if (old := number - NUM_STORED_RESULTS) > 0:
            self.store.delete_key(self._key(old))
            self.store.delete_key(self._decision_key(old))

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"

    def _decision_key(self, number: int) -> str:
        return f"{self._prefix}/{number}/decision"
