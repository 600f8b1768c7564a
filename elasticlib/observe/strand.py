"""What one agent told, in its order, folded as it comes: bounded however long the run is, but for
one life a generation, which who folds may take away.

A life is one generation as one node lived it. All times are those of the events, by the node's own
monotonic clock; nothing here compares nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import attrs

from . import facts
from .event import Event
from .history import Mark, Pace, Why
from .standing import NodeStanding, after

Item = TypeVar("Item")

PACES = 2_000
MARKS = 2_000
FEWER: Mapping[str, int] = {"saved": 500, "snapshot": 500, "worker.ended": 250}
"""So many are kept of each agent: evenly spread ones where there were more. MARKS is for each kind
but those of FEWER; `worker.ended` has so many for each worker of the node, since all of them may
end each time in the same order."""
WORKERS = 64
"""That have so many each; if there are more, they share."""

_IN_STANDING = (
    *("run.began", "rendezvous.began", "generation.began", "failure"),
    *("stopping", "drain.asked", "run.ended"),
)
_IN_NO_LIFE = ("run.began", "generation.began", "saved", "snapshot", "lost")
_WORDS: Mapping[str, str] = {"failure": "reason", "worker.ended": "how", "drain.asked": "why"}


@attrs.frozen
class Life:
    """began: its workers were started. sought: the rendezvous for it began, or None. why: it was
    sought, None where that was not told.

    trouble: the first sign that it would not last, None if it ended well. over: nobody works any
    more, for whatever reason. gone: no worker was left. left: the last worker's end. silent:
    seconds before `trouble` in which something was wrong and nobody knew. failed: workers of this
    node failed; asked: it ends on purpose. trained: the end of the first step, as exactly as
    it was told; last_at: that of the last. saved, snapshot: how many steps were kept so.
    """

    node: str
    number: int
    began: float
    wall: float
    nodes: int = 1
    world: int = 1
    restarts: int = 0
    max_restarts: int | None = None
    node_rank: int = 0
    ranks: tuple[int, int] = (0, 0)
    cause: str = ""
    why: Why | None = None
    sought: float | None = None
    trouble: float | None = None
    over: float | None = None
    gone: float | None = None
    silent: float | None = None
    failed: bool = False
    asked: bool = False
    left: float | None = None
    restored: float | None = None
    restore_seconds: float | None = None
    restored_step: int | None = None
    trained: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    last_at: float | None = None
    saved: int = 0
    snapshot: int = 0

    @property
    def seconds_per_step(self) -> float | None:
        """The pace of all of it; None where too little was told."""
        if self.trained is None or self.last_at is None:
            return None
        if self.first_step is None or self.last_step is None:
            return None
        steps, took = self.last_step - self.first_step, self.last_at - self.trained
        return took / steps if steps > 0 and took > 0 else None


def begun(event: Event, sought: float | None) -> Life:
    """What `generation.began` tells."""
    told = event.facts
    nodes, world = facts.count(told, "nodes"), facts.count(told, "world")
    return Life(
        node=event.node,
        number=event.generation,
        began=event.at,
        wall=event.wall,
        nodes=nodes or 1,
        world=world or 1,
        restarts=facts.count(told, "restarts") or 0,
        max_restarts=facts.count(told, "max_restarts"),
        node_rank=facts.count(told, "node_rank") or 0,
        ranks=facts.pair(told, "ranks") or (0, 0),
        cause=facts.text(told, "cause"),
        why=next((why for why in Why if why.value == facts.text(told, "why")), None),
        sought=None if sought is None else min(sought, event.at),
    )


def lived(life: Life, event: Event) -> Life:
    """The same once this has happened in it; a kind that says nothing of it changes nothing."""
    at = event.at
    if event.kind in ("saved", "snapshot"):
        return attrs.evolve(life, **{event.kind: getattr(life, event.kind) + 1})
    silent = facts.seconds(event.facts, "silent")
    if event.kind in ("training.began", "steps"):
        return _worked(life, event, at, silent or 0.0)
    if event.kind == "restored":
        took, after = (facts.seconds(event.facts, name) for name in ("seconds", "after"))
        if took is not None and after is not None:
            at = min(at, life.began + after + took)
        step = facts.count(event.facts, "step")
        return attrs.evolve(life, restored=at, restore_seconds=took, restored_step=step)
    if event.kind in ("failure", "stopping", "rendezvous.began") and silent is not None:
        life = attrs.evolve(life, silent=max(silent, life.silent or 0.0))
    if event.kind == "failure":
        return attrs.evolve(_troubled(life, at), failed=True)
    if event.kind == "stopping":
        asked = life.asked or bool(facts.text(event.facts, "why"))
        return attrs.evolve(_troubled(life, at), asked=asked)
    if event.kind == "drain.asked":
        return attrs.evolve(_troubled(life, at), asked=True)
    if event.kind == "worker.ended":
        told_to = event.facts.get("stopped") is True
        life = attrs.evolve(life, left=at)
        return life if event.facts.get("ok") is True or told_to else _troubled(life, at)
    if event.kind == "stopped":
        return attrs.evolve(life, over=life.over or at, gone=at)
    if event.kind == "rendezvous.began":
        asked = life.asked or event.facts.get("planned") is True
        return _ended(attrs.evolve(_troubled(life, at), asked=asked), at)
    if event.kind == "run.ended":
        return _ended(life, at if life.left is None else life.left)
    return life


def _troubled(life: Life, at: float) -> Life:
    return life if life.trouble is not None else attrs.evolve(life, trouble=at)


def _ended(life: Life, at: float) -> Life:
    gone = at if life.gone is None else life.gone
    return attrs.evolve(life, over=life.over or at, gone=gone)


def _worked(life: Life, event: Event, at: float, silent: float) -> Life:
    """A step was told: the first of the generation, or the last before now."""
    step = facts.count(event.facts, "step")
    if step is None:
        return life
    if event.kind == "training.began":
        took = facts.seconds(event.facts, "seconds")
        done = at if took is None else min(at, life.began + took)
        life = attrs.evolve(life, trained=done, first_step=step)
    else:
        # Who was silent for long before the look had made its step by then.
        done = max(life.began, at - silent)
    if life.trained is None:
        life = attrs.evolve(life, trained=done, first_step=_first(life, step))
    if life.last_step is not None and step < life.last_step:
        return life
    return attrs.evolve(life, last_step=step, last_at=max(done, life.trained or done))


def _first(life: Life, step: int) -> int:
    """Where nobody told of the first step itself, it follows the one that was restored."""
    return step if life.restored_step is None else min(step, life.restored_step + 1)


class Thinned(Generic[Item]):
    """A bounded choice of many things that come in order: every one up to `limit`; then each
    second one, then each fourth, and so on. The first and the last are always there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._every = 1
        self._kept: list[Item] = []
        self._last: list[Item] = []
        self.seen = 0

    def add(self, item: Item) -> None:
        if self._limit <= 0:
            return
        if self.seen % self._every == 0:
            self._kept.append(item)
            self._last = []
        else:
            self._last = [item]
        self.seen += 1
        if len(self._kept) > self._limit:
            if not len(self._kept) % 2:
                self._last = self._kept[-1:]
            self._kept = self._kept[::2]
            self._every *= 2

    @property
    def items(self) -> tuple[Item, ...]:
        return (*self._kept, *self._last)

    @property
    def left_out(self) -> int:
        """How many came that are not kept."""
        return self.seen - len(self.items)


