"""Pages of docs/ whose code a third party follows: what stands in them, and their own suites."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def read_page(name: str) -> tuple[str, list[tuple[str, str]]]:
    """A page's text, and its blocks of code, each with its language."""
    text = (DOCS / name).read_text()
    return text, re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)


def name_blocks(codes: list[str]) -> dict[str, str]:
    """The files that the blocks make up: each begins with its name, in a comment."""
    return {code.split("\n")[0].removeprefix("# "): code for code in codes}


def check_suite_passes(
    folder: Path, suite: str, seconds: float, environment: Mapping[str, str] | None = None
) -> None:
    """The page's tests, all of them."""
    said = run_suite(folder, suite, seconds, environment)
    assert re.search(r"^\d\d passed in", said, re.MULTILINE), said


def run_suite(
    folder: Path, suite: str, seconds: float, environment: Mapping[str, str] | None = None
) -> str:
    """The page's tests, in a pytest of their own; what that said."""
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
