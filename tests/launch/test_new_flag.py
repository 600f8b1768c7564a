"""The flag that CONTRIBUTING.md adds, in a copy of the library: three files are changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add a flag")[2]
SECTION = SECTION.partition("\n## ")[0]
BLOCKS = re.findall(r"^   ```python\n(.*?)^   ```$", SECTION, re.MULTILINE | re.DOTALL)
FIELD, ROW, USE = (textwrap.dedent(block).partition("\n")[2] for block in BLOCKS)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def insert(path: Path, after: str, code: str, indentation: int) -> None:
    """Insert code after a text that occurs once in a file."""
    text = path.read_text()
    assert text.count(after) == 1
    path.write_text(text.replace(after, after + textwrap.indent(code, " " * indentation)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs the changed elasticrun with flags and variables."""
    folder = tmp_path_factory.mktemp("changed")
    package = folder / "elasticlib"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "elasticlib", package, ignore=ignored)
    start = '"""Where the output of the workers of a node goes. The defaults show all of it."""\n'
    insert(package / "options.py", start, f"\n{FIELD}", 4)
    insert(package / "launch" / "flags.py", '    "output": (\n', ROW, 8)
    setup = package / "launch" / "worker_setup.py"
    insert(setup, "import os\n", "import shutil\n", 0)
    insert(setup, '"log_dir", "must be writable", path)\n', USE, 4)
    (folder / "train.py").touch()

    def run_changed(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "elasticlib.launch", *flags, "train.py")
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
        )

    return run_changed


def test_the_section_names_three_files_that_exist() -> None:
    steps = re.findall(r"^\d\. ", SECTION, re.MULTILINE)
    assert len(steps) == len(BLOCKS) == 3
    named = set(re.findall(r"`(elasticlib/[\w/]+\.py)`", SECTION))
    assert len(named) == 3
    assert all((ROOT / name).is_file() for name in named)


def test_the_new_flag_is_read_checked_and_shown(run: Run) -> None:
    flags = ("--standalone", "--start-method", "spawn", "--log-dir", "logs")
    full = run(*flags, "--min-log-space", "1e9")
    assert full.returncode == 2
    assert "elasticrun: error: --min-log-space must be free in the file system of" in full.stderr
    invalid = run(*flags, PET_MIN_LOG_SPACE="-1")
    message = "--min-log-space must be at least 0, got -1.0 (--min-log-space is set by PET_MIN_LOG"
    assert message in invalid.stderr
    shown = run(*flags, "--dry-run", PET_MIN_LOG_SPACE="1e-9")
    assert re.search(r"--min-log-space +1e-9 +PET_MIN_LOG_SPACE", shown.stdout), shown.stderr
    assert re.search(r"--min-log-space +0 +default", run("--dry-run").stdout)
    assert "--min-log-space GB" in run("--help-all").stdout
    assert run(*flags, "--min-log-space", "1e-9").returncode == 0
