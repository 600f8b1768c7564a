"""The Python code of the guide and the troubleshooting page runs; their commands can be parsed."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import DOCS, read_page

from elasticlib.launch import cli
from elasticlib.launch.arguments import parse_launch
from elasticlib.launch.command_line import build_parser
from elasticlib.observe.formatting import format_duration
from elasticlib.observe.history import PHASES

GUIDE = sorted(str(path.relative_to(DOCS)) for path in (DOCS / "guide").glob("*.md"))
PAGES = [*GUIDE, "troubleshooting.md"]
FOUND = {page: read_page(page) for page in PAGES}
LINES = [
    (page, line)
    for page, (_, blocks) in FOUND.items()
    for language, code in blocks
    if language == "sh"
    for line in code.splitlines()
]
PYTHON = [
    page
    for page in PAGES
    if "```python" in FOUND[page][0]
    # Tests of their own run these: tests/integrations/test_quickstart_page.py and
    # tests/launch/test_events_page.py start the jobs, and tests/checkpoint/test_checkpoints_page.py
    # writes the checkpoints.
    and page not in ("guide/launch.md", "guide/events.md", "guide/checkpoints.md")
]
OTHERS = {"--help", "--ipc", "--pids-limit", "--shm-size", "--ulimit"}  # Docker's, except --help


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def list_subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return all subcommands of a command, at any depth, by their words."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found[name] = inner
                nested = list_subcommands(inner).items()
                found.update({f"{name} {inner_name}": p for inner_name, p in nested})
    return found


COMMANDS = list_subcommands(cli._parser())


def parse_command_line(program: str, *arguments: str) -> bool:
    """Parse a command line of elasticlib as its program does; return False for other programs."""
    if program == "elasticrun":
        parse_launch(arguments, {})
    elif program == "elasticlib":
        cli._parser().parse_args(arguments)
    else:
        return False
    return True


FLAGS = {
    option
    for parser in (build_parser(), *COMMANDS.values())
    for action in parser._actions
    for option in action.option_strings
}


@pytest.mark.parametrize("page", PYTHON)
def test_the_python_code_of_the_page_runs(
    page: str, group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del group
    monkeypatch.chdir(tmp_path)
    trained: list[Any] = []
    names: dict[str, Any] = {
        "dataset": torch.arange(64),
        "decode": bytes,
        "last": 3,
        "model": torch.nn.Linear(1, 1),
        "paths": ["shard-0.tar"],
        "save": trained.append,
        "sizes": [4],
        "state": {"step": torch.zeros(1)},
        "train": trained.append,
        "weights": torch.ones(64),
        "world_size": 1,
    }
    for language, code in FOUND[page][1]:
        if language == "python":
            exec(code, names)
    assert trained


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_line_of_a_page_can_be_parsed(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del page
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert parse_command_line(*shlex.split(line))


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_subcommands_that_a_page_names_exist(page: str) -> None:
    code = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", FOUND[page][0], flags=re.DOTALL))
    named = {flag for text in code for flag in re.findall(r"(?:^|\s)(--[a-z-]+)", text)}
    named |= {m[1] for text in code if (m := re.match(r"elasticlib ([a-z]+)", text))}
    assert named <= FLAGS | COMMANDS.keys() | OTHERS


SUMMARY = r"^.* in \d+ generations, .*$|^.* s lost: .*$|^ *time lost on this node: .*$"


@pytest.mark.parametrize("page", ["quickstart.md", "troubleshooting.md", "guide/reports.md"])
def test_durations_of_a_summary_on_a_page_are_written_as_elasticrun_writes_them(page: str) -> None:
    lines = re.findall(SUMMARY, read_page(page)[0], re.MULTILINE)
    durations = [text for line in lines for text in re.findall(r"(?:\d+ min )?\d[\d.]* s\b", line)]
    assert len(durations) >= 7
    for text in durations:
        minutes, _, seconds = text.removesuffix(" s").rpartition(" min ")
        assert format_duration(60 * float(minutes or 0) + float(seconds)) == text


def test_reports_page_describes_each_phase_of_lost_time() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", FOUND["guide/reports.md"][0], re.MULTILINE)
    assert rows == list(PHASES.items())
