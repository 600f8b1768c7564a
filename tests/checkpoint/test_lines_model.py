"""Random histories of a job with rollbacks, losses and bystanders, against a model of its line."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elasticlib import CheckpointManager
from elasticlib.checkpoint.end_save import EndSave
from elasticlib.checkpoint.refs import parse_folder_name
from elasticlib.checkpoint.snapshot_slots import list_snapshots, remove_snapshots
from elasticlib.errors import CheckpointError, CheckpointFencedError
from elasticlib.testing.waiting import wait_until

KEEP = 2


@attrs.define(eq=False)
class Saved:
    """A state that was saved: its unique value, and the state that its training continued."""

    step: int
    value: int
    before: Saved | None  # the state that was restored or saved before it
    folder: str = ""  # of its checkpoint
    is_pinned: bool = False
    is_damaged: bool = False

    def ancestors(self) -> list[Saved]:
        """Return this state and all that it continues, newest first."""
        found: list[Saved] = []
        state: Saved | None = self
        while state is not None:
            found.append(state)
            state = state.before
        return found


class History(RuleBasedStateMachine):
    """One job, which restarts, goes back and crashes, and processes that only read or interfere.

    The model has no branches: each state knows the one that its training continued. The newest
    state that the training has saved, and what this one continues, is what a restore may find.
    """

    def __init__(self) -> None:
        super().__init__()
        # In memory, because a disk would make each save slow.
        self.folder = Path(tempfile.mkdtemp(prefix="lines-", dir="/dev/shm"))
        self.memory = self.folder / "memory"
        self.checkpoints = self.folder / "checkpoints"
        self.values = itertools.count(1)
        self.launch, self.generation, self.attempt = 0, 0, 0
        self.tip: Saved | None = None  # the newest state of the current training
        self.base: Saved | None = None  # what the present manager has restored or saved last
        self.on_disk: dict[int, Saved] = {}  # by value
        self.in_memory: Saved | None = None  # the newest snapshot of this launch's training
        self.environment: dict[str, str] = {}
        self.manager: CheckpointManager

    @initialize()
    def start(self) -> None:
        self.new_launch()

    def teardown(self) -> None:
        self.manager.close()
        for name in self.environment:
            os.environ.pop(name, None)
        shutil.rmtree(self.folder, ignore_errors=True)  # A claim may still be on its way.

    # -- the job ------------------------------------------------------------------------------

    def open_manager(self) -> None:
        self.attempt += 1
        attempt = self.memory / str(self.attempt)
        attempt.mkdir(parents=True)
        self.environment = {
            "TORCHELASTIC_RUN_ID": "job",
            "ELASTICLIB_INCARNATION": f"launch {self.launch}",
            "ELASTICLIB_GENERATION": str(self.generation),
            "ELASTICLIB_SNAPSHOTS": str(attempt),
        }
        os.environ.update(self.environment)
        self.manager = CheckpointManager(self.checkpoints, keep_last=KEEP)
        self.base = None

    def new_launch(self) -> None:
        self.launch, self.generation = self.launch + 1, 1
        shutil.rmtree(self.memory, ignore_errors=True)
        self.in_memory = None
        self.open_manager()

    @rule()
    def start_another_launch(self) -> None:
        self.manager.close()
        self.new_launch()
        self.tip = self.newest_on_disk()
        self.restore_newest()

    @rule()
    def restart(self) -> None:
        self.manager.close()
        self.generation += 1
        self.open_manager()
        self.restore_newest()

    def line(self) -> list[Saved]:
        """Return the states that the job continues, newest first.

        A training of which nothing exists any more continues what was saved before it.
        """
        line = [] if self.tip is None else self.tip.ancestors()
        if not any(state is self.in_memory or self.is_known(state) for state in line):
            saved = max(self.on_disk.values(), key=age, default=None)
            line = [] if saved is None else saved.ancestors()
        return line

    def newest_on_disk(self) -> Saved | None:
        return next((state for state in self.line() if self.is_known(state)), None)

    def expected(self) -> Saved | None:
        """Return the state that a restore without a step must find."""
        for state in self.line():
            is_intact = self.on_disk.get(state.value) is state and not state.is_damaged
            if state is self.in_memory or is_intact:
                return state
        return None

    def restore_newest(self) -> None:
        expected, live = self.expected(), state_of(0, 0)
        if expected is None and self.newest_on_disk() is not None:
            with pytest.raises(CheckpointError, match="none of them can be used"):
                self.manager.restore(live)
            self.manager.restore(live, if_unusable="start_over")
            self.base = None
            return
        result = self.manager.restore(live)
        found = (live["step"], live["value"]) if result else None
        wanted = (expected.step, expected.value) if expected else None
        assert found == wanted
        self.base = expected

    @rule()
    def restore_again(self) -> None:
        self.restore_newest()

    @rule(data=st.data())
    @precondition(lambda self: self.on_disk)
    def go_back(self, data: st.DataObject) -> None:
        candidates = sorted((s for s in self.on_disk.values() if not s.is_damaged), key=age)
        if not candidates:
            return
        state = data.draw(st.sampled_from(candidates))
        live = state_of(0, 0)
        assert self.manager.restore(live, step=state.folder).step == state.step
        assert live["value"] == state.value
        self.base = state

    @rule(data=st.data())
    @precondition(lambda self: self.on_disk and self.base is not None)
    def restore_a_part(self, data: st.DataObject) -> None:
        intact = sorted((s for s in self.on_disk.values() if not s.is_damaged), key=age)
        if intact:
            state, part = data.draw(st.sampled_from(intact)), {"value": 0}
            self.manager.restore(part, step=state.folder, strict=False)
            assert part["value"] == state.value

    def train(self, steps: int) -> Saved:
        step = (self.base.step if self.base else 0) + steps
        return Saved(step, next(self.values), self.base)

    def note(self, state: Saved) -> None:
        self.tip = self.base = state

    @rule(steps=st.integers(1, 3), pin=st.booleans())
    def save(self, steps: int, pin: bool) -> None:
        state = self.train(steps)
        state.is_pinned = pin
        self.manager.save(state.step, state_of(state.step, state.value), pin=pin).wait()
        self.note(state)
        state.folder = Path(self.manager.path(state.step)).name
        self.on_disk[state.value] = state
        self.forget_deleted()

    @rule(steps=st.integers(1, 3))
    def snapshot(self, steps: int) -> None:
        state = self.train(steps)
        assert self.manager.snapshot(state.step, state_of(state.step, state.value))
        # The claim, for which no snapshot waits, must not come later: examples are repeated.
        writer = self.manager._writer
        wait_until("the claim", lambda: not (writer._claims or writer._work.is_running))
        self.note(state)
        self.in_memory = state

    @rule()
    def lose_the_memory(self) -> None:
        remove_snapshots(self.memory, list_snapshots(self.memory))
        self.in_memory = None
        # What was only in memory is lost, and with it what the fence does not know.
        self.manager.close()
        self.generation += 1
        self.open_manager()
        self.tip = self.newest_on_disk()
        self.restore_newest()

    @rule(is_over=st.booleans())
    def drain(self, is_over: bool) -> None:
        """End all workers early. The agent saves the last snapshot, if no checkpoint is as new.

        It reads these checkpoints, so a damaged one does not count.
        """
        self.manager.close()
        snapshot, line = self.in_memory, [] if self.tip is None else self.tip.ancestors()
        intact = (s for s in self.line() if self.is_known(s) and not s.is_damaged)
        newest, before = next(intact, None), self.folders()
        assert EndSave(self.memory, None).run() == ""
        is_behind = newest is None or snapshot is None or age(newest) < age(snapshot)
        if snapshot in line and is_behind and not self.is_known(snapshot):
            (snapshot.folder,) = self.folders() - before
            assert snapshot.folder.startswith(f"step-{snapshot.step:010d}.")
            assert snapshot.folder.endswith(".end")
            self.on_disk[snapshot.value] = snapshot
        if is_over:
            self.new_launch()
            self.tip = self.newest_on_disk()
        else:
            self.generation += 1
            self.open_manager()
        self.restore_newest()

    def folders(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob("step-*")}

    def is_known(self, state: Saved) -> bool:
        return self.on_disk.get(state.value) is state

    # -- others -------------------------------------------------------------------------------

    @rule(data=st.data())
    @precondition(lambda self: self.on_disk)
    def damage(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(sorted(self.on_disk.values(), key=age)))
        if state.is_damaged:
            return
        path = self.checkpoints / state.folder / "state.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        state.is_damaged = True

    @rule(data=st.data())
    @precondition(lambda self: any(s.is_pinned for s in self.on_disk.values()))
    def unpin(self, data: st.DataObject) -> None:
        pinned = sorted((s for s in self.on_disk.values() if s.is_pinned), key=age)
        state = data.draw(st.sampled_from(pinned))
        self.manager.unpin(state.folder)
        state.is_pinned = False

    @rule()
    def prune(self) -> None:
        self.manager.prune()
        self.forget_deleted()

    @rule()
    def a_bystander_reads_and_tries_to_save(self) -> None:
        for name in self.environment:
            del os.environ[name]
        other = CheckpointManager(self.checkpoints, keep_last=1)
        try:
            other.restore(state_of(0, 0), if_unusable="start_over")
            if (self.checkpoints / "fence.json").exists():
                with pytest.raises(CheckpointFencedError):
                    other.save(10**6, state_of(10**6, -1)).wait()
            other.close()
        finally:
            os.environ.update(self.environment)

    # -- what must hold ---------------------------------------------------------------------------

    def forget_deleted(self) -> None:
        """Check what was deleted, and forget it."""
        folders = self.folders()
        line = [] if self.tip is None else self.tip.ancestors()
        newest = [state for state in line if self.on_disk.get(state.value) is state][:KEEP]
        needed = {state.folder for state in newest if not state.is_damaged}
        needed |= {state.folder for state in self.on_disk.values() if state.is_pinned}
        assert needed <= folders
        self.on_disk = {v: state for v, state in self.on_disk.items() if state.folder in folders}

    @invariant()
    def nothing_is_left_half_written(self) -> None:
        for path in self.checkpoints.glob("step-*"):
            assert parse_folder_name(path.name)
            assert (path / "manifest.json").exists()


def age(state: Saved) -> int:
    return state.value


def state_of(step: int, value: int) -> dict[str, Any]:
    return {"step": step, "value": value, "x": torch.zeros(2)}


@pytest.mark.timeout(7200)  # Each example takes up to a second on a busy machine.
@pytest.mark.parametrize(
    "examples",
    [
        40,
        pytest.param(400, marks=pytest.mark.long),
        pytest.param(2000, marks=pytest.mark.release),
    ],
)
def test_a_restore_finds_the_newest_state_of_the_training_and_nothing_needed_is_deleted(
    examples: int,
) -> None:
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            derandomize=examples < 2000,  # A new counterexample would block unrelated changes.
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
