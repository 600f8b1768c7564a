"""The directories in which launches record their events."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchOptions, RendezvousOptions
from elasticlib.launch.observability import open_journal
from elasticlib.observe.runs import UNFINISHED_PREFIX, runs_dir


def test_launch_removes_an_unfinished_directory_of_an_earlier_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover = runs_dir() / f"{UNFINISHED_PREFIX}left"
    leftover.mkdir(parents=True)
    leftover.parent.chmod(0o700)
    os.utime(leftover, (0, 0))
    no_setup: Any = None
    options = LaunchOptions(rendezvous=RendezvousOptions(run_id="job"))
    with open_journal(options, no_setup, "n1") as journal:
        directories = [path.name for path in leftover.parent.iterdir()]
        assert directories == [Path(journal.path).parent.name]
