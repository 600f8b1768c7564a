"""A real Redis on loopback, which keeps nothing on disk, and can be stopped and killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from etcd_server import BOOT
from jobs import until
from ports import held_port

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="no Redis here: install redis-server")


class RedisServer:
    """Starts when entered, and is gone when left."""

    def __init__(self, folder: Path) -> None:
        self._holder = held_port()
        self.endpoint = "{}:{}".format(*self._holder.getsockname())
        self.url = f"redis://{self.endpoint}"
        self.log = folder / "redis.log"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        assert BINARY is not None
        host, _, port = self.endpoint.rpartition(":")
        nothing = ("--save", "", "--appendonly", "no", "--dir", str(self._folder))
        command = (BINARY, "--bind", host, "--port", port, *nothing)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, *command], stdout=log, stderr=log
            )
        try:
            until("Redis to serve", self._serves, 30.0)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._holder.close()

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        return "Ready to accept connections" in self.log.read_text()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait(10.0)
            self._process = None
