"""Each notebook runs completely, shows a picture, and leaves no process, no file and no output."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jobs import TAG
from processes import find_processes

from elasticlib.testing.waiting import wait_until

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FOLDERS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
IDS = [path.stem for path in NOTEBOOKS]


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory for the history and sockets of kernels.

    It has two subdirectories for notebooks: `here` is the current directory, `tmp` for temporary
    files.
    """
    for name in (*FOLDERS, "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("here", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv(TAG, str(tmp_path))
    # A user runs a notebook in its own directory, next to its modules; here it runs in another one.
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    # The debugger in each kernel would warn about frozen modules.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return tmp_path


def find_notebook_processes(mark: Path) -> set[int]:
    """Return all processes that a notebook has started, directly or indirectly."""
    return find_processes(TAG, str(mark))


def read_notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def execute(path: Path, folder: Path) -> Any:
    """Run a notebook, and return it with its outputs."""
    notebook = read_notebook(path)
    resources = {"metadata": {"path": str(folder / "here")}}
    client = nbclient.NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources=resources
    )
    client.execute()
    return notebook


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_runs_and_shows_a_picture_and_leaves_no_process_or_file(
    path: Path, directories: Path
) -> None:
    notebook = execute(path, directories)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    wait_until("all processes to exit", lambda: not find_notebook_processes(directories), 10.0)
    assert not os.listdir(directories / "here")
    assert not os.listdir(directories / "tmp")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = read_notebook(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_starts_with_a_title_and_a_summary_and_has_no_local_paths(path: Path) -> None:
    cells = read_notebook(path).cells
    assert re.fullmatch(r"# [^\n]+\n\n[^.\n]+\.", cells[0].source)
    for cell in cells:
        assert not re.search(r"(?<![\w.:/])(?:~/|/(?:home|root|tmp|work|usr)\b)", cell.source)
