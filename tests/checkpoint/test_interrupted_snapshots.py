"""Snapshots that a signal handler interrupts, and calls during a snapshot.

A signal handler that raises (KeyboardInterrupt) can interrupt `snapshot` at any line. Afterwards,
the newest snapshot is that of the call before or that of the interrupted call, and the next call
works. A handler that itself calls the manager may get an error, but never deadlocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import Interrupter

from elasticlib import CheckpointManager
from elasticlib.checkpoint import snapshot_slots
from elasticlib.checkpoint.pack import unpack
from elasticlib.errors import CheckpointError

TRACED = ("checkpoint/", "threads.py", threading.__file__)
SNAPSHOTS = (
    "checkpoint/manager.py",
    "checkpoint/snapshot_source.py",
    "checkpoint/snapshot_slots.py",
)
REJECTED = "is still copying a state"


def state_of(step: int, size: int = 100) -> dict[str, Any]:
    return {"n": step, "w": [torch.full((size,), float(step)) for _ in range(3)]}


def newest_step(agent_memory: Path) -> int:
    """Return the step of the newest snapshot, or 0, and check that it is the state of one call."""
    found = snapshot_slots.list_snapshots(agent_memory)
    counting = sorted(found, key=lambda ref: (ref.step, ref.number), reverse=True)
    if not counting:
        return 0
    with snapshot_slots.map_snapshot(agent_memory, counting[0]) as view:
        assert view is not None
        state = unpack(view)
    step = counting[0].step
    assert state["n"] == step
    assert [tensor.unique().tolist() for tensor in state["w"]] == [[step]] * 3
    return step


def assert_next_snapshot_works(manager: CheckpointManager, agent_memory: Path, step: int) -> None:
    """Make a snapshot of this step, and check it."""
    assert manager.snapshot(step, state_of(step))
    assert newest_step(agent_memory) == step


@pytest.mark.parametrize(
    "grows",
    [
        pytest.param(False, id="same size"),
        pytest.param(True, id="larger each time", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(400)  # The calls are traced line by line, and each line costs a call.
def test_interrupted_at_any_line_a_snapshot_is_complete_or_the_one_before_stays(
    tmp_path: Path, agent_memory: Path, grows: bool
) -> None:
    interrupter = Interrupter(*TRACED)
    with CheckpointManager(tmp_path / "disk") as manager:
        for step in count(1, 3):
            state = state_of(step + 1, size=(100 + 1000 * step) if grows else 100)
            assert manager.snapshot(step, state_of(step))
            is_interrupted = interrupter.interrupt(lambda: manager.snapshot(step + 1, state))  # noqa: B023
            assert newest_step(agent_memory) in (
                (step, step + 1) if is_interrupted else (step + 1,)
            )
            assert_next_snapshot_works(manager, agent_memory, step + 2)
            if not is_interrupted:
                break
    assert len(interrupter.where) > 100
    assert len(list(agent_memory.glob("1/own.*"))) <= 4, "interrupted calls have leaked slots"


def test_interrupted_at_any_line_the_first_snapshot_is_complete_or_not_there(
    tmp_path: Path, agent_memory: Path
) -> None:
    interrupter, is_interrupted = Interrupter(*SNAPSHOTS), True
    while is_interrupted:
        with CheckpointManager(tmp_path / "disk") as manager:
            is_interrupted = interrupter.interrupt(lambda: manager.snapshot(1, state_of(1)))
            assert newest_step(agent_memory) in ((0, 1) if is_interrupted else (1,))
            assert_next_snapshot_works(manager, agent_memory, 2)
        snapshot_slots.remove_snapshots(agent_memory, snapshot_slots.list_snapshots(agent_memory))
    assert len(interrupter.where) > 50


def snapshot(manager: CheckpointManager) -> None:
    manager.snapshot(3, state_of(3))


def save(manager: CheckpointManager) -> None:
    manager.save(3, state_of(3))


def close(manager: CheckpointManager) -> None:
    manager.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "act",
    [
        pytest.param(snapshot, marks=pytest.mark.long),
        pytest.param(save, marks=pytest.mark.long),
        pytest.param(close, marks=pytest.mark.long),
    ],
)
def test_a_signal_handler_at_any_line_gets_an_error_at_worst(
    tmp_path: Path, agent_memory: Path, act: Callable[[CheckpointManager], None]
) -> None:
    errors = list[str]()

    def handler() -> None:
        try:
            act(manager)
        except CheckpointError as error:
            errors.append(str(error))

    interrupter, is_interrupted = Interrupter(*SNAPSHOTS, handler=handler), True
    while is_interrupted:
        with CheckpointManager(tmp_path / "disk") as manager:
            is_interrupted = interrupter.interrupt(lambda: snapshot_unless_closed(manager))
            assert newest_step(agent_memory) in ((0, 2) if act is close else (2, 3))
        snapshot_slots.remove_snapshots(agent_memory, snapshot_slots.list_snapshots(agent_memory))
    assert len(interrupter.where) > 50
    assert all(REJECTED in error for error in errors)
    assert errors


def snapshot_unless_closed(manager: CheckpointManager) -> None:
    try:
        manager.snapshot(2, state_of(2))
    except CheckpointError as error:
        if not str(error).endswith("is closed"):
            raise


class GatedPart:
    """A part of a state whose `state_dict` blocks until the gate is open."""

    def __init__(self) -> None:
        self.is_read, self.gate = threading.Event(), threading.Event()

    def state_dict(self) -> dict[str, Any]:
        self.is_read.set()
        assert self.gate.wait(60)
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Take nothing."""


def test_a_second_thread_is_rejected_while_one_copies(tmp_path: Path, agent_memory: Path) -> None:
    part = GatedPart()
    with CheckpointManager(tmp_path / "disk") as manager:
        state = {**state_of(1), "gated": part}
        thread = threading.Thread(target=lambda: manager.snapshot(1, state))
        thread.start()
        assert part.is_read.wait(60)
        for call, result in ((manager.snapshot, "kept"), (manager.save, "saved")):
            with pytest.raises(
                CheckpointError, match=f"step 2 (is|was) not {result}: .*{REJECTED}"
            ):
                call(2, state_of(2))
        part.gate.set()
        thread.join(60)
        assert newest_step(agent_memory) == 1
        assert_next_snapshot_works(manager, agent_memory, 3)
