"""Plausible histories, made up: one in which nothing happened, an eventful and a vast one."""

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
    """One node, one generation, one worker that tells of nothing."""
    node = NodeHistory(
        "n0", "laptop", 0.0, 42.5, 1, NodeExit(42.5, JobState.SUCCEEDED, "all workers succeeded", 0)
    )
    generation = Generation(1, GenerationTrigger.START, "the first generation", 0.4, 42.4, 1, 1, 0)
    stay = NodeMembership("n0", 1, 0, (0, 0), 0.4, 42.4)
    return History("train", WALL, 42.5, JobState.SUCCEEDED, (node,), (stay,), (generation,))


def unborn() -> History:
    """An agent that waits for others since it has told its first event."""
    return History("job", WALL, 0.0, JobState.WAITING, (NodeHistory("n0", "a", 0.0, 0.0, 8),))


class Script:
    """A run as it is written down: generation after generation, each with who is there."""

    def __init__(self, seed: int, run: str, workers: int, speed: float = 2.0) -> None:
        self.random = random.Random(seed)
        self.run, self.workers, self.speed = run, workers, speed
        self.at, self.step, self.done, self.restarts = 0.0, 0, 0, 0
        self.generations: list[Generation] = []
        self.memberships: list[NodeMembership] = []
        self.timeline: list[TimelineEvent] = []
        self.progress: list[ProgressSample] = []
        self.nodes: dict[str, NodeHistory] = {}

    def appear(self, *names: str) -> None:
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
        why: GenerationTrigger,
        cause: str,
        paces: float = 10.0,
    ) -> None:
        """A generation of these nodes, and what its workers tell every so many seconds."""
        draw = self.random.uniform
        first = why is GenerationTrigger.START
        redone = 0 if first else self.step - self.step // 100 * 100
        lost = why in (GenerationTrigger.FAILURE, GenerationTrigger.NODE_LOSS)
        redone = redone if lost else 0
        self.restarts += why is GenerationTrigger.FAILURE
        self.step -= redone
        cost = RecoveryCost(
            detection=(draw(2, 9) if why is GenerationTrigger.NODE_LOSS else draw(0.01, 0.1))
            if not first
            else None,
            shutdown=None if first else draw(0.2, 2.5),
            rendezvous=draw(0.4, 3.0),
            startup=draw(0.5, 2.5),
            restore=None if first else draw(0.1, 1.2),
            repeated_steps=redone,
            repeated=redone / self.speed,
        )
        began = self.at + (cost.detection or 0) + (cost.shutdown or 0) + (cost.rendezvous or 0)
        trained = began + (cost.startup or 0) + (cost.restore or 0)
        ended = trained + seconds
        number = len(self.generations) + 1
        world = len(names) * self.workers
        start = self.step
        for place, name in enumerate(names):
            ranks = (place * self.workers, (place + 1) * self.workers - 1)
            self.memberships.append(
                NodeMembership(self.id(name), number, place, ranks, began, ended)
            )
        self.tell(number, names, trained, ended, paces)
        made = Generation(
            number, why, cause, began, ended, len(names), world, self.restarts, trained, start
        )
        self.generations.append(attrs.evolve(made, last_step=self.step, cost=cost))
        self.at = ended

    def tell(
        self, number: int, names: Sequence[str], trained: float, ended: float, paces: float
    ) -> None:
        at = trained
        while at + paces < ended:
            at += paces
            self.step += max(1, round(self.speed * paces * self.random.uniform(0.85, 1.1)))
            loss = 0.3 + 3.2 * math.exp(-self.step / 900) + self.random.gauss(0, 0.05)
            for place, name in enumerate(names):
                speed = self.speed * self.random.uniform(0.9, 1.1)
                samples = 64.0 * self.workers * speed
                told = loss if place == 0 else None
                node = self.id(name)
                self.progress.append(
                    ProgressSample(at, node, number, self.step, speed, told, samples)
                )
            if self.step // 100 != self.done // 100:
                self.done = self.step
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
        words: str,
        *,
        at: float | None = None,
        rank: int | None = None,
        step: int | None = None,
    ) -> None:
        when = self.at if at is None else at
        self.timeline.append(TimelineEvent(when, kind, self.id(name), words, rank, step))

    def end(self, name: str, state: JobState, reason: str, code: int) -> None:
        story = attrs.evolve(
            self.nodes[name], last_event_at=self.at, exit=NodeExit(self.at, state, reason, code)
        )
        self.nodes[name] = story

    def vanish(self, name: str) -> None:
        self.nodes[name] = attrs.evolve(self.nodes[name], last_event_at=self.at, is_lost=True)

    def history(self, state: JobState, reason: str) -> History:
        until = self.at + 0.5
        return History(
            self.run,
            WALL,
            until,
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
    """Three nodes and one that comes for another, twelve generations: failures, a drain, a loss."""
    script = Script(7, "llm-pretrain-42", 4)
    script.appear("gpu-a", "gpu-b")
    run, fail = script.run_for, script.mark
    pair, trio = ("gpu-a", "gpu-b"), ("gpu-a", "gpu-b", "gpu-c")
    run(240, pair, GenerationTrigger.START, "the first generation")
    script.appear("gpu-c")
    run(300, trio, GenerationTrigger.RESIZE, "gpu-c joined")
    fail("failure", "gpu-b", NASTY, rank=5)
    run(130, trio, GenerationTrigger.FAILURE, "rank 5 on gpu-b failed: ValueError")
    fail("failure", "gpu-b", "rank 4 ended with signal 11 (SIGSEGV)", rank=4)
    fail("failure", "gpu-c", "rank 9 ended with exit code 1", rank=9)
    run(80, trio, GenerationTrigger.FAILURE, "rank 4 on gpu-b failed: signal 11 (SIGSEGV)")
    fail("failure", "gpu-a", LONG, rank=0)
    run(310, trio, GenerationTrigger.FAILURE, "rank 0 on gpu-a failed: RuntimeError")
    fail("drain.requested", "gpu-c", "SIGTERM: preemption in 120 s")
    script.end("gpu-c", JobState.DRAINED, "drained after SIGTERM", 75)
    run(200, pair, GenerationTrigger.RESIZE, "gpu-c drained")
    script.vanish("gpu-b")
    run(150, pair[:1], GenerationTrigger.NODE_LOSS, "gpu-b was lost: its lease ran out")
    script.appear("gpu-d-with-a-rather-long-name.cluster.example.org")
    late = ("gpu-a", "gpu-d-with-a-rather-long-name.cluster.example.org")
    run(240, late, GenerationTrigger.RESIZE, "gpu-d joined")
    for rank in (3, 1, 6):
        fail("failure", late[rank > 3], f"rank {rank}: no step for 30 s, a hang", rank=rank)
        run(90, late, GenerationTrigger.FAILURE, f"rank {rank} hung")
    fail("events.dropped", "gpu-a", "17 events could not be written")
    run(420, late, GenerationTrigger.RESIZE, "a spare was let in")
    for name in late:
        script.end(name, JobState.SUCCEEDED, "all workers succeeded", 0)
    return script.history(JobState.SUCCEEDED, "all workers of all nodes succeeded")


def vast(nodes: int = 500, generations: int = 200) -> History:
    """A week of so many nodes, with 50,000 paces and more."""
    script = Script(11, "week", 8, speed=0.5)
    names = [f"node{number:03d}" for number in range(nodes)]
    script.appear(*names)
    here = list(names)
    why, cause = GenerationTrigger.START, "the first generation"
    for number in range(generations):
        script.run_for(script.random.uniform(600, 6000), here, why, cause, paces=1500.0)
        who = script.random.choice(here)
        kind = script.random.random()
        if kind < 0.6:
            script.mark("failure", who, f"rank {number} ended with signal 9 (SIGKILL)", rank=number)
            why, cause = GenerationTrigger.FAILURE, f"{who} failed"
        elif kind < 0.8 and len(here) > nodes // 2:
            here.remove(who)
            script.vanish(who)
            why, cause = GenerationTrigger.NODE_LOSS, f"{who} was lost"
        else:
            script.mark("drain.requested", who, "SIGUSR1")
            here.remove(who)
            script.end(who, JobState.DRAINED, "drained after SIGUSR1", 75)
            why, cause = GenerationTrigger.RESIZE, f"{who} drained"
    for name in here:
        script.end(name, JobState.FAILED, "the budget of 20 restarts is spent", 1)
    return script.history(JobState.FAILED, "the budget of 20 restarts is spent")
