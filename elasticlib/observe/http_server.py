"""HTTP server for health, status and metrics of one agent.

The server only reads: no request changes anything. The number of connections, the size of a
request and the time that a client may take are bounded, so clients cannot disturb the agent, and
slow ones cannot keep a health probe from being answered.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..threads import daemon_thread, only_logged

log = logging.getLogger("elasticlib.observe")

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 16 * 1024
CLIENT_TIMEOUT_S = 5.0

_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"


@attrs.frozen
class HttpResponse:
    """Status code, content type and body of a response."""

    status: int
    content_type: str
    body: bytes


def text_response(status: int, message: str) -> HttpResponse:
    """Return a response with one line of plain text."""
    return HttpResponse(status, "text/plain; charset=utf-8", f"{message}\n".encode())


Pages = Mapping[str, Callable[[], HttpResponse]]


class HttpServer:
    """Serves pages by their path.

    The constructor binds the port, so a port in use is noticed early. Requests are answered between
    `start` and `close`.

    Args:
        host: address to listen on; `::` listens on all addresses, those of IPv4 included.
        port: port to listen on; 0 chooses a free one.
        max_connections: a further client is answered as well, and the connection that has been open
            longest is closed; each connection has a thread.
        client_timeout_s: time for the whole request to arrive and the whole response to be taken by
            the client.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_connections: int = MAX_CONNECTIONS,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
    ) -> None:
        self._server = _Server(host, port, max_connections, client_timeout_s)
        self.host, self.port = self._server.server_address[:2]
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """The bound address as `host:port`."""
        return join_endpoint(str(self.host), self.port)

    def start(self, pages: Pages) -> None:
        """Answer requests from now on, including those of clients that connected before.

        Args:
            pages: for each path, the function that makes the response. The server calls one
                function at a time, in one of its threads.
        """
        self._server.pages = pages
        self._thread = daemon_thread(self._server.serve_forever, "http-server", only_logged)
        self._thread.start()

    def close(self) -> None:
        """Release the port. Responses that are being sent are not waited for."""
        if self._thread is not None:
            self._server.stop()
            self._thread = None
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, max_connections: int, client_timeout_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages: Pages = {}
        self.page_lock = threading.Lock()  # locked while a page is generated
        self._max_connections = max_connections
        self._changed = threading.Condition()  # guards the fields below
        self._connections: dict[socket.socket, None] = {}  # the oldest is the first
        self._num_threads = 0  # more than connections while those of closed ones end
        self._is_stopping = False
        self.client_timeout_s = client_timeout_s
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer.server_bind also looks up the name of the host, which can block for seconds.
        socketserver.TCPServer.server_bind(self)

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        # The loop of serve_forever looks every 0.5 s whether it should end. Shutting the listening
        # socket down wakes it at once.
        self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            # The threads of closed connections end at once, unless the function of a page blocks.
            is_accepted = self._changed.wait_for(self._has_thread, self.client_timeout_s)
            if is_accepted:
                self._close_oldest_at_limit()
                self._connections[request] = None
                self._num_threads += 1
        if not is_accepted:
            log.debug("refused the connection of %s: too many are open", client_address)
            request.setblocking(False)
            request.send(_BUSY)  # fits the empty send buffer of a new connection
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def _has_thread(self) -> bool:
        return self._num_threads < 2 * self._max_connections or self._is_stopping

    def _close_oldest_at_limit(self) -> None:
        # A probe sends its request at once. A connection that is open for long is one that waits
        # for its client, and must not keep the next probe from being answered.
        if len(self._connections) < self._max_connections:
            return
        oldest = next(iter(self._connections))
        del self._connections[oldest]
        with contextlib.suppress(OSError):  # the client or its thread has closed it meanwhile
            oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which ends

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        with self._changed:
            self._connections.pop(request, None)
            self._num_threads -= 1
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        if isinstance(sys.exc_info()[1], OSError):
            log.debug("lost the connection of %s", client_address, exc_info=True)
        else:
            log.exception("failed to answer the request of %s", client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request per connection (HTTP/1.0)."""

    server: _Server
    server_version = "elasticlib"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._deadline = monotonic() + self.server.client_timeout_s  # for request and response
        self.rfile = io.BytesIO(_read_request(self.connection, self._deadline))
        self.wfile = self._response = io.BytesIO()

    def finish(self) -> None:
        response = self._response.getvalue()
        super().finish()
        self.connection.settimeout(_left_s(self._deadline))
        self.connection.sendall(response)  # the time-out applies to the whole of its data

    def do_GET(self) -> None:
        response = self._respond(self.path.partition("?")[0])
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    do_HEAD = do_GET

    def _respond(self, path: str) -> HttpResponse:
        page = self.server.pages.get(path)
        if page is None:
            known = ", ".join(sorted(self.server.pages))
            return text_response(404, f"no such page; the pages are {known}")
        try:
            with self.server.page_lock:
                return page()
        except Exception as error:
            log.exception("failed to make the page %s", path)
            return text_response(500, f"{path} failed: {type(error).__name__}: {error}")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.address_string(), *args)


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - monotonic())


def _read_request(connection: socket.socket, deadline: float) -> bytes:
    """Read a request up to the blank line, or until the client closes the connection.

    A body is not waited for.

    Raises:
        OSError: the client was too slow, sent more than MAX_REQUEST_BYTES without a blank
            line, or reset the connection.
    """
    request = b""
    while b"\r\n\r\n" not in request and b"\n\n" not in request:
        if len(request) > MAX_REQUEST_BYTES:
            raise OSError(f"the request has more than {MAX_REQUEST_BYTES} bytes")
        connection.settimeout(_left_s(deadline))
        data = connection.recv(MAX_REQUEST_BYTES)
        if not data:
            break
        request += data
    return request
