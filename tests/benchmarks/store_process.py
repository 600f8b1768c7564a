"""An `elasticlib store` in a process of its own, for whoever is to meet in it."""

from __future__ import annotations

import subprocess
import sys

BOUND = 60.0


class Server:
    """A store in a process of its own, for as long as the block lasts."""

    def __enter__(self) -> int:
        command = [sys.executable, "-m", "elasticlib.launch.commands", "store"]
        self._process = subprocess.Popen(
            [*command, "--bind", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return int(self._process.stdout.readline().split()[2].rpartition(":")[2])

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=BOUND)
