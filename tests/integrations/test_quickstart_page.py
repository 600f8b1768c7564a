"""The commands of docs/quickstart.md install a checkout and train through a killed worker.

All commands of the page run in order, in the environment that they create. Only torch is not
downloaded again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import read_page

from elasticlib.testing.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
TEXT, BLOCKS = read_page("quickstart.md")
SHELL = [code for language, code in BLOCKS if language == "sh"]
(SCRIPT,) = (code for language, code in BLOCKS if language == "python")
INSTALL, MAKE_FOLDER, RUN, KILL, LOOK, AFTERWARDS, AGAIN = SHELL
PACKAGE = ("elasticlib", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]


class Terminal:
    """A terminal in a directory, with the environment of the page."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.folder = top
        unwanted = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        self.environment = {k: v for k, v in os.environ.items() if k not in unwanted}
        self.environment["TMPDIR"] = str(top / "tmp")

    def activate(self) -> None:
        programs = self.top / "venv" / "bin"
        self.environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def start(self, lines: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-e", "-c", lines],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, lines: str, seconds: float = 300.0) -> str:
        with self.start(lines) as shell:
            try:
                output, _ = shell.communicate(timeout=seconds)
            finally:
                shell.kill()
        assert shell.returncode == 0, output
        return output


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """Return a terminal after the installation, with this tree as the checkout."""
    top = tmp_path_factory.mktemp("reader")
    for name in ("tmp", "elasticlib"):
        (top / name).mkdir()
    for name in PACKAGE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, top / "elasticlib" / name)
    terminal = Terminal(top)
    make, activate, install = INSTALL.strip().splitlines()
    # The `python3` of the page may be another interpreter than that of the tests.
    terminal.run(make.replace("python3", sys.executable, 1))
    (site,) = (top / "venv").glob("lib/python*/site-packages")
    (site / "torch_is_here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert activate == ". venv/bin/activate"
    terminal.run(f"{activate} && {install}", 200.0)
    terminal.activate()
    output = terminal.run(MAKE_FOLDER)
    terminal.folder = top / "first"
    assert re.search(r"^elasticlib \d", output, re.MULTILINE)
    yield terminal
    # The records of runs and a directory of torch remain.
    stays = (f"elasticlib-runs-{os.getuid()}", "torchinductor_")
    left = [path.name for path in (top / "tmp").iterdir()]
    assert not [name for name in left if not name.startswith(stays)]


def has(subcommand: str, terminal: Terminal) -> bool:
    """Return True if elasticlib has this subcommand."""
    return subcommand in terminal.run("elasticlib --help")


def test_training_continues_after_a_killed_worker(terminal: Terminal) -> None:
    folder = terminal.folder
    (folder / "train.py").write_text(SCRIPT)
    # A reader takes longer to type than a test.
    assert RUN.count(" 600") == 1
    with terminal.start(RUN.replace(" 600", " 80")) as job:
        try:
            pid = folder / "rank1.pid"
            wait_until("rank 1 to train", lambda: pid.exists() and pid.read_text(), 120.0)
            first = pid.read_text()
            if has("status", terminal):
                terminal.run(LOOK)
            terminal.run(KILL)
            wait_until("another rank 1 to train", lambda: pid.read_text() not in ("", first), 120.0)
            output, _ = job.communicate(timeout=120)
        finally:
            job.terminate()
    assert job.returncode == 0, output
    # Both ranks write to one terminal, so their lines may be interleaved.
    assert len(re.findall(r"rank \d goes on after step 0(?!\d)", output)) == 2
    later = set(re.findall(r"rank \d goes on after step ([1-9]\d*)", output))
    assert len(later) == 1, output
    assert "was killed by SIGKILL (not sent by this agent)" in output
    assert output.count("ends after step 80") == 2
    for line in AFTERWARDS.strip().splitlines():
        subcommand = line.split()[1]
        if has(subcommand, terminal):
            shown = terminal.run(line)
            assert subcommand != "checkpoints" or re.search(
                r"^80 .* complete$", shown, re.MULTILINE
            )


def test_training_resumes_with_another_number_of_workers(terminal: Terminal) -> None:
    folder = terminal.folder
    assert (folder / "checkpoints").exists(), "this test needs the state of the test above"
    output = terminal.run(AGAIN.replace(" 700", " 90"))
    assert "rank 0 goes on after step 80" in output
    assert "rank 0 ends after step 90" in output


def test_launch_from_python_returns_the_values_in_the_guide(terminal: Terminal) -> None:
    (code,) = (code for language, code in read_page("guide/launch.md")[1] if language == "python")
    (terminal.folder / "sums.py").write_text(code)
    output = re.search(r"^ +print\(.*\) +# (.*)$", code, re.MULTILINE)
    assert output
    assert terminal.run("python sums.py 2> sums.err") == f"{output[1]}\n"
