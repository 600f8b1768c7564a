"""Client of the TCP store: one connection for all threads, which the first operation opens.

A broken connection ends the operations in flight with StoreConnectionError, and the leases of this
client; the next operation opens a new connection. The threads that wait for a reply read the
connection, by the event loop of the client.
"""

from __future__ import annotations

import contextlib

# A child that is forked while the first connection imports this module would wait for ever.
import encodings.idna  # noqa: F401
import logging
import os
import secrets
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import (
    ConfigError,
    ElasticError,
    StoreConnectionError,
    StoreError,
    StoreRejectedError,
    StoreTimeoutError,
    format_error,
)
from ..event_loop import EventLoop
from ..threads import ForkAware
from .authentication import NONCE_BYTES, check_secret
from .connection import create_connection, enable_keepalive, numeric_address
from .interface import (
    CancelWatch,
    CompareSetResult,
    Entry,
    Listing,
    Store,
    WatchResult,
    check_key,
    check_ttl,
)
from .tcp_protocol import ClientProtocol, Frame, decode_entry, decode_error, decode_listing

log = logging.getLogger("elasticlib.stores")

INITIAL_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
RECEIVE_BYTES = 256 * 1024
MAX_WAIT_S = 1e6  # locks do not accept much longer timeouts

Reply = Frame | ElasticError


