"""The folder of one run, and in it one for each worker of each attempt.

It stays where somebody asked for it or for the output in it; else it is temporary, holds no more
than one attempt, and goes with the agent, however that ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from .guardian import Guardian


class RunFolder:
    """`<log_dir>/<run_id>_<random>`; made when first asked for."""

    def __init__(self, guardian: Guardian, log_dir: str | None, run_id: str, *, kept: bool) -> None:
        self._guardian = guardian
        # The workers are told of it, and may go elsewhere.
        self._log_dir = None if log_dir is None else os.path.abspath(log_dir)
        self._run_id = run_id
        self.kept = kept
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        if self._path is None:
            if self._log_dir is not None:
                os.makedirs(self._log_dir, exist_ok=True)
            safe = self._run_id.replace(os.sep, "_")
            made = tempfile.mkdtemp(prefix=f"{safe}_", dir=self._log_dir)
            self._path = Path(made)
            if not self.kept:
                self._guardian.add_folder(made)
        return self._path

    @property
    def kept_path(self) -> Path | None:
        """The folder, where there is one that stays."""
        return self._path if self.kept else None

    def of(self, attempt: int, local_rank: int) -> Path:
        """The folder of one worker. Raises OSError."""
        folder = self.path / f"attempt_{attempt}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def forget(self, but: int) -> None:
        """Remove what earlier attempts left in a folder that is not for people to look at."""
        if not self.kept:
            for path in self.path.glob("attempt_*"):
                if path.name != f"attempt_{but}":
                    shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """The run is over."""
        if self._path is not None and not self.kept:
            shutil.rmtree(self._path, ignore_errors=True)
            self._guardian.remove_folder(str(self._path))
            self._path = None
