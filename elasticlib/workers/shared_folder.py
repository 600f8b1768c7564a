"""A folder in memory that workers are told of and that outlives them: it goes with their agent.

Each start of the workers has a folder of its own in it, numbered as they come: an era.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..held_folder import FolderLock, try_to_hold
from .channels import SHARED_MEMORY


class SharedFolder:
    """One agent's; there is none on the disk or in memory before it is asked for.

    listed, unlisted: told of the folder, so that it goes with us even if we are killed.
    """

    def __init__(self, listed: Callable[[str], None], unlisted: Callable[[str], None]) -> None:
        self._listed = listed
        self._unlisted = unlisted
        self._path: Path | None = None
        self._lock: FolderLock | None = None

    @property
    def made(self) -> Path | None:
        """The folder, if there is one."""
        return self._path

    def era(self, number: int) -> Path:
        """The folder of this start of the workers. Raises OSError."""
        folder = self._made_path() / str(number)
        if not folder.exists():
            for earlier in self._made_path().iterdir():
                with contextlib.suppress(OSError):
                    earlier.rmdir()  # those in which there is something stay
            folder.mkdir()
        return folder

    def remove(self) -> None:
        """Leave nothing behind; harmless if there is nothing."""
        path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            if self._lock is not None:
                self._lock.close()
            self._unlisted(str(path))

    def _made_path(self) -> Path:
        if self._path is None:
            usable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
            try:
                made = tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY if usable else None)
            except OSError:
                # Shared memory may be full, of what DataLoaders keep there.
                made = tempfile.mkdtemp(prefix=PREFIX)
            self._path = Path(made)
            self._lock = try_to_hold(self._path)
            self._listed(made)
        return self._path


PREFIX = "elasticlib-memory-"
