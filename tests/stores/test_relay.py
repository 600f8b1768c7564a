"""Clients of the store of torch that connect to this server are forwarded to that store."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import ServerLimits, TcpStoreServer

HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
BOUND = 30.0
SECRET = b"sixteen bytes are the least"


class Upstream:
    """A server in place of the store of torch. It accepts one client at a time."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(BOUND)
        self.port: int = self._listener.getsockname()[1]

    def client(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.settimeout(BOUND)
        return connection

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    limits = ServerLimits(max_torch_relays=2)
    with TcpStoreServer("127.0.0.1", 0, secret=SECRET, limits=limits) as server:
        yield server


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.close()


def connect_torch_client(server: TcpStoreServer, *more: bytes) -> socket.socket:
    client = socket.create_connection((server.host, server.port), BOUND)
    client.sendall(b"".join((HELLO, *more)))
    return client


def read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def is_disconnected(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_relay_transfers_all_bytes_in_both_directions(
    server: TcpStoreServer, upstream: Upstream
) -> None:
    server.forward_torch_clients_to(("127.0.0.1", upstream.port))
    sent = hashlib.sha256(b"x").digest() * 250_000
    with connect_torch_client(server) as client, upstream.client() as other:
        assert read_exactly(other, len(HELLO)) == HELLO
        for one, two in ((client, other), (other, client)):
            sending = threading.Thread(target=one.sendall, args=(sent,), daemon=True)
            sending.start()
            assert read_exactly(two, len(sent)) == sent
            sending.join(BOUND)
            assert not sending.is_alive()


def test_a_relay_ends_after_the_last_bytes_of_one_side(
    server: TcpStoreServer, upstream: Upstream
) -> None:
    server.forward_torch_clients_to(("127.0.0.1", upstream.port))
    client = connect_torch_client(server, b"last words")
    client.close()
    with upstream.client() as other:
        assert read_exactly(other, 1000) == HELLO + b"last words"
    with connect_torch_client(server) as client:
        upstream.client().close()
        assert is_disconnected(client)


def test_torch_clients_are_forwarded_to_the_latest_store_or_disconnected(
    server: TcpStoreServer, upstream: Upstream
) -> None:
    with connect_torch_client(server) as early:
        assert is_disconnected(early)
    newer = Upstream()
    server.forward_torch_clients_to(("127.0.0.1", upstream.port))
    server.forward_torch_clients_to(("127.0.0.1", newer.port))
    with connect_torch_client(server), newer.client() as other:
        assert read_exactly(other, len(HELLO)) == HELLO
    server.forward_torch_clients_to(None)
    with connect_torch_client(server) as late:
        assert is_disconnected(late)
    newer.close()


def test_relays_are_limited_and_do_not_affect_nodes(
    server: TcpStoreServer, upstream: Upstream
) -> None:
    server.forward_torch_clients_to(("127.0.0.1", upstream.port))
    pairs = [(connect_torch_client(server), upstream.client()) for _ in range(2)]
    with connect_torch_client(server) as third:
        assert is_disconnected(third)
    with TcpStore(server.host, server.port, secret=SECRET) as store:
        store.set("a", b"1")
        entry = store.get("a")
        assert entry is not None
        assert entry.value == b"1"
    for pair in pairs:
        for one in pair:
            one.close()


def test_torch_clients_are_disconnected_without_relays() -> None:
    with TcpStoreServer("127.0.0.1", 0) as server, connect_torch_client(server) as client:
        assert is_disconnected(client)
