"""Traces of the agent's machine (`trace_files`); `--rewrite-traces` writes the effects."""

from __future__ import annotations

from pathlib import Path

import pytest
import trace_files

TRACES = sorted((Path(__file__).parent / "traces").glob("*.txt"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_machine_answers_as_the_trace_says(path: Path, pytestconfig: pytest.Config) -> None:
    expected, found = path.read_text(), trace_files.run(path.read_text())
    if pytestconfig.getoption("--rewrite-traces"):
        path.write_text(found)
    else:
        assert found == expected
