"""The pages of the documentation: tables of contents, links, the reference, and lists of names.

`make docs` builds the site with warnings as errors. These tests find errors without building it.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from making import code_tables

import elasticlib
from elasticlib import Command, WorkerSpec, errors, interfaces, testing
from elasticlib.launch import cli
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.flags import FLAGS
from elasticlib.observe.event_kinds import KINDS
from elasticlib.observe.metrics import FAMILIES
from elasticlib.rendezvous.interface import RankAssignment, RendezvousInfo, RendezvousStoreInfo
from elasticlib.workers.spec import Worker, WorkerGroup, worker_environment

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COPIED = {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")}
WRITTEN = {
    str(path.relative_to(DOCS).with_suffix(""))
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] != "notebooks"
}


@functools.cache
def read_text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def without_code(page: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", read_text(page), flags=re.DOTALL)


def list_contents(page: str) -> Iterator[str]:
    """Yield the pages that the tables of contents of a page name."""
    folder = Path(page).parent
    for options, block in re.findall(
        r"```\{toctree\}\n((?::[^\n]*\n)*)\n(.*?)```", read_text(page), re.DOTALL
    ):
        for entry in block.split():
            name = str(folder / entry)
            matching = fnmatch.filter(sorted(WRITTEN | COPIED), name)
            yield from matching if ":glob:" in options else [name]


def test_each_page_is_in_one_table_of_contents() -> None:
    found = sorted([*list_contents("index"), *list_contents("reference/index")])
    assert found == sorted((WRITTEN | COPIED) - {"index"})


@functools.cache
def find_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#{1,3} (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(WRITTEN))
def test_each_link_of_a_page_has_a_target_in_the_repository(page: str) -> None:
    path = DOCS / f"{page}.md"
    check_links(path, without_code(page))
    # Sphinx does not find pages outside docs/, and does not accept skipped levels of headings.
    for target in re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", without_code(page)):
        if not target.startswith("https:"):
            assert DOCS in (path.parent / target).resolve().parents, f"{page} links to {target}"
    levels = [len(found) for found in re.findall(r"^(#+) ", without_code(page), re.MULTILINE)]
    assert all(after <= before + 1 for before, after in pairwise(levels)), f"headings of {page}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_each_link_of_a_page_outside_docs_has_a_target_in_the_repository(name: str) -> None:
    check_links(ROOT / name, re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL))


def check_links(page: Path, markdown: str) -> None:
    """Check that the files and headings that a page links to exist without a build."""
    for target in re.findall(r"\]\(([^)]+)\)", markdown):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        resolved = (page.parent / path if path else page).resolve()
        # `make docs` copies the notebooks to docs/notebooks, which git ignores.
        is_copy = DOCS / "notebooks" in resolved.parents
        assert resolved.exists(), f"{page} links to {target}"
        assert not is_copy, f"{page} links to {target}"
        if anchor:
            assert anchor in find_anchors(resolved), f"{page} links to {target}: no such heading"


# Failure modes

MODES = "failure_modes"
FOOTNOTES = {
    name: re.findall(r"`([^`]+)`", tests)
    for name, tests in re.findall(
        r"^\[\^([\w-]+)\]: (.*(?:\n    .*)*)", read_text(MODES), re.MULTILINE
    )
}


def rows_of_failure_table(markdown: str) -> list[list[str]]:
    """Return the cells of each row of all tables with the column "what elasticlib does"."""
    header = r"^\| fault \| what elasticlib does \|.*\n\|[-|]+\n((?:\| .*\n)+)"
    lines = "".join(re.findall(header, markdown, re.MULTILINE)).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROWS = rows_of_failure_table(read_text(MODES))


def test_readme_quotes_rows_of_the_failure_modes() -> None:
    effects = {row[0]: row[1] for row in ROWS}
    assert len(effects) == len(ROWS)
    readme = (ROOT / "README.md").read_text()
    assert f"has {len(ROWS)} rows" in readme
    quoted = rows_of_failure_table(readme)
    assert len(quoted) >= 6
    for fault, effect in quoted:
        assert effects.get(fault) == effect.replace("](docs/", "]("), fault


def test_each_failure_mode_has_one_footnote_of_its_own() -> None:
    assert len(ROWS) > 80
    assert sorted(row[2] for row in ROWS) == sorted(f"[^{name}]" for name in FOOTNOTES)


@pytest.mark.parametrize("name", FOOTNOTES)
def test_each_test_named_by_a_failure_mode_exists(name: str) -> None:
    assert FOOTNOTES[name]
    for test_id in FOOTNOTES[name]:
        path, _, test = test_id.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert test in set(list_functions(tree)), test_id


def list_functions(tree: ast.Module | ast.ClassDef, within: str = "") -> Iterator[str]:
    """Yield the functions of a module and of its classes, with the names that pytest uses."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield within + node.name
        elif isinstance(node, ast.ClassDef):
            yield from list_functions(node, f"{within}{node.name}::")


# The reference

