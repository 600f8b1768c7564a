"""Where a launch keeps its events."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elasticlib.launch.launch_config import LaunchConfig
from elasticlib.launch.observability import open_journal
from elasticlib.observe.runs import UNFINISHED_PREFIX, runs_dir


def test_a_launch_clears_up_what_an_earlier_one_left_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = runs_dir() / f"{UNFINISHED_PREFIX}left"
    left.mkdir(parents=True)
    left.parent.chmod(0o700)
    os.utime(left, (0, 0))
    nobody: Any = None
    with open_journal(LaunchConfig(run_id="job"), nobody, "n1") as journal:
        assert [path.name for path in left.parent.iterdir()] == [Path(journal.path).parent.name]
