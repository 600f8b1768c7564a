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
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import ConfigError
from ..visible import visible, visible_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as Drawn

Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A head, which may be empty, and rows."""
Part: TypeAlias = "str | Table"
"""Of what is shown: lines of text, or a table, which is left out where it has no row."""
T = TypeVar("T")

_STYLES = {
    **dict.fromkeys(("RUNNING", "SUCCEEDED", "ok", "whole"), "green"),
    **dict.fromkeys(("FAILED", "BAD"), "bold red"),
    **dict.fromkeys(("gone", "no answer"), "red"),
    "note": "yellow",
}
"""By the whole text of a cell."""


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


def table_lines(table: Table) -> list[str]:
    """A table as plain text, a line a row; nothing where there is no row."""
    head, body = table
    if not body:
        return []
    rows = [[visible_line(cell) for cell in row] for row in (head, *body) if row]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def show(*parts: Part) -> None:
    """Print them, with an empty line between two."""
    if _on_terminal():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            Console(highlight=False).print(_drawn(parts))
            return
    print(_plain(parts), flush=True)


@contextlib.contextmanager
def shown_in_place() -> Iterator[Callable[..., None]]:
    """What shows parts in place of those shown before, where there is a terminal and rich for it;
    else one after another."""
    if _on_terminal():
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


def _on_terminal() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _plain(parts: Sequence[Part]) -> str:
    texts = [part if isinstance(part, str) else "\n".join(table_lines(part)) for part in parts]
    return "\n\n".join(text for text in texts if text)


def _drawn(parts: Sequence[Part]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    found: list[RenderableType] = []
    for part in parts:
        if not isinstance(part, str):
            if part[1]:
                found += [_drawn_table(*part), ""]
        elif part:
            found += [Text(part), ""]
    return Group(*found[:-1])


def _drawn_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Drawn:
    from rich.table import Table as Drawn
    from rich.text import Text

    table = Drawn(box=None, header_style="bold", pad_edge=False, show_header=bool(head))
    for at, name in enumerate(head or rows[0]):
        # Only what comes last may be long, and is broken where it has no room.
        options: dict[str, Any] = {"no_wrap": at < len(rows[0]) - 1}
        table.add_column(name, **options)
    for row in rows:
        cells = map(visible_line, row)
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    return table
