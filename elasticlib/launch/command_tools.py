"""Functions that the subcommands of `elasticlib` share: read arguments, show tables and errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from ..errors import ConfigError
from ..observe.wording import table
from ..visible import visible, visible_line
from .flags import flag_message

CLEAR = "\x1b[H\x1b[2J"
"""Moves the cursor to the first line of a terminal and clears its screen."""


class Table(NamedTuple):
    """head: may be empty. title: stands above it, and has the rows indented."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


Part: TypeAlias = "str | Table"
"""Of what is shown: lines of text, or a table, which is left out where it has no row."""
T = TypeVar("T")


def typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader for argparse, which tells its ConfigError as a usage error."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(flag_message(error)) from None

    return convert


def complain(command: str, error: object, status: int) -> int:
    """Print an error to stderr and return the exit status."""
    text = flag_message(error) if isinstance(error, ConfigError) else str(error)
    print(f"elasticlib {command}: {visible(text)}", file=sys.stderr)
    return status


def table_lines(made: Table) -> list[str]:
    """As plain text, a line a row; nothing where there is no row."""
    lines = table(made.head, [[visible_line(cell) for cell in row] for row in made.rows])
    return [made.title, *(f"  {line}" for line in lines)] if made.title and lines else lines


def show(*parts: Part) -> None:
    """Print the parts, with an empty line between two."""
    print(_text(parts), flush=True)


def redraw(*parts: Part) -> None:
    """Print the parts in place of what the terminal shows.

    Without a terminal, or with NO_COLOR in the environment, print them below the earlier ones.
    """
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        print(CLEAR + _text(parts), flush=True)
    else:
        print(_text(parts) + "\n", flush=True)


def _text(parts: Sequence[Part]) -> str:
    texts = [part if isinstance(part, str) else "\n".join(table_lines(part)) for part in parts]
    return "\n\n".join(text for text in texts if text)
