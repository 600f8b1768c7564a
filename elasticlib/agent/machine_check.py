"""Invariants of the agent's machine. Tests call `check` after each event."""

from __future__ import annotations

from .machine import NEVER, MachineState, Phase, due_at, members, must_end, wanted


def check(state: MachineState) -> None:
    """Check that a state is possible.

    Raises:
        ValueError: it is not; the message says what is wrong.
    """
    for text, holds in _rules(state):
        if not holds:
            raise ValueError(f"{text}: {state}")


def _rules(state: MachineState) -> list[tuple[str, bool]]:
    return [*_rules_of_phase(state), *_rules_of_workers(state), *_rules_of_stop(state)]


def _has_survivor(state: MachineState) -> bool:
    return state.outcome is not None and "survived SIGKILL" in state.outcome.reason


def _rules_of_phase(state: MachineState) -> list[tuple[str, bool]]:
    phase, group = state.phase, members(state)
    return [
        ("a run that ends has an outcome", phase is not Phase.ENDED or state.outcome is not None),
        (
            "an active node trains, or has succeeded",
            phase is not Phase.ACTIVE
            or (state.generation is not None and (bool(group) or state.has_succeeded)),
        ),
        (
            "a node that joins is in no generation",
            phase is not Phase.JOINING or state.generation is None,
        ),
        (
            "no worker continues after a restart",
            phase is not Phase.JOINING or not state.must_restart,
        ),
        (
            "a stop and the end have a limit",
            phase not in (Phase.STOPPING, Phase.CLOSING) or due_at(state) < NEVER,
        ),
        (
            "hangs and failed workers are looked for while active",
            phase is Phase.ACTIVE or (state.hang is None and not state.overdue),
        ),
    ]


def _rules_of_workers(state: MachineState) -> list[tuple[str, bool]]:
    phase, group = state.phase, members(state)
    return [
        (
            "no member is alive without a generation",
            phase in (Phase.ACTIVE, Phase.STOPPING) or _has_survivor(state) or not group,
        ),
        (
            "nobody is alive at the end",
            phase not in (Phase.CLOSING, Phase.ENDED) or _has_survivor(state) or not state.alive,
        ),
        (
            "nobody has left the group of an active node",
            phase is not Phase.ACTIVE
            or not any(state.view[n].has_left for n in group & state.view.keys()),
        ),
        ("what is seen is alive", state.view.keys() <= state.alive.keys()),
        (
            "no worker is of a later start",
            all(worker.start <= state.start for worker in state.alive.values()),
        ),
    ]


def _rules_of_stop(state: MachineState) -> list[tuple[str, bool]]:
    stop = state.stop
    first = (
        "there is a stop exactly while stopping",
        (state.phase is Phase.STOPPING) == (stop is not None),
    )
    if stop is None:
        return [first]
    # Without the next two, a mistake shows 30 s late only, when the next stage begins.
    known = {local: stop.sent.get(local, (-1, "")) for local in state.alive}
    is_sent = all(
        known[local] == (how, reason) or known[local][0] > how
        for local, how, reason in wanted(state, stop)
    )
    return [
        first,
        ("a stop waits for somebody", bool(must_end(state))),
        ("what the stage asks for has been sent to all who have to end", is_sent),
    ]
