"""A small HTTP server for whoever asks how an agent is: it reads, and changes nothing.

One thread serves all clients, and waits for none of them, so that no client, slow or many, is felt
by the agent, or by others who ask.
"""

from __future__ import annotations

import contextlib
import io
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..threads import helper

log = logging.getLogger("elasticlib.observe")

SECONDS = 3.0
"""For a request to arrive, and again for its answer to be taken."""
LONGEST_HEAD = 16 * 1024
WAITING = 32
"""Clients that have connected, before others are put off."""
MOST = 128
"""Clients at a time; who has waited longest goes for the next."""


@attrs.frozen
class Page:
    """One answer."""

    status: int
    kind: str
    content: bytes


def plain(status: int, sentence: str) -> Page:
    """A line of text."""
    return Page(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())


Pages = Mapping[str, Callable[[], Page]]


@attrs.define(eq=False)
class _Client:
    """What it has said so far, then what is left of its answer; and until when it may take."""

    connection: socket.socket
    peer: Any
    until: float
    head: bytes = b""
    answer: memoryview | None = None

    @property
    def said_all(self) -> bool:
        """But for a body, of which there is none that we would read."""
        return b"\r\n\r\n" in self.head or b"\n\n" in self.head


class ObservePort:
    """Serves pages by their path, from `begin` to `close`; bound from the start.

    Args:
        host, port: where, `::` for all addresses, of IPv4 as well; port 0 for any that is free.

    Raises:
        OSError: it cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        both = host == "::" and socket.has_dualstack_ipv6()
        if host == "::" and not both:
            host = "0.0.0.0"
        self._socket = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=WAITING,
            dualstack_ipv6=both,
        )
        self.host, self.port = self._socket.getsockname()[:2]
        self._pages: Pages = {}
        self._thread: threading.Thread | None = None
        self._over = False
        self._wake, self._waker = socket.socketpair()
        # In the order in which their time is over.
        self._clients: dict[Any, _Client] = {}
        self._selector = selectors.DefaultSelector()

    @property
    def address(self) -> str:
        """`host:port` as it was bound."""
        return join_endpoint(self.host, self.port)

    def begin(self, pages: Pages) -> None:
        """Answer from now on; who has connected already has waited."""
        self._pages = pages
        self._socket.setblocking(False)
        for own in (self._socket, self._wake):
            self._selector.register(own, selectors.EVENT_READ)
        self._thread = helper(self._run, "observe")
        self._thread.start()

    def close(self) -> None:
        """Answer no more; an answer that is under way is not waited for."""
        self._over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._waker.close()
        if self._thread is None:
            self._let_go()

    def _run(self) -> None:
        while not self._over:
            self._turn()
        for client in list(self._clients.values()):
            self._drop(client)
        self._let_go()

    def _let_go(self) -> None:
        self._selector.close()
        self._socket.close()
        self._wake.close()

    def _turn(self) -> None:
        oldest = next(iter(self._clients.values()), None)
        left = None if oldest is None else max(0.0, oldest.until - monotonic())
        for key, _ in self._selector.select(left):
            if key.fileobj is self._socket:
                self._accept()
            elif (client := self._clients.get(key.fileobj)) is not None:
                self._go_on(client)
        now = monotonic()
        for client in [one for one in self._clients.values() if one.until <= now]:
            self._drop(client)

    def _accept(self) -> None:
        try:
            connection, peer = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # Too many open files, or a client that left again: neither is for ever.
            if not self._over:
                threading.Event().wait(0.1)
            return
        connection.setblocking(False)
        self._clients[connection] = _Client(connection, peer, monotonic() + SECONDS)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._clients) > MOST:
            self._drop(next(iter(self._clients.values())))

    def _go_on(self, client: _Client) -> None:
        try:
            if client.answer is None:
                self._read(client)
            else:
                self._write(client, client.answer)
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("a client went away: %s", error)
            self._drop(client)
        except Exception:
            log.exception("a request was not answered")
            self._drop(client)

    def _read(self, client: _Client) -> None:
        data = client.connection.recv(LONGEST_HEAD)
        client.head += data
        if client.said_all or not data:
            client.answer = memoryview(_Answer(client, self._pages).wfile.getvalue())
            client.until = monotonic() + SECONDS
            self._clients[client.connection] = self._clients.pop(client.connection)
            self._selector.modify(client.connection, selectors.EVENT_WRITE)
        elif len(client.head) > LONGEST_HEAD:
            self._drop(client)

    def _write(self, client: _Client, answer: memoryview) -> None:
        client.answer = answer[client.connection.send(answer) :] if answer else answer
        if not client.answer:
            client.connection.shutdown(socket.SHUT_WR)
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection]
        self._selector.unregister(client.connection)
        client.connection.close()


class _Answer(BaseHTTPRequestHandler):
    """To one request; HTTP/1.0, so one a connection."""

    server_version = "elasticlib"
    sys_version = ""

    def __init__(self, client: _Client, pages: Pages) -> None:
        self._pages = pages
        self._head = client.head
        super().__init__(client.connection, client.peer, None)  # type: ignore[arg-type]

    def setup(self) -> None:
        self.rfile: Any = io.BytesIO(self._head)
        self.wfile: Any = io.BytesIO()

    def finish(self) -> None:
        """What is in `wfile` is sent by the port."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        look = self._pages.get(path)
        if look is None:
            page = plain(404, f"there are {', '.join(sorted(self._pages))} here")
        else:
            try:
                page = look()
            except Exception as error:
                log.exception("%s cannot be shown", path)
                page = plain(500, f"{path} cannot be shown: {type(error).__name__}: {error}")
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.address_string(), *args)
