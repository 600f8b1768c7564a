"""Folders that somebody else removes, at the worst moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def dir_removed_when_listed(folder: Path) -> Iterator[Path]:
    """A folder that goes when its files are about to be listed, having been found."""
    folder.mkdir()
    scandir = os.scandir

    def gone(path: Any = ".") -> Any:
        if str(path) == str(folder) and folder.exists():
            folder.rmdir()
        return scandir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", gone)
        yield folder
    assert not folder.exists()
