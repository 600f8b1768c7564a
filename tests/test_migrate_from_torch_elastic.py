"""docs/migrate_from_torch_elastic.md: it has each public name of torch, and its program runs.

The page also names only objects of elasticlib that exist.
"""

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


def list_modules() -> list[str]:
    elastic = torch.distributed.elastic
    submodules = [
        info.name for info in pkgutil.walk_packages(elastic.__path__, f"{elastic.__name__}.")
    ]
    names = [elastic.__name__, *submodules, *(f"torch.distributed.{name}" for name in ROOTS)]
    return [name for name in names if not name.split(".")[-1].startswith("_")]


def public_names(module: ModuleType) -> set[str]:
    """Return `__all__`, or the functions and classes of a module or that a package exports."""
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


def read_rows(section: str) -> list[tuple[set[str], str]]:
    """Return the names in the first column of a section's table, each with the second column."""
    rows = []
    for line in section.splitlines():
        if line.startswith("| `"):
            left, right = line.strip("| ").split(" | ", 1)
            rows.append((set(re.findall(r"`([^`]+)`", left)), right))
    return rows


def find_code(text: str) -> list[str]:
    """Return all texts in backquotes."""
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.filterwarnings("ignore")
def test_the_page_has_each_public_name_of_the_installed_torch() -> None:
    names = list_modules()
    assert len(names) > 40
    for name in names:
        [section] = [s for s in SECTIONS if name in find_code(s.partition("\n| ")[0])] or [""]
        assert section, f"no section is about {name}"
        documented = {name for left, _ in read_rows(section) for name in left}
        missing = public_names(importlib.import_module(name)) - documented
        assert not missing, f"{name}: {sorted(missing)}"


@pytest.mark.filterwarnings("ignore")
def test_the_page_has_no_name_that_torch_does_not_have() -> None:
    for section in SECTIONS:
        named = [name for name in find_code(section.partition("\n| ")[0]) if name in list_modules()]
        known = {n for name in named for n in public_names(importlib.import_module(name))}
        for left, _ in read_rows(section):
            assert not named or left <= known, left - known


def test_the_page_has_each_field_of_torchs_launch_config_and_no_other() -> None:
    [section] = [s for s in SECTIONS if s.startswith("LaunchConfig, field by field")]
    documented = [name for left, _ in read_rows(section) for name in left]
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(TorchConfig))


def test_a_handler_of_torch_has_the_names_of_all_methods_without_a_default() -> None:
    abstract: frozenset[str] = TorchHandler.__abstractmethods__
    # elasticlib's `get_backend` has a default.
    assert RendezvousHandler.__abstractmethods__ == abstract - {"get_backend"}


def test_each_row_names_a_replacement() -> None:
    for section in SECTIONS:
        for left, right in read_rows(section):
            if not section.startswith("LaunchConfig, field by field"):
                assert re.search(r"`elasticlib\.|\buse\b", right), left


def test_names_of_elasticlib_on_the_page_exist() -> None:
    loggers = {"elasticlib.launch", "elasticlib.agent"}
    named = {n.partition("(")[0] for n in find_code(TEXT) if n.startswith("elasticlib.")}
    assert len(named) > 40
    for name in sorted(named - loggers):
        parts = name.split(".")
        value: object = importlib.import_module(parts[0])
        for depth, part in enumerate(parts[1:], 2):
            if isinstance(value, ModuleType) and not hasattr(value, part):
                importlib.import_module(".".join(parts[:depth]))
            value = getattr(value, part)


def test_flags_and_documents_on_the_page_exist() -> None:
    flags = {name for name in find_code(TEXT) if name.startswith("--")}
    assert {"--hang-timeout", "--standalone"} <= flags
    assert flags <= set(build_parser()._option_string_actions)
    pages = {name for name in find_code(TEXT) if name.startswith("docs/")}
    assert pages
    assert all((DOCS.parent / page).is_file() for page in pages)
    with pytest.raises(SystemExit) as exit_info:
        main(["store", "--help"])
    assert exit_info.value.code == 0


@pytest.mark.faults
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(BLOCKS[0][1])
    environment = {**os.environ, "PYTHONPATH": WITHOUT_TORCH}
    for steps, code, output in (
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
        assert (done.returncode, done.stdout) == (code, output), done.stderr


@pytest.mark.faults
def test_the_agent_of_the_page_runs(tmp_path: Path) -> None:
    (code,) = (code for _, code in BLOCKS if code.startswith("# agent.py"))
    (tmp_path / "agent.py").write_text(code)
    command = [sys.executable, str(tmp_path / "agent.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "succeeded [(0, 0), (1, 2)]\n", done.stderr
