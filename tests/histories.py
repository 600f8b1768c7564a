"""Histories of runs for tests of reports: an uneventful, an eventful and a very long one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import attrs

from elasticlib.observe.event import TimelineEvent
from elasticlib.observe.history import (
    Generation,
    GenerationTrigger,
    History,
    JobState,
    NodeExit,
    NodeHistory,
    NodeMembership,
    ProgressSample,
    RecoveryCost,
)

WALL = 1_790_000_000.0
NASTY = 'ValueError: <script>alert("x")</script> & \x1b[31mred\x1b[0m \x07\x00 \u202eevil\u2069'
LONG = "RuntimeError: " + "a_word_of_forty_letters_without_any_space " * 30 + "x" * 400


def uneventful() -> History:
    """Return a run of one node and one worker, with one generation and no progress reports."""
    node = NodeHistory(
        "n0", "laptop", 0.0, 42.5, 1, NodeExit(42.5, JobState.SUCCEEDED, "all workers succeeded", 0)
    )
    generation = Generation(1, GenerationTrigger.START, "the first generation", 0.4, 42.4, 1, 1, 0)
    membership = NodeMembership("n0", 1, 0, (0, 0), 0.4, 42.4)
    return History("train", WALL, 42.5, JobState.SUCCEEDED, (node,), (membership,), (generation,))


def waiting() -> History:
    """Return a run whose only agent has waited for other nodes since its first event."""
    return History("job", WALL, 0.0, JobState.WAITING, (NodeHistory("n0", "a", 0.0, 0.0, 8),))


class HistoryBuilder:
    """Builds the history of a run, generation by generation."""

    def __init__(self, seed: int, run: str, workers: int, speed: float = 2.0) -> None:
        self.random = random.Random(seed)
        self.run, self.workers, self.speed = run, workers, speed
        self.at, self.step, self.restarts = 0.0, 0, 0
        self.marked_step = 0  # the last step for which a checkpoint was considered
        self.generations: list[Generation] = []
        self.memberships: list[NodeMembership] = []
        self.timeline: list[TimelineEvent] = []
        self.progress: list[ProgressSample] = []
        self.nodes: dict[str, NodeHistory] = {}

    def add_nodes(self, *names: str) -> None:
        for name in names:
            self.nodes[name] = NodeHistory(
                f"{name}_4711_a1b2c3d4",
                name,
                self.at,
                self.at,
                self.workers,
                pid=4711,
                log_dir=f"/scratch/logs/{self.run}_k2j3h4g5",
                settings={
                    "min_nodes": "1",
                    "max_nodes": "4",
                    "nproc_per_node": str(self.workers),
                    "max_restarts": "20",
                    "rdzv_backend": "c10d",
                    "rdzv_endpoint": "[fd00::17]:29400",
                },
                versions={"elasticlib": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.2"},
            )

    def run_for(
        self,
        seconds: float,
        names: Sequence[str],
        trigger: GenerationTrigger,
        cause: str,
        report_interval: float = 10.0,
    ) -> None:
        """Add a generation of these nodes that trains for so many seconds."""
        draw = self.random.uniform
        is_first = trigger is GenerationTrigger.START
        is_failure = trigger in (GenerationTrigger.FAILURE, GenerationTrigger.NODE_LOSS)
        redone = self.step % 100 if is_failure else 0
        self.restarts += trigger is GenerationTrigger.FAILURE
        self.step -= redone
        cost = RecoveryCost(
            detection=(draw(2, 9) if trigger is GenerationTrigger.NODE_LOSS else draw(0.01, 0.1))
            if not is_first
            else None,
            shutdown=None if is_first else draw(0.2, 2.5),
            rendezvous=draw(0.4, 3.0),
            startup=draw(0.5, 2.5),
            restore=None if is_first else draw(0.1, 1.2),
            repeated_steps=redone,
            repeated=redone / self.speed,
        )
        started = self.at + (cost.detection or 0) + (cost.shutdown or 0) + (cost.rendezvous or 0)
        trained = started + (cost.startup or 0) + (cost.restore or 0)
        finished = trained + seconds
        number = len(self.generations) + 1
        world = len(names) * self.workers
        start = self.step
        for node_rank, name in enumerate(names):
            ranks = (node_rank * self.workers, (node_rank + 1) * self.workers - 1)
            self.memberships.append(
                NodeMembership(self.id(name), number, node_rank, ranks, started, finished)
            )
        self._add_progress(number, names, trained, finished, report_interval)
        generation = Generation(
            number,
            trigger,
            cause,
            started,
            finished,
            len(names),
            world,
            self.restarts,
            trained,
            start,
        )
        self.generations.append(attrs.evolve(generation, last_step=self.step, cost=cost))
        self.at = finished

    def _add_progress(
        self, number: int, names: Sequence[str], start: float, end: float, interval: float
    ) -> None:
        at = start
        while at + interval < end:
            at += interval
            self.step += max(1, round(self.speed * interval * self.random.uniform(0.85, 1.1)))
            loss = 0.3 + 3.2 * math.exp(-self.step / 900) + self.random.gauss(0, 0.05)
            for node_rank, name in enumerate(names):
                speed = self.speed * self.random.uniform(0.9, 1.1)
                samples = 64.0 * self.workers * speed
                reported_loss = loss if node_rank == 0 else None
                node = self.id(name)
                self.progress.append(
                    ProgressSample(at, node, number, self.step, speed, reported_loss, samples)
                )
            if self.step // 100 != self.marked_step // 100:
                self.marked_step = self.step
                saved = self.step // 100 * 100
                for name in names:
                    self.mark("checkpoint.saved", name, f"step {saved}", at=at, step=saved)
            elif self.random.random() < 0.3:
                self.mark("snapshot.taken", names[0], f"step {self.step}", at=at, step=self.step)

    def id(self, name: str) -> str:
        return self.nodes[name].node

    def mark(
        self,
        kind: str,
        name: str,
        text: str,
        *,
        at: float | None = None,
        rank: int | None = None,
        step: int | None = None,
    ) -> None:
        when = self.at if at is None else at
        self.timeline.append(TimelineEvent(when, kind, self.id(name), text, rank, step))

    def end(self, name: str, state: JobState, reason: str, code: int) -> None:
        node_exit = NodeExit(self.at, state, reason, code)
        self.nodes[name] = attrs.evolve(self.nodes[name], last_event_at=self.at, exit=node_exit)

    def lose(self, name: str) -> None:
        self.nodes[name] = attrs.evolve(self.nodes[name], last_event_at=self.at, is_lost=True)

    def history(self, state: JobState, reason: str) -> History:
        read_at = self.at + 0.5
        return History(
            self.run,
            WALL,
            read_at,
            state,
            nodes=tuple(self.nodes.values()),
            memberships=tuple(self.memberships),
            generations=tuple(self.generations),
            timeline=tuple(sorted(self.timeline, key=lambda mark: mark.at)),
            progress=tuple(self.progress),
            restarts=self.restarts,
            max_restarts=20,
            reason=reason,
            checkpoint_step=max(
                (m.step for m in self.timeline if m.kind == "checkpoint.saved" and m.step),
                default=None,
            ),
            snapshot_step=max(
                (m.step for m in self.timeline if m.kind == "snapshot.taken" and m.step),
                default=None,
            ),
        )


def eventful() -> History:
    """Return a run of four nodes and twelve generations, with failures, a drain and a lost node."""
    builder = HistoryBuilder(7, "llm-pretrain-42", 4)
    builder.add_nodes("gpu-a", "gpu-b")
    run, mark = builder.run_for, builder.mark
    pair, trio = ("gpu-a", "gpu-b"), ("gpu-a", "gpu-b", "gpu-c")
    run(240, pair, GenerationTrigger.START, "the first generation")
    builder.add_nodes("gpu-c")
    run(300, trio, GenerationTrigger.RESIZE, "gpu-c joined")
    mark("failure", "gpu-b", NASTY, rank=5)
    run(130, trio, GenerationTrigger.FAILURE, "rank 5 on gpu-b failed: ValueError")
    mark("failure", "gpu-b", "rank 4 ended with signal 11 (SIGSEGV)", rank=4)
    mark("failure", "gpu-c", "rank 9 ended with exit code 1", rank=9)
    run(80, trio, GenerationTrigger.FAILURE, "rank 4 on gpu-b failed: signal 11 (SIGSEGV)")
    mark("failure", "gpu-a", LONG, rank=0)
    run(310, trio, GenerationTrigger.FAILURE, "rank 0 on gpu-a failed: RuntimeError")
    mark("drain.requested", "gpu-c", "SIGTERM: preemption in 120 s")
    builder.end("gpu-c", JobState.DRAINED, "drained after SIGTERM", 75)
    run(200, pair, GenerationTrigger.RESIZE, "gpu-c drained")
    builder.lose("gpu-b")
    run(150, pair[:1], GenerationTrigger.NODE_LOSS, "gpu-b was lost: its lease ran out")
    builder.add_nodes("gpu-d-with-a-rather-long-name.cluster.example.org")
    late = ("gpu-a", "gpu-d-with-a-rather-long-name.cluster.example.org")
    run(240, late, GenerationTrigger.RESIZE, "gpu-d joined")
    for rank in (3, 1, 6):
        mark("failure", late[rank > 3], f"rank {rank}: no step for 30 s, a hang", rank=rank)
        run(90, late, GenerationTrigger.FAILURE, f"rank {rank} hung")
    mark("events.dropped", "gpu-a", "17 events could not be written")
    run(420, late, GenerationTrigger.RESIZE, "a spare node was admitted")
    for name in late:
        builder.end(name, JobState.SUCCEEDED, "all workers succeeded", 0)
    return builder.history(JobState.SUCCEEDED, "all workers of all nodes succeeded")


def vast(nodes: int = 500, generations: int = 200) -> History:
    """Return a run of a week with many nodes and more than 50,000 progress samples."""
    builder = HistoryBuilder(11, "week", 8, speed=0.5)
    names = [f"node{number:03d}" for number in range(nodes)]
    builder.add_nodes(*names)
    members = list(names)
    trigger, cause = GenerationTrigger.START, "the first generation"
    for number in range(generations):
        builder.run_for(
            builder.random.uniform(600, 6000), members, trigger, cause, report_interval=1500.0
        )
        node = builder.random.choice(members)
        kind = builder.random.random()
        if kind < 0.6:
            builder.mark(
                "failure", node, f"rank {number} ended with signal 9 (SIGKILL)", rank=number
            )
            trigger, cause = GenerationTrigger.FAILURE, f"{node} failed"
        elif kind < 0.8 and len(members) > nodes // 2:
            members.remove(node)
            builder.lose(node)
            trigger, cause = GenerationTrigger.NODE_LOSS, f"{node} was lost"
        else:
            builder.mark("drain.requested", node, "SIGUSR1")
            members.remove(node)
            builder.end(node, JobState.DRAINED, "drained after SIGUSR1", 75)
            trigger, cause = GenerationTrigger.RESIZE, f"{node} drained"
    for name in members:
        builder.end(name, JobState.FAILED, "the budget of 20 restarts is spent", 1)
    return builder.history(JobState.FAILED, "the budget of 20 restarts is spent")
