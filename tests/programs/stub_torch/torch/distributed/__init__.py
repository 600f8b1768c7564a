"""A TCPStore that holds its port, so that nobody else gets it, and answers nobody."""

import socket
from typing import Any


class TCPStore:
    def __init__(self, host: str, port: int, *, master_listen_fd: int, **_: Any) -> None:
        self.host, self.port = host, port
        self._listener = socket.socket(fileno=master_listen_fd)

    def __del__(self) -> None:
        self._listener.close()
