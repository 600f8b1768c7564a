"""A TCPStore that only occupies its port and answers no client.

It writes its other arguments to the file that STUB_TORCH_ARGUMENTS names.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any


class TCPStore:
    def __init__(self, host: str, port: int, *, master_listen_fd: int, **arguments: Any) -> None:
        self.host, self.port = host, port
        self._listener = socket.socket(fileno=master_listen_fd)
        if "STUB_TORCH_ARGUMENTS" in os.environ:
            Path(os.environ["STUB_TORCH_ARGUMENTS"]).write_text(json.dumps(arguments))

    def __del__(self) -> None:
        self._listener.close()
