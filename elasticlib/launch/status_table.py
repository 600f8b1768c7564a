"""A status as tables of rich's, which draws them in place. Imported only where rich is wanted."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..observe.status import JobStatus, headline, node_table, rank_table
from ..observe.status import Table as Rows

_STYLES = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "FAILED": "bold red",
    "gone": "red",
    "no status": "red",
}


def table_of(status: JobStatus) -> RenderableType:
    """All of it, one part above the other."""
    first, *rest = headline(status)
    state = "" if status.state is None else status.state.value
    parts: list[RenderableType] = [Text(first, style=_STYLES.get(state, "yellow"))]
    parts += [Text(line) for line in rest]
    parts += [_drawn(rows) for rows in (node_table(status), rank_table(status)) if rows[1]]
    return Group(*parts)


def _drawn(rows: Rows) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    head, body = rows
    for name in head:
        table.add_column(name, no_wrap=True)
    for row in body:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
