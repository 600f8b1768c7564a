"""Every notebook runs from its first cell to its last, shows a picture, and leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
FOLDERS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
IDS = [path.stem for path in NOTEBOOKS]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which kernels keep their history and sockets, and run."""
    for name in (*FOLDERS, "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    # Frozen modules upset the debugger that every kernel carries; nobody debugs here.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return tmp_path


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def executed(path: Path, folder: Path) -> tuple[Any, int]:
    """The notebook with its outputs, and the process that ran it."""
    notebook = read(path)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources=resources
    )
    pids: list[int] = []

    def note(**_: object) -> None:
        manager: Any = client.km
        pids.append(manager.provisioner.pid)

    client.on_notebook_start = note
    client.execute()
    return notebook, pids[0]


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_runs_shows_a_picture_and_leaves_no_process(path: Path, elsewhere: Path) -> None:
    notebook, pid = executed(path, elsewhere)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_is_kept_without_its_outputs(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)
