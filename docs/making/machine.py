"""The agent's machine on its page: its table, and the arrows between its phases.

The table is the literal one of `elasticlib.agent.machine`. The arrows are those that the traces of
its tests show.
"""

from __future__ import annotations

from pathlib import Path

from elasticlib.agent.machine import _ROWS, Phase
from elasticlib.agent.messages import (
    ComponentFailed,
    Finished,
    NodeReady,
    Requested,
    SignalReceived,
    StacksCollected,
    Tick,
    WorkerExited,
    WorkersSeen,
)
from elasticlib.rendezvous.interface import Joined, MembershipChanged, PeerMessages

TRACES = Path(__file__).parent.parent.parent / "tests" / "agent" / "traces"

# The events by their names in a trace.
EVENTS: dict[str, type] = {
    "ready": NodeReady,
    "joined": Joined,
    "over": MembershipChanged,
    "peers": PeerMessages,
    "see": WorkersSeen,
    "exit": WorkerExited,
    "stacks": StacksCollected,
    "signal": SignalReceived,
    "ask": Requested,
    "fail": ComponentFailed,
    "finished": Finished,
    "wait": Tick,
}


def rows() -> list[list[str]]:
    """Return the rows of the table: a kind of event, and its method in each phase."""
    return [line.split() for line in _ROWS.strip().splitlines()]


def table() -> str:
    """Return the table in Markdown."""
    head, *others = rows()
    cells = [[f"`{row[0]}`", *map(_cell, row[1:])] for row in others]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *cells])


def _cell(name: str) -> str:
    return {"-": "-", "x": "\N{MULTIPLICATION SIGN}"}.get(name, f"`{name}`")


def arrows() -> dict[tuple[str, str], list[str]]:
    """Return the events that lead from one phase to another, by pair of phases."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(TRACES.glob("*.txt")):
        phase, event = Phase.JOINING.value, ""
        for line in path.read_text().splitlines():
            if line.startswith("  ["):
                # Such as "[stopping TERM: failed, the reason]"
                after = line.strip(" []").partition(":")[0].split(" ")[0]
                if after != phase:
                    found.setdefault((phase, after), set()).add(event)
                phase = after
            elif (name := line.split(" ")[0]) in EVENTS:
                event = EVENTS[name].__name__
    return {pair: sorted(names) for pair, names in sorted(found.items())}
