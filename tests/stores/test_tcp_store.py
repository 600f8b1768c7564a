"""The client of the TCP store connects when needed, and its errors name the address."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from elasticlib.clock import monotonic
from elasticlib.errors import (
    ConfigError,
    LeaseLostError,
    StoreConnectionError,
    StoreRejectedError,
    StoreTimeoutError,
)
from elasticlib.stores.connection import create_connection
from elasticlib.stores.etcd_store import EtcdStore
from elasticlib.stores.key_space import MIB
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_protocol import Frame, encode
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.waiting import wait_until

WELCOME = encode(Frame("welcome", 0, {"nonce": "0" * 64, "proof": None}))


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer("127.0.0.1", 0) as server:
        yield server


@contextmanager
def start_answering_server(*answers: bytes) -> Iterator[int]:
    """Start a server that accepts one connection, and yield its port.

    It replies to each message with the next of `answers`.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(10.0)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10.0)
                for answer in answers:
                    connection.recv(4096)
                    connection.sendall(answer)
                while connection.recv(4096):
                    pass

        serving = pool.submit(serve)
        yield listener.getsockname()[1]
        serving.result(10.0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_the_constructor_does_not_connect() -> None:
    before = threading.active_count()
    store = TcpStore("no.such.host.invalid", 1)
    assert store.local_address is None
    assert threading.active_count() <= before  # A thread of an earlier test may have exited.
    store.close()


@pytest.mark.parametrize(("host", "port"), [("", 1), ("a", 0), ("a", 65536)])
def test_an_impossible_address_is_rejected(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=r"a host and a port 1\.\.65535"):
        TcpStore(host, port)


def test_the_error_of_an_unreachable_server_names_the_timeout() -> None:
    port = free_port()
    with (
        TcpStore("127.0.0.1", port, connect_timeout=0.2) as store,
        pytest.raises(
            StoreConnectionError,
            match=rf"127\.0\.0\.1:{port} could not be reached within 0\.2 s.*refused",
        ),
    ):
        store.get("key")


def test_the_error_names_a_host_without_an_address() -> None:
    raises_error = pytest.raises(
        StoreConnectionError, match=r"no\.such\.host\.invalid:1 could not be reached"
    )
    with TcpStore("no.such.host.invalid", 1, connect_timeout=0.1) as store, raises_error:
        store.get("key")


class StoreThatCountsAttempts(TcpStore):
    """A client that counts its attempts to connect."""

    num_attempts = 0

    def _connect_once(self, timeout: float) -> Any:
        self.num_attempts += 1
        return super()._connect_once(timeout)


def test_a_client_connects_to_a_server_that_starts_later() -> None:
    server = TcpStoreServer("127.0.0.1", free_port())
    with (
        StoreThatCountsAttempts(server.host, server.port, timeout=20.0) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        getting = pool.submit(store.get, "key")
        wait_until("an attempt after a refused one", lambda: store.num_attempts > 1)
        with server:
            assert getting.result() is None
            attempts = store.num_attempts
            assert store.get("key") is None
            assert store.num_attempts == attempts, "the connection is used again"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\0\0\0\x06\0\0\0\x02{}",
        encode(Frame("answer", 0, {"yes": True, "version": 0})),
    ],
)
def test_a_server_of_another_protocol_is_rejected_by_name(answer: bytes) -> None:
    with (
        start_answering_server(answer) as port,
        TcpStore("127.0.0.1", port) as store,
        pytest.raises(
            StoreRejectedError,
            match=rf"127\.0\.0\.1:{port} answers, but not as an elasticlib store",
        ),
    ):
        store.get("key")


def test_the_error_of_a_server_without_handshake_names_the_timeout() -> None:
    # The message names the rest of the timeout, which is less than 0.2 s.
    raises_error = pytest.raises(StoreTimeoutError, match=r"but no handshake, within 0\.[12]\d* s")
    with (
        start_answering_server() as port,
        TcpStore("127.0.0.1", port, connect_timeout=0.2) as store,
        raises_error,
    ):
        store.get("key")


def test_the_error_of_an_operation_without_reply_names_the_timeout() -> None:
    with (
        start_answering_server(WELCOME) as port,
        TcpStore("127.0.0.1", port, timeout=0.2, connect_timeout=20.0) as store,
    ):
        with pytest.raises(StoreTimeoutError, match=rf":{port} did not answer get within 0\.2 s"):
            store.get("key")
        with pytest.raises(StoreTimeoutError, match=rf":{port} did not answer wait within 0\.3 s"):
            store.wait("key", after=0, timeout=0.1)
        with pytest.raises(StoreTimeoutError, match=rf":{port} did not answer write within 0\.2 s"):
            store.set("key", b"")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500",
        encode(Frame("listing", 1, {"version": 1, "rows": []})),
        encode(Frame("proof", 1, {"proof": "0" * 64})),
        b"",
    ],
)
def test_a_wrong_reply_raises_an_error(answer: bytes) -> None:
    raises_error = pytest.raises((StoreRejectedError, StoreTimeoutError), match=r"127\.0\.0\.1:\d+")
    with (
        start_answering_server(WELCOME, answer) as port,
        TcpStore("127.0.0.1", port, timeout=0.3, connect_timeout=20.0) as store,
    ):
        store.connect()
        with raises_error:
            store.get("key")


