"""Addresses at which a TCP store is hosted on machines without IPv6 or with link-local names."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, TcpStore, TcpStoreServer
from elasticlib.launch.addresses import is_local_address, outward_address, resolve
from elasticlib.launch.store_host import TcpStoreHost


class WithoutIPv6(socket.socket):
    """Sockets of a kernel that was built without IPv6."""

    def __init__(self, family: int = socket.AF_INET, *args: Any, **kwargs: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *args, **kwargs)


def test_without_ipv6_store_and_client_use_the_other_addresses_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TcpStoreServer("127.0.0.1", 0) as free:
        port = free.port
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        hosts = ("::1", "127.0.0.1") if host == "localhost" else (host,)
        return [info for name in hosts for info in real(name, *args, **kwargs)]

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = LaunchConfig(max_nodes=2, run_id="job", rdzv_endpoint=f"localhost:{port}")
    server, store = TcpStoreHost(config.options(), None).open()
    assert server is not None
    with server, store, TcpStore("localhost", port, job="job", connect_timeout=5.0) as other:
        assert other.set("key", b"value") == store.get("key")
    assert outward_address()


def test_link_local_address_keeps_its_scope() -> None:
    link = next((name for _, name in socket.if_nameindex() if link_local_address(name)), None)
    if link is None:
        pytest.skip("no interface here has a link-local address")
    address = f"{link_local_address(link)}%{link}"
    assert resolve(address, 1) == [address]
    assert is_local_address(address)
    with TcpStoreServer(address, 0, job="job") as server:
        assert server.host == address
        with TcpStore(server.host, server.port, job="job") as store:
            store.set("key", b"")
            assert store.local_address == address


def link_local_address(interface: str) -> str:
    """Return the link-local address of an interface, or an empty text if it has none."""
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return ""
    addresses = [bytes.fromhex(row[0]) for row in rows if row[5] == interface]
    link_local = (a for a in addresses if a[:2] == b"\xfe\x80")
    return next((socket.inet_ntop(socket.AF_INET6, a) for a in link_local), "")
