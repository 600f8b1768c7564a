"""Saves that a signal handler interrupts, saves within saves, and saves without a new thread.

A signal handler that raises (KeyboardInterrupt, SystemExit) can interrupt `save` and `wait` at any
line. Afterwards, each checkpoint that exists is complete and holds the state of one call, the one
before the interrupted save or a newer one exists, and the next save works.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import Interrupter, interrupt
from managers import GatedStorage, no_new_threads

from elasticlib import CheckpointManager
from elasticlib.checkpoint.storage import LocalStorage
from elasticlib.errors import CheckpointError

# The calls are traced line by line, and each line costs a call.
pytestmark = pytest.mark.timeout(400)

SAVING = (
    *("checkpoint/manager.py", "checkpoint/save_handle.py", "checkpoint/snapshot_slots.py"),
    *("threads.py", threading.__file__),
)
Act = Callable[[CheckpointManager, int], object]


class SlowDisk(LocalStorage):
    """A directory on a disk that takes a moment for each file."""

    def write(self, name: str, data: memoryview) -> int:
        time.sleep(0.002)
        return super().write(name, data)


def state_of(step: int, size: int = 100) -> dict[str, Any]:
    return {"n": step, "w": [torch.full((size,), float(step)) for _ in range(3)]}


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, state_of(step))


def save_more(manager: CheckpointManager, step: int) -> None:
    """Save a state that does not fit into the buffer of the previous one."""
    manager.save(step, state_of(step, size=100 + step))


def wait(manager: CheckpointManager, _: int) -> None:
    manager.wait()


def close_after_save(manager: CheckpointManager, step: int) -> None:
    with manager:
        manager.save(step, state_of(step))


def assert_holds_one_call(manager: CheckpointManager, step: int) -> None:
    """Fail unless the checkpoint of this step holds the state of the call that saved it."""
    state = manager.load(step)
    assert state["n"] == step
    assert [tensor.unique().tolist() for tensor in state["w"]] == [[step]] * 3


def assert_next_save_works(manager: CheckpointManager, before: int, after: int) -> None:
    """Save `after`; check it and all checkpoints from `before`, the last complete one, on."""
    manager.save(after, state_of(after)).wait()
    steps = [step for step in manager.steps() if step >= before]
    assert {before, after} <= {*steps}
    for step in steps:
        assert_holds_one_call(manager, step)


def interrupt_everywhere(
    manager: CheckpointManager,
    act: Act,
    handler: Callable[[], object] = interrupt,
    traced: Sequence[str] = SAVING,
) -> int:
    """Interrupt `act` at each line that it reaches while a save is under way. Return how many."""
    interrupter = Interrupter(*traced, handler=handler)

    def interrupt_after(step: int) -> bool:
        save(manager, step)
        return interrupter.interrupt(lambda: act(manager, step + 1))

    for step in count(1, 4):
        is_interrupted = interrupt_after(step)
        assert_next_save_works(manager, step, step + 3)
        if not is_interrupted:
            return len(interrupter.where)
    raise AssertionError


@pytest.mark.parametrize(
    ("act", "handler"),
    [
        pytest.param(save_more, interrupt, marks=pytest.mark.long),
        (wait, interrupt),
        (wait, sys.exit),
    ],
)
def test_save_and_wait_interrupted_at_any_line_leave_complete_checkpoints(
    tmp_path: Path, act: Act, handler: Callable[[], object]
) -> None:
    with CheckpointManager(SlowDisk(tmp_path)) as manager:
        assert interrupt_everywhere(manager, act, handler, ("", threading.__file__)) > 10


def test_first_save_and_close_interrupted_at_any_line_leave_complete_checkpoints(
    tmp_path: Path,
) -> None:
    interrupter, is_interrupted = Interrupter(*SAVING), True
    while is_interrupted:
        folder = tmp_path / str(len(interrupter.where))
        manager = CheckpointManager(SlowDisk(folder))
        is_interrupted = interrupter.interrupt(partial(close_after_save, manager, 1))
        manager.close()
        with CheckpointManager(SlowDisk(folder)) as manager:
            manager.restore(state_of(0))
            assert_next_save_works(manager, max(manager.steps(), default=2), 2)
    assert manager.steps() == [1, 2]


@pytest.mark.long
def test_a_save_in_a_signal_handler_at_any_line_leaves_checkpoints_of_one_call_each(
    tmp_path: Path,
) -> None:
    interrupted, errors = [0], list[str]()
    with CheckpointManager(SlowDisk(tmp_path), keep_last=4) as manager:

        def act(manager: CheckpointManager, step: int) -> None:
            interrupted.append(step)
            save(manager, step)

        def handler() -> None:
            try:
                save(manager, interrupted[-1] + 1)
            except CheckpointError as error:
                errors.append(str(error))
            manager.wait()

        assert interrupt_everywhere(manager, act, handler) > 10
    assert len(errors) > 10
    assert all(
        "another call of save() or snapshot() of the CheckpointManager" in error for error in errors
    )


@contextmanager
def alarms() -> Iterator[Callable[[float], None]]:
    """Return a function that makes a signal handler raise KeyboardInterrupt after a delay."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.long
