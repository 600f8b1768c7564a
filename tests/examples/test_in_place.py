"""elasticlib/examples/in_place.py runs, and docs/in_place_recovery.md quotes it."""

from __future__ import annotations

import sys

from jobs import Job
from pages import DOCS, read_page

from elasticlib import CheckpointManager

EXAMPLE = DOCS.parent / "elasticlib/examples/in_place.py"


def test_the_page_quotes_the_example() -> None:
    _, blocks = read_page("in_place_recovery.md")
    _, quoted = blocks[0]
    before, _, loop = quoted.partition("...\n")
    for part in (before, loop):
        assert part.strip()
        assert part in EXAMPLE.read_text()


def test_the_example_completes_its_training(job: Job) -> None:
    flags = ("--standalone", "--nproc-per-node", "2")
    command = (sys.executable, "-m", "elasticlib.launch", *flags, str(EXAMPLE))
    node = job.start("node", *command, str(job.folder / "checkpoints"))
    assert node.exit_code() == 0, node.text
    assert "done after 30 steps" in node.text
    assert CheckpointManager(job.folder / "checkpoints").steps()[-1] == 30
