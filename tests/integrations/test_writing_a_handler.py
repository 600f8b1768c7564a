"""docs/writing_a_handler.md, followed by a third party: its files, its tests, its command line."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, check_one_world
from modules import path_with, with_module
from pages import blocks_of, by_name, run_suite

TEXT, BLOCKS = blocks_of("writing_a_handler.md")
FILES = by_name([code for kind, code in BLOCKS if kind != "sh"])
MODULE, SUITE = "elasticlib_register", "test_elasticlib_register.py"
(COMMAND,) = (code.strip() for kind, code in BLOCKS if kind == "sh")
MEMBER = """
import sys
from elasticlib import Limits, Node
from elasticlib_register import RegisterHandler

node = Node(sys.argv[2], sys.argv[2], "127.0.0.1", 1)
handler = RegisterHandler(sys.argv[1], "job", node, Limits(1, 2), 20.0)
while True:
    print(handler.next_rendezvous().world_size, flush=True)
    while handler.wait_for_change(1.0) is None:
        pass
"""

pytestmark = pytest.mark.faults


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the page's module."""
    return with_module(tmp_path / "site", MODULE, FILES[f"{MODULE}.py"])


def test_every_block_of_the_page_is_known_to_a_test() -> None:
    assert set(FILES) == {f"{MODULE}.py", SUITE}
    assert len(BLOCKS) == len(FILES) + 1


def test_the_pages_suite_passes(site: Path, tmp_path: Path) -> None:
    (tmp_path / SUITE).write_text(FILES[SUITE])
    said = run_suite(tmp_path, SUITE, 100.0, {**os.environ, "PYTHONPATH": path_with(site)})
    # Those of failures and of success are the agents'.
    assert re.search(r"^\d\d passed, 3 skipped in", said, re.MULTILINE), said


def test_the_pages_command_line_runs_a_job(job: Job, site: Path, tmp_path: Path) -> None:
    words = shlex.split(COMMAND)
    assert (words[0], words[-1]) == ("elasticrun", "train.py")
    meeting = str(tmp_path / "meeting")
    flags = [meeting if word == "meeting" else word for word in words[1:-1]]
    assert flags != words[1:-1]
    nodes = [job.run(name, *flags, PYTHONPATH=path_with(site)) for name in "ab"]
    check_one_world(job.settled(2))
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_a_member_that_is_killed_is_missed_at_once(site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": path_with(site)}

    def member(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEMBER, str(tmp_path / "meeting"), name]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def said(process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with member("a") as first:
        try:
            assert said(first) == "1"
            with member("b") as second:
                assert [said(first), said(second)] == ["2", "2"]
                second.send_signal(signal.SIGKILL)
                assert said(first) == "1"
        finally:
            first.kill()
