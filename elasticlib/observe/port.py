"""A small HTTP server for whoever asks how an agent is: it reads, and changes nothing.

One thread collects what all clients say, and a handful answers those who have said it whole, so
that no client, slow or many, is felt by the agent, or by others who ask.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
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

THREADS = 4
SECONDS = 3.0
"""For a request to arrive, and again for its answer to be taken."""
LONGEST_HEAD = 16 * 1024
WAITING = 32
"""Whole requests, before others are put off."""
MOST = 128
"""Clients that have not said all; who has waited longest goes for the next."""


@attrs.frozen
class Page:
    """One answer."""

    status: int
    kind: str
    content: bytes


def plain(status: int, sentence: str) -> Page:
    """A line of text."""
    return Page(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())


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
        self._pages: Mapping[str, Callable[[], Page]] = {}
        self._threads: list[threading.Thread] = []
        self._requests: queue.Queue[_Request | None] = queue.Queue(WAITING)
        self._over = False
        self._wake, self._waker = socket.socketpair()

    @property
    def address(self) -> str:
        """`host:port` as it was bound."""
        return join_endpoint(self.host, self.port)

    def begin(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        """Answer from now on; who has connected already has waited."""
        self._pages = pages
        self._socket.setblocking(False)
        runs = [("observe", self._collect)]
        runs += [(f"observe-{number}", self._serve) for number in range(THREADS)]
        for name, run in runs:
            thread = helper(run, name)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Answer no more; an answer that is under way is not waited for."""
        self._over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._waker.close()  # wakes who collects
        if not self._threads:
            self._wake.close()

    def _collect(self) -> None:
        heads = _Heads(self._hand_on)
        with heads.selector, self._wake:
            with contextlib.suppress(OSError, ValueError):  # closed already
                heads.selector.register(self._socket, selectors.EVENT_READ)
            heads.selector.register(self._wake, selectors.EVENT_READ)
            while not self._over:
                for found in heads.wait():
                    if found is self._socket:
                        self._accept(heads)
                    elif found is not self._wake:
                        heads.read(found)
            heads.drop_all()
        for _ in range(THREADS):
            self._requests.put(None)

    def _accept(self, heads: _Heads) -> None:
        try:
            heads.add(*self._socket.accept())
        except BlockingIOError:
            return
        except OSError:
            # Too many open files, or a client that left again: neither is for ever.
            if not self._over:
                threading.Event().wait(0.1)

    def _hand_on(self, request: _Request) -> None:
        try:
            self._requests.put_nowait(request)
        except queue.Full:
            request.connection.close()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                with request.connection:
                    _Answer(request, self._pages)
            except OSError as error:
                log.debug("a client went away: %s", error)
            except Exception:
                log.exception("a request was not answered")


@attrs.define(eq=False)
class _Request:
    """What a client has said so far, and until when it may go on."""

    connection: socket.socket
    peer: Any
    until: float
    head: bytes = b""

    @property
    def whole(self) -> bool:
        """Without its body, of which there is none that we would read."""
        return b"\r\n\r\n" in self.head or b"\n\n" in self.head


class _Heads:
    """What clients have begun to say; `whole` is called with each that is through."""

    def __init__(self, whole: Callable[[_Request], None]) -> None:
        self.selector = selectors.DefaultSelector()
        self._whole = whole
        # In the order in which they came, which is that in which their time is over.
        self._begun: dict[Any, _Request] = {}

    def wait(self) -> list[Any]:
        """Sockets at which there is something, once there is; who is late by then is dropped."""
        oldest = next(iter(self._begun.values()), None)
        left = None if oldest is None else max(0.0, oldest.until - monotonic())
        ready = self.selector.select(left)
        for request in [one for one in self._begun.values() if one.until <= monotonic()]:
            self._drop(request)
        return [key.fileobj for key, _ in ready]

    def add(self, connection: socket.socket, peer: Any) -> None:
        connection.setblocking(False)
        self._begun[connection] = _Request(connection, peer, monotonic() + SECONDS)
        self.selector.register(connection, selectors.EVENT_READ)
        if len(self._begun) > MOST:
            self._drop(next(iter(self._begun.values())))

    def read(self, connection: Any) -> None:
        request = self._begun.get(connection)
        if request is None:  # dropped meanwhile
            return
        try:
            data = connection.recv(LONGEST_HEAD)
        except BlockingIOError:
            return
        except OSError:
            self._drop(request)
            return
        request.head += data
        if request.whole or not data:
            self._forget(request)
            self._whole(request)
        elif len(request.head) > LONGEST_HEAD:
            self._drop(request)

    def drop_all(self) -> None:
        for request in list(self._begun.values()):
            self._drop(request)

    def _drop(self, request: _Request) -> None:
        self._forget(request)
        request.connection.close()

    def _forget(self, request: _Request) -> None:
        del self._begun[request.connection]
        self.selector.unregister(request.connection)


class _Answer(BaseHTTPRequestHandler):
    """To one request, with the time for the whole of it bounded; HTTP/1.0, so one a connection."""

    server_version = "elasticlib"
    sys_version = ""

    def __init__(self, request: _Request, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = pages
        self._head = request.head
        super().__init__(request.connection, request.peer, None)  # type: ignore[arg-type]

    def setup(self) -> None:
        self.rfile: Any = io.BytesIO(self._head)
        self.wfile: Any = io.BytesIO()

    def finish(self) -> None:
        # For all of it, however small the pieces that are taken.
        self.request.settimeout(SECONDS)
        self.request.sendall(self.wfile.getvalue())
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_WR)

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
