"""Modules of a user, in a folder on the import path."""

from __future__ import annotations

import os
from pathlib import Path


def write_module(folder: Path, name: str, code: str) -> Path:
    """Write the module into the folder, and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    return folder


def extend_pythonpath(folder: Path) -> str:
    """Return a PYTHONPATH on which the folder's modules are found."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
