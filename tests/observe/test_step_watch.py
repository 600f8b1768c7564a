"""The watch on the steps: what it sees belongs to the generation that it is told of with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from jobs import until

from elasticlib import Context
from elasticlib.clock import monotonic
from elasticlib.observe.interface import Journal
from elasticlib.observe.step_watch import StepWatch
from elasticlib.workers.channel import Channel
from elasticlib.workers.interface import Heartbeat, Workers


class Kept(Journal):
    def __init__(self) -> None:
        self.told: list[tuple[str, int, dict[str, Any]]] = []

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        del rank
        self.told.append((kind, generation, facts))

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(generation, facts) for told, generation, facts in self.told if told == kind]


class Trained:
    """A worker of the group, which tells of its steps what a script does."""

    def __init__(self) -> None:
        self.beat = Heartbeat(attached=True)

    def step(self, step: int, *, samples: float = 0.0) -> None:
        now, old = monotonic(), self.beat
        first = {} if old.steps else {"first_step": step, "first_at": now}
        self.beat = attrs.evolve(
            old,
            **{"step": step, "steps": old.steps + 1, "at": now, "alive": now, **first},
            samples=old.samples + samples,
        )

    def restored(self, step: int, *, source: str, seconds: float) -> None:
        ended = monotonic()
        state: Any = SimpleNamespace(step=step, source=source, began=ended - seconds, ended=ended)
        self.beat = attrs.evolve(self.beat, restored=state, restores=self.beat.restores + 1)


class Group(Workers):
    """Workers of one node by what they tell of their steps alone; this test is each of them."""

    tell_steps = True
    start = collect = running = terminate = kill = close = None

    def __init__(self) -> None:
        self.now: dict[int, Trained] = {}
        self.last: dict[int, Trained] = {}

    def begin(self, watch: Journal, generation: int, count: int) -> list[Trained]:
        watch.tell("generation.began", generation=generation)
        self.now = {local: Trained() for local in range(count)}
        self.last = dict(self.now)
        for local in range(count):
            watch.tell("worker.began", generation=generation, rank=local)
        return list(self.now.values())

    def end(self) -> None:
        self.now = {}

    def beats(self) -> Mapping[int, Heartbeat]:
        return {local: worker.beat for local, worker in self.now.items()}

    def last_beats(self) -> Mapping[int, Heartbeat]:
        return {local: worker.beat for local, worker in self.last.items()}


@pytest.fixture
def group() -> Group:
    return Group()


def test_the_last_step_of_each_generation_is_told_before_the_next(group: Group) -> None:
    journal = Kept()
    # Its thread is not started: what is told is told by the agent's own words.
    watch = StepWatch(group, journal)
    for generation in (1, 2):
        for worker in group.begin(watch, generation, 2):
            for step in range(10 * generation):
                worker.step(step, samples=2)
        group.end()
        watch.tell("rendezvous.began", generation=generation)
        watch.tell("rendezvous.began", generation=generation)
    watch.tell("generation.began", generation=3)
    watch.tell("run.ended", generation=3)
    assert [(g, facts["step"]) for g, facts in journal.of("steps")] == [(1, 9), (2, 19)]
    assert [(g, facts["step"]) for g, facts in journal.of("training.began")] == [(1, 0), (2, 0)]
    kinds = [kind for kind, _, _ in journal.told]
    assert kinds.index("steps") < kinds.index("rendezvous.began")


def test_that_training_has_begun_is_told_soon_whenever_the_next_look_is(group: Group) -> None:
    journal = Kept()
    with StepWatch(group, journal, every=600.0, soon=0.02) as watch:
        before = monotonic()
        (worker,) = group.begin(watch, 1, 1)
        begun = monotonic()
        worker.restored(6, source="memory", seconds=0.001)
        until("the state", lambda: journal.of("restored"))
        least = monotonic() - begun
        worker.step(7)
        most = monotonic() - before
        until("the first step", lambda: journal.of("training.began"))
        assert not journal.of("steps")
    ((_, facts),), ((_, state),) = journal.of("training.began"), journal.of("restored")
    assert (facts["step"], state["step"]) == (7, 6)
    # By the worker's clock, whenever that was looked at.
    assert least - 1e-6 <= facts["seconds"] <= most + 1e-6


def test_how_far_training_is_is_told_now_and_then(group: Group) -> None:
    journal = Kept()
    with StepWatch(group, journal, every=0.05, soon=0.02) as watch:
        (worker,) = group.begin(watch, 1, 1)
        for count in (1, 2, 3):
            worker.step(count)
            until("another line", lambda count=count: len(journal.of("steps")) == count)


class Broken(Group):
    def beats(self) -> Mapping[int, Heartbeat]:
        raise OSError("gone")


def test_a_look_that_fails_is_felt_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    journal, broken = Kept(), Broken()
    watch = StepWatch(broken, journal)
    broken.begin(watch, 1, 1)
    watch.tell("run.ended")
    assert journal.told[-1][0] == "run.ended"
    assert "could not be looked at" in caplog.text


class Shared(Group):
    """Eight workers, and the memory that each of them shares with its agent."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = [Channel.made() for _ in range(8)]

    def beats(self) -> Mapping[int, Heartbeat]:
        return {local: channel.beat() for local, channel in enumerate(self.channels)}


def test_at_rest_a_look_a_second_at_eight_workers_takes_less_than_a_thousandth_of_a_core() -> None:
    group = Shared()
    watch = StepWatch(group, Kept())
    group.begin(watch, 1, 8)
    for channel in group.channels:
        Context(channel).restored(1)
    assert processor_seconds(lambda: watch._look(final=False), 200) < 1e-3
    for channel in group.channels:
        channel.close()


def processor_seconds(call: Callable[[], object], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - began) / calls


def test_a_worker_of_an_older_version_tells_what_it_knows() -> None:
    agent = Channel.made()
    # Its words: the step, how many, and when.
    agent._words[8], agent._words[9], agent._seconds[10] = 5, 3, 7.0
    beat = agent.beat()
    assert (beat.step, beat.steps, beat.at) == (5, 3, 7.0)
    assert (beat.first_step, beat.snapshot, beat.loss, beat.restored) == (-1, -1, None, None)
    agent.close()
