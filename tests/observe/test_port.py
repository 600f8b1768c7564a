"""The small HTTP server, and clients that are slow, rude, or many."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest
from jobs import until

from elasticlib.clock import monotonic
from elasticlib.observe import port as port_module
from elasticlib.observe.port import ObservePort, Page, plain


def broken() -> Page:
    raise ValueError("no")


@pytest.fixture
def port() -> Iterator[ObservePort]:
    port = ObservePort("127.0.0.1", 0)
    port.begin({"/good": lambda: plain(200, "well"), "/broken": broken})
    yield port
    port.close()
    assert port._thread is not None
    port._thread.join(10)
    assert not port._thread.is_alive()


def asked(port: ObservePort, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(port.host, port.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def raw(port: ObservePort, data: bytes) -> bytes:
    with socket.create_connection((port.host, port.port), 20) as client:
        found = b""
        # Who is put off before all is read gets a reset.
        with contextlib.suppress(OSError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(4096):
                found += piece
        return found


def test_pages_are_had_by_path_and_nothing_else_is_done(port: ObservePort) -> None:
    assert asked(port, "GET", "/good?x=1") == (200, b"well\n")
    assert asked(port, "HEAD", "/good") == (200, b"")
    assert asked(port, "GET", "/other") == (404, b"there are /broken, /good here\n")
    for method in ("POST", "PUT", "DELETE"):
        assert asked(port, method, "/good")[0] == 501


def test_a_page_that_cannot_be_shown_says_so_and_the_port_goes_on(port: ObservePort) -> None:
    status, text = asked(port, "GET", "/broken")
    assert (status, text) == (500, b"/broken cannot be shown: ValueError: no\n")
    assert asked(port, "GET", "/good")[0] == 200


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
def test_what_is_no_request_is_refused_and_the_port_goes_on(port: ObservePort, data: bytes) -> None:
    assert b"well" not in raw(port, data)
    assert asked(port, "GET", "/good")[0] == 200


def test_a_request_without_end_is_not_read_to_the_end_of_its_time(
    port: ObservePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "SECONDS", 60.0)
    with socket.create_connection((port.host, port.port), 10) as client:
        client.sendall(b"GET /good HTTP/1.1\r\n" + b"x: y\r\n" * 3000)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""


def test_clients_that_say_nothing_hold_up_nobody(
    port: ObservePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "SECONDS", 60.0)
    monkeypatch.setattr(port_module, "MOST", 20)
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(30):
            client = socket.create_connection((port.host, port.port), 20)
            clients.append(stack.enter_context(client))
            client.sendall(b"GET /g")
            began = monotonic()
            assert asked(port, "GET", "/good") == (200, b"well\n")
            assert monotonic() < began + 5
        # Who has waited for longest has gone, and who has not may still say the rest.
        assert clients[0].recv(100) == b""
        clients[-1].sendall(b"ood HTTP/1.0\r\n\r\n")
        assert clients[-1].recv(100).startswith(b"HTTP/1.0 200 OK")
        assert set(threading.enumerate()) <= before


def test_who_does_not_say_all_in_time_is_dropped(
    port: ObservePort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "SECONDS", 0.1)
    with socket.create_connection((port.host, port.port), 20) as client:
        client.sendall(b"GET /good")
        with contextlib.suppress(ConnectionResetError):  # what has come is not read any more
            assert client.recv(100) == b""


def test_a_port_can_be_had_again_once_it_is_closed() -> None:
    first = ObservePort("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        ObservePort("127.0.0.1", first.port)
    first.begin({})
    first.close()
    assert first._thread is not None
    first._thread.join(10)
    ObservePort("127.0.0.1", first.port).close()


def test_it_serves_over_version_6_of_the_protocol() -> None:
    port = ObservePort("::1", 0)
    port.begin({"/": lambda: plain(200, "six")})
    assert port.address.startswith("[::1]:")
    assert asked(port, "GET", "/") == (200, b"six\n")
    port.close()


def test_an_answer_that_nobody_takes_holds_up_nobody_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_module, "SECONDS", 0.5)
    port = ObservePort("127.0.0.1", 0)
    large = Page(200, "text/plain", b"x" * (64 * 1024 * 1024))
    port.begin({"/large": lambda: large, "/good": lambda: plain(200, "well")})
    with socket.create_connection((port.host, port.port), 20) as client:
        client.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        assert asked(port, "GET", "/good") == (200, b"well\n")
        until("it to be dropped", lambda: not port._clients)
    assert asked(port, "GET", "/large") == (200, large.content)
    port.close()