DOCUMENTED = [
    name
    for page in sorted(DOCS.glob("reference/*.md"))
    for name in re.findall(r"^\.\. auto(?:class|function|data):: ([\w.]+)$", page.read_text(), re.M)
]
# These need frameworks that only the tests of the integrations have.
WITHOUT_FRAMEWORKS = [name for name in DOCUMENTED if "elasticlib.integrations." not in name]


def test_each_public_name_is_in_the_reference_once() -> None:
    assert len(set(DOCUMENTED)) == len(DOCUMENTED)
    own = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    names = {f"elasticlib.errors.{name}" for name in own - {"ElasticError"} if name in DECLARED}
    for module in (elasticlib, testing):
        names |= {f"{module.__name__}.{name}" for name in module.__all__ if name not in NOT_NAMES}
    names |= {
        f"elasticlib.interfaces.{name}"
        for name in interfaces.__all__
        if getattr(interfaces, name) is not getattr(elasticlib, name, None)
    }
    assert set(WITHOUT_FRAMEWORKS) == names


DECLARED = {
    node.name
    for node in ast.parse((ROOT / "elasticlib" / "errors.py").read_text()).body
    if isinstance(node, ast.ClassDef)
}
NOT_NAMES = {"__version__", "errors", "integrations", "interfaces", "testing"}


@pytest.mark.parametrize("name", WITHOUT_FRAMEWORKS)
def test_each_documented_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    if not inspect.isclass(value):
        assert not inspect.isfunction(value) or inspect.getdoc(value), name
        return
    members = inspect.getmembers(value, lambda one: inspect.isfunction(one) or is_property(one))
    names = [name for name, _ in members if not name.startswith(("_", "test_"))]
    assert inspect.getdoc(value)
    assert [name for name in names if not inspect.getdoc(getattr(value, name))] == []


def is_property(value: object) -> bool:
    return isinstance(value, property | functools.cached_property)


@pytest.mark.parametrize("page", ["writing_a_backend", "writing_a_handler", "writing_an_agent"])
def test_reference_contains_what_authors_import(page: str) -> None:
    lines = re.findall(r"^from elasticlib\.interfaces import (.*)$", read_text(page), re.MULTILINE)
    names = [name for line in lines for name in line.split(", ")]
    assert names
    for name in names:
        module = "elasticlib" if name in elasticlib.__all__ else "elasticlib.interfaces"
        assert f"{module}.{name}" in DOCUMENTED, name


def test_each_flag_is_in_the_reference_with_its_variable() -> None:
    page = "\n".join(code_tables.elasticrun())
    for dest, option in FLAGS.items():
        row = rf"^\| `[^`]*{re.escape(option.name)}\b[^`]*` \| .+ \| `PET_{dest.upper()}` \|$"
        assert re.search(row, page, re.MULTILINE), option.name


def test_each_subcommand_event_and_metric_is_in_the_reference() -> None:
    def headings(texts: Iterable[str]) -> list[str]:
        return re.findall(r"^## (.*)$", "\n".join(texts), re.MULTILINE)

    assert headings(code_tables.commands()) == [f"elasticlib {name}" for name in cli.COMMANDS]
    assert headings(code_tables.events()) == [*KINDS]
    assert all(f"`{name}`" in "".join(code_tables.metrics()) for name in FAMILIES)


# Variables and exit codes

VARIABLE_NAME = re.compile(r"\b(?:ELASTICLIB|TORCHELASTIC|TORCH_ELASTIC)_[A-Z_]+[A-Z]\b")


def test_the_page_of_variables_lists_exactly_the_variables_of_the_code() -> None:
    files = [path for path in (ROOT / "elasticlib").rglob("*.py") if "examples" not in path.parts]
    known = {name for path in files for name in VARIABLE_NAME.findall(path.read_text())}
    assert set(VARIABLE_NAME.findall(read_text("reference/environment"))) == known


def test_the_page_of_variables_lists_those_that_workers_get() -> None:
    spec = WorkerSpec(Command("x"), 1, virtual_local_rank=True)
    (worker,) = workers = (Worker(0, 0, 0, 1, 1),)
    info = RendezvousInfo(
        "job", 1, RankAssignment(0, 1, 1, 0, 1, 0, 1), RendezvousStoreInfo("here", 1)
    )
    group = WorkerGroup(spec, info, workers)
    variables = worker_environment(group, worker, {}, cores=1)
    section = read_text("reference/environment").partition("## Set for each worker")[2]
    assert set(variables) <= set(re.findall(r"`([A-Z_]+)`", section))


def test_the_page_of_exit_codes_lists_those_of_the_help_text() -> None:
    epilog = " ".join((build_parser().epilog or "").split())
    exit_codes = epilog.partition("exit codes: ")[2]
    first = re.findall(r"^\| ([\d+N ]+) \|", read_text("reference/exit_codes"), re.MULTILINE)
    assert first == re.findall(r"(?:^|, )(\d+(?: \+ N)?) ", exit_codes)
