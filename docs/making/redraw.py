"""Update the generated parts of the documentation that are in the repository.

`python docs/making/redraw.py` (or `make docs`) writes the table and the picture of the agent's
policy, and the pages of the reference. Tests compare all of them with the code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from elasticlib.agent.policy import AgentState  # noqa: E402
from making.policy import arrows, table  # noqa: E402
from making.reference import GENERATED, pages  # noqa: E402
from making.states import Arrow, Point, picture  # noqa: E402

PAGE = DOCS / "design" / "agent.md"
PICTURE = DOCS / "drawn" / "agent_states.svg"

# The center of the box of each state.
POSITIONS = {
    AgentState.JOINING.value: (130.0, 250.0),
    AgentState.RUNNING.value: (470.0, 250.0),
    AgentState.FINISHED.value: (660.0, 70.0),
    AgentState.STOPPING.value: (320.0, 450.0),
    AgentState.ENDING.value: (660.0, 450.0),
    AgentState.ENDED.value: (860.0, 250.0),
}
# The bends of an arrow and the start of its text. An arrow that is not listed is straight.
ROUTES: Mapping[Arrow, tuple[Sequence[Point], Point]] = {
    ("joining", "running"): ((), (350, 244)),
    ("joining", "ended"): ([(130, 590), (885, 590)], (495, 606)),
    ("joining", "ending"): ([(155, 560), (645, 560)], (225, 496)),
    ("running", "stopping"): ((), (400, 332)),
    ("running", "finished"): ((), (565, 164)),
    ("running", "ending"): ((), (570, 340)),
    ("stopping", "ended"): ([(320, 530), (845, 530)], (590, 524)),
    ("stopping", "joining"): ((), (222, 356)),
    ("stopping", "ending"): ((), (490, 466)),
    ("finished", "ended"): ((), (775, 146)),
    ("finished", "ending"): ((), (666, 300)),
    ("finished", "stopping"): ([(290, 110), (290, 400)], (300, 128)),
    ("finished", "joining"): ([(130, 70)], (380, 64)),
    ("ending", "ended"): ((), (765, 352)),
}


def states() -> str:
    """Return the picture of the states."""
    dots = {AgentState.JOINING.value: (30.0, 250.0), AgentState.ENDED.value: (960.0, 250.0)}
    return picture(
        "The states of an agent, and the events that lead from one to another",
        (990, 665),
        positions=POSITIONS,
        arrows=arrows(),
        routes=ROUTES,
        dots=dots,
    )


def with_table(page: str) -> str:
    """Return the page with the current table.

    Raises:
        LookupError: the page has no markers around the table.
    """
    before, start, rest = page.partition("<!-- table: drawn from the code -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not start or not end:
        raise LookupError(f"{PAGE.name} has no markers for the table")
    return f"{before}{start}{table()}\n{end}{after}"


def update_reference() -> None:
    """Write the pages of the reference, and delete pages that are not generated any more."""
    GENERATED.mkdir(exist_ok=True)
    texts = pages()
    for path in GENERATED.iterdir():
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        path = GENERATED / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    PICTURE.write_text(states())
    update_reference()
