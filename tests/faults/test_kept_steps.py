"""The example, killed at random steps on one to three nodes: no sample twice or never, no
committed step lost, next to nothing done again, and the same weights."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
from collections import defaultdict
from typing import ClassVar

import attrs
import pytest
from jobs import PROGRAMS, Job, Node
from processes import find_workers
from traces import read_traces

from elasticlib import CheckpointManager
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

PACED = str(PROGRAMS / "paced_training.py")
LAUNCH = (sys.executable, "-m", "elasticlib.launch")
DONE = r"done: loss \S+ steps (\d+) weights sha256 (\w{64})"
SAMPLES, BATCH = 402, 5
STEPS_AN_EPOCH = -(-SAMPLES // BATCH)
PATIENT = ("--max-restarts", "100")


@attrs.define
class Generation:
    """What the traces of one generation say, its ranks taken together."""

    resumed: int = -1
    last: int = 0
    world: int = 0


class Run:
    """A run of the example under a folder of its own."""

    def __init__(self, job: Job, name: str, epochs: int, *flags: str) -> None:
        self.job = job
        self.folder = job.folder / name
        self.folder.mkdir()
        self.checkpoints = self.folder / "checkpoints"
        self.trace = self.folder / "trace"
        self.steps = epochs * STEPS_AN_EPOCH
        settings = {
            "checkpoint-dir": self.checkpoints,
            "trace": self.trace,
            "samples": SAMPLES,
            "global-batch": BATCH,
            "epochs": epochs,
            "save-every": 15,
            "print-every": 100,
        }
        options = (f"--{name}={value}" for name, value in settings.items())
        self.pace = self.folder / "pace"
        self.script = (PACED, str(self.pace), *options, *flags)

    def generations(self, least: int = 0) -> dict[int, Generation]:
        """Those from `least` on of a run of one launch, as far as they have come by now."""
        found: dict[int, Generation] = defaultdict(Generation)
        for path in self.folder.glob("trace.*.jsonl"):
            number = int(path.name.split(".")[-3])
            if number < least:
                continue
            generation = found[number]
            lines = path.read_text().split("\n")[:-1]  # the last may be in the making
            for line in map(json.loads, (lines[:1] + lines[-1:])):
                generation.resumed = max(generation.resumed, line.get("resumed", -1))
                generation.last = max(generation.last, line.get("step", 0))
                generation.world = max(generation.world, line.get("world_size", 0))
        return dict(found)

    def comes_to(self, step: int, after: int = 0, world: int = 1) -> int:
        """Waits until a generation past `after`, of `world` ranks at least, has begun `step`;
        returns its number."""

        def look() -> int:
            found = self.generations(after + 1)
            newest = max(found, default=0)
            if not newest or found[newest].world < world:
                return 0
            return newest if found[newest].last >= step else 0

        return wait_until(f"step {step} in a generation after {after}", look, 120.0)

    def committed(self) -> int:
        """The newest step that is on the disk."""
        if not self.checkpoints.exists():
            return 0
        return max(CheckpointManager(self.checkpoints).steps(), default=0)


def weights_of(node: Node, steps: int) -> str:
    """What a run that has come to its end says of its weights."""
    said = re.search(DONE, node.text)
    assert said, node.text
    assert int(said[1]) == steps
    return said[2]


def kill_a_worker(node: Node, dice: random.Random) -> None:
    os.kill(
        dice.choice(wait_until("workers to kill", lambda: find_workers(node.pid))), signal.SIGKILL
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kills_at_one_world_size_change_no_bit_of_the_weights(job: Job) -> None:
    calm, storm = Run(job, "calm", 2), Run(job, "storm", 2)
    place = ("--standalone", "--nproc-per-node", "2", *PATIENT)
    undisturbed = job.start("calm", *LAUNCH, *place, *calm.script)
    dice = random.Random(1)
    node = job.start("storm", *LAUNCH, "--rdzv-id", "storm", *place, *storm.script)
    step = generation = 0
    for _ in range(6):
        generation = storm.comes_to(step + dice.randint(1, 20), generation)
        step = storm.generations()[generation].last
        kill_a_worker(node, dice)
    assert node.exit_code() == 0, node.text
    assert undisturbed.exit_code() == 0, undisturbed.text
    assert weights_of(node, storm.steps) == weights_of(undisturbed, calm.steps)
    check_nothing_is_lost(storm, kills=6)
    assert sources(job) == {"memory"}


class Nodes:
    """Those of one job: of two workers, of two, and of one; who leaves is replaced."""

    SIZES: ClassVar = {"a": 2, "b": 2, "c": 1}

    def __init__(self, run: Run) -> None:
        store = run.job.start_store()
        place = ("--nnodes", "1:3", "--rdzv-id", "storm", "--rdzv-endpoint", store)
        self._run = run
        self._flags = (*place, *PATIENT, "--rdzv-conf", "last_call_timeout=0.2")
        self.all: dict[str, Node] = {}
        for name in self.SIZES:
            self._start(name)

    def _start(self, name: str) -> None:
        flags = (*self._flags, "--nproc-per-node", str(self.SIZES[name[0]]))
        self.all[name] = self._run.job.start(name, *LAUNCH, *flags, *self._run.script)

    def at_work(self) -> list[str]:
        """Those that have come so far as to have workers, from old to new."""
        return [name for name, node in self.all.items() if find_workers(node.pid)]

    def replace(self, turn: int) -> Node:
        """Another node starts for the one that has been there for longest, which is returned."""
        name = self.at_work()[0]
        node = self.all.pop(name)
        self._start(f"{name[0]}{turn}")
        return node


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("turns", [10, pytest.param(20, marks=pytest.mark.release)])
def test_kills_and_resizes_lose_nothing_and_change_no_bit_of_the_weights(
    job: Job, turns: int
) -> None:
    """Worlds of one to five ranks, over which five logical workers are dealt."""
    epochs = turns // 5
    calm = Run(job, "calm", epochs, "--logical-workers", "5")
    storm = Run(job, "storm", epochs, "--logical-workers", "5")
    undisturbed = job.start("calm", *LAUNCH, "--standalone", *calm.script)
    storm.pace.write_text("0.3")
    nodes = Nodes(storm)
    dice = random.Random(5)
    committed, drained, step, generation = [], [], 0, 0
    killed, drains = turns // 4, turns * 3 // 5
    for turn in range(turns):
        leaves = turn in (killed, drains)
        # A node may be lost without its steps only where there is another that has them.
        world = 3 if leaves else 1
        generation = storm.comes_to(step + dice.randint(1, 6), generation, world)
        step = storm.generations()[generation].last
        committed.append((generation, storm.committed()))
        if not leaves:
            kill_a_worker(nodes.all[dice.choice(nodes.at_work())], dice)
        elif turn == drains:
            node = nodes.replace(turn)
            node.signal(signal.SIGUSR2)
            assert node.exit_code() == 75, node.text
            drained.append(generation)
        else:
            nodes.replace(turn).kill()
    storm.pace.unlink()
    for node in nodes.all.values():
        assert node.exit_code(120.0) == 0, node.text
    assert undisturbed.exit_code() == 0, undisturbed.text
    last = next(node for node in nodes.all.values() if re.search(DONE, node.text))
    assert weights_of(last, storm.steps) == weights_of(undisturbed, calm.steps)
    check_nothing_is_lost(storm, kills=turns - 1, committed=committed, drained=drained)
    # A newcomer is sent the state by a peer, or finds the same step on the disk where those who
    # made way for it had time to save.
    assert "memory" in sources(job)


@pytest.mark.long
def test_a_job_that_fails_for_good_leaves_its_last_step_on_the_disk(job: Job) -> None:
    run = Run(job, "run", 1, "--save-every", "1000")
    place = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "0")
    node = job.start("first", *LAUNCH, *place, *run.script)
    generation = run.comes_to(20)
    kill_a_worker(node, random.Random(3))
    assert node.exit_code() == 1, node.text
    kept, begun = run.committed(), run.generations()[generation].last
    assert begun - 2 <= kept <= begun, node.text
    again = job.start("again", *LAUNCH, *place, *run.script)
    assert again.exit_code() == 0, again.text
    weights_of(again, run.steps)
    ((state,),) = [[e for e in events if e.kind == "state.restored"] for events in job.events()]
    assert (state.data["source"], state.data["step"]) == ("disk", kept)
    told = read_traces(run.trace)  # of both launches, in each of which generations count from 1
    assert told.used_exactly_once(SAMPLES)
    assert told.steps == run.steps


def sources(job: Job) -> set[str]:
    """Whence the nodes of the disturbed run say that they took up a state."""
    told = [
        event
        for events in job.events("storm")
        for event in events
        if event.kind == "state.restored"
    ]
    return {event.data["source"] for event in told}


def check_nothing_is_lost(
    run: Run,
    kills: int,
    committed: list[tuple[int, int]] | None = None,
    drained: list[int] | None = None,
) -> None:
    """What the traces and the disk say of a run that has come to its end.

    committed: generations, each with the newest step on the disk before it was disturbed.
    drained: those that ended by a drain.
    """
    told = read_traces(run.trace)
    assert told.used_exactly_once(SAMPLES)
    assert told.steps == run.steps
    assert run.committed() == run.steps
    generations = run.generations()
    order = sorted(generations)
    redone = 0
    for before, after in itertools.pairwise(order):
        begun, resumed = generations[before].last, generations[after].resumed
        # A step that was begun by one rank was done by none; the one before it may have been
        # done by all, and the rank that would have kept it was killed just then.
        assert 0 <= begun - resumed <= 2, (before, after, generations)
        redone += begun > resumed
        if before in (drained or ()):
            assert begun == resumed, (before, after, generations)
    assert redone <= kills, generations
    for generation, step in committed or ():
        later = [number for number in order if number > generation]
        assert generations[later[0]].resumed >= step
