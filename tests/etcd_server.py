"""A real etcd server, on loopback or on a host of a cluster. It can be killed and started again.

Its data is in the directory of the test.
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

# The server is killed when the process of the test ends, even if that is killed.
BOOT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


AnyServer = TypeVar("AnyServer", bound="Server")


class Server:
    """A server program, which runs while this context manager is entered.

    Args:
        folder: directory for its log and data.
        endpoint: address for clients. Default: a free port of loopback.
    """

    NAME = ""  # name in messages and of the log file
    READY = ""  # text in the log that means that the server accepts clients

    def __init__(self, folder: Path, endpoint: str = "") -> None:
        self._reserved_port = None if endpoint else reserved_port()
        self.endpoint = endpoint or "{}:{}".format(*self._reserved_port.getsockname())
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> tuple[str, ...]:
        raise NotImplementedError

    def __enter__(self: AnyServer) -> AnyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._reserved_port is not None:
            self._reserved_port.close()

    @property
    def log(self) -> Path:
        return self._folder / f"{self.NAME}.log"

    def start(self) -> None:
        """Start the server with its existing data, and wait until it accepts clients."""
        self.launch()
        self.wait_until_serving()

    def launch(self) -> None:
        """Start the process without waiting: a member of etcd serves once most members run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log)

    def wait_until_serving(self) -> None:
        try:
            wait_until(f"{self.NAME} to serve", self._is_serving)
        except BaseException:
            self.kill()
            raise

    def _is_serving(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        return self.READY in self.log.read_text()

    def signal(self, number: int) -> None:
        """Send a signal. After SIGSTOP, wait until all threads of the process have stopped."""
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
    """An etcd with one member, or one of several members.

    Args:
        folder: directory for its log and data.
        *flags: flags of etcd, which override those of this class.
        protocol: http or https.
        endpoint: address for clients. Default: a free port of loopback.
        enter: wraps a command, so that it runs on the host of this server.
    """

    NAME = "etcd"
    READY = "serving client traffic"

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
            # Any port, because no other member connects to it.
            "listen-peer-urls": "http://127.0.0.1:0",
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            # With short intervals, etcd grants leases of one second.
            "heartbeat-interval": "10",
            "election-timeout": "100",
            "logger": "zap",
        }
        command = (BINARY, *(f"--{name}={value}" for name, value in flags.items()), *self._flags)
        return self._enter(sys.executable, "-c", BOOT, *command)

    def post(self, path: str, token: str = "", **body: Any) -> Mapping[str, Any]:
        """Send a request that the store class has no method for."""
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(
            f"{self._url}/v3/{path}", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=10.0) as response:
            answer: Mapping[str, Any] = json.load(response)
        return answer
