"""What docs/design.md shows of the agent's policy: its table, and the picture of its states.

`python docs/making/redraw.py` (or `make docs`) writes both anew; a test compares them.
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
from making.states import Arrow, Point, picture  # noqa: E402

PAGE = DOCS / "design.md"
PICTURE = DOCS / "drawn" / "agent_states.svg"

PLACES = {
    AgentState.JOINING.value: (130.0, 250.0),
    AgentState.RUNNING.value: (470.0, 250.0),
    AgentState.FINISHED.value: (660.0, 70.0),
    AgentState.STOPPING.value: (320.0, 450.0),
    AgentState.ENDING.value: (660.0, 450.0),
    AgentState.ENDED.value: (860.0, 250.0),
}
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
"""Where arrows bend, and where their words begin; an arrow that is not here is drawn straight."""


def states() -> str:
    """The picture."""
    ends = {AgentState.JOINING.value: (30.0, 250.0), AgentState.ENDED.value: (960.0, 250.0)}
    return picture(
        "The states of an agent, and what leads from one to another",
        (990, 665),
        places=PLACES,
        arrows=arrows(),
        routes=ROUTES,
        ends=ends,
    )


def with_table(page: str) -> str:
    """The page with its table as it should be.

    Raises:
        LookupError: there is no place for it.
    """
    before, begin, rest = page.partition("<!-- table: drawn from the code -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise LookupError(f"{PAGE.name} has no place for the table")
    return f"{before}{begin}{table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    PICTURE.write_text(states())