def test_real_signals_at_any_time_leave_complete_checkpoints(tmp_path: Path) -> None:
    with CheckpointManager(SlowDisk(tmp_path)) as manager, alarms() as alarm:
        for number in range(200):
            step = 3 * number + 1
            save(manager, step)
            with suppress(KeyboardInterrupt):
                try:
                    alarm(1e-6 + number * 4e-5)
                    save(manager, step + 1)
                    manager.wait()
                finally:
                    alarm(0.0)
            assert_next_save_works(manager, step, step + 2)


def test_a_signal_interrupts_a_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    place = GatedStorage(tmp_path)
    with CheckpointManager(place) as manager, alarms() as alarm:
        save(manager, 1)
        for act in (manager.wait, lambda: save(manager, 2), manager.close):
            alarm(0.01)
            with pytest.raises(KeyboardInterrupt):
                act()
        place.gate.set()
    assert manager.steps() == [1]
    assert_holds_one_call(manager, 1)


def test_each_save_of_several_threads_is_complete_or_rejected(tmp_path: Path) -> None:
    saved, rejected = set[int](), list[str]()
    with CheckpointManager(tmp_path, keep_last=1000) as manager:

        def save_often(first: int) -> None:
            for step in range(first, first + 60, 3):
                try:
                    save(manager, step)
                    saved.add(step)
                except CheckpointError as error:
                    rejected.append(str(error))

        threads = [threading.Thread(target=save_often, args=(first,)) for first in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {*manager.steps()} == saved
    assert len(saved) + len(rejected) == 60
    assert all("let several threads save under a lock" in error for error in rejected)
    for step in saved:
        assert_holds_one_call(manager, step)


def test_save_keeps_no_reference_to_the_state(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    state = weakref.ref(tensor)
    with CheckpointManager(tmp_path) as manager:
        gc.disable()
        try:
            handle = manager.save(1, {"w": tensor})
            del tensor
            assert state() is None
        finally:
            gc.enable()
        handle.wait()


def test_save_writes_in_the_calling_thread_if_no_thread_can_be_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = GatedStorage(tmp_path)
    place.gate.set()
    with CheckpointManager(place) as manager:
        with no_new_threads():
            assert manager.save(1, state_of(1)).done()
        assert "cannot start a thread that writes step 1" in caplog.text
        place.full = True
        with no_new_threads(), pytest.raises(CheckpointError, match="No space left"):
            save(manager, 2)
        place.full = False
        assert_next_save_works(manager, 1, 3)


@pytest.mark.long
def test_save_without_threads_interrupted_at_any_line_leaves_complete_checkpoints(
    tmp_path: Path,
) -> None:
    with CheckpointManager(SlowDisk(tmp_path)) as manager, no_new_threads():
        assert interrupt_everywhere(manager, save) > 10


def test_a_signal_handler_that_interrupts_the_writer_cannot_wait_for_it(
    tmp_path: Path,
) -> None:
    errors = []

    class Interrupted(LocalStorage):
        def write(self, name: str, data: memoryview) -> int:
            os.kill(os.getpid(), signal.SIGALRM)
            return super().write(name, data)

    def handler(*_: object) -> None:
        with pytest.raises(CheckpointError, match="return from the handler first") as raised:
            manager.wait()
        errors.append(raised)

    with CheckpointManager(Interrupted(tmp_path)) as manager, alarms(), no_new_threads():
        signal.signal(signal.SIGALRM, handler)
        save(manager, 1)
    assert (manager.steps(), len(errors)) == ([1], 1)
