"""Code blocks of pages in docs/, and the test suites that some pages contain."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def read_page(name: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a page, and its code blocks with their languages."""
    text = (DOCS / name).read_text()
    return text, re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)


def name_blocks(codes: list[str]) -> dict[str, str]:
    """Return the files that the blocks contain, by the name in the comment at their start."""
    return {code.split("\n")[0].removeprefix("# "): code for code in codes}


def become_only_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the only rank of a job, in this directory."""
    monkeypatch.chdir(folder)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def check_suite_passes(
    folder: Path, suite: str, seconds: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run the tests of a page, and check that at least ten run and all pass."""
    output = run_suite(folder, suite, seconds, environment)
    assert re.search(r"^\d\d passed in", output, re.MULTILINE), output


def run_suite(
    folder: Path, suite: str, seconds: float, environment: Mapping[str, str] | None = None
) -> str:
    """Run the tests of a page in another pytest process, and return its output."""
    flags = ("-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, suite],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
