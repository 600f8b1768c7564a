"""The pages of the documentation: tables of contents, links, the reference, and lists of names.

`make docs` builds the site with warnings as errors. These tests find errors without building it.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from making.reference import COLUMNS, check_told, pages, plain, with_bold_fields

import elasticlib
from elasticlib import Command, WorkerSpec, testing
from elasticlib.launch.command_line import build_parser
from elasticlib.launch.flags import FLAGS
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.spec import Worker, WorkerGroup, worker_environment

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATED = {f"reference/made/{name.rpartition('.')[0]}" for name in pages()}
COPIED = {f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb")}
WRITTEN = {
    str(path.relative_to(DOCS).with_suffix(""))
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[:2] != ("reference", "made")
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
            matching = fnmatch.filter(sorted(WRITTEN | GENERATED | COPIED), name)
            yield from matching if ":glob:" in options else [name]


def test_each_page_is_in_one_table_of_contents() -> None:
    found = sorted([*list_contents("index"), *list_contents("reference/index")])
    assert found == sorted((WRITTEN | GENERATED | COPIED) - {"index"})


def find_anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"```.*?```", "", read_text(page), flags=re.DOTALL)
    headings = re.findall(r"^#{1,3} (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(WRITTEN))
def test_each_link_of_a_page_has_a_target(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        target_path = (DOCS / f"{page}.md").parent / path if path else DOCS / f"{page}.md"
        resolved = target_path.resolve()
        name = str(resolved.relative_to(DOCS).with_suffix("")) if DOCS in resolved.parents else ""
        assert resolved.exists() or name in GENERATED | COPIED, f"{page} links to {target}"
        if anchor:
            assert anchor in find_anchors(name), f"{page} links to {target}: no such heading"


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


def test_each_public_name_is_in_the_reference_once() -> None:
    written = "\n".join(pages().values())
    for module in (elasticlib, testing):
        for name in set(module.__all__) - {"__version__", "ElasticError"}:
            shown = re.findall(
                rf"^\.\. auto\w+:: {module.__name__}\.{name}$", written, re.MULTILINE
            )
            assert len(shown) == 1, name
    assert ".. automodule:: elasticlib.errors" in written


@pytest.mark.parametrize("page", ["writing_a_backend", "writing_a_handler", "writing_an_agent"])
def test_reference_contains_what_authors_import(page: str) -> None:
    written = "\n".join(pages().values())
    lines = re.findall(r"^from elasticlib\.interfaces import (.*)$", read_text(page), re.MULTILINE)
    names = [name for line in lines for name in line.split(", ")]
    assert names
    for name in names:
        module = "elasticlib" if name in elasticlib.__all__ else "elasticlib.interfaces"
        assert re.search(rf"^\.\. auto\w+:: {module}\.{name}$", written, re.MULTILINE), name


def test_the_reference_of_a_class_includes_members_of_its_private_base() -> None:
    (entry,) = re.findall(
        r"autoclass:: elasticlib.ElasticBatchSampler\n(?: .*\n?)+", pages()["data.rst"]
    )
    assert ":inherited-members: Generic, Sampler, object" in entry


def test_each_flag_is_in_the_reference_with_its_variable() -> None:
    page = pages()["elasticrun.rst"]
    for dest, option in FLAGS.items():
        flag = option.name.replace("_", "-")
        assert re.search(rf"^\.\. option:: .*{flag}\b", page, re.MULTILINE), flag
        assert f"Variable: ``PET_{dest.upper()}``" in page, flag


def test_a_public_name_without_a_docstring_is_rejected() -> None:
    class Documented:
        """A class with a docstring."""

        def undocumented(self) -> None:
            pass

    with pytest.raises(
        LookupError, match=r"here\.Documented\.undocumented is public and has no docstring"
    ):
        check_told("here.Documented", Documented)
    with pytest.raises(LookupError, match="here is public and has no docstring"):
        check_told("here", lambda: None)
    check_told("elasticlib.workers.exits.WorkerExit", WorkerExit)


@pytest.mark.parametrize(
    ("docstring", "rst"),
    [
        ("a `b` and `c`s, 2 * 3 * 4", r"a ``b`` and ``c``\ s, 2 \* 3 \* 4"),
        ("**bold** name_ and |x|", r"**bold** name\_ and \|x\|"),
        ("*this* one, *a\nb* and c*d*e", "*this* one, \\*a\nb\\* and c\\*d\\*e"),
        ("* one\n* two `a*b`", "* one\n* two ``a*b``"),
        ("so: ::\n\n    a * b_\n\nand a*b", "so: ::\n\n    a * b_\n\nand a\\*b"),
    ],
)
def test_only_code_in_a_docstring_is_markup(docstring: str, rst: str) -> None:
    assert plain(docstring) == rst


def test_verbatim_blocks_fit_the_width_of_the_page() -> None:
    shown = pages()["elasticlib_command.rst"].split(".. code-block:: text")[1:]
    blocks = [block.partition("\n\n\n")[0] for block in shown]
    epilogs = [re.split(r"\n(?=\S)", block.strip("\n"))[0] for block in blocks]
    assert len(epilogs) >= 2
    assert max(len(line) for epilog in epilogs for line in epilog.splitlines()) <= COLUMNS + 3


def test_field_names_at_the_start_of_a_description_are_bold() -> None:
    text = "A thing: of two.\n\na: this; it is so. b_c and d: that. other: no."
    bold = "A thing: of two.\n\n**a**: this; it is so. **b_c and d**: that. other: no."
    assert with_bold_fields(text, {"a", "b_c", "d"}) == bold
    assert with_bold_fields("Args:\n    a: this", {"a"}) == "Args:\n    a: this"


# Variables and exit codes

VARIABLE_NAME = re.compile(r"\b(?:ELASTICLIB|TORCHELASTIC|TORCH_ELASTIC)_[A-Z_]+[A-Z]\b")


def test_the_page_of_variables_lists_exactly_the_variables_of_the_code() -> None:
    files = [path for path in (ROOT / "elasticlib").rglob("*.py") if "examples" not in path.parts]
    known = {name for path in files for name in VARIABLE_NAME.findall(path.read_text())}
    assert set(VARIABLE_NAME.findall(read_text("reference/environment"))) == known


def test_the_page_of_variables_lists_those_that_workers_get() -> None:
    spec = WorkerSpec(Command("x"), 1, virtual_local_rank=True)
    (worker,) = workers = (Worker(0, 0, 0, 1, 1),)
    group = WorkerGroup(spec, workers, "job", 1, 0, 1, "here", 1)
    variables = worker_environment(group, worker, {}, error_file="", cores=1)
    section = read_text("reference/environment").partition("## Set for each worker")[2]
    assert set(variables) <= set(re.findall(r"`([A-Z_]+)`", section))


def test_the_page_of_exit_codes_lists_those_of_the_help_text() -> None:
    epilog = " ".join((build_parser().epilog or "").split())
    exit_codes = epilog.partition("exit codes: ")[2]
    first = re.findall(r"^\| ([\d+N ]+) \|", read_text("reference/exit_codes"), re.MULTILINE)
    assert first == re.findall(r"(?:^|, )(\d+(?: \+ N)?) ", exit_codes)
