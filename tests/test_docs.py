"""docs/design.md says what the code does: its table and picture are drawn from the policy itself.

`python tests/test_docs.py` (or `make docs`) redraws them in the page.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from elasticlib.agent.policy import (
    TABLE,
    Changed,
    DrainAsked,
    Event,
    GroupStopped,
    Hung,
    JoinEnded,
    Outcome,
    OutcomeKind,
    Settled,
    SignalArrived,
    StartFailed,
    State,
    Supervision,
    WorkerEnded,
    react,
)
from elasticlib.rendezvous.change import Change, ChangeKind
from elasticlib.workers.exits import WorkerExit

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "design.md"
BOTH = frozenset({0, 1})
GOOD, BAD = (WorkerExit(0, 0, 1, returncode) for returncode in (0, 1))
BEFORE = Outcome(OutcomeKind.FAILED, "decided before")

Case = tuple[str, Event, frozenset[int]]
Row = tuple[str, str, str, str]

CASES: dict[type, tuple[Case, ...]] = {
    Settled: (("", Settled(BOTH), frozenset()),),
    JoinEnded: (("", JoinEnded(BEFORE), frozenset()),),
    StartFailed: (("", StartFailed("why"), BOTH),),
    Hung: (("", Hung("why"), BOTH),),
    WorkerEnded: (
        ("well, others still run", WorkerEnded(GOOD), BOTH),
        ("well, the last one", WorkerEnded(GOOD), frozenset({0})),
        ("badly", WorkerEnded(BAD), BOTH),
    ),
    GroupStopped: (
        ("none is left", GroupStopped(), frozenset()),
        ("some would not die", GroupStopped("pid 1"), frozenset()),
    ),
    Changed: tuple((kind.value, Changed(Change(kind, "why")), BOTH) for kind in ChangeKind),
    SignalArrived: (("", SignalArrived(15, "SIGTERM"), BOTH),),
    DrainAsked: (("", DrainAsked(12, "SIGUSR2", "drain"), BOTH),),
}
"""Of each event, all that a transition may tell apart: label, event, whose end is awaited."""


def rows() -> list[Row]:
    """State, event, next state and commands; cases of an event with one answer stand together."""
    found = []
    for state, event in TABLE:
        answers = [(label, _answer(state, case, awaited)) for label, case, awaited in CASES[event]]
        answers.sort(key=lambda answer: str(answer[1]))
        for (after, doing), same in groupby(answers, key=lambda answer: answer[1]):
            labels = [label for label, _ in same if label]
            every = len(labels) in (0, len(CASES[event]))
            what = event.__name__ if every else f"{event.__name__}: {', '.join(labels)}"
            found.append((state.value, what, after, doing))
    return found


def _answer(state: State, event: Event, awaited: frozenset[int]) -> tuple[str, str]:
    outcome = BEFORE if state is State.ENDING else None
    after, actions = react(Supervision(state, awaited, outcome), event)
    told = after.state.value
    if after.outcome is not None and after.outcome is not BEFORE:
        told += f" ({after.outcome.kind.value})"
    return told, ", ".join(type(action).__name__ for action in actions) or "-"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| while | this happens | then | and does |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


def diagram() -> str:
    """The states as a mermaid diagram: an arrow for each pair, with all that leads along it."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, what, after, _ in rows():
        then = after.split(" ")[0]
        event = what.split(":")[0]
        if then != state and event not in arrows.setdefault((state, then), []):
            arrows[state, then].append(event)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.JOINING.value}"]
    lines += [f"    {a} --> {b}: {', '.join(names)}" for (a, b), names in arrows.items()]
    return "\n".join([*lines, f"    {State.ENDED.value} --> [*]", "```"])


def drawn(page: str) -> str:
    """The page with its table and diagram as they should be."""
    for name, content in (("diagram", diagram()), ("table", table())):
        before, begin, rest = page.partition(f"<!-- {name}: drawn from the code -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert begin, f"no place for the {name}"
        assert end, f"no end of the {name}"
        page = f"{before}{begin}{content}\n{end}{after}"
    return page


def test_every_event_of_the_policy_has_its_cases_here() -> None:
    assert set(CASES) == {event for _, event in TABLE}


def test_the_page_shows_the_policy_as_it_is() -> None:
    page = PAGE.read_text()
    assert page == drawn(page), "run `make docs`"


def test_every_file_and_folder_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:elasticlib|tests|docs|notebooks)/[\w./]*)`", PAGE.read_text())
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
