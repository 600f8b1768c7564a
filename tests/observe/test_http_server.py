"""HTTP server of an agent, with clients that are slow, invalid or numerous."""

from __future__ import annotations

import contextlib
import http.client
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticlib.clock import monotonic
from elasticlib.observe.http_server import (
    MAX_CONNECTIONS,
    HttpResponse,
    HttpServer,
    text_response,
)
from elasticlib.testing.waiting import wait_until

LARGE = HttpResponse(200, "text/plain", b"x" * (64 * 1024 * 1024))
Start = Callable[..., HttpServer]


def fail() -> HttpResponse:
    raise ValueError("no")


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts servers; after the test, no thread of them remains."""
    before = set(threading.enumerate())
    with contextlib.ExitStack() as servers:

        def start_server(host: str = "127.0.0.1", port: int = 0, **limits: Any) -> HttpServer:
            server = servers.enter_context(contextlib.closing(HttpServer(host, port, **limits)))
            server.start(
                {
                    "/good": lambda: text_response(200, "well"),
                    "/broken": fail,
                    "/large": lambda: LARGE,
                }
            )
            return server

        yield start_server
    wait_until("all threads to end", lambda: set(threading.enumerate()) <= before)


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), 20)


def send_request(server: HttpServer, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()


def receive_all(client: socket.socket) -> bytes:
    """Receive until the server closes or resets the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(4096):
            data += piece
    return data


def test_pages_are_served_by_path_and_other_methods_are_rejected(start: Start) -> None:
    server = start()
    assert send_request(server, "GET", "/good?x=1") == (200, b"well\n")
    assert send_request(server, "HEAD", "/good") == (200, b"")
    status, text = send_request(server, "GET", "/other")
    assert (status, text) == (404, b"no such page; the pages are /broken, /good, /large\n")
    for method in ("POST", "PUT", "DELETE"):
        assert send_request(server, method, "/good")[0] == 501


def test_page_that_raises_is_answered_with_its_error(start: Start) -> None:
    server = start()
    assert send_request(server, "GET", "/broken") == (500, b"/broken failed: ValueError: no\n")
    assert send_request(server, "GET", "/good")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /good HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /good HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
        bytes(range(256)) * 4 + b"\r\n\r\n",
    ],
    ids=["nothing", "empty", "nonsense", "version", "long", "headers", "bytes"],
)
def test_invalid_request_is_rejected_and_the_next_one_is_answered(
    start: Start, data: bytes
) -> None:
    server = start()
    with connect(server) as client:
        with contextlib.suppress(OSError):  # the server may disconnect before it has read all
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        assert b"well" not in receive_all(client)
    assert send_request(server, "GET", "/good")[0] == 200


def test_client_that_sends_an_endless_request_is_disconnected_before_its_timeout(
    start: Start,
) -> None:
    with connect(start(client_timeout_s=60.0)) as client:
        client.sendall(b"GET /good HTTP/1.1\r\n" + b"x: y\r\n" * 3000)
        assert receive_all(client) == b""


def test_new_probe_is_answered_while_slow_connections_use_up_the_limit(start: Start) -> None:
    # 515 clients connect at once and send nothing; the newest of them stay connected.
    server = start(client_timeout_s=60.0)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        clients = [stack.enter_context(connect(server)) for _ in range(515)]
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        for _ in range(3):
            assert send_request(server, "GET", "/good") == (200, b"well\n")
        closed = set()
        deadline = monotonic() + 60
        while len(closed) < 515 - MAX_CONNECTIONS and monotonic() < deadline:
            for key, _ in selector.select(1.0):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                assert receive_all(key.fileobj) == b""
                closed.add(key.fileobj)
        assert closed >= {*clients[: 515 - MAX_CONNECTIONS]}
        clients[-1].sendall(b"GET /good HTTP/1.0\r\n\r\n")
        assert receive_all(clients[-1]).startswith(b"HTTP/1.0 200 OK")


def test_connections_whose_page_blocks_are_bounded() -> None:
    entered, released = threading.Event(), threading.Event()

    def block() -> HttpResponse:
        entered.set()
        assert released.wait(120)
        return text_response(200, "late")

    server = HttpServer("127.0.0.1", 0, max_connections=2, client_timeout_s=0.5)
    with contextlib.closing(server), contextlib.ExitStack() as stack:
        server.start({"/blocked": block})
        stack.callback(released.set)
        before = threading.active_count()
        # Those that the system has accepted wait for the server, which refuses each in its turn.
        clients = [stack.enter_context(connect(server)) for _ in range(12)]
        for client in clients:
            with contextlib.suppress(OSError):  # the server may have refused it already
                client.sendall(b"GET /blocked HTTP/1.0\r\n\r\n")
        assert entered.wait(60)
        last = receive_all(clients[-1])
        assert last.startswith(b"HTTP/1.0 503 ") or last == b""
        assert threading.active_count() - before <= 4


@pytest.mark.parametrize("pause_s", [60.0, 0.02], ids=["nothing", "a byte at a time"])
def test_client_that_sends_its_request_too_slowly_is_disconnected(
    start: Start, pause_s: float
) -> None:
    with connect(start(client_timeout_s=0.3)) as client:
        client.sendall(b"GET /good")
        client.settimeout(pause_s)
        deadline = monotonic() + 30
        while monotonic() < deadline:
            try:
                assert client.recv(100) == b""
                break
            except ConnectionResetError:
                break
            except TimeoutError:
                with contextlib.suppress(OSError):
                    client.sendall(b"x")
        else:
            pytest.fail("the client is still connected")


def test_client_that_does_not_read_its_response_is_disconnected(start: Start) -> None:
    before = threading.active_count()
    server = start(max_connections=1, client_timeout_s=0.5)
    with connect(server) as client:
        client.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        wait_until("its thread to end", lambda: threading.active_count() == before + 1)
        assert len(receive_all(client)) < len(LARGE.body)


def test_large_response_arrives_complete(start: Start) -> None:
    assert send_request(start(), "GET", "/large") == (200, LARGE.body)


def test_closed_port_can_be_bound_again(start: Start) -> None:
    first = start()
    with pytest.raises(OSError, match="in use"):
        HttpServer("127.0.0.1", first.port)
    first.close()
    HttpServer("127.0.0.1", first.port).close()


def test_ipv6_address_is_served(start: Start) -> None:
    server = start("::1")
    assert server.address.startswith("[::1]:")
    assert send_request(server, "GET", "/good") == (200, b"well\n")


def test_all_addresses_of_both_families_are_served_at_two_colons(start: Start) -> None:
    server = start("::")
    for host in ("::1", "127.0.0.1"):
        connection = http.client.HTTPConnection(host, server.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/good")
            assert connection.getresponse().status == 200
