"""A small HTTP server for whoever asks how an agent is: it reads, and changes nothing.

A handful of threads, each with one connection at a time for some seconds at most, so that no
client, slow or many, is felt by the agent.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint

log = logging.getLogger("elasticlib.observe")

THREADS = 4
SECONDS = 3.0
"""For a request to arrive, and again for its answer to be taken."""
LONGEST_HEAD = 16 * 1024
WAITING = 32


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
        host, port: where; port 0 for any that is free.

    Raises:
        OSError: it cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=WAITING)
        self.host, self.port = self._socket.getsockname()[:2]
        self._pages: Mapping[str, Callable[[], Page]] = {}
        self._threads: list[threading.Thread] = []

    @property
    def address(self) -> str:
        """`host:port` as it was bound."""
        return join_endpoint(self.host, self.port)

    def begin(self, pages: Mapping[str, Callable[[], Page]]) -> None:
        """Answer from now on; who has connected already has waited."""
        self._pages = pages
        for number in range(THREADS):
            thread = threading.Thread(target=self._serve, name=f"observe-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Answer no more; an answer that is under way is not waited for."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes those who wait in accept
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                # Too many open files, or a client that left again: neither is for ever.
                threading.Event().wait(0.1)
                continue
            try:
                with connection:
                    _Answer(connection, peer, self._pages)
            except OSError as error:
                log.debug("a client went away: %s", error)
            except Exception:
                log.exception("a request was not answered")


class _Answer(BaseHTTPRequestHandler):
    """To one request, with the time for the whole of it bounded; HTTP/1.0, so one a connection."""

    server_version = "elasticlib"
    sys_version = ""

    def __init__(
        self, connection: socket.socket, peer: Any, pages: Mapping[str, Callable[[], Page]]
    ) -> None:
        self._pages = pages
        super().__init__(connection, peer, None)  # type: ignore[arg-type]

    def setup(self) -> None:
        self.rfile: Any = io.BytesIO(_head(self.request))
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


def _head(connection: socket.socket) -> bytes:
    """The request without its body, of which there is none that we would read."""
    deadline = monotonic() + SECONDS
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        left = deadline - monotonic()
        if left <= 0 or len(head) > LONGEST_HEAD:
            raise TimeoutError("no whole request in time, or one too long")
        connection.settimeout(left)
        data = connection.recv(4096)
        if not data:
            break
        head += data
    return head
