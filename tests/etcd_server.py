"""A real etcd on loopback or on a host of a cluster, that can be killed and come back.

Its data is in the test's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from ports import reserved_port

from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until

BINARY = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(BINARY is None, reason="no etcd here: install etcd-server")

# It ends with the test's process, even if that is killed.
BOOT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


Itself = TypeVar("Itself", bound="Server")


class Server:
    """A program that serves on loopback, or where it is told to; running between enter and exit.

    folder: its log is there. endpoint: where clients find it; a free port of loopback unless given.
    """

    NAME, READY = "", ""
    """What it is called, and what its log says once it serves."""

    def __init__(self, folder: Path, endpoint: str = "") -> None:
        self._holder = None if endpoint else reserved_port()
        self.endpoint = endpoint or "{}:{}".format(*self._holder.getsockname())
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> tuple[str, ...]:
        raise NotImplementedError

    def __enter__(self: Itself) -> Itself:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._holder is not None:
            self._holder.close()

    @property
    def log(self) -> Path:
        return self._folder / f"{self.NAME}.log"

    def start(self) -> None:
        """Start on the data that is there; answers when this returns."""
        self.launch()
        self.wait_until_serving()

    def launch(self) -> None:
        """Start, and return at once: one of several members serves when most are there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log)

    def wait_until_serving(self) -> None:
        try:
            wait_until(f"{self.NAME} to serve", self._serves)
        except BaseException:
            self.kill()
            raise

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        return self.READY in self.log.read_text()

    def signal(self, number: int) -> None:
        """Once it is stopped, where the signal stops it: its threads go on for a moment."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(DEFAULT_TIMEOUT_S)
            self._process = None


class EtcdServer(Server):
    """One etcd of one member, or a member of several.

    protocol: http or https. enter: the command that runs another one where this server is to run.
    flags: etcd's own, and stronger than ours.
    """

    NAME, READY = "etcd", "serving client traffic"

    def __init__(
        self,
        folder: Path,
        *flags: str,
        protocol: str = "http",
        endpoint: str = "",
        enter: Callable[..., tuple[str, ...]] = lambda *command: command,
    ) -> None:
        super().__init__(folder, endpoint)
        self._flags = flags
        self._url = f"{protocol}://{self.endpoint}"
        self._enter = enter

    def command(self) -> tuple[str, ...]:
        assert BINARY is not None
        peer = "http://127.0.0.1:1"
        flags = {
            "data-dir": str(self._folder / "data"),
            "listen-client-urls": self._url,
            "advertise-client-urls": self._url,
            # Any port, as no other member will ever look for it.
            "listen-peer-urls": "http://127.0.0.1:0",
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            # Short, for then it grants leases of one second.
            "heartbeat-interval": "10",
            "election-timeout": "100",
            "logger": "zap",
        }
        command = (BINARY, *(f"--{name}={value}" for name, value in flags.items()), *self._flags)
        return self._enter(sys.executable, "-c", BOOT, *command)

    def post(self, path: str, token: str = "", **body: Any) -> Mapping[str, Any]:
        """A request by hand, for what the store does not do."""
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(
            f"{self._url}/v3/{path}", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=10.0) as response:
            answer: Mapping[str, Any] = json.load(response)
        return answer
