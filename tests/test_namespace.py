"""Public names: what `dir` lists, and where users and authors of backends import names from."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import elasticlib
from elasticlib import interfaces, testing
from elasticlib.rendezvous.membership import NodeRecord

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SUBMODULES = {"errors", "integrations", "interfaces", "testing"}
PUBLIC_MODULES = {"elasticlib", *(f"elasticlib.{name}" for name in SUBMODULES)}


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100
    ).stdout.strip()


@pytest.mark.parametrize("before", ["", "import elasticlib.stores.file_store, elasticlib.clock; "])
def test_dir_lists_public_names_and_submodules(before: str) -> None:
    listed = run_python(f"{before}import elasticlib; elasticlib.Store; print(*dir(elasticlib))")
    assert set(listed.split()) == {*elasticlib.__all__, *SUBMODULES}
    assert len(set(elasticlib.__all__)) == len(elasticlib.__all__)


@pytest.mark.parametrize("module", ["testing", "interfaces"])
def test_dir_of_a_public_submodule_lists_its_public_names(module: str) -> None:
    code = f"import elasticlib; m = elasticlib.{module}; m.StoreContract if {module == 'testing'} "
    listed = run_python(code + "else m.Store; print(*dir(m))")
    assert listed.split() == sorted(getattr(elasticlib, module).__all__)


def test_dir_of_the_integrations_lists_the_integrations() -> None:
    listed = run_python("import elasticlib; print(*dir(elasticlib.integrations))")
    folder = ROOT / "elasticlib" / "integrations"
    assert set(listed.split()) == {path.stem for path in folder.iterdir() if path.stem[0] != "_"}


@pytest.mark.parametrize("module", [elasticlib, interfaces, testing])
def test_each_public_name_exists_and_is_declared_for_type_checkers(module: object) -> None:
    source = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    declared = {
        alias.asname: alias.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    names = module.__all__  # type: ignore[attr-defined]
    assert declared == {name: name for name in names}
    assert all(getattr(module, name) is not None for name in names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'elasticlib' has no attribute 'Stroe'"):
        _ = elasticlib.Stroe
    assert not hasattr(interfaces, "LocalNode")


def test_interfaces_contain_what_the_interfaces_mention() -> None:
    """Each class of elasticlib in the signatures of an interface is importable from one module."""
    mentioned = set()
    for interface in (interfaces.Store, interfaces.RendezvousHandler, interfaces.Workers):
        for _, method in inspect.getmembers(interface, inspect.isfunction):
            for annotation in method.__annotations__.values():
                mentioned |= set(re.findall(r"\b[A-Z]\w+", str(annotation)))
    standard = {
        "BaseException",
        "Callable",
        "Collection",
        "Exception",
        "Mapping",
        "None",
        "Path",
        "Self",
        "TracebackType",
    }
    assert mentioned - standard <= set(interfaces.__all__)


def test_documented_programs_import_public_modules_only() -> None:
    """Programs in the documentation, which users copy, need no internal module."""
    internal = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in DOCS
        for block in re.findall(
            r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE
        )
        for name in re.findall(r"^\s*(?:from|import) (elasticlib[\w.]*)", block, re.MULTILINE)
        if "." in name or name == "elasticlib"
        if name not in PUBLIC_MODULES and not name.startswith("elasticlib.integrations.")
    ]
    assert not internal


def test_a_node_has_only_the_fields_that_its_launcher_gives() -> None:
    fields = [*attrs.fields_dict(elasticlib.Node)]
    assert fields == ["id", "host", "address", "slots", "role", "rank_hint", "topology"]
    node = elasticlib.Node("n-1", "n", "10.0.0.1", slots=2, topology="rack1")
    record = NodeRecord.of(node)
    assert {name: getattr(record, name) for name in fields} == attrs.asdict(node)
    assert (record.membership_id, record.may_run_workers) == ("", False)
