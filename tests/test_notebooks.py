"""Every notebook runs from its first cell to its last, shows a picture, and leaves nothing: no
process, no file, and no output in the repository."""

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
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels keep their history and sockets, and two folders of it for what notebooks do:
    `here`, in which they run, and `tmp`."""
    for name in (*FOLDERS, "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("here", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv(TAG, str(tmp_path))
    # Where a notebook is opened, it finds the modules beside it; here it runs in another folder.
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    # Frozen modules upset the debugger that every kernel carries; nobody debugs here.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return tmp_path


def processes(mark: Path) -> set[int]:
    """All that a notebook has started, directly or not."""
    return find_processes(TAG, str(mark))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def executed(path: Path, folder: Path) -> Any:
    """The notebook with its outputs."""
    notebook = read(path)
    resources = {"metadata": {"path": str(folder / "here")}}
    client = nbclient.NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources=resources
    )
    client.execute()
    return notebook


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_runs_shows_a_picture_and_leaves_nothing(path: Path, elsewhere: Path) -> None:
    notebook = executed(path, elsewhere)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    wait_until("no process to be left", lambda: not processes(elsewhere), 10.0)
    assert not os.listdir(elsewhere / "here")
    assert not os.listdir(elsewhere / "tmp")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_is_kept_without_its_outputs(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_begins_with_a_title_and_a_sentence_and_names_no_place(path: Path) -> None:
    cells = read(path).cells
    assert re.fullmatch(r"# [^\n]+\n\n[^.\n]+\.", cells[0].source)
    for cell in cells:
        assert not re.search(r"(?<![\w.:/])(?:~/|/(?:home|root|tmp|work|usr)\b)", cell.source)
