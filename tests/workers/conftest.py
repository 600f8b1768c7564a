"""What tests of workers start one group after another with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_local import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.workers.close()
    assert not run.workers.running()
