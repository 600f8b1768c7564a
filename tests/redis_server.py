"""A real Redis server on loopback that stores nothing on disk. It can be stopped and killed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from etcd_server import BOOT, Server

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="no Redis here: install redis-server")


class RedisServer(Server):
    """A Redis server, which runs while this context manager is entered."""

    NAME = "redis"
    READY = "Ready to accept connections"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"redis://{self.endpoint}"

    def command(self) -> tuple[str, ...]:
        assert BINARY is not None
        host, _, port = self.endpoint.rpartition(":")
        no_files = ("--save", "", "--appendonly", "no", "--dir", str(self._folder))
        return (sys.executable, "-c", BOOT, BINARY, "--bind", host, "--port", port, *no_files)