class TcpStore(Store, ForkAware):
    """Client of the `TcpStoreServer` at an address. Thread-safe.

    In a forked child, the copy is another client, which opens a connection of its own. A store that
    is garbage-collected without `close` ends its connection, and its watches with it.

    Args:
        host: Name or address of the server. All addresses of a name are tried.
        port: Port of the server.
        job: The expected job. The server of another job rejects this client.
        timeout: Seconds to wait for the reply to an operation, in addition to the time that
            connecting takes and to the timeout of `wait`.
        connect_timeout: Seconds to keep trying to connect; by default `timeout`.
        secret: The secret that the server must prove to know, as this client does. It is never
            sent. The data after the handshake is neither encrypted nor signed.

    Raises:
        ConfigError: The address, a timeout or the secret is invalid.
    """

    event_loop: EventLoop
    _connection: _TcpConnection | None = None
    _finalizer: weakref.finalize[..., Any] | None = None  #: ends the last connection

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str = "",
        timeout: float = 60.0,
        connect_timeout: float | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._job = job
        self._timeout = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        if not host or not 0 < port <= 65535:
            raise ConfigError(f"a store is at a host and a port 1..65535, got {host!r}, {port}")
        if not (timeout > 0 and self._connect_timeout > 0):
            raise ConfigError(f"timeouts are positive, got {timeout} and {connect_timeout}")
        self._secret = check_secret(secret)
        self._closed = threading.Event()  # set by `close`
        self._check_process()

    def _init_process_state(self) -> None:
        self._label = f"{os.getpid()}@{socket.gethostname()}/{secrets.token_hex(4)}"
        self._connect_lock = threading.Lock()  # owned by the thread that opens a connection
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self._closed.set()
        if self._connection is not None:
            # A shutdown would end the connection of the parent.
            self._connection.socket.close()
        if self._pid:
            self.event_loop.close_after_fork()
        self.event_loop, self._owns_event_loop = EventLoop(), True
        self._connection = None  # the last connection, which may have ended
        # This machine's address on the connection to the store; None before the first connection.
        self.local_address: str | None = None

    @property
    def label(self) -> str:
        """The name of this client at the server."""
        self._check_process()
        return self._label

    @property
    def address(self) -> str:
        """The host and the port that were given, as one text with IPv6 in brackets."""
        return join_endpoint(self._host, self._port)

    def connect(self, timeout: float | None = None) -> None:
        """Open the connection if there is none. Each operation does this by itself.

        Args:
            timeout: Seconds to keep trying; by default the `connect_timeout` of this store.

        Raises:
            StoreConnectionError: The server cannot be reached.
            StoreTimeoutError: The server accepts connections and does not answer.
            StoreRejectedError: The server rejects this client or does not know the secret.
        """
        self._ensure_connected(timeout)

    def get(self, key: str) -> Entry | None:
        return decode_entry(key, self._request("get", {"key": check_key(key)}))

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        fields = {"key": check_key(key), "ttl": check_ttl(ttl), "expected": None}
        reply = self._request("write", fields, bytes(value))
        return Entry(key, bytes(value), reply.fields["version"])

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        fields = {"key": check_key(key), "ttl": check_ttl(ttl), "expected": int(expected)}
        reply = self._request("write", fields, bytes(value))
        if reply.fields["yes"]:
            return CompareSetResult(True, Entry(key, bytes(value), reply.fields["version"]))
        return CompareSetResult(False, decode_entry(key, reply))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        reply = self._request("delete", {"key": check_key(key), "expected": expected})
        return bool(reply.fields["yes"])

    def refresh(self, key: str, version: int) -> None:
        self._request("refresh", {"key": check_key(key), "version": version})

    def list(self, prefix: str) -> Listing:
        try:
            return decode_listing(self._request("list", {"prefix": prefix}))
        except StoreRejectedError as error:
            raise StoreRejectedError(f"{self.address}: {error}") from None

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        seconds = min(max(timeout, 0.0), MAX_WAIT_S)
        fields = {"prefix": prefix, "after": after, "listing": False}
        replies: deque[Reply] = deque()
        connection = self._ensure_connected()
        numbers = [connection.send_request("watch", fields, replies.append)]
        try:
            if not connection.run_until(lambda: replies, seconds):
                # The first reply shows whether there was a change at the last moment.
                unwatch = {"number": numbers[0]}
                numbers.append(connection.send_request("unwatch", unwatch, replies.append))
                if not connection.run_until(lambda: replies, self._timeout):
                    seconds += self._timeout
                    raise StoreTimeoutError(
                        f"{self.address} did not answer wait within {seconds:g} s"
                    )
        finally:
            for number in numbers:
                connection.cancel(number)
        return _is_yes(_raise_if_error(replies[0]))

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch:
        def on_reply(reply: Reply) -> None:
            result: WatchResult = False
            with contextlib.suppress(ElasticError):
                frame = _raise_if_error(reply)
                result = decode_listing(frame) if frame.op == "listing" else _is_yes(frame)
            callback(result)

        fields = {"prefix": prefix, "after": after, "listing": with_listing}
        connection = self._ensure_connected()
        try:
            self.event_loop.start_thread()
        except OSError as error:
            raise StoreConnectionError(f"cannot watch {self.address}: {error}") from error
        number = connection.send_request("watch", fields, on_reply)

        def cancel() -> None:
            if connection.cancel(number):
                # After an error, the connection has ended, and its watches with it.
                with contextlib.suppress(StoreError):
                    connection.send_request("unwatch", {"number": number}, lambda _: None)

        return cancel

    def close(self) -> None:
        self._check_process()
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.close("this store is closed")
        if self._owns_event_loop:
            self.event_loop.close()

    def use_event_loop(self, loop: EventLoop) -> None:
        """Let another event loop read the connections. The caller closes that loop.

        This must be called before the first operation.
        """
        self.event_loop, self._owns_event_loop = loop, False

    def _request(self, op: str, fields: dict[str, Any], value: bytes = b"") -> Frame:
        return self._ensure_connected().request(op, fields, value)

    # -- connecting ---------------------------------------------------------------------------

    def _ensure_connected(self, timeout: float | None = None) -> _TcpConnection:
        self._check_process()
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        timeout = self._connect_timeout if timeout is None else timeout
        deadline = monotonic() + timeout
        lock = self._connect_lock
        if not lock.acquire(timeout=min(timeout, MAX_WAIT_S)):
            raise StoreTimeoutError(f"{self.address} could not be reached within {timeout:g} s")
        try:
            old = self._connection
            if old is not None and old.is_open:
                return old
            self._connection = connection = self._connect_until(deadline, timeout)
            self._finalize(connection)
            if old is not None:
                old.close("the connection was replaced")
            self.local_address = numeric_address(connection.socket.getsockname())
            if self._closed.is_set():  # another thread has closed this store
                connection.close("this store is closed")
            return connection
        finally:
            lock.release()

    def _finalize(self, connection: _TcpConnection) -> None:
        """Let the garbage collector end this connection instead of the last one."""
        if self._finalizer is not None:
            self._finalizer.detach()
        loop = self.event_loop if self._owns_event_loop else None
        self._finalizer = weakref.finalize(self, _abandon, connection, loop, os.getpid())
        self._finalizer.atexit = False

    def _connect_until(self, deadline: float, timeout: float) -> _TcpConnection:
        """Connect, and try again after failures until the deadline."""
        backoff = INITIAL_BACKOFF_S
        while True:
            if self._closed.is_set():
                raise StoreConnectionError(f"{self.address}: this store is closed")
            try:
                return self._connect_once(max(deadline - monotonic(), 0.01))
            except StoreTimeoutError:
                raise
            except OSError as error:
                if deadline - monotonic() <= backoff:
                    raise StoreConnectionError(
                        f"{self.address} could not be reached within {timeout:g} s: {error}"
                    ) from error
            self._closed.wait(backoff)
            backoff = min(backoff * 2, MAX_BACKOFF_S)

    def _connect_once(self, timeout: float) -> _TcpConnection:
        deadline = monotonic() + timeout
        nonce = secrets.token_bytes(NONCE_BYTES).hex()
        protocol = ClientProtocol(self.address, self._job, self._label, self._secret, nonce)
        sock = create_connection(self._host, self._port, timeout)
        try:
            proof = b""
            sock.sendall(protocol.hello)
            while not protocol.is_authenticated:
                sock.settimeout(max(deadline - monotonic(), 0.001))
                if not (data := sock.recv(4096)):
                    raise ConnectionResetError(
                        f"{self.address} ended the connection before it answered"
                    )
                proof = protocol.receive_handshake(data)
            enable_keepalive(sock, self._timeout)
            # The event loop reads without waiting. A sender waits for the socket up to the
            # timeout, after which `sendall` raises BlockingIOError.
            sock.settimeout(None)
            seconds, part = divmod(min(max(self._timeout, 0.001), MAX_WAIT_S), 1)
            packed = struct.pack("ll", int(seconds), int(part * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
            # The server does not reply to the proof: the first request follows it at once.
            sock.sendall(proof)
            connection = _TcpConnection(
                self.address, sock, protocol, self._timeout, self.event_loop
            )
            self.event_loop.add_reader(sock.fileno(), connection.on_readable)
        except TimeoutError:
            sock.close()
            raise StoreTimeoutError(
                f"{self.address} accepted the connection, but no handshake, within {timeout:.3g} s"
            ) from None
        except BaseException:
            sock.close()
            raise
        return connection


def _abandon(connection: _TcpConnection, loop: EventLoop | None, pid: int) -> None:
    """End the connection and the event loop, if any, of a store that the collector has freed.

    The collector runs in any thread and at any line, so this neither takes a lock nor blocks.
    """
    if pid != os.getpid():
        # In a forked child, a shutdown would end the connection of the parent.
        connection.socket.close()
        return
    connection.abandon()
    if loop is not None:
        loop.abandon()


def _raise_if_error(reply: Reply) -> Frame:
    """Return the frame, or raise a copy of the error."""
    if isinstance(reply, ElasticError):
        # Several threads can raise it, each with a traceback of its own.
        raise type(reply)(str(reply))
    return reply


def _is_yes(frame: Frame) -> bool:
    return bool(frame.fields.get("yes", False))


class _TcpConnection:
    """An authenticated connection, which all threads of one store share.

    When the connection ends, all requests in flight end with an error. It is not used again.
    """

    def __init__(
        self,
        address: str,
        sock: socket.socket,
        protocol: ClientProtocol,
        timeout: float,
        loop: EventLoop,
    ) -> None:
        self.socket = sock
        self._address = address
        self._protocol = protocol
        self._timeout = timeout
        self._loop = loop
        self._send_lock = threading.Lock()  # owned by the thread that sends a request
        # Guards `_error`, additions to `_pending`, and the close of the socket.
        self._state_lock = threading.Lock()
        self._pending: dict[int, Callable[[Reply], None]] = {}  # callback of each request
        self._error: ElasticError | None = None  # why the connection was closed

    @property
    def is_open(self) -> bool:
        """True if requests can be sent."""
        return self._error is None

    def request(self, op: str, fields: dict[str, Any], value: bytes = b"") -> Frame:
        """Send a request, and return its reply."""
        replies: deque[Reply] = deque()
        number = self.send_request(op, fields, replies.append, value)
        try:
            if not self.run_until(lambda: replies, self._timeout):
                raise StoreTimeoutError(
                    f"{self._address} did not answer {op} within {self._timeout:g} s"
                )
        finally:
            self.cancel(number)
        frame = _raise_if_error(replies[0])
        if frame.op != ("listing" if op == "list" else "answer"):
            raise StoreRejectedError(f"{self._address} answered {op} with a {frame.op}")
        return frame

    def send_request(
        self,
        op: str,
        fields: dict[str, Any],
        callback: Callable[[Reply], None],
        value: bytes = b"",
    ) -> int:
        """Send a request, and return its number.

        A thread that runs the event loop calls `callback` once with the reply, or any thread with
        the error that closed the connection. The callback must not block.
        """
        number, data = self._protocol.encode_request(op, fields, value)
        with self._state_lock:
            if self._error is not None:
                raise StoreConnectionError(str(self._error))
            self._pending[number] = callback
        try:
            self._send(data)
        except BaseException:
            self.cancel(number)
            raise
        return number

    def run_until(self, condition: Callable[[], object], timeout: float) -> bool:
        """Receive data until a condition is true. Return False if it is not within the timeout."""
        return self._loop.run_until(condition, timeout)

    def cancel(self, number: int) -> bool:
        """Forget a request, so that its reply is ignored. Return False if it had its reply."""
        return self._pending.pop(number, None) is not None

    def close(self, reason: str) -> None:
        """End the connection. Requests in flight raise StoreConnectionError with the reason."""
        self._end(StoreConnectionError(f"{self._address}: {reason}"))

    def abandon(self) -> None:
        """End the connection without taking a lock. No request but watches may be in flight."""
        if not self.is_open:
            return
        if self._loop.is_driven:
            # The thread of the loop receives the end, closes the socket and ends the watches.
            with contextlib.suppress(OSError):  # the peer may have ended the connection
                self.socket.shutdown(socket.SHUT_RDWR)
            return
        self._error = StoreConnectionError(f"{self._address}: this store was not closed")
        self._loop.remove_reader(self.socket.fileno())
        self.socket.close()

    def _send(self, data: bytes) -> None:
        if not self._send_lock.acquire(timeout=min(self._timeout, MAX_WAIT_S)):
            raise StoreTimeoutError(
                f"{self._address} accepted no request within {self._timeout:g} s"
            )
        try:
            self.socket.sendall(data)
        except BlockingIOError:
            self._end(
                StoreConnectionError(f"{self._address} took no data within {self._timeout:g} s")
            )
        except OSError as error:
            self._end(StoreConnectionError(f"the connection to {self._address} broke: {error}"))
        finally:
            self._send_lock.release()

    # -- called by the event loop -------------------------------------------------------------

    def on_readable(self) -> None:
        """Receive data, and pass each reply to its callback. An error ends the connection."""
        broken = f"the connection to {self._address} broke"
        try:
            data = self.socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                self._end(StoreConnectionError(f"{self._address} ended the connection"))
            for frame in self._protocol.feed(data):
                self._deliver(frame)
        except BlockingIOError:
            pass
        except StoreRejectedError as error:
            self._end(StoreRejectedError(f"{self._address} sent no frame of elasticlib: {error}"))
        except OSError as error:
            self._end(StoreConnectionError(f"{broken}: {error}"))
        except Exception as error:
            # A defective callback ends its own connection, and not those of other stores.
            log.exception(
                "a callback for a reply of the store at %s failed: closing the connection",
                self._address,
            )
            self._end(StoreConnectionError(f"{broken}: {format_error(error)}"))

    def _deliver(self, frame: Frame) -> None:
        if frame.op == "error" and frame.id == 0:
            error = decode_error(frame)
            self._end(type(error)(f"{self._address}: {error}"))
            return
        callback = self._pending.pop(frame.id, None)
        if callback is not None:  # otherwise the request has timed out
            callback(decode_error(frame) if frame.op == "error" else frame)

    def _end(self, error: ElasticError) -> None:
        with self._state_lock:
            if self._error is not None:
                return
            self._error = error
            callbacks = list(self._pending.values())
            self._pending.clear()
            self._loop.remove_reader(self.socket.fileno())
            with contextlib.suppress(OSError):  # the peer may have ended the connection
                self.socket.shutdown(socket.SHUT_RDWR)  # ends a send of another thread
            self.socket.close()
        for callback in callbacks:
            callback(error)
        self._loop.wake()
