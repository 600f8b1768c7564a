"""Where one node and its workers stand just now, as the events told so far have it.

Each event makes a new standing of the one before; what only a look at the workers can tell, such
as the age of their last sign of life, is filled in by who looks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import attrs

from ..clock import Clock, monotonic, wall
from ..workers.interface import NOTHING, Heartbeat
from .event import Event
from .facts import count, seconds, text
from .history import JobState
from .interface import Journal

_ENDS = {
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "stopped": JobState.STOPPED,
    "drained": JobState.PREEMPTED,
}


def end_state(word: str) -> JobState:
    """Of the `state` that `run.ended` tells; FAILED for a word that nobody knows."""
    return _ENDS.get(word, JobState.FAILED)


@attrs.frozen
class WorkerStanding:
    """name: such as `pid 123`. step, saved: the last that it told of. silent: seconds since it
    last gave a sign of life. per_second: its steps. None where it does not tell."""

    rank: int
    local_rank: int
    name: str
    running: bool = True
    step: int | None = None
    per_second: float | None = None
    silent: float | None = None
    saved: int | None = None


@attrs.frozen
class NodeStanding:
    """since: when this state began, by the node's monotonic clock, as `at` of an event. step,
    per_second: as its events tell of its slowest worker; the workers' own are newer. expelled: it
    has ended, and the job goes on without it."""

    run: str
    node: str
    host: str = ""
    pid: int = 0
    slots: int = 0
    state: JobState = JobState.RENDEZVOUS
    since: float = 0.0
    began: float = 0.0
    generation: int = 0
    node_rank: int | None = None
    nodes: int = 0
    world: int = 0
    restarts: int = 0
    max_restarts: int | None = None
    reason: str = ""
    saved: int | None = None
    snapshot: int | None = None
    step: int | None = None
    per_second: float | None = None
    exit_code: int | None = None
    expelled: bool = False
    workers: tuple[WorkerStanding, ...] = ()


def after(standing: NodeStanding, event: Event) -> NodeStanding:
    """The standing once this has happened; a kind that says nothing of it changes nothing."""
    facts = event.facts
    now = attrs.evolve(standing, generation=event.generation, **_named(event))
    if event.kind == "worker.began" and event.rank is not None:
        local, name = count(facts, "local_rank") or 0, text(facts, "name")
        return _with(now, WorkerStanding(event.rank, local, name))
    if event.kind == "worker.ended":
        gone = (w for w in now.workers if w.rank == event.rank)
        return _with(now, *(attrs.evolve(worker, running=False) for worker in gone))
    step = count(facts, "step")
    if event.kind in ("saved", "snapshot") and step is not None:
        told: dict[str, Any] = {event.kind: step}
        return attrs.evolve(now, **told)
    if event.kind in ("training.began", "steps"):
        return attrs.evolve(now, step=step, per_second=seconds(facts, "per_second"))
    state = _state(standing.state, event)
    if event.kind == "generation.began":
        now = attrs.evolve(now, workers=(), step=None, per_second=None)
    reason = text(facts, _REASONS.get(event.kind, "")) or now.reason
    if state is standing.state:
        return attrs.evolve(now, reason=reason)
    return attrs.evolve(now, state=state, since=event.at, reason=reason)


_TAKEN: Mapping[str, tuple[str, ...]] = {
    "run.began": ("host", "pid", "slots"),
    "generation.began": ("node_rank", "nodes", "world", "restarts", "max_restarts"),
    "run.ended": ("exit_code",),
}


def _named(event: Event) -> dict[str, Any]:
    """What this event tells under the names that a standing has for it."""
    found: dict[str, Any] = {}
    for key in _TAKEN.get(event.kind, ()):
        value = text(event.facts, key) if key == "host" else count(event.facts, key)
        if value is not None:
            found[key] = value
    if event.kind == "run.ended":
        found["expelled"] = event.facts.get("expelled") is True
    return found


_REASONS: Mapping[str, str] = {
    "rendezvous.began": "why",
    "generation.began": "cause",
    "failure": "reason",
    "drain.asked": "why",
    "run.ended": "reason",
}


def _state(state: JobState, event: Event) -> JobState:
    if event.kind == "run.ended":
        return end_state(str(event.facts.get("state", "")))
    if event.kind == "generation.began":
        return JobState.RUNNING
    if event.kind == "drain.asked":
        return JobState.DRAINING
    if event.kind == "failure":
        return JobState.RESTARTING
    if event.kind == "stopping" and state is JobState.RUNNING:
        # Whom nobody gave notice must start again for a failure or a loss elsewhere.
        return JobState.RESIZING if event.facts.get("why") else JobState.RESTARTING
    if event.kind == "rendezvous.began" and state is JobState.RUNNING:
        return JobState.RENDEZVOUS
    return state


def _with(standing: NodeStanding, *workers: WorkerStanding) -> NodeStanding:
    changed = {worker.rank for worker in workers}
    kept = (worker for worker in standing.workers if worker.rank not in changed)
    return attrs.evolve(
        standing, workers=tuple(sorted((*kept, *workers), key=lambda worker: worker.rank))
    )


def put_out(standing: NodeStanding) -> NodeStanding:
    """Of a node that is no member any more: where its workers were is told as nobody's place now,
    and the checkpoints that they wrote are there still."""
    told = (standing.saved, *(worker.saved for worker in standing.workers))
    saved = max((step for step in told if step is not None), default=None)
    return attrs.evolve(
        standing, saved=saved, workers=(), step=None, per_second=None, snapshot=None
    )


def seen(standing: NodeStanding, beats: Mapping[int, Heartbeat], now: float) -> NodeStanding:
    """The same with what its workers tell, by local rank; now: by this machine's clock."""
    found, kept = [], []
    for worker in standing.workers:
        beat = beats.get(worker.local_rank)
        if beat is not None and beat.snapshot != NOTHING:
            kept.append(beat.snapshot)
        if beat is None or not beat.attached:
            found.append(worker)
            continue
        durations = sorted(beat.durations)
        middle = durations[len(durations) // 2] if durations else 0.0
        told = attrs.evolve(
            worker,
            step=None if beat.step == NOTHING else beat.step,
            per_second=1 / middle if middle > 0 else None,
            silent=max(0.0, now - beat.alive) if beat.alive else None,
            saved=None if beat.saved == NOTHING else beat.saved,
        )
        found.append(told)
    # Of a state in parts each worker keeps its own, and it is whole once the last of them has.
    snapshot = min(kept, default=standing.snapshot)
    return attrs.evolve(standing, workers=tuple(found), snapshot=snapshot)


class StandingJournal(Journal):
    """Folds what is told into a standing, for whoever looks at it from another thread; it keeps
    nothing else.

    Args:
        begins: the node before anything is told; its times are set here.
    """

    prompt = True

    def __init__(self, begins: NodeStanding, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self._standing = attrs.evolve(begins, since=now, began=now)

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        with self._lock:
            run, node = self._standing.run, self._standing.node
            event = Event(kind, run, node, generation, wall(), self._clock(), rank, facts)
            self._standing = after(self._standing, event)

    def look(self, beats: Mapping[int, Heartbeat]) -> NodeStanding:
        """Where it stands now, with what its workers tell, by local rank."""
        with self._lock:
            standing = self._standing
        return seen(standing, beats, self._clock())
