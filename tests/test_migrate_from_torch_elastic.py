"""docs/migrate_from_torch_elastic.md names every public name of the installed torch, and only names
of elasticlib that exist; its program runs."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.elastic
from jobs import WITHOUT_TORCH
from pages import DOCS, read_page
from torch.distributed.elastic.rendezvous import RendezvousHandler as TorchHandler
from torch.distributed.launcher import LaunchConfig as TorchConfig

from elasticlib import RendezvousHandler
from elasticlib.launch.cli import main
from elasticlib.launch.command_line import build_parser

TEXT, BLOCKS = read_page("migrate_from_torch_elastic.md")
ROOTS = ("launcher", "launcher.api", "run", "launch")
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


def modules() -> list[str]:
    elastic = torch.distributed.elastic
    found = [info.name for info in pkgutil.walk_packages(elastic.__path__, f"{elastic.__name__}.")]
    named = [elastic.__name__, *found, *(f"torch.distributed.{name}" for name in ROOTS)]
    return [name for name in named if not name.split(".")[-1].startswith("_")]


def public_names(module: ModuleType) -> set[str]:
    """`__all__`, or the functions and classes that are the module's, or handed on by a package."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("torch.distributed")
        and (value.__module__ == module.__name__ or hasattr(module, "__path__"))
    }


def rows(section: str) -> list[tuple[set[str], str]]:
    """The names in the first column of a section's table, and what the second says of them."""
    found = []
    for line in section.splitlines():
        if line.startswith("| `"):
            left, right = line.strip("| ").split(" | ", 1)
            found.append((set(re.findall(r"`([^`]+)`", left)), right))
    return found


def ticked(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.filterwarnings("ignore")
def test_no_public_name_of_the_installed_torch_is_missing() -> None:
    names = modules()
    assert len(names) > 40
    for name in names:
        [section] = [s for s in SECTIONS if name in ticked(s.partition("\n| ")[0])] or [""]
        assert section, f"no section is about {name}"
        said = {name for left, _ in rows(section) for name in left}
        missing = public_names(importlib.import_module(name)) - said
        assert not missing, f"{name}: {sorted(missing)}"


@pytest.mark.filterwarnings("ignore")
def test_no_name_is_told_of_that_torch_does_not_have() -> None:
    for section in SECTIONS:
        named = [name for name in ticked(section.partition("\n| ")[0]) if name in modules()]
        known = {n for name in named for n in public_names(importlib.import_module(name))}
        for left, _ in rows(section):
            assert not named or left <= known, left - known


def test_every_field_of_torchs_config_is_told_of_and_no_other() -> None:
    [section] = [s for s in SECTIONS if s.startswith("LaunchConfig, field by field")]
    said = [name for left, _ in rows(section) for name in left]
    assert sorted(said) == sorted(field.name for field in dataclasses.fields(TorchConfig))


def test_a_handler_of_torch_has_the_names_of_all_methods_without_a_default() -> None:
    theirs: frozenset[str] = TorchHandler.__abstractmethods__
    # `get_backend` has a default here.
    assert RendezvousHandler.__abstractmethods__ == theirs - {"get_backend"}


def test_each_row_says_what_to_use() -> None:
    for section in SECTIONS:
        for left, right in rows(section):
            if not section.startswith("LaunchConfig, field by field"):
                assert re.search(r"`elasticlib\.|\buse\b", right), left


def test_what_is_named_of_elasticlib_is_there() -> None:
    loggers = {"elasticlib.launch", "elasticlib.agent"}
    named = {n.partition("(")[0] for n in ticked(TEXT) if n.startswith("elasticlib.")}
    assert len(named) > 40
    for name in sorted(named - loggers):
        parts = name.split(".")
        value: object = importlib.import_module(parts[0])
        for depth, part in enumerate(parts[1:], 2):
            if isinstance(value, ModuleType) and not hasattr(value, part):
                importlib.import_module(".".join(parts[:depth]))
            value = getattr(value, part)


def test_what_is_named_of_the_command_lines_and_the_docs_is_there() -> None:
    flags = {name for name in ticked(TEXT) if name.startswith("--")}
    assert {"--hang-timeout", "--standalone"} <= flags
    assert flags <= set(build_parser()._option_string_actions)
    pages = {name for name in ticked(TEXT) if name.startswith("docs/")}
    assert pages
    assert all((DOCS.parent / page).is_file() for page in pages)
    with pytest.raises(SystemExit) as ended:
        main(["store", "--help"])
    assert ended.value.code == 0


@pytest.mark.faults
def test_the_pages_program_runs(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(BLOCKS[0][1])
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    for steps, code, said in (
        ("2", 0, "[(0, 0), (1, 2)]\n"),
        ("1", 1, "rank 1 exited with 1: ValueError: 1 steps are too few\n"),
    ):
        done = subprocess.run(
            [sys.executable, str(script), steps],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, said), done.stderr
