"""The job through its campaign: each fault when it is due, what it cost, and that it came about."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from elasticlib.observe.event import Event

from .board import View
from .campaign import FIRST_NODES, Campaign, Fault
from .faults import Effect, NoEffect, strike
from .ledger import Generation
from .phases import Recovery, recovery
from .stage import Stage, now

TRIES = 3
SPARES, LOOKAHEAD = 3, 15
NEEDED = {"join": 1, "agent": 1, "corrupt": 2}
"""Nodes that come with a fault of the kind: they should be at their gates by then."""


@attrs.frozen
class Played:
    """A fault that took effect. step: the one that was under way; late: by so many steps; world:
    before it. struck: steps that were begun and not built on, by the generation that did not, as
    far as had come to light by then. missed: what was seen instead when it was tried before."""

    number: int
    kind: str
    step: int
    late: int
    world: int
    generation: int
    shown: str
    struck: Mapping[int, int]
    missed: tuple[str, ...]
    recovery: Recovery | None


@attrs.define
class Told:
    """What is known at the end of a storm."""

    played: list[Played] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)
    restarts: int = 0
    _charged: int = 0

    def count_restarts(self, events: Sequence[Event]) -> None:
        """A job that has lost all of its nodes begins to count anew."""
        for event in events:
            if event.kind == "generation.started":
                self.restarts += max(0, event.data["restarts"] - self._charged)
                self._charged = event.data["restarts"]


def storm(stage: Stage, campaign: Campaign, say: Callable[[str], None], log: Path) -> Told:
    """Play all faults, and wait for the job's end.

    Raises:
        AssertionError: the job is stuck, or dead.
    """
    told = Told()
    stage.nodes.prepare(FIRST_NODES)
    for _ in range(FIRST_NODES):
        stage.nodes.come()
    stage.wait_for_world()
    with log.open("a") as file:
        for number, fault in enumerate(campaign.faults, 1):
            stage.nodes.prepare(_soon(campaign.faults[number - 1 :]))
            played = _play(stage, number, fault, told)
            told.played.append(played)
            file.write(json.dumps(attrs.asdict(played)) + "\n")
            file.flush()
            say(_sentence(played))
    say(f"all faults are played at step {stage.board_step()} of {stage.steps}")
    _end(stage)
    return told


def _soon(faults: Sequence[Fault]) -> int:
    """How many nodes should be on their way to their gates: those that the next faults need."""
    return min(SPARES, sum(NEEDED.get(fault.kind, 0) for fault in faults[:LOOKAHEAD]))


def _play(stage: Stage, number: int, fault: Fault, told: Told) -> Played:
    missed: list[str] = []
    while True:
        stage.nodes.prepare(NEEDED.get(fault.kind, 0))
        view = stage.due(fault.at, NEEDED.get(fault.kind, 0))
        stage.hear()
        stage.events.clear()
        committed = stage.committed()
        try:
            effect = strike(stage, fault, view)
        except NoEffect as error:
            missed.append(str(error))
            if len(missed) == TRIES:
                told.wrong.append(f"fault {number} ({fault.kind}) took no effect: {missed}")
                return Played(
                    number, fault.kind, view.step, 0, len(view.ranks), view.generation, "", {},
                    tuple(missed), None,
                )  # fmt: skip
            continue
        found = (view, committed, effect)
        return _seen_through(stage, number, fault, found, tuple(missed), told=told)


def _seen_through(
    stage: Stage,
    number: int,
    fault: Fault,
    struck_at: tuple[View, int, Effect],
    missed: tuple[str, ...],
    *,
    told: Told,
) -> Played:
    """Wait until the job is whole again and has done the step that was struck; count what it
    cost."""
    view, committed, effect = struck_at
    old = view.generation
    stage.wait_for_world(old if effect.restarts else 0)
    before = stage.generations(old)[0]
    at = effect.at or _last_done(before)[1]
    step = effect.step or _under_way(before, at)
    if effect.restarts:
        step = _last_done(before)[0] + 1
    after = stage.wait_for_world(0, step)
    generations = stage.generations(old)
    stage.hear()
    found = recovery(at, step, stage.events, generations)
    told.wrong += _kept(number, generations[1:], committed, effect.damaged)
    told.count_restarts(stage.events)
    struck = stage.fold(after.generation)
    world, late = len(view.ranks), view.step - fault.at
    return Played(
        number, fault.kind, step, late, world, old, effect.shown, struck, missed, found
    )  # fmt: skip


def _last_done(generation: Generation) -> tuple[int, float]:
    """The last step that a generation did, and when; the one before its first if it did none."""
    done = {number: step.done for number, step in generation.steps.items() if step.done}
    if done:
        return max(done), done[max(done)]
    return min(generation.steps, default=1) - 1, now()


def _under_way(generation: Generation, at: float) -> int:
    begun = [number for number, step in generation.steps.items() if step.began <= at]
    return max(begun, default=min(generation.steps, default=1))


def _kept(number: int, later: list[Generation], committed: int, damaged: int) -> Iterator[str]:
    """What was on the disk before a fault must be in all that is built on later."""
    for generation in later:
        for line in generation.resumed:
            if line["resumed"] < committed and not damaged:
                yield (
                    f"fault {number}: generation {generation.number} went on from step "
                    f"{line['resumed']}, and step {committed} was on the disk"
                )


def _sentence(played: Played) -> str:
    cost = "" if played.recovery is None else f"{played.recovery.total:.2f} s"
    again = f", tried {len(played.missed) + 1} times" if played.missed else ""
    return (
        f"{played.number:5} step {played.step:6} world {played.world} {played.kind:9} {cost:>7}"
        f"  {played.shown[:100]}{again}"
    )


def _end(stage: Stage) -> None:
    """Nobody comes any more; who is there trains to the end."""
    stage.board.let(stage.steps)
    for node in stage.nodes.waiting:
        stage.nodes.dismiss(node)
    stage.nodes.waiting.clear()
    stage.wait_until(
        "the job to come to its end",
        lambda: all(node.process.poll() == 0 for node in stage.nodes.present),
        600.0,
    )
    stage.fold(1 << 40)
