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


def broken() -> HttpResponse:
    raise ValueError("no")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers, and check that each of them ends when it is closed."""
    before = set(threading.enumerate())
    with contextlib.ExitStack() as servers:

        def started(host: str = "127.0.0.1", port: int = 0, **limits: Any) -> HttpServer:
            server = servers.enter_context(contextlib.closing(HttpServer(host, port, **limits)))
            server.start(
                {
                    "/good": lambda: text_response(200, "well"),
                    "/broken": broken,
                    "/large": lambda: LARGE,
                }
            )
            return server

        yield started
    wait_until("all threads to end", lambda: set(threading.enumerate()) <= before)


def connected(server: HttpServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), 20)


def response_to(server: HttpServer, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()


def received(client: socket.socket) -> bytes:
    """Everything until the server ends the connection, which may be by a reset."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(4096):
            data += piece
    return data


def test_pages_are_served_by_path_and_other_methods_are_rejected(start: Start) -> None:
    server = start()
    assert response_to(server, "GET", "/good?x=1") == (200, b"well\n")
    assert response_to(server, "HEAD", "/good") == (200, b"")
    status, text = response_to(server, "GET", "/other")
    assert (status, text) == (404, b"no such page; the pages are /broken, /good, /large\n")
    for method in ("POST", "PUT", "DELETE"):
        assert response_to(server, method, "/good")[0] == 501


def test_page_that_raises_is_answered_with_its_error(start: Start) -> None:
    server = start()
    assert response_to(server, "GET", "/broken") == (500, b"/broken failed: ValueError: no\n")
    assert response_to(server, "GET", "/good")[0] == 200


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
    with connected(server) as client:
        with contextlib.suppress(OSError):  # the server may disconnect before it has read all
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        assert b"well" not in received(client)
    assert response_to(server, "GET", "/good")[0] == 200


def test_endless_request_is_disconnected_before_its_time_is_over(start: Start) -> None:
    with connected(start(client_timeout_s=60.0)) as client:
        client.sendall(b"GET /good HTTP/1.1\r\n" + b"x: y\r\n" * 3000)
        assert received(client) == b""


def test_connections_over_the_limit_are_refused(start: Start) -> None:
    """515 clients connect at once and send nothing; no more than the limit stay connected."""
    server = start(client_timeout_s=60.0)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(515):
            client = stack.enter_context(connected(server))
            selector.register(client, selectors.EVENT_READ)
        refused = 0
        deadline = monotonic() + 60
        while refused < 515 - MAX_CONNECTIONS and monotonic() < deadline:
            for key, _ in selector.select(1.0):
                client = key.fileobj
                selector.unregister(client)
                assert isinstance(client, socket.socket)
                assert received(client).startswith(b"HTTP/1.0 503 ")
                refused += 1
        assert refused == 515 - MAX_CONNECTIONS
        assert selector.select(0) == []  # the others are still connected


def test_connection_that_ends_makes_room_for_another(start: Start) -> None:
    server = start(max_connections=2, client_timeout_s=60.0)
    with connected(server) as first, connected(server) as second:
        assert response_to(server, "GET", "/good")[0] == 503
        second.sendall(b"GET /good HTTP/1.0\r\n\r\n")
        assert received(second).startswith(b"HTTP/1.0 200 OK")
        wait_until("room", lambda: response_to(server, "GET", "/good") == (200, b"well\n"))
        first.sendall(b"GET /good HTTP/1.0\r\n\r\n")
        assert received(first).startswith(b"HTTP/1.0 200 OK")


@pytest.mark.parametrize("pause_s", [60.0, 0.02], ids=["silent", "a byte at a time"])
def test_client_that_sends_its_request_too_slowly_is_disconnected(
    start: Start, pause_s: float
) -> None:
    with connected(start(client_timeout_s=0.3)) as client:
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
    server = start(max_connections=1, client_timeout_s=0.5)
    with connected(server) as client:
        client.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        wait_until("its place", lambda: response_to(server, "GET", "/good") == (200, b"well\n"))
        assert len(received(client)) < len(LARGE.body)


def test_large_response_arrives_complete(start: Start) -> None:
    assert response_to(start(), "GET", "/large") == (200, LARGE.body)


def test_closed_port_can_be_bound_again(start: Start) -> None:
    first = start()
    with pytest.raises(OSError, match="in use"):
        HttpServer("127.0.0.1", first.port)
    first.close()
    HttpServer("127.0.0.1", first.port).close()


def test_ipv6_address_is_served(start: Start) -> None:
    server = start("::1")
    assert server.address.startswith("[::1]:")
    assert response_to(server, "GET", "/good") == (200, b"well\n")


def test_all_addresses_of_both_families_are_served_at_two_colons(start: Start) -> None:
    server = start("::")
    for host in ("::1", "127.0.0.1"):
        connection = http.client.HTTPConnection(host, server.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/good")
            assert connection.getresponse().status == 200
