"""Table of the agent's policy: the reaction to each event in each state."""

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

LOCAL_RANKS = frozenset({0, 1})
SUCCESS, FAILURE = (WorkerExit(0, 0, 1, returncode) for returncode in (0, 1))
EARLIER_OUTCOME = RunOutcome(WorkerState.FAILED, "an earlier event")

Case = tuple[str, AgentEvent, frozenset[int]]
Row = tuple[str, str, str, str]

# The cases that a transition may distinguish, for each event: a label, the event, and the local
# ranks that run when it happens.
CASES: dict[type, tuple[Case, ...]] = {
    GenerationFormed: (("", GenerationFormed(LOCAL_RANKS), frozenset()),),
    PeersStillTraining: (("", PeersStillTraining(LOCAL_RANKS), frozenset()),),
    RendezvousEnded: (("", RendezvousEnded(EARLIER_OUTCOME), frozenset()),),
    WorkerStartFailed: (
        ("no worker can regroup", WorkerStartFailed("reason"), LOCAL_RANKS),
        ("workers can regroup", WorkerStartFailed("reason", can_regroup=True), LOCAL_RANKS),
    ),
    HangDetected: (
        ("no worker can regroup", HangDetected("reason"), LOCAL_RANKS),
        ("workers can regroup", HangDetected("reason", can_regroup=True), LOCAL_RANKS),
    ),
    WorkerExited: (
        ("success, others still run", WorkerExited(SUCCESS), LOCAL_RANKS),
        ("success, the last worker", WorkerExited(SUCCESS), frozenset({0})),
        ("failure", WorkerExited(FAILURE), LOCAL_RANKS),
        ("failure, the others can regroup", WorkerExited(FAILURE, can_regroup=True), LOCAL_RANKS),
        (
            "failure before it has saved",
            WorkerExited(FAILURE, exited_before_saving=True, stop_call_undecided=True),
            LOCAL_RANKS,
        ),
    ),
    WorkersStopped: (
        ("all have exited", WorkersStopped(), frozenset()),
        ("some survived SIGKILL", WorkersStopped("pid 1"), frozenset()),
    ),
    MembershipChanged: (
        *(
            (kind.value, MembershipChanged(Change(kind, "reason")), LOCAL_RANKS)
            for kind in ChangeKind
        ),
        (
            "generation_ended and workers can regroup",
            MembershipChanged(Change(ChangeKind.GENERATION_ENDED, "reason"), True),
            LOCAL_RANKS,
        ),
    ),
    SignalReceived: (
        ("SIGINT", SignalReceived(2, "SIGINT", is_interrupt=True), LOCAL_RANKS),
        ("another signal", SignalReceived(15, "SIGTERM"), LOCAL_RANKS),
    ),
    ComponentFailed: (("", ComponentFailed("reason"), LOCAL_RANKS),),
    DrainRequested: (
        ("of this node", DrainRequested(12, "SIGUSR2", "drain"), LOCAL_RANKS),
        ("of all nodes", DrainRequested(0, "a request", "drain", ends_job=True), LOCAL_RANKS),
    ),
}

EVENTS = {event for _, event in TRANSITIONS}  # the events that the policy handles in some state


def rows() -> list[Row]:
    """Return state, event, next state and commands. Cases with the same result share a row."""
    table_rows = []
    for state, event in TRANSITIONS:
        results = [result for case in CASES[event] for result in _results(state, *case)]
        results.sort(key=lambda result: str(result[1]))
        for (next_state, commands), group in groupby(results, key=lambda result: result[1]):
            labels = [label for label, _ in group if label]
            has_all_cases = len(labels) in (0, len(results))
            name = event.__name__
            text = name if has_all_cases else f"{name}: {'; '.join(labels)}"
            table_rows.append((state.value, text, next_state, commands))
    return table_rows


def _results(
    state: AgentState, label: str, event: AgentEvent, running: frozenset[int]
) -> list[tuple[str, tuple[str, str]]]:
    """Return the result of a case with its label; two results if standby workers matter."""
    without, with_standby = (
        _result(state, event, running, standby) for standby in (frozenset(), LOCAL_RANKS)
    )
    if without == with_standby:
        return [(label, without)]
    prefix = f"{label}, " if label else ""
    return [
        (f"{prefix}no standby workers", without),
        (f"{prefix}standby workers", with_standby),
    ]


def _result(
    state: AgentState, event: AgentEvent, running: frozenset[int], standby: frozenset[int]
) -> tuple[str, str]:
    outcome = EARLIER_OUTCOME if state is AgentState.ENDING else None
    after, commands = transition(SupervisorState(state, running, outcome, standby), event)
    next_state = after.state.value
    if after.outcome is not None and after.outcome is not EARLIER_OUTCOME:
        next_state += f" ({after.outcome.state.value})"
    return next_state, ", ".join(type(command).__name__ for command in commands) or "-"


def table() -> str:
    """Return the rows as a Markdown table."""
    lines = ["| state | event | next state | commands |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


def arrows() -> dict[tuple[str, str], list[str]]:
    """Return the names of the events that lead from one state to another, by pair of states."""
    events: dict[tuple[str, str], list[str]] = {}
    for state, text, result, _ in rows():
        next_state = result.split(" ")[0]
        event = text.split(":")[0]
        if next_state != state and event not in events.setdefault((state, next_state), []):
            events[state, next_state].append(event)
    return events
