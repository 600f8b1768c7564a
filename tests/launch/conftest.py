"""Fixtures of the tests of launches."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from elasticlib.launch import addresses, store_host


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """The machine's own name as in Debian's /etc/hosts.

    It resolves to 127.0.1.1, where no server listens, and which no other machine can reach.
    """
    real = socket.getaddrinfo

    def resolve_debian_name(host: str, *args: Any, **kwargs: Any) -> Any:
        return real("127.0.1.1" if host == "debian" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_debian_name)
    for module in (addresses, store_host):
        monkeypatch.setattr(module, "outward_address", lambda: "127.0.0.1")
    return "debian"


@pytest.fixture
def script(tmp_path: Path) -> str:
    """The path of an existing script, because each command line must name one."""
    path = tmp_path / "train.py"
    path.touch()
    return str(path)
