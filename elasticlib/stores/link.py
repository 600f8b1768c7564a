"""One connection to a TCP store's server, from its handshake to its end.

Each request waits for the answer of its own number; when the connection ends, all requests in
flight end with StoreUnavailable, and the link is never used again.
"""

from __future__ import annotations

import contextlib

# Else the first connection imports it, in whatever thread, and a child that is forked amid that
# waits for the end of the import for ever.
import encodings.idna  # noqa: F401
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import ElasticError, StoreRefused, StoreTimeout, StoreUnavailable
from .forks import close_in_children
from .handshake import shake_hands
from .peer import address_of, bound_sending, keep_honest
from .receiver import RECEIVER
from .service import error_of
from .wire import MAX_FRAME_BYTES, Frame, FrameReader, encode

LONGEST_WAIT = 1e6
"""Seconds; a lock or a queue cannot wait for much longer than this."""

Answer = Frame | ElasticError


def dial(
    host: str, port: int, timeout: float, resolve: Callable[..., Any] = socket.getaddrinfo
) -> socket.socket:
    """A connection to the first address of the host that takes one. Raises OSError."""
    deadline = monotonic() + timeout
    addresses = resolve(host, port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for tried, (family, kind, proto, _, address) in enumerate(addresses):
        # A silent address must leave time for those behind it.
        share = max(deadline - monotonic(), 0.01) / (len(addresses) - tried)
        try:
            connection = close_in_children(socket.socket(family, kind, proto))
        except OSError as error:
            failure = error  # of a family that this kernel does not have
            continue
        try:
            connection.settimeout(share)
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure or OSError(f"{host} has no address")


class Link:
    """A greeted connection, shared by all threads of one store."""

    def __init__(self, name: str, connection: socket.socket, timeout: float) -> None:
        self.connection = connection
        self._name = name
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._pending: dict[int, Callable[[Answer], None]] = {}
        self._ended: ElasticError | None = None
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._gone = threading.Event()

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        hello: Mapping[str, Any],
        *,
        secret: bytes | None = None,
        connect: float,
        timeout: float,
    ) -> Link:
        """Connect and shake hands, in `connect` seconds.

        Raises:
            OSError: nobody answers there, or the connection broke.
            StoreTimeout: somebody took the connection and then said nothing.
            StoreRefused: what is there is no store of ours, or says no to us.
        """
        name = join_endpoint(host, port)
        deadline = monotonic() + connect
        connection = dial(host, port, connect)
        try:
            shake_hands(connection, name, hello, secret, deadline)
            connection.settimeout(None)
            keep_honest(connection, timeout)
            bound_sending(connection, timeout)
            link = cls(name, connection, timeout)
            RECEIVER.add(link)
        except TimeoutError:
            connection.close()
            raise StoreTimeout(
                f"{name} took the connection, but not the handshake, within {connect:.3g} s"
            ) from None
        except BaseException:
            connection.close()
            raise
        return link

    @property
    def local_address(self) -> str:
        """The address of this machine from which the server was reached."""
        return address_of(self.connection.getsockname())

    @property
    def alive(self) -> bool:
        """Whether requests can still be made."""
        return self._ended is None

    def request(
        self, op: str, fields: Mapping[str, Any], value: bytes = b"", *, patience: float = 0.0
    ) -> Frame:
        """The answer to one request, which may take `patience` seconds beyond the timeout."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        number = self._ask(op, fields, value, answers.put)
        try:
            answer = answers.get(timeout=min(self._timeout + patience, LONGEST_WAIT))
        except queue.Empty:
            raise StoreTimeout(
                f"{self._name} did not answer {op} within {self._timeout + patience:g} s"
            ) from None
        finally:
            self._pending.pop(number, None)
        if isinstance(answer, ElasticError):
            # Its own traceback for each thread that it is raised in.
            raise type(answer)(str(answer))
        return answer

    def call_back(
        self, op: str, fields: Mapping[str, Any], answered: Callable[[Answer], None]
    ) -> None:
        """Ask, and have the answer, or the error that ended the connection, passed to `answered`
        in the receiver's thread, however long that takes; it must not block."""
        self._ask(op, fields, b"", answered)

    def _ask(
        self, op: str, fields: Mapping[str, Any], value: bytes, answered: Callable[[Answer], None]
    ) -> int:
        number = next(self._numbers)
        with self._state:
            if self._ended is not None:
                raise StoreUnavailable(str(self._ended))
            self._pending[number] = answered
        try:
            self._send(encode(Frame(op, number, fields, value)))
        except BaseException:
            self._pending.pop(number, None)
            raise
        return number

    def close(self, reason: str) -> None:
        """End the connection; requests in flight raise StoreUnavailable with the reason."""
        self._end(StoreUnavailable(f"{self._name}: {reason}"))
        if not RECEIVER.is_current():
            self._gone.wait(min(self._timeout, LONGEST_WAIT))

    def _send(self, data: bytes) -> None:
        if not self._sending.acquire(timeout=min(self._timeout, LONGEST_WAIT)):
            raise StoreTimeout(f"{self._name} took no request within {self._timeout:g} s")
        try:
            self.connection.sendall(data)
        except BlockingIOError:
            self._end(StoreUnavailable(f"{self._name} took no data within {self._timeout:g} s"))
        except OSError as error:
            self._end(StoreUnavailable(f"the connection to {self._name} broke: {error}"))
        finally:
            self._sending.release()

    # -- as the receiver calls it -------------------------------------------------------------

    def received(self, data: bytes) -> None:
        try:
            for frame in self._reader.frames(data):
                self._deliver(frame)
        except StoreRefused as error:
            self._end(StoreRefused(f"{self._name} sent what is no frame of ours: {error}"))

    def ended(self, error: OSError | None) -> None:
        how = f"{self._name} ended the connection"
        if error is not None:
            how = f"the connection to {self._name} broke: {error}"
        self._end(StoreUnavailable(how))

    def gone(self) -> None:
        self._gone.set()

    def _deliver(self, frame: Frame) -> None:
        if frame.op == "error" and frame.id == 0:
            self._end(type(error_of(frame))(f"{self._name}: {error_of(frame)}"))
            return
        answered = self._pending.pop(frame.id, None)
        if answered is not None:  # else the request has timed out
            answered(error_of(frame) if frame.op == "error" else frame)

    def _end(self, error: ElasticError) -> None:
        with self._state:
            if self._ended is not None:
                return
            self._ended = error
            awaited = list(self._pending.values())
            self._pending.clear()
        for answered in awaited:
            answered(error)
        with contextlib.suppress(OSError):  # wakes the reader; it may be gone already
            self.connection.shutdown(socket.SHUT_RDWR)
