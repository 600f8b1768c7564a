"""Fixtures of the tests of workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_groups import GroupRunner


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[GroupRunner]:
    """Starts groups of workers; after the test, none of them may run."""
    runner = GroupRunner(tmp_path)
    yield runner
    runner.workers.close()
    assert not runner.workers.view()
