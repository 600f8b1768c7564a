"""Random kills, from a seed, of workers and nodes of a job with in-place recovery.

The surviving processes continue, each sample is used once, no committed step is lost, and the
weights are bitwise equal to those of an undisturbed job. `pytest tests/in_place/test_kills.py
--kills 160` runs 40 kills for each shape; another number draws other kills.
"""

from __future__ import annotations

import random
import time

import attrs
import pytest
from in_place_runs import Training, Worker, kill, needs_newest, pids, train_undisturbed
from jobs import Job
from processes import is_alive

from elasticlib.testing.waiting import wait_until

pytestmark = [needs_newest, pytest.mark.faults]


@attrs.frozen
class Shape:
    """The size of a job, and whether its workers or its nodes are killed. Nodes are replaced."""

    nodes: int
    workers: int
    kills_nodes: bool = False

    @property
    def world(self) -> int:
        return self.nodes * self.workers

    @property
    def pace(self) -> float:
        """Seconds that are added to a step while processes are killed."""
        return 0.2 if self.kills_nodes else 0.05


SHAPES = {
    "five workers": Shape(1, 5),
    "two workers": Shape(1, 2),
    "three nodes, nodes are killed": Shape(3, 1, kills_nodes=True),
    "two nodes of two": Shape(2, 2),
    "two nodes of two, nodes are killed": Shape(2, 2, kills_nodes=True),
}
NUM_SHORT = 2  # the first shapes are tested in each run, the others in long runs


class DisturbedJob:
    """A job of a shape, and the kills of its processes."""

    def __init__(self, job: Job, shape: Shape, rounds: int, seed: str) -> None:
        self.training = Training(job, "storm", 10 + 3 * rounds)
        self.shape, self.rng = shape, random.Random(seed)
        rendezvous_flags: tuple[str, ...] = ("--standalone",)
        if shape.nodes > 1:
            size = ("--nnodes", f"1:{shape.nodes}", "--rdzv-conf", "last_call_timeout=0.3")
            rendezvous_flags = (*size, "--rdzv-endpoint", job.start_store())
        self._flags = (
            *rendezvous_flags,
            "--rdzv-id",
            "storm",
            "--nproc-per-node",
            str(shape.workers),
        )
        self._started = 0
        self.training.pace(shape.pace)
        for _ in range(shape.nodes):
            self.add_node()

    def add_node(self) -> None:
        self._started += 1
        self.training.start(f"node{self._started}", *self._flags)

    def kill_some(self, before: list[Worker]) -> set[int]:
        """Kill some workers, and return the processes that must survive."""
        time.sleep(self.rng.uniform(0.0, 2 * self.shape.pace))
        if self.shape.kills_nodes:
            lost = self.rng.choice(sorted({worker.node for worker in before}))
            self.training.nodes.pop(lost).kill()
            killed = pids(worker for worker in before if worker.node == lost)
            wait_until(
                "the exit of the workers of the node", lambda: not any(map(is_alive, killed))
            )
            self.add_node()
            return pids(before) - killed
        # Usually one worker is killed; otherwise more are killed while the next group forms.
        only_one = self.rng.random() < 0.7
        victims = self.rng.sample(before, 1 if only_one else self.rng.randint(1, len(before) - 1))
        for victim in victims:
            kill(victim)
            time.sleep(self.rng.uniform(0.0, 0.1))
        return pids(before) - pids(victims)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if i < NUM_SHORT else pytest.mark.long)
        for i, name in enumerate(SHAPES)
    ],
)
def test_surviving_workers_continue_and_no_committed_step_is_lost(
    job: Job, kills: int, name: str
) -> None:
    rounds = max(1, kills // 4)
    disturbed_job = DisturbedJob(job, SHAPES[name], rounds, f"{rounds} {name}")
    training, step = disturbed_job.training, 0
    for _ in range(rounds):
        before = training.wait_for_workers(
            disturbed_job.shape.world, step + disturbed_job.rng.randint(0, 3)
        )
        survivors = disturbed_job.kill_some(before)
        step = training.last_step
        after = training.wait_for_workers(disturbed_job.shape.world, step)
        assert survivors <= pids(after), job.logs
    assert training.wait_for_success() == train_undisturbed(job, training.epochs)
    training.check_nothing_is_lost()
