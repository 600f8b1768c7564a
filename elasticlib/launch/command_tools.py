"""What the subcommands of `elasticlib` share: how arguments are read, tables and sentences shown.

A table is drawn by rich where that is installed and stdout is a terminal; anywhere else, and where
NO_COLOR is set, its rows are printed by one plain function.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from ..errors import ConfigError
from ..observe.wording import table
from ..visible import visible, visible_line

if TYPE_CHECKING:
    from rich.console import RenderableType


class Table(NamedTuple):
    """head: may be empty. title: stands above it, and has the rows indented."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


Part: TypeAlias = "str | Table"
"""Of what is shown: lines of text, or a table, which is left out where it has no row."""
T = TypeVar("T")

_STYLES = {
    **dict.fromkeys(("RUNNING", "SUCCEEDED", "ok", "complete", "verified"), "green"),
    **dict.fromkeys(("FAILED", "BAD"), "bold red"),
    **dict.fromkeys(("gone", "no status"), "red"),
    **dict.fromkeys(("RENDEZVOUS", "WAITING", "RESTARTING", "RESIZING", "DRAINING"), "yellow"),
    **dict.fromkeys(("note", "DRAINED", "STOPPED"), "yellow"),
}
"""By the whole text of a cell, or a word of a text's first line."""


def typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader for argparse, which tells its ConfigError as a usage error."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def complain(command: str, error: object, status: int) -> int:
    """Say on stderr what is wrong; the exit status."""
    print(f"elasticlib {command}: {visible(str(error))}", file=sys.stderr)
    return status


def table_lines(made: Table) -> list[str]:
    """As plain text, a line a row; nothing where there is no row."""
    lines = table(made.head, [[visible_line(cell) for cell in row] for row in made.rows])
    return [made.title, *(f"  {line}" for line in lines)] if made.title and lines else lines


def show(*parts: Part) -> None:
    """Print them, with an empty line between two."""
    if on_terminal():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            Console(highlight=False).print(_drawn(parts))
            return
    print(_plain(parts), flush=True)


@contextlib.contextmanager
def shown_in_place() -> Iterator[Callable[..., None]]:
    """What shows parts in place of those shown before, where there is a terminal and rich for it;
    else one after another."""
    if on_terminal():
        try:
            from rich.live import Live
        except ImportError:
            hint = "for a table that stays in place: pip install 'elasticlib[ui]'"
            print(hint, file=sys.stderr)
        else:
            with Live(auto_refresh=False) as live:
                yield lambda *parts: live.update(_drawn(parts), refresh=True)
            return
    yield lambda *parts: print(_plain(parts) + "\n", flush=True)


def on_terminal() -> bool:
    """Whether colours and drawing may be used."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _plain(parts: Sequence[Part]) -> str:
    texts = [part if isinstance(part, str) else "\n".join(table_lines(part)) for part in parts]
    return "\n\n".join(text for text in texts if text)


def _drawn(parts: Sequence[Part]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    found: list[RenderableType] = []
    for part in parts:
        if isinstance(part, str):
            first, _, rest = part.partition("\n")
            styles = [_STYLES[word] for word in first.split() if word in _STYLES]
            found += [Text(first, style="".join(styles[:1])), *([Text(rest)] if rest else []), ""]
        elif part.rows:
            found += [Text(part.title, style="bold")] if part.title else []
            found += [_drawn_table(part), ""]
    return Group(*found[:-1])


def _drawn_table(made: Table) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, header_style="bold", pad_edge=False, show_header=bool(made.head))
    for at, name in enumerate(made.head or made.rows[0]):
        # What has no room in its column is broken, and never cut off.
        grid.add_column(name, no_wrap=at == 0, overflow="fold")
    for row in made.rows:
        cells = map(visible_line, row)
        grid.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    return Padding(grid, (0, 0, 0, 2)) if made.title else grid
