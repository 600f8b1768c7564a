"""The agent's policy as rows: each state, all that may happen in it, and what is done then."""

from __future__ import annotations

from itertools import groupby

from elasticlib.agent.policy import (
    TRANSITIONS,
    AgentEvent,
    AgentState,
    ComponentFailed,
    DrainRequested,
    GenerationFormed,
    HangDetected,
    MembershipChanged,
    PeersStillTraining,
    RendezvousEnded,
    RunOutcome,
    SignalReceived,
    SupervisorState,
    WorkerExited,
    WorkersStopped,
    WorkerStartFailed,
    transition,
)
from elasticlib.rendezvous.membership import Change, ChangeKind
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.spec import WorkerState

BOTH = frozenset({0, 1})
GOOD, BAD = (WorkerExit(0, 0, 1, returncode) for returncode in (0, 1))
BEFORE = RunOutcome(WorkerState.FAILED, "decided before")

Case = tuple[str, AgentEvent, frozenset[int]]
Row = tuple[str, str, str, str]

CASES: dict[type, tuple[Case, ...]] = {
    GenerationFormed: (("", GenerationFormed(BOTH), frozenset()),),
    PeersStillTraining: (("", PeersStillTraining(BOTH), frozenset()),),
    RendezvousEnded: (("", RendezvousEnded(BEFORE), frozenset()),),
    WorkerStartFailed: (
        ("none can be kept", WorkerStartFailed("why"), BOTH),
        ("all can be kept", WorkerStartFailed("why", can_regroup=True), BOTH),
    ),
    HangDetected: (
        ("none can be kept", HangDetected("why"), BOTH),
        ("all can be kept", HangDetected("why", can_regroup=True), BOTH),
    ),
    WorkerExited: (
        ("well, others still run", WorkerExited(GOOD), BOTH),
        ("well, the last one", WorkerExited(GOOD), frozenset({0})),
        ("badly", WorkerExited(BAD), BOTH),
        ("badly, the others can be kept", WorkerExited(BAD, can_regroup=True), BOTH),
        (
            "badly, when all are to save",
            WorkerExited(BAD, exited_before_saving=True, stop_call_undecided=True),
            BOTH,
        ),
    ),
    WorkersStopped: (
        ("none is left", WorkersStopped(), frozenset()),
        ("some would not die", WorkersStopped("pid 1"), frozenset()),
    ),
    MembershipChanged: (
        *((kind.value, MembershipChanged(Change(kind, "why")), BOTH) for kind in ChangeKind),
        (
            "reopened, all can be kept",
            MembershipChanged(Change(ChangeKind.GENERATION_ENDED, "why"), True),
            BOTH,
        ),
    ),
    SignalReceived: (("", SignalReceived(15, "SIGTERM"), BOTH),),
    ComponentFailed: (("", ComponentFailed("why"), BOTH),),
    DrainRequested: (
        ("of this node", DrainRequested(12, "SIGUSR2", "drain"), BOTH),
        ("of all nodes", DrainRequested(0, "a request", "drain", ends_job=True), BOTH),
    ),
}
"""Of each event, all that a transition may tell apart: label, event, whose end is awaited."""

EVENTS = {event for _, event in TRANSITIONS}
"""What the policy answers anywhere; each has its cases above."""


def rows() -> list[Row]:
    """State, event, next state and commands; cases of an event with one answer stand together."""
    found = []
    for state, event in TRANSITIONS:
        answers = [found for case in CASES[event] for found in _answers(state, *case)]
        answers.sort(key=lambda answer: str(answer[1]))
        for (after, doing), same in groupby(answers, key=lambda answer: answer[1]):
            labels = [label for label, _ in same if label]
            every = len(labels) in (0, len(answers))
            what = event.__name__ if every else f"{event.__name__}: {'; '.join(labels)}"
            found.append((state.value, what, after, doing))
    return found


def _answers(
    state: AgentState, label: str, event: AgentEvent, awaited: frozenset[int]
) -> list[tuple[str, tuple[str, str]]]:
    """The case's label and answer; two of them where workers that wait for a place matter."""
    without, beside = (_answer(state, event, awaited, spare) for spare in (frozenset(), BOTH))
    if without == beside:
        return [(label, without)]
    some = f"{label}, " if label else ""
    return [(f"{some}no worker waits", without), (f"{some}workers wait for a place", beside)]


def _answer(
    state: AgentState, event: AgentEvent, awaited: frozenset[int], spare: frozenset[int]
) -> tuple[str, str]:
    outcome = BEFORE if state is AgentState.ENDING else None
    after, actions = transition(SupervisorState(state, awaited, outcome, spare), event)
    told = after.state.value
    if after.outcome is not None and after.outcome is not BEFORE:
        told += f" ({after.outcome.state.value})"
    return told, ", ".join(type(action).__name__ for action in actions) or "-"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| while | this happens | then | and does |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


def arrows() -> dict[tuple[str, str], list[str]]:
    """The pairs of states that one event or another leads along, and which ones these are."""
    found: dict[tuple[str, str], list[str]] = {}
    for state, what, after, _ in rows():
        then = after.split(" ")[0]
        event = what.split(":")[0]
        if then != state and event not in found.setdefault((state, then), []):
            found[state, then].append(event)
    return found
