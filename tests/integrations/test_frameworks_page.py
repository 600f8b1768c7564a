"""docs/frameworks.md has the commands, code and versions that the tests use."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path

from framework_jobs import PRELOAD
from pages import read_page

from elasticlib.launch.arguments import parse_options

TEXT, BLOCKS = read_page("frameworks.md")
ROOT = Path(__file__).parent.parent.parent
NAMES = ["lightning", "transformers", "accelerate", "torchdata"]
COMMANDS = [shlex.split(code) for language, code in BLOCKS if language == "sh"]
CODES = [code for language, code in BLOCKS if language == "python"]


def test_each_command_starts_the_example_with_the_options_of_the_tests() -> None:
    assert len(COMMANDS) == len(NAMES)
    for name, (program, *arguments) in zip(NAMES, COMMANDS, strict=True):
        assert program == "elasticrun"
        options, _ = parse_options(arguments)
        assert arguments[-1] == f"elasticlib/examples/with_{name}.py"
        assert (ROOT / arguments[-1]).exists()
        assert ",".join(options.workers.preload) == PRELOAD.get(name, "")


def test_each_line_of_code_is_in_the_example() -> None:
    assert len(CODES) == len(NAMES)
    for name, code in zip(NAMES, CODES, strict=True):
        lines = (ROOT / f"elasticlib/examples/with_{name}.py").read_text().splitlines()
        assert [line for line in code.splitlines() if line not in lines] == []


def test_versions_on_the_page_are_installed() -> None:
    rows = dict(re.findall(r"^\| (\w+) (\d+\.\d+\.\d+) \|", TEXT, re.MULTILINE))
    assert [name.lower() for name in rows] == NAMES
    for name, version in rows.items():
        assert metadata.version(name.lower()) == version
    assert metadata.version("torch").startswith("2.13.0")
