"""Output of the subcommands of `elasticlib`: tables, errors and a refreshed display."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from ..errors import ConfigError
from ..observe.formatting import format_table
from ..sanitize import escape_control_chars, escape_to_one_line
from .layers import with_flags

CLEAR_SCREEN = "\x1b[H\x1b[2J"  # also moves the cursor to the first line


class Table(NamedTuple):
    """A table that is printed as text. A table without rows is left out."""

    head: Sequence[str]  # may be empty
    rows: Sequence[Sequence[str]]
    title: str = ""  # printed above the table, whose rows are then indented


Block: TypeAlias = "str | Table"
T = TypeVar("T")


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a type for argparse that turns a ConfigError of `parse` into a usage error."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(with_flags(error, {}))) from None

    return convert


def print_error(command: str, error: object, status: int) -> int:
    """Print an error to stderr and return the exit status."""
    text = str(with_flags(error, {}) if isinstance(error, ConfigError) else error)
    print(f"elasticlib {command}: {escape_control_chars(text)}", file=sys.stderr)
    return status


def table_lines(content: Table) -> list[str]:
    """Return the lines of a table, or no lines if it has no row."""
    lines = format_table(
        content.head, [[escape_to_one_line(cell) for cell in row] for row in content.rows]
    )
    return [content.title, *(f"  {line}" for line in lines)] if content.title and lines else lines


def show(*blocks: Block) -> None:
    """Print the blocks with an empty line between two."""
    print(_text(blocks), flush=True)


def redraw(*blocks: Block) -> None:
    """Replace what the terminal shows by the blocks.

    Without a terminal, or with NO_COLOR in the environment, the blocks are printed below.
    """
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        print(CLEAR_SCREEN + _text(blocks), flush=True)
    else:
        print(_text(blocks) + "\n", flush=True)


def _text(blocks: Sequence[Block]) -> str:
    texts = [block if isinstance(block, str) else "\n".join(table_lines(block)) for block in blocks]
    return "\n\n".join(text for text in texts if text)
