"""What one agent told, in its order, folded as it comes: bounded however long the run is, but for
one life a generation, which who folds may take away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import facts
from .event import Event
from .history import Mark, Pace
from .life import Life, begun, lived
from .standing import NodeStanding, after
from .thinned import Thinned

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
