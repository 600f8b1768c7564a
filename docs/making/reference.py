"""The pages of the reference that are written from the code: names, command lines, events.

`pages` gives each as text; `docs/conf.py` puts them where Sphinx looks, below a folder that git
ignores. What has no docstring is refused here, by its name, as a page could say nothing of it.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import elasticlib
from elasticlib import interfaces, testing
from elasticlib.launch import cli
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.flags import FLAGS
from elasticlib.observe.event import KINDS, VERSION

FOLDERS = {
    "stores": "Stores",
    "rendezvous": "Rendezvous",
    "agent": "Agents",
    "workers": "Workers, and what a script sees of its agent",
    "compat": "Torch's shapes: failures, record, and what torchrun takes from variables",
    "launch": "Launching",
    "data": "Data",
    "logical": "Logical workers",
    "checkpoint": "Checkpoints",
    "observe": "Histories and reports",
    "errors": "Errors",
}
"""The pages of names, in their order; what stands elsewhere comes under its folder's own name."""
CONTRACTS = {"stores", "rendezvous", "workers"}
"""Folders whose `interface.py` says in its docstring what an author has to keep."""
COLUMNS = 88
"""Of what is shown as it is: an epilog."""
NOTHING_TOLD = {"object", "ABC", "Enum", "Exception"}
MEANT = re.compile(
    r"^( *[*-] )|(\*\*\w[^*]*\*\*|(?<!\w)\*\w[^*\n]*\*(?!\w))|([|*_\\])", re.MULTILINE
)
LITERAL = re.compile(r"(?<=::)\n\n(?P<by> +)\S.*\n(?:(?P=by).*\n|\n)*(?:(?P=by).*\Z)?")
"""A list's bullet, and bold or stressed words, which docstrings may have; signs that mean
nothing there; and blocks of code."""


def pages() -> dict[str, str]:
    """File name and text of each."""
    found = {f"{folder}.rst": text for folder, text in _names_pages()}
    found["testing.rst"] = _testing_page()
    found["elasticrun.rst"] = _elasticrun_page()
    found["elasticlib_command.rst"] = _command_page()
    found["events.rst"] = _events_page()
    return found


# Names


def _names_pages() -> Iterator[tuple[str, str]]:
    by_folder: dict[str, list[tuple[str, str]]] = {folder: [] for folder in FOLDERS}
    for module, names in elasticlib._EXPORTS.items():
        by_folder.setdefault(module.split(".")[0], []).extend(("elasticlib", n) for n in names)
    for module, names in interfaces._EXPORTS.items():
        by_folder[module.split(".")[0]].extend(
            ("elasticlib.interfaces", n) for n in names if n not in elasticlib.__all__
        )
    for folder, places in by_folder.items():
        title = FOLDERS.get(folder, folder.capitalize())
        if folder == "errors":
            yield folder, _errors_page(title)
        else:
            told = [_directive("automodule", f"elasticlib.{folder}.interface")]
            named = [_named(module, name) for module, name in places]
            yield folder, _page(title, "", *(told if folder in CONTRACTS else []), *named)


def _named(module: str, name: str) -> str:
    """The directive that shows one name."""
    value = getattr(__import__(module, fromlist=[name]), name)
    full = f"{module}.{name}"
    if inspect.isclass(value):
        check_told(full, value)
        options = [":members:"]
        if not {base.__name__ for base in value.__bases__} <= NOTHING_TOLD:
            options.append(":show-inheritance:")
        ours = [base for base in value.__mro__[1:] if base.__module__.startswith("elasticlib.")]
        shown = {*elasticlib.__all__, *interfaces.__all__}
        if any(base.__name__ not in shown for base in ours):
            # What such a base tells stands nowhere else; what others' bases tell stands with them.
            others = {base.__name__ for base in value.__mro__[1:]} - {one.__name__ for one in ours}
            options.append(f":inherited-members: {', '.join(sorted(others))}")
        if issubclass(value, enum.Enum) or name.endswith("Contract"):
            options.append(":undoc-members:")
        return _directive("autoclass", full, *options)
    if callable(value):
        check_told(full, value)
        return _directive("autofunction", full)
    return _directive("autodata", full, ":no-value:")


def check_told(name: str, value: Any) -> None:
    """Raises LookupError for a name without a docstring of its own, or a method without one."""
    if not (value.__doc__ or "").strip():
        raise LookupError(f"{name} is public and has no docstring")
    if not inspect.isclass(value) or issubclass(value, enum.Enum):
        return
    for method, found in vars(value).items():
        function = inspect.isfunction(found) or isinstance(found, property)
        public = function and not method.startswith(("_", "test_"))
        if public and not (inspect.getdoc(getattr(value, method)) or "").strip():
            raise LookupError(f"{name}.{method} is public and has no docstring")


def _errors_page(title: str) -> str:
    told = "All that elasticlib raises on purpose is an ``ElasticError``."
    options = (":members:", ":show-inheritance:", ":member-order: bysource")
    return _page(title, told, _directive("automodule", "elasticlib.errors", *options))