class Strand:
    """One agent's events; marks and paces have its own times still.

    keep: whether marks and paces are wanted.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.node = ""
        self.began: float | None = None
        self.seen = 0.0
        self.launch: Mapping[str, Any] = {}
        self.end: Event | None = None
        self.standing = NodeStanding("", "")
        self.events_lost = 0
        self.lives: list[Life] = []
        self.saved: tuple[float, int] | None = None
        self.snapshot: tuple[float, int] | None = None
        self.paces: Thinned[Pace] = Thinned(PACES if keep else 0)
        self.failures = 0
        self._keep = keep
        self._marks: dict[tuple[str, int], Thinned[Mark]] = {}
        self._highest: dict[str, int] = {}
        self._clocks: Thinned[float] = Thinned(64)
        self._sought: float | None = None

    @property
    def clock(self) -> float:
        """Wall clock minus monotonic clock, in the middle of what was told."""
        told = sorted(self._clocks.items)
        return told[len(told) // 2] if told else 0.0

    @property
    def marks(self) -> list[Mark]:
        kept = [mark for marks in self._marks.values() for mark in marks.items]
        return sorted(kept, key=lambda mark: mark.at)

    @property
    def left_out(self) -> int:
        """Marks and paces that there were too many of."""
        return self.paces.left_out + sum(marks.left_out for marks in self._marks.values())

    def thinned(self, kind: str) -> bool:
        """Whether there were too many of this kind for all to be in `marks`."""
        return any(of == kind and marks.left_out for (of, _), marks in self._marks.items())

    def fold(self, event: Event) -> None:
        """Once this has happened, too. What has no time or no generation that can be is passed
        over."""
        if not 0 <= event.generation < facts.LARGEST:
            return
        if not (abs(event.at) < facts.LARGEST and abs(event.wall) < facts.LARGEST):
            return
        self._meet(event)
        if event.kind in _IN_STANDING:
            self.standing = after(self.standing, event)
        if event.kind == "run.began":
            self.launch = event.facts
        elif event.kind == "generation.began" and event.generation:
            self._enter(event)
        elif event.kind == "run.ended":
            self.end = event
        elif event.kind == "lost":
            self.events_lost += facts.count(event.facts, "events") or 0
        elif event.kind == "rendezvous.began":
            self._sought = event.at
        step = facts.count(event.facts, "step")
        if event.kind == "saved" and step is not None:
            self.saved = (event.at, step)
        if event.kind == "snapshot" and step is not None:
            self.snapshot = (event.at, step)
        if event.kind not in _IN_NO_LIFE or self._kept_anew(event.kind, step):
            self._live(event)
        self._mark(event, step)

    def _kept_anew(self, kind: str, step: int | None) -> bool:
        """Whether a step was kept, and none as high before."""
        if kind not in ("saved", "snapshot") or step is None or step <= self._highest.get(kind, -1):
            return False
        self._highest[kind] = step
        return True

    def _meet(self, event: Event) -> None:
        if self.began is None:
            self.node, self.began, self.seen = event.node, event.at, event.at
            self.standing = NodeStanding(event.run, event.node)
        self.began = min(self.began, event.at)
        self.seen = max(self.seen, event.at)
        self._clocks.add(event.wall - event.at)

    def _enter(self, event: Event) -> None:
        if self.lives and self.lives[-1].over is None:
            # It was not told how that one ended; it has, by now.
            last = self.lives[-1]
            ended = Event("rendezvous.began", event.run, event.node, last.number, 0.0, event.at)
            self.lives[-1] = lived(last, ended)
        self.lives.append(begun(event, self._sought))
        self._sought = None

    def _live(self, event: Event) -> None:
        """What looks at workers may tell of a generation when the next has begun."""
        for index in range(len(self.lives) - 1, max(-1, len(self.lives) - 3), -1):
            if self.lives[index].number == event.generation:
                self.lives[index] = lived(self.lives[index], event)
                return

    def _mark(self, event: Event, step: int | None) -> None:
        kind, told = event.kind, event.facts
        if kind == "steps" and step is not None:
            pace = Pace(
                at=event.at,
                node=self.node,
                generation=event.generation,
                step=step,
                per_second=facts.seconds(told, "per_second"),
                loss=facts.value(told, "loss"),
                samples_per_second=facts.seconds(told, "samples_per_second"),
            )
            self.paces.add(pace)
            return
        words = facts.text(told, _WORDS.get(kind, ""))
        if kind in ("saved", "snapshot") and step is not None:
            words = f"step {step}"
        elif kind == "restored":
            words = f"step {step} from {facts.text(told, 'source') or 'an unknown place'}"
        elif kind == "lost":
            words = f"{facts.count(told, 'events') or 0} events could not be written"
        elif kind == "worker.ended":
            if told.get("ok") is True or told.get("stopped") is True:
                return  # it did as it was to
        elif kind not in _WORDS:
            return
        mark = Mark(event.at, kind, self.node, words, rank=event.rank, step=step)
        self.failures += kind == "failure"
        if self._keep:
            place = facts.count(told, "local_rank") or 0 if kind == "worker.ended" else 0
            limit = FEWER.get(kind, MARKS)
            self._marks.setdefault((kind, place % WORKERS), Thinned(limit)).add(mark)
