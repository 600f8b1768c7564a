"""What an agent answers to a request of an operator. Pure.

The answer follows from what the request has changed: the machine's state before and after it, and
the effects. Nothing is answered before the machine has decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..rendezvous.interface import Report, ReportKind
from .machine import MachineState, Phase
from .messages import Action, Effect, Requested


@attrs.frozen
class Reaction:
    """The reaction of a node to a request."""

    done: bool  # the node does what was requested
    text: str  # what it does, for the operator


def describe_reaction(
    request: Requested, before: MachineState, after: MachineState, effects: Sequence[Effect]
) -> Reaction:
    """Return how a node reacts to a request.

    Args:
        request: the request, as the machine has handled it.
        before: the state before that.
        after: the state after that.
        effects: the effects of the request.
    """
    if request.action is Action.RESTART:
        return _describe_restart(request, before, effects)
    workers = _number_of_workers(before)
    if before.outcome is None and after.outcome is not None:
        verb = "leaves the job" if request.action is Action.DRAIN else "ends"
        return Reaction(True, f"{verb}{_once_stopped(workers)}")
    if after.outcome is not before.outcome:
        return Reaction(True, f"ends instead of draining{_once_stopped(workers)}")
    # A stop reaches its aim: this node ends, and is told to whoever requests it again.
    is_stop = request.action is Action.STOP
    if before.outcome is not None and before.outcome.ends_job:
        return Reaction(is_stop, "is ending already")
    return Reaction(is_stop, "was leaving the job already")


def _describe_restart(
    request: Requested, before: MachineState, effects: Sequence[Effect]
) -> Reaction:
    generation = before.generation
    if before.outcome is not None or before.phase is Phase.ENDED:
        return Reaction(False, "is leaving the job")
    if any(isinstance(one, Report) and one.kind is ReportKind.RESTART for one in effects):
        return Reaction(True, f"restarts its {_plural(_number_of_workers(before))}")
    if before.phase is Phase.STOPPING:
        return Reaction(False, "is stopping its workers already")
    if generation is not None and generation.generation > request.generation:
        text = f"has started generation {generation.generation} since the request"
        return Reaction(False, text)
    return Reaction(False, "has no workers to restart")


def _number_of_workers(state: MachineState) -> int:
    return len(state.alive)


def _once_stopped(workers: int) -> str:
    if not workers:
        return ""
    return f" once its {_plural(workers)} {'has' if workers == 1 else 'have'} stopped"


def _plural(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"
