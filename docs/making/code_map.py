"""The tables of the code map, from the docstrings of the modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(
    r"(## `(elasticlib(?:/\w+)*)/`\n(?:[^#|\n].*\n|\n)*)\| file \| purpose \|\n(?:\|.*\n)+"
)


def with_tables(page: str) -> str:
    """Return the code map with a row for each file of the packages that it names."""
    return TABLE.sub(lambda found: found[1] + _table(ROOT / found[2]), page)


def _table(folder: Path) -> str:
    rows = "".join(
        f"| `{path.name}` | {_purpose(path)} |\n" for path in sorted(folder.glob("[!_]*.py"))
    )
    return f"| file | purpose |\n|---|---|\n{rows}"


def _purpose(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return re.split(r"(?<=\.)\s(?=[A-Z`])", " ".join(paragraph.split()))[0].replace("|", "\\|")
