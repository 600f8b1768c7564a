"""elasticlib/examples/in_place.py, and what docs/in_place_recovery.md shows of it."""

from __future__ import annotations

import sys

from jobs import Job
from pages import DOCS, read_page

from elasticlib import CheckpointManager

EXAMPLE = DOCS.parent / "elasticlib/examples/in_place.py"


def test_the_page_shows_the_example_as_it_is() -> None:
    _, blocks = read_page("in_place_recovery.md")
    _, shown = blocks[0]
    before, _, loop = shown.partition("...\n")
    assert before in EXAMPLE.read_text()
    assert loop in EXAMPLE.read_text()


def test_the_example_trains_to_its_end(job: Job) -> None:
    flags = ("--standalone", "--nproc-per-node", "2")
    command = (sys.executable, "-m", "elasticlib.launch", *flags, str(EXAMPLE))
    node = job.start("node", *command, str(job.folder / "checkpoints"))
    assert node.exit_code() == 0, node.text
    assert "done after 30 steps" in node.text
    assert CheckpointManager(job.folder / "checkpoints").steps()[-1] == 30
