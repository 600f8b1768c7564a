"""Modules of a user, in a directory on the import path."""

from __future__ import annotations

import os
from pathlib import Path


def write_module(folder: Path, name: str, code: str) -> Path:
    """Write a module into the directory, and return the directory."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    return folder


def extend_pythonpath(folder: Path) -> str:
    """Return the current PYTHONPATH with the directory in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