def _testing_page() -> str:
    told = (
        "The contracts of a store, a handler and an agent, as pytest suites; they need "
        "``pip install 'elasticlib[testing]'``. Each test is a promise, and its name says which."
    )
    names = (_named("elasticlib.testing", name) for name in testing.__all__)
    return _page("elasticlib.testing", told, *names)


# Command lines


def _elasticrun_page() -> str:
    told = (
        "Each flag of two words may be written with underscores, as torchrun's. What is not given "
        "is taken from the variable that is named with it, then from a scheduler (``--scheduler``)."
    )
    variables = {f"--{dest.replace('_', '-')}": f"PET_{dest.upper()}" for dest in FLAGS}
    return _page("elasticrun", told, *_program(build_parser(), "elasticrun", variables))


def _command_page() -> str:
    told = "What a person does beside training: one subcommand for each thing."
    return _page("elasticlib, the command", told, *_tree(cli._parser(), "elasticlib"))


def _tree(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """A parser's own flags, then its subcommands, each under its name."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield from _program(parser, name, {})
    for action in below:
        for word, inner in action.choices.items():
            if not any(isinstance(a, argparse._SubParsersAction) for a in inner._actions):
                yield _heading(f"{name} {word}", "-")
            yield from _tree(inner, f"{name} {word}")


def _program(
    parser: argparse.ArgumentParser, name: str, variables: dict[str, str]
) -> Iterator[str]:
    formatter = parser._get_formatter()
    if parser.description:
        yield plain(parser.description)
    yield f".. program:: {name}"
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            continue
        help_ = "" if action.help is None else formatter._expand_help(action)
        dashed = [word for word in action.option_strings if "_" not in word]
        shown = ", ".join(_with_value(formatter, action, word) for word in dashed)
        lines = [plain(help_)] if help_ else []
        if action.choices is not None and action.metavar is None:
            choices = ", ".join(f"``{choice}``" for choice in action.choices)
            lines.append(f"One of {choices}.")
        lines += [f"Variable: ``{variables[word]}``" for word in dashed if word in variables]
        place = shown or formatter._format_args(action, action.dest)
        yield _directive("option", place, "", "\n\n".join(lines)).rstrip()
    if parser.epilog:
        yield ".. code-block:: text\n\n" + _indented(wrapped(parser.epilog.strip()))


def _with_value(formatter: Any, action: argparse.Action, word: str) -> str:
    if action.nargs == 0:
        return word
    return f"{word} {formatter._format_args(action, action.dest.upper())}"


# Events


def _events_page() -> str:
    told = f"Version {VERSION}, kind by kind."
    kinds = [
        _heading(kind, "-")
        + "\n\n"
        + "\n".join(f"``{name}``\n   {plain(meaning)}\n" for name, meaning in values.items())
        for kind, values in KINDS.items()
    ]
    return _page("Events", "", _directive("automodule", "elasticlib.observe.event"), told, *kinds)


# reStructuredText


def plain(text: str) -> str:
    """Text of ours as reStructuredText: code in backticks, bullets, bold and stressed words,
    blocks of code behind two colons, and no more."""
    found = LITERAL.search(text)
    if found:
        return plain(text[: found.start()]) + found[0] + plain(text[found.end() :])
    parts = text.split("`")
    for at, part in enumerate(parts):
        if at % 2 == 0:
            parts[at] = MEANT.sub(lambda found: f"\\{found[3]}" if found[3] else found[0], part)
    return _fenced(parts)


def wrapped(text: str) -> str:
    """Long lines broken as a terminal would, at columns that a page has."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent=f"{indent}  ") or [""]
    return "\n".join(lines)


def fields_of(value: Any) -> set[str]:
    """The names of what a class or function takes; none of what takes nothing."""
    try:
        return set(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return set()


def with_bold_fields(text: str, fields: set[str]) -> str:
    """The text with the names at the beginning of sentences in bold that say what a field is."""
    if "Args:" in text:
        return text

    def bold(found: re.Match[str]) -> str:
        names = re.split(r",\s|\sand\s", found[2])
        return f"{found[1]}**{found[2]}**:" if set(names) <= fields else found[0]

    return re.sub(r"((?:^|[.;]\s)\s*)((?:\w+(?:,\s|\sand\s))*\w+):(?=\s)", bold, text, flags=re.M)


def _fenced(parts: list[str]) -> str:
    """Code gets two backticks a side, and a join where a letter touches it."""
    text = ""
    for at, part in enumerate(parts):
        if at % 2 == 0:
            joined = at > 0 and part[:1].isalnum()
            text += ("\\ " if joined else "") + part
        else:
            text += ("\\ " if text[-1:].isalnum() else "") + f"``{part}``"
    return text


def _page(title: str, told: str, *blocks: str) -> str:
    return "\n\n".join([_heading(title, "="), *([told] if told else []), *blocks]) + "\n"


def _heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}"


def _directive(name: str, argument: str, *body: str) -> str:
    return "\n".join([f".. {name}:: {argument}", *(_indented(line) for line in body)])


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" if line.strip() else "" for line in text.splitlines())
