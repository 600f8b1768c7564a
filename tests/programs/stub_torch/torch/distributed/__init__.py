"""A TCPStore that holds its port, so that nobody else gets it, and answers nobody.

What it is told beside goes to the file that STUB_TORCH_TOLD names.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any


class TCPStore:
    def __init__(self, host: str, port: int, *, master_listen_fd: int, **told: Any) -> None:
        self.host, self.port = host, port
        self._listener = socket.socket(fileno=master_listen_fd)
        if "STUB_TORCH_TOLD" in os.environ:
            Path(os.environ["STUB_TORCH_TOLD"]).write_text(json.dumps(told))

    def __del__(self) -> None:
        self._listener.close()
