"""How a benchmark tells what it found: a table to whoever looks on, and all of it to a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from figures import Found, Row, in_plain_text, to_plain


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's, which says what its docstring says."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write all samples there as well")
    return parser


def tell(given: argparse.Namespace, rows: Iterable[Row], notes: Iterable[str] = ()) -> None:
    found = Found(rows, notes)
    print(in_plain_text(found.rows))
    for note in found.notes:
        print(note)
    if given.json:
        Path(given.json).write_text(json.dumps(to_plain(found)))
