"""What several tests of launches stand on."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from elasticlib.launch import addresses, store_host


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine's own name as Debian's /etc/hosts has it: it means 127.0.1.1, where nobody serves,
    and which no other machine reaches."""
    real = socket.getaddrinfo

    def debian(host: str, *rest: Any, **more: Any) -> Any:
        return real("127.0.1.1" if host == "debian" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    for module in (addresses, store_host):
        monkeypatch.setattr(module, "outward_address", lambda: "127.0.0.1")
    return "debian"


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A program that there is, as is asked of each command line."""
    path = tmp_path / "train.py"
    path.touch()
    return str(path)
