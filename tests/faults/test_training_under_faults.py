"""The text example is killed at random steps on one to three nodes.

Each sample of an epoch is used once, no committed step is lost, few steps are redone, and the
weights are bitwise equal to those of an undisturbed run.
"""

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
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
MANY_RESTARTS = ("--max-restarts", "100")


@attrs.define
class Generation:
    """The traces of all ranks of a generation."""

    resumed: int = -1  # the step from which it resumed
    last: int = 0  # the last step that a rank has started
    world: int = 0


class Run:
    """A run of the example in its own directory."""

    def __init__(self, job: Job, name: str, epochs: int, *flags: str) -> None:
        self.job = job
        self.folder = job.folder / name
        self.folder.mkdir()
        self.checkpoints = self.folder / "checkpoints"
        self.trace = self.folder / "trace"
        self.steps = epochs * STEPS_PER_EPOCH
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
        """Return the current traces of the generations from `least` on."""
        generations: dict[int, Generation] = defaultdict(Generation)
        for path in self.folder.glob("trace.*.jsonl"):
            number = int(path.name.split(".")[-3])
            if number < least:
                continue
            generation = generations[number]
            lines = path.read_text().split("\n")[:-1]  # the last line may be incomplete
            for line in map(json.loads, (lines[:1] + lines[-1:])):
                generation.resumed = max(generation.resumed, line.get("resumed", -1))
                generation.last = max(generation.last, line.get("step", 0))
                generation.world = max(generation.world, line.get("world_size", 0))
        return dict(generations)

    def wait_for_step(self, step: int, after: int = 0, world: int = 1) -> int:
        """Wait until a generation of at least `world` ranks has started `step`.

        Returns:
            The number of the generation, which is larger than `after`.
        """

        def find_generation() -> int:
            generations = self.generations(after + 1)
            newest = max(generations, default=0)
            if not newest or generations[newest].world < world:
                return 0
            return newest if generations[newest].last >= step else 0

        return wait_until(f"step {step} in a generation after {after}", find_generation, 120.0)

    def committed(self) -> int:
        """Return the newest step on the disk, or 0."""
        if not self.checkpoints.exists():
            return 0
        return max(CheckpointManager(self.checkpoints).steps(), default=0)


def weights_of(node: Node, steps: int) -> str:
    """Return the checksum of the weights that a finished run has printed."""
    match = re.search(DONE, node.text)
    assert match, node.text
    assert int(match[1]) == steps
    return match[2]


