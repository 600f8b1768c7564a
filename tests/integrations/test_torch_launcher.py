"""The launcher of docs/migrate_from_torch_elastic.md returns the same in torch and elasticlib."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import read_page

_, [(_, PROGRAM), (_, TORCH_IMPORTS), *_] = read_page("migrate_from_torch_elastic.md")
ELASTICLIB_IMPORT = (
    "from elasticlib import ChildFailedError, LaunchConfig, elastic_launch, record\n"
)


def run(folder: Path, program: str, steps: str) -> tuple[int, str, object]:
    """Return the exit code, the output, and the error file of the launcher."""
    folder.mkdir()
    script, error_file = folder / "launcher.py", folder / "error.json"
    script.write_text(program)
    process = subprocess.run(
        [sys.executable, str(script), steps],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    error = json.loads(error_file.read_text())["message"] if error_file.exists() else {}
    return process.returncode, process.stdout, (error.get("message"), error.get("errorCode"))


@pytest.mark.parametrize(
    ("steps", "code", "cause"),
    [("2", 0, (None, None)), ("1", 1, ("ValueError: 1 steps are too few", 1))],
)
def test_a_program_has_the_same_result_under_both_launchers(
    steps: str, code: int, cause: object, tmp_path: Path
) -> None:
    assert PROGRAM.count(ELASTICLIB_IMPORT) == 1
    result = run(tmp_path / "elasticlib", PROGRAM, steps)
    assert result == run(
        tmp_path / "torch", PROGRAM.replace(ELASTICLIB_IMPORT, TORCH_IMPORTS), steps
    )
    assert (result[0], result[2]) == (code, cause)
