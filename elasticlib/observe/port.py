"""A small HTTP server for whoever asks how an agent is: it reads, and changes nothing.

One thread serves all clients, and waits for none of them, so that no client, slow or many, is felt
by the agent, or by others who ask.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import attrs

from ..endpoint import join_endpoint
from ..threads import helper

if TYPE_CHECKING:
    import asyncio  # which takes 50 ms, so that it is imported where a port is served

log = logging.getLogger("elasticlib.observe")

SECONDS = 3.0
"""For a request to arrive, and again for each piece of its answer to be taken."""
LONGEST_HEAD, PIECE = 16 * 1024, 256 * 1024
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
        # In the order in which they came.
        self._clients: dict[asyncio.Task[None] | None, None] = {}

    @property
    def address(self) -> str:
        """`host:port` as it was bound."""
        return join_endpoint(self.host, self.port)

    def begin(self, pages: Pages) -> None:
        """Answer from now on; who has connected already has waited."""
        import asyncio

        self._pages = pages
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = helper(self._run, "observe")
        self._thread.start()

    def close(self) -> None:
        """Answer no more; an answer that is under way is not waited for."""
        if self._thread is None:
            self._socket.close()
            return
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._over.set)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        import asyncio

        server = await asyncio.start_server(self._meet, sock=self._socket, backlog=WAITING)
        await self._over.wait()
        server.close()
        clients = [task for task in self._clients if task is not None]
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import asyncio

        me = asyncio.current_task()
        self._clients[me] = None
        if len(self._clients) > MOST and (oldest := next(iter(self._clients))) is not None:
            oldest.cancel()
        try:
            head = await asyncio.wait_for(_head(reader), SECONDS)
            if len(head) <= LONGEST_HEAD:
                answer = _Answer(head, writer.get_extra_info("peername"), self._pages)
                writer.transport.set_write_buffer_limits(0)  # so that all of it is waited for
                for at in range(0, len(answer.content), PIECE):
                    writer.write(answer.content[at : at + PIECE])
                    await asyncio.wait_for(writer.drain(), SECONDS)
                writer.write_eof()
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError) as error:
            log.debug("a client went away: %s", error)
        except Exception:
            log.exception("a request was not answered")
        finally:
            del self._clients[me]
            writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """What a client says; a body is nothing that we would read."""
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) <= LONGEST_HEAD:
        data = await reader.read(LONGEST_HEAD)
        if not data:
            break
        head += data
    return head


class _Answer(BaseHTTPRequestHandler):
    """To one request; HTTP/1.0, so one a connection."""

    server_version = "elasticlib"
    sys_version = ""

    def __init__(self, head: bytes, peer: Any, pages: Pages) -> None:
        self._pages, self._head = pages, head
        super().__init__(None, peer, None)  # type: ignore[arg-type]

    def setup(self) -> None:
        self.rfile: Any = io.BytesIO(self._head)
        self.wfile: Any = io.BytesIO()

    def finish(self) -> None:
        self.content = self.wfile.getvalue()

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

    do_GET = do_HEAD = _answer

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.address_string(), *args)
