"""Trainings whose workers outlive their groups, on one to three nodes, and what must hold of them:
`programs/in_place_training.py`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import attrs
import pytest
import torch.distributed as dist
from jobs import PROGRAMS, Job, Node
from processes import alive
from traces import survey

from elasticlib import CheckpointManager
from elasticlib.testing.waiting import wait_until

IN_PLACE = hasattr(dist, "_reconfigure")
needs_newest = pytest.mark.skipif(
    not IN_PLACE, reason="torch 2.14 is the first that gives a process group other members"
)

TRAINING = str(PROGRAMS / "in_place_training.py")
LAUNCH = (sys.executable, "-m", "elasticlib.launch")
SAMPLES, BATCH = 103, 10
STEPS_AN_EPOCH = -(-SAMPLES // BATCH)
DONE = r"done: steps (\d+) weights sha256 (\w{64})"
PATIENT = ("--max-restarts", "1000")
SLOW = 120.0
"""Seconds within which something comes on a busy machine."""


@attrs.frozen
class Worker:
    """A process, and what it has committed: step, generation and world size, in its order."""

    pid: int
    node: str
    local_rank: int
    committed: tuple[tuple[int, int, int], ...]

    @property
    def generation(self) -> int:
        return self.committed[-1][1]

    @property
    def step(self) -> int:
        return self.committed[-1][0]


class Training:
    """A run of the program under a folder of its own."""

    def __init__(self, job: Job, name: str, epochs: int) -> None:
        self.job, self.folder = job, job.folder / name
        self.folder.mkdir()
        self.epochs, self.steps = epochs, epochs * STEPS_AN_EPOCH
        self.nodes: dict[str, Node] = {}

    def start(self, name: str, *flags: str) -> Node:
        """Another node of it, or the only one."""
        sizes = (str(self.epochs), str(SAMPLES), str(BATCH))
        script = (TRAINING, str(self.folder), *sizes)
        node = self.nodes[name] = self.job.start(name, *LAUNCH, *PATIENT, *flags, *script)
        return node

    def pace(self, seconds: float) -> None:
        """So much longer does each step take from now on."""
        path = self.folder / "pace"
        if seconds:
            # At once, as the workers read it.
            (self.folder / "new").write_text(str(seconds))
            (self.folder / "new").replace(path)
        else:
            path.unlink(missing_ok=True)

    def workers(self, *, living: bool = False) -> list[Worker]:
        """All that have ever committed a step, or those of them that live."""
        paths = self.folder.glob("committed.*")
        found = (path for path in paths if not living or alive(int(path.suffix[1:])))
        return [worker for path in found for worker in _read(path)]

    def at_work(self, world: int, past: int = 0) -> list[Worker]:
        """Waits until so many workers are a group that has committed a step after this one."""

        def look() -> list[Worker]:
            found = self.workers(living=True)
            newest = max((worker.generation for worker in found), default=0)
            group = [worker for worker in found if worker.generation == newest]
            there = len(group) == world and min(worker.step for worker in group) > past
            return group if there and group[0].committed[-1][2] == world else []

        what = f"{world} workers at work past step {past}"
        try:
            return wait_until(what, look, SLOW)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.workers()}\n{self.job.logs}") from None

    @property
    def last_step(self) -> int:
        return max((worker.step for worker in self.workers()), default=0)

    def ends(self, names: Iterable[str] = ()) -> str:
        """Waits for the end of these nodes, or of all; what they say of the weights."""
        self.pace(0)
        nodes = [self.nodes[name] for name in names or self.nodes]
        for node in nodes:
            assert node.exit_code(SLOW + self.steps / 5) == 0, self.job.logs
        # It is said again if somebody joins while the others end.
        ((steps, weights),) = {end for node in nodes for end in re.findall(DONE, node.text)}
        assert int(steps) == self.steps, self.job.logs
        return str(weights)

    def check_nothing_is_lost(self) -> None:
        """Each sample of each epoch was used once, and no worker ever went back before a step that
        it had committed."""
        assert "does the script call" not in self.job.logs, self.job.logs
        told = survey(self.folder / "trace")
        assert told.exactly_once(SAMPLES)
        assert told.steps == self.steps
        for worker in self.workers():
            steps = [step for step, _, _ in worker.committed]
            assert steps == sorted(set(steps)), worker

    def saved(self) -> int:
        """The newest step on the disk."""
        return max(CheckpointManager(self.folder / "checkpoints").steps(), default=0)

    def sources(self) -> set[str]:
        """Whence nodes say that they took up a state."""
        told = (event for events in self.job.events(self.folder.name) for event in events)
        return {event.facts["source"] for event in told if event.kind == "restored"}


def _read(path: Path) -> list[Worker]:
    node, local_rank, pid = path.name.split(".")[1:]
    lines = path.read_text().split("\n")[:-1]  # the last may be in the making
    committed = tuple(tuple(json.loads(line)) for line in lines)
    return [Worker(int(pid), node, int(local_rank), committed)] if committed else []


def pids(workers: Iterable[Worker]) -> set[int]:
    return {worker.pid for worker in workers}


_UNDISTURBED: dict[int, str] = {}


def undisturbed(job: Job, epochs: int) -> str:
    """The weights at which the same training ends on a single worker that nobody disturbs."""
    if epochs not in _UNDISTURBED:
        calm = Training(job, "calm", epochs)
        calm.start("calm", "--standalone", "--rdzv-id", "calm")
        _UNDISTURBED[epochs] = calm.ends()
    return _UNDISTURBED[epochs]


def kill(*workers: Worker) -> None:
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
