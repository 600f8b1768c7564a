"""Directories that another process removes at an inconvenient moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def dir_removed_when_listed(folder: Path) -> Iterator[Path]:
    """Create a directory that is removed just before its files are listed."""
    folder.mkdir()
    scandir = os.scandir

    def remove_and_list(path: Any = ".") -> Any:
        if str(path) == str(folder) and folder.exists():
            folder.rmdir()
        return scandir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", remove_and_list)
        yield folder
    assert not folder.exists()
