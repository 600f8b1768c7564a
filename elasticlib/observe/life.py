"""One generation as one node lived it, folded from that node's events.

All times are those of the events, by the node's own monotonic clock; nothing here compares nodes.
"""

from __future__ import annotations

import attrs

from . import facts
from .event import Event
from .history import Why


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
