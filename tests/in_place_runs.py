"""Jobs with in-place recovery on one to three nodes, and checks of their results.

They run `programs/in_place_training.py`.
"""

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
from processes import is_alive
from traces import read_traces

from elasticlib import CheckpointManager
from elasticlib.testing.waiting import wait_until

IN_PLACE = hasattr(dist, "_reconfigure")
needs_newest = pytest.mark.skipif(
    not IN_PLACE, reason="torch older than 2.14 cannot replace the members of a group"
)

TRAINING = str(PROGRAMS / "in_place_training.py")
LAUNCH = (sys.executable, "-m", "elasticlib.launch")
SAMPLES, BATCH = 103, 10
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
DONE = r"done: steps (\d+) weights sha256 (\w{64})"
MANY_RESTARTS = ("--max-restarts", "1000")
TIMEOUT_S = 120.0  # for one event on a busy machine


@attrs.frozen
class Worker:
    """A process, and the step, generation and world size of each step that it has committed."""

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
    """A run of the program in its own directory."""

    def __init__(self, job: Job, name: str, epochs: int) -> None:
        self.job, self.folder = job, job.folder / name
        self.folder.mkdir()
        self.epochs, self.steps = epochs, epochs * STEPS_PER_EPOCH
        self.nodes: dict[str, Node] = {}

    def start(self, name: str, *flags: str) -> Node:
        """Start a node of the job."""
        sizes = (str(self.epochs), str(SAMPLES), str(BATCH))
        script = (TRAINING, str(self.folder), *sizes)
        node = self.nodes[name] = self.job.start(name, *LAUNCH, *MANY_RESTARTS, *flags, *script)
        return node

    def pace(self, seconds: float) -> None:
        """Add a number of seconds to each step from now on."""
        path = self.folder / "pace"
        if seconds:
            # The workers may read the file at any time, so it is replaced atomically.
            (self.folder / "new").write_text(str(seconds))
            (self.folder / "new").replace(path)
        else:
            path.unlink(missing_ok=True)

    def workers(self, *, living: bool = False) -> list[Worker]:
        """Return all workers that have committed a step, or only the living ones."""
        paths = self.folder.glob("committed.*")
        selected = (path for path in paths if not living or is_alive(int(path.suffix[1:])))
        return [worker for path in selected for worker in _read(path)]

    def wait_for_workers(self, world: int, past: int = 0) -> list[Worker]:
        """Wait until `world` workers form a group that has committed a step after `past`."""

        def find_group() -> list[Worker]:
            workers = self.workers(living=True)
            newest = max((worker.generation for worker in workers), default=0)
            group = [worker for worker in workers if worker.generation == newest]
            if len(group) < world or min(worker.step for worker in group) <= past:
                return []
            return group if group[0].committed[-1][2] == len(group) == world else []

        what = f"{world} workers at work past step {past}"
        try:
            return wait_until(what, find_group, TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.workers()}\n{self.job.logs}") from None

    @property
    def last_step(self) -> int:
        return max((worker.step for worker in self.workers()), default=0)

    def wait_for_success(self, names: Iterable[str] = ()) -> str:
        """Wait until these nodes, or all of them, exit; return the digest of the weights."""
        self.pace(0)
        nodes = [self.nodes[name] for name in names or self.nodes]
        for node in nodes:
            assert node.exit_code(TIMEOUT_S + self.steps / 5) == 0, self.job.logs
        # Several nodes report it if one joins while the others finish.
        ((steps, weights),) = {end for node in nodes for end in re.findall(DONE, node.text)}
        assert int(steps) == self.steps, self.job.logs
        return str(weights)

    def check_nothing_is_lost(self) -> None:
        """Check that each sample of an epoch was used once, and that no committed step is lost."""
        assert "does the script call" not in self.job.logs, self.job.logs
        trace = read_traces(self.folder / "trace")
        assert trace.used_exactly_once(SAMPLES)
        assert trace.steps == self.steps
        first_and_last: dict[int, tuple[int, int]] = {}  # step of each generation
        for worker in self.workers():
            steps = [step for step, _, _ in worker.committed]
            assert steps == sorted(set(steps)), worker
            for step, generation, _ in worker.committed:
                first, last = first_and_last.get(generation, (step, step))
                first_and_last[generation] = (min(first, step), max(last, step))
        newest = 0
        for generation, (first, last) in sorted(first_and_last.items()):
            # Only the last step of workers that were killed may be repeated.
            assert first >= newest, (generation, first, newest, self.job.logs)
            newest = max(newest, last)

    def saved(self) -> int:
        """Return the newest step on the disk."""
        return max(CheckpointManager(self.folder / "checkpoints").steps(), default=0)

    def sources(self) -> set[str]:
        """Return the sources from which nodes have restored a state."""
        events = (event for node in self.job.events(self.folder.name) for event in node)
        return {event.data["source"] for event in events if event.kind == "state.restored"}


def _read(path: Path) -> list[Worker]:
    node, local_rank, pid = path.name.split(".")[1:]
    lines = path.read_text().split("\n")[:-1]  # the last line may be incomplete
    committed = tuple(tuple(json.loads(line)) for line in lines)
    return [Worker(int(pid), node, int(local_rank), committed)] if committed else []


def pids(workers: Iterable[Worker]) -> set[int]:
    return {worker.pid for worker in workers}


_UNDISTURBED: dict[int, str] = {}


def train_undisturbed(job: Job, epochs: int) -> str:
    """Return the digest of the weights after the same training on one undisturbed worker."""
    if epochs not in _UNDISTURBED:
        training = Training(job, "undisturbed", epochs)
        training.start("undisturbed", "--standalone", "--rdzv-id", "undisturbed")
        _UNDISTURBED[epochs] = training.wait_for_success()
    return _UNDISTURBED[epochs]


def kill(*workers: Worker) -> None:
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
