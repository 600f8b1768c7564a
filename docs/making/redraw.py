"""Update the generated parts of the documentation that are in the repository.

`python docs/making/redraw.py` (or `make docs`) writes the table and the picture of the agent's
machine, and the tables of the code map. Tests compare them with the code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from elasticlib.agent.machine import Phase  # noqa: E402
from making import code_map  # noqa: E402
from making.machine import arrows, table  # noqa: E402
from making.states import Arrow, Point, picture  # noqa: E402

PAGE = DOCS / "design" / "agent.md"
CODE_MAP = DOCS / "design" / "code_map.md"
PICTURE = DOCS / "drawn" / "agent_phases.svg"

# The center of the box of each phase.
POSITIONS = {
    Phase.JOINING.value: (130.0, 90.0),
    Phase.ACTIVE.value: (640.0, 90.0),
    Phase.STOPPING.value: (385.0, 270.0),
    Phase.CLOSING.value: (385.0, 440.0),
    Phase.ENDED.value: (700.0, 440.0),
}
# The bends of an arrow and the start of its text. An arrow that is not listed is straight.
ROUTES: Mapping[Arrow, tuple[Sequence[Point], Point]] = {
    ("joining", "active"): ((), (385, 84)),
    ("active", "joining"): ([(640, 42), (130, 42)], (385, 20)),
    ("active", "stopping"): ((), (560, 152)),
    ("stopping", "joining"): ((), (262, 178)),
    ("joining", "stopping"): ([(110, 270)], (212, 264)),
    ("joining", "closing"): ([(80, 440)], (200, 400)),
    ("stopping", "closing"): ((), (335, 336)),
    ("active", "closing"): ([(680, 360), (420, 360)], (560, 378)),
    ("closing", "ended"): ((), (545, 434)),
}


def phases() -> str:
    """Return the picture of the phases."""
    dots = {Phase.JOINING.value: (30.0, 90.0), Phase.ENDED.value: (810.0, 440.0)}
    return picture(
        "The phases of an agent, and the events that lead from one to another",
        (860, 500),
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


if __name__ == "__main__":
    CODE_MAP.write_text(code_map.with_tables(CODE_MAP.read_text()))
    PAGE.write_text(with_table(PAGE.read_text()))
    PICTURE.write_text(phases())
