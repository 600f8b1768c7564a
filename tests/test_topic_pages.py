"""The pages about one topic (docs/installation.md and others) agree with the code.

Their command lines are parsed, their options exist, and their tables have the values of the code.
"""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
from pages import DOCS, blocks_of
from test_guide_pages import COMMANDS, FLAGS

from elasticlib.launch import cli
from elasticlib.launch.arguments import parse_launch

ROOT = DOCS.parent
PAGES = ["installation.md"]
COMMAND_LINES = [
    (page, line)
    for page in PAGES
    for language, code in blocks_of(page)[1]
    if language == "sh"
    for line in code.splitlines()
]
OTHER_OPTIONS = {"--shm-size", "--index-url"}  # of Docker and pip


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirement_names(text: str) -> set[str]:
    """Return the names in a list of requirements, without their versions."""
    return {re.split(r"[\[>=<]", line)[0] for line in text.split()}


def table_rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    text = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines, f"{page} has no table below {heading}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES)
def test_command_line_of_page_is_valid(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del page
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    program, *arguments = shlex.split(line)
    if arguments == ["--version"]:
        arguments = ["--dry-run", "train.py"]
    if program == "elasticrun":
        parse_launch(arguments, {})
    elif program == "elasticlib":
        cli._parser().parse_args(arguments)
    elif program == "pip":
        extras = set(setup_cfg()["options.extras_require"])
        named = re.findall(r"elasticlib\[([\w,]+)\]", line)
        assert {extra for names in named for extra in names.split(",")} <= extras
    else:
        assert program in {"python3", ".", "openssl", "export"}


@pytest.mark.parametrize("page", PAGES)
def test_options_that_page_names_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    code = re.findall(r"`([^`\n]+)`", text)
    named = {flag for part in code for flag in re.findall(r"(?:^|\s)(--[a-z-]+)", part)}
    named |= {match[1] for part in code if (match := re.match(r"elasticlib ([a-z]+)", part))}
    assert named <= FLAGS | COMMANDS.keys() | OTHER_OPTIONS


# Installation


def test_table_of_extras_is_that_of_setup_cfg() -> None:
    extras = setup_cfg()["options.extras_require"]
    rows = {row[0].strip("`"): row[2] for row in table_rows("installation.md", "Extras")}
    assert set(rows) == set(extras)
    for name in ("fsspec", "lightning", "transformers", "ray", "images", "testing", "docs"):
        assert set(rows[name].split(", ")) == requirement_names(extras[name])


def test_requirements_of_page_are_those_of_setup_cfg() -> None:
    options = setup_cfg()["options"]
    rows = {row[0]: row[1] for row in table_rows("installation.md", "Requirements")}
    required = dict(re.findall(r"(\w+)>=([\d.]+)", options["install_requires"]))
    assert rows["Python"].startswith(options["python_requires"].removeprefix(">="))
    assert rows["torch"].startswith(required["torch"])
    assert re.findall(r"[\d.]+", rows["attrs, filelock"]) == [
        required["attrs"],
        required["filelock"],
    ]
