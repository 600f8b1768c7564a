"""Where a TCP store is served, on machines whose kernel or names have something missing."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from elasticlib.launch.config import LaunchConfig
from elasticlib.launch.tcp_place import TcpMeetingPlace, outward_address
from elasticlib.stores.server import TcpStoreServer
from elasticlib.stores.tcp import TcpStore


class WithoutIPv6(socket.socket):
    """As the kernel makes them where IPv6 is not built in."""

    def __init__(self, family: int = socket.AF_INET, *rest: Any, **more: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *rest, **more)


def test_a_kernel_without_ipv6_hosts_and_dials_at_the_other_addresses_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TcpStoreServer("127.0.0.1", 0) as free:
        port = free.port
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **more: Any) -> list[Any]:
        hosts = ("::1", "127.0.0.1") if host == "localhost" else (host,)
        return [info for one in hosts for info in real(one, *rest, **more)]

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = LaunchConfig(max_nodes=2, run_id="job", rdzv_endpoint=f"localhost:{port}")
    server, store = TcpMeetingPlace(config, None).open()
    assert server is not None
    with server, store, TcpStore("localhost", port, job="job", connect_timeout=5.0) as other:
        assert other.set("key", b"value") == store.get("key")
    assert outward_address()