def test_a_broken_connection_ends_operations_in_flight_and_the_next_one_reconnects() -> None:
    server = TcpStoreServer("127.0.0.1", 0).start()
    with TcpStore(server.host, server.port, timeout=20.0) as store, ThreadPoolExecutor(4) as pool:
        lease = store.set("lease", b"", ttl=1000.0)
        waits = [
            pool.submit(store.wait, "key", after=lease.version, timeout=30.0) for _ in range(4)
        ]
        store.wait("nothing", after=lease.version, timeout=0.05)
        server.close()
        for wait in waits:
            with pytest.raises(StoreConnectionError, match=server.address):
                wait.result()
        with TcpStoreServer(server.host, server.port):
            with pytest.raises(LeaseLostError, match="the key is gone"):
                store.refresh("lease", lease.version)
            # The versions of the new store start at 1, so a version of the old store has changed.
            assert store.wait("", after=lease.version, timeout=0.0) is True
            assert store.set("key", b"").version == 1


def test_all_threads_share_one_connection(server: TcpStoreServer) -> None:
    with TcpStore(server.host, server.port) as store, ThreadPoolExecutor(8) as pool:
        numbers = range(200)
        written = list(pool.map(lambda n: store.set(f"key/{n}", b"%d" % n), numbers))
        read = list(pool.map(lambda n: store.get(f"key/{n}"), numbers))
        assert read == written
        assert server.labels == (store.label,)


def test_every_address_of_a_name_is_tried(server: TcpStoreServer) -> None:
    addresses = [("127.0.0.1", free_port()), ("127.0.0.1", server.port)]

    def resolve(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

    with create_connection("two-addresses", 1, 10.0, resolve) as connection:
        assert connection.getpeername()[1] == server.port
    addresses.pop()
    with pytest.raises(ConnectionRefusedError):
        create_connection("one-address", 1, 10.0, resolve)
    with pytest.raises(OSError, match=r"no.such.invalid does not resolve .*: check the name"):
        create_connection("no.such.invalid", 1, 10.0)


class SlowNameServer:
    """A name server that resolves `slow.test` when the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.num_queries = threading.Event(), 0
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)

    def _resolve(self, host: str, *rest: Any, **more: Any) -> Any:
        if host != "slow.test":
            return self._real(host, *rest, **more)
        if more.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self.num_queries += 1
        assert self.answers.wait(60)
        return self._real("127.0.0.1", *rest, **more)


def test_a_name_server_that_does_not_answer_is_queried_once_and_ends_the_attempt(
    server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = SlowNameServer(monkeypatch)
    with TcpStore("slow.test", server.port, connect_timeout=0.3) as store:
        for _ in range(3):
            started = monotonic()
            with pytest.raises(
                StoreConnectionError, match=r"slow\.test could not be resolved within"
            ):
                store.get("key")
            # The name server does not answer for 60 s.
            assert monotonic() - started < 30
        assert names.num_queries == 1
        # A later attempt uses the answer to the query of an earlier one.
        names.answers.set()
        wait_until("a connection to the resolved address", lambda: can_connect(store))
        assert names.num_queries == 1


def test_a_name_server_that_does_not_answer_ends_a_call_of_an_etcd_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = SlowNameServer(monkeypatch)
    with EtcdStore("slow.test:2379", timeout=0.3) as store:
        started = monotonic()
        with pytest.raises(StoreConnectionError, match=r"slow\.test could not be resolved within"):
            store.get("key")
        assert monotonic() - started < 30
    names.answers.set()


def can_connect(store: TcpStore) -> bool:
    with contextlib.suppress(StoreConnectionError):
        store.connect()
        return True
    return False


def test_a_client_connects_to_a_host_name_and_knows_its_own_address(server: TcpStoreServer) -> None:
    with TcpStore("localhost", server.port) as store:
        assert store.get("key") is None
        assert store.local_address == "127.0.0.1"


def test_a_request_that_is_too_long_is_rejected_and_the_connection_stays(
    server: TcpStoreServer,
) -> None:
    with TcpStore(server.host, server.port) as store:
        lease = store.set("lease", b"", ttl=1000.0)
        with pytest.raises(
            StoreRejectedError, match=r"a value is at most .* got 9437184 for key 'key'"
        ):
            store.set("key", b"x" * (9 * MIB))
        with pytest.raises(
            StoreRejectedError, match="a value is at most 4194304 bytes, got 5242880"
        ):
            store.set("key", b"x" * (5 * MIB))
        with pytest.raises(StoreRejectedError, match="expected is null or an integer"):
            store.compare_set("key", b"", expected=-1)
        store.refresh("lease", lease.version)


def test_close_ends_attempts_to_connect() -> None:
    store = StoreThatCountsAttempts("127.0.0.1", free_port(), timeout=60.0)
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(store.get, "key")
        wait_until("an attempt after a refused one", lambda: store.num_attempts > 1)
        store.close()
        with pytest.raises(StoreConnectionError, match="this store is closed"):
            getting.result(10.0)