def kill_a_worker(node: Node, dice: random.Random) -> None:
    workers = wait_until("workers to kill", lambda: find_workers(node.pid))
    os.kill(dice.choice(workers), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_workers_at_one_world_size_do_not_change_the_weights(job: Job) -> None:
    calm, storm = Run(job, "calm", 2), Run(job, "storm", 2)
    flags = ("--standalone", "--nproc-per-node", "2", *MANY_RESTARTS)
    undisturbed = job.start("calm", *LAUNCH, *flags, *calm.script)
    dice = random.Random(1)
    node = job.start("storm", *LAUNCH, "--rdzv-id", "storm", *flags, *storm.script)
    step = generation = 0
    for _ in range(6):
        generation = storm.wait_for_step(step + dice.randint(1, 20), generation)
        step = storm.generations()[generation].last
        kill_a_worker(node, dice)
    assert node.exit_code() == 0, node.text
    assert undisturbed.exit_code() == 0, undisturbed.text
    assert weights_of(node, storm.steps) == weights_of(undisturbed, calm.steps)
    check_no_step_is_lost(storm, kills=6)
    assert restore_sources(job) == {"memory"}


class Nodes:
    """The nodes of a job, with two, two and one workers. A node that leaves is replaced."""

    SIZES: ClassVar = {"a": 2, "b": 2, "c": 1}

    def __init__(self, run: Run) -> None:
        store = run.job.start_store()
        meet = ("--nnodes", "1:3", "--rdzv-id", "storm", "--rdzv-endpoint", store)
        self._run = run
        self._flags = (*meet, *MANY_RESTARTS, "--rdzv-conf", "last_call_timeout=0.2")
        self.all: dict[str, Node] = {}
        for name in self.SIZES:
            self._start(name)

    def _start(self, name: str) -> None:
        flags = (*self._flags, "--nproc-per-node", str(self.SIZES[name[0]]))
        self.all[name] = self._run.job.start(name, *LAUNCH, *flags, *self._run.script)

    def with_workers(self) -> list[str]:
        """Return the nodes that have workers, the oldest first."""
        return [name for name, node in self.all.items() if find_workers(node.pid)]

    def replace(self, turn: int) -> Node:
        """Start a new node, and return the oldest node, which the test then stops."""
        name = self.with_workers()[0]
        node = self.all.pop(name)
        self._start(f"{name[0]}{turn}")
        return node


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("turns", [10, pytest.param(20, marks=pytest.mark.release)])
def test_kills_and_resizes_lose_no_step_and_do_not_change_the_weights(job: Job, turns: int) -> None:
    """The world size varies from one to five; the ranks share five logical workers."""
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
        node_leaves = turn in (killed, drains)
        # Another node must have the snapshots of the node that leaves.
        world = 3 if node_leaves else 1
        generation = storm.wait_for_step(step + dice.randint(1, 6), generation, world)
        step = storm.generations()[generation].last
        committed.append((generation, storm.committed()))
        if not node_leaves:
            kill_a_worker(nodes.all[dice.choice(nodes.with_workers())], dice)
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
    check_no_step_is_lost(storm, kills=turns - 1, committed=committed, drained=drained)
    # A node that joins gets the state from a peer, or finds the step on the disk if the others had
    # time to save it before the resize.
    assert "memory" in restore_sources(job)


@pytest.mark.long
def test_a_job_that_fails_permanently_leaves_its_last_step_on_the_disk(job: Job) -> None:
    run = Run(job, "run", 1, "--save-every", "1000")
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "0")
    node = job.start("first", *LAUNCH, *flags, *run.script)
    generation = run.wait_for_step(20)
    kill_a_worker(node, random.Random(3))
    assert node.exit_code() == 1, node.text
    committed, started = run.committed(), run.generations()[generation].last
    assert started - 2 <= committed <= started, node.text
    again = job.start("again", *LAUNCH, *flags, *run.script)
    assert again.exit_code() == 0, again.text
    weights_of(again, run.steps)
    ((state,),) = [[e for e in events if e.kind == "state.restored"] for events in job.events()]
    assert (state.data["source"], state.data["step"]) == ("disk", committed)
    trace = read_traces(run.trace)  # of both launches; the generations of each start at 1
    assert trace.used_exactly_once(SAMPLES)
    assert trace.steps == run.steps


def restore_sources(job: Job) -> set[str]:
    """Return the sources from which the nodes of the disturbed run have restored a state."""
    events = [
        event
        for events_of_node in job.events("storm")
        for event in events_of_node
        if event.kind == "state.restored"
    ]
    return {event.data["source"] for event in events}


def check_no_step_is_lost(
    run: Run,
    kills: int,
    committed: list[tuple[int, int]] | None = None,
    drained: list[int] | None = None,
) -> None:
    """Check the traces and the checkpoints of a finished run.

    Args:
        run: the run.
        kills: how many times workers were killed.
        committed: generations, each with the newest step on the disk before it was disturbed.
        drained: generations that a drain has stopped.
    """
    trace = read_traces(run.trace)
    assert trace.used_exactly_once(SAMPLES)
    assert trace.steps == run.steps
    assert run.committed() == run.steps
    generations = run.generations()
    order = sorted(generations)
    redone = 0
    for before, after in itertools.pairwise(order):
        started, resumed = generations[before].last, generations[after].resumed
        # The last started step was completed by no rank. The step before may have been completed,
        # but a rank was killed before it had taken its snapshot.
        assert 0 <= started - resumed <= 2, (before, after, generations)
        redone += started > resumed
        if before in (drained or ()):
            assert started == resumed, (before, after, generations)
    assert redone <= kills, generations
    for generation, step in committed or ():
        later = [number for number in order if number > generation]
        assert generations[later[0]].resumed >= step
