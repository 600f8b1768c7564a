"""A Sphinx directive that renders the tables of the code: options, commands, events and metrics.

```{code-table} elasticrun
```
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from elasticlib.launch import cli
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.flags import FLAGS
from elasticlib.observe import event_kinds
from elasticlib.observe.event import COMMON_KEYS
from elasticlib.observe.metrics import FAMILIES


def elasticrun() -> Iterator[str]:
    """Yield the options of elasticrun, with their variables."""
    variables = {f"--{dest.replace('_', '-')}": f"`PET_{dest.upper()}`" for dest in FLAGS}
    yield from _program(build_parser(), variables)


def commands() -> Iterator[str]:
    """Yield the arguments of each subcommand of elasticlib."""
    actions = cli._parser()._actions
    (choices,) = (one.choices for one in actions if isinstance(one, argparse._SubParsersAction))
    for name, parser in choices.items():
        yield f"## elasticlib {name}\n\n{parser.description or ''}"
        yield from _program(parser, {})


def events() -> Iterator[str]:
    """Yield the values of all events, and those of each kind."""
    yield _table(("value", "meaning"), ((f"`{key}`", text) for key, text in COMMON_KEYS.items()))
    yield "Each kind has values of its own in `data`, which are the fields of its class:"
    comments = ModuleAnalyzer.for_module(event_kinds.__name__).find_attr_docs()
    for kind, cls in event_kinds.KINDS.items():
        names = [field.name for field in attrs.fields(cls)]
        rows = ((f"`{name}`", " ".join(comments[cls.__name__, name])) for name in names)
        head = f"## {kind}\n\n{cls.__doc__} The class is `{cls.__name__}`."
        yield f"{head}\n\n{_table(('value', 'meaning'), rows)}"


def metrics() -> Iterator[str]:
    """Yield the metrics."""
    rows = (
        (f"`{one.name}`", one.type, ", ".join(f"`{label}`" for label in one.labels), one.help)
        for one in FAMILIES.values()
    )
    yield _table(("metric", "type", "other labels", "value"), rows)


TABLES = {one.__name__: one for one in (elasticrun, commands, events, metrics)}


def _program(parser: argparse.ArgumentParser, variables: Mapping[str, str]) -> Iterator[str]:
    formatter = parser._get_formatter()
    columns = ("option", "description", *(["variable"] if variables else []))
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if action.help in (None, argparse.SUPPRESS):
                continue
            spellings = [text for text in action.option_strings if "_" not in text]
            value = "" if action.nargs == 0 else formatter._format_args(action, action.dest.upper())
            name = ", ".join(f"{text} {value}".rstrip() for text in spellings) or action.metavar
            found = (variables[text] for text in spellings if text in variables)
            help_text = formatter._expand_help(action)
            rows.append((f"`{name or action.dest}`", help_text, next(found, ""))[: len(columns)])
        if rows:
            title = f"## {str(group.title).capitalize()}\n\n" if variables else ""
            yield title + _table(columns, rows)
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


class CodeTable(SphinxDirective):
    """Renders the table whose name is the argument."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table."""
        text = "\n\n".join(TABLES[self.arguments[0]]())
        container = nodes.section()
        self.state.nested_parse(StringList(text.splitlines()), 0, container, match_titles=True)
        return container.children


def setup(app: Any) -> None:
    """Add the directive. Sphinx calls this function."""
    app.add_directive("code-table", CodeTable)
