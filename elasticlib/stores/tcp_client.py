"""Client of the TCP store: one connection for all threads, which the first operation opens.

A broken connection ends the operations in flight with StoreConnectionError, and the leases of this
client; the next operation opens a new connection. One thread reads the connections of all clients
of this process.
"""

from __future__ import annotations

import contextlib

# A child that is forked while the first connection imports this module would wait for ever.
import encodings.idna  # noqa: F401
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import (
    ConfigError,
    ElasticError,
    StoreConnectionError,
    StoreRejectedError,
    StoreTimeoutError,
    format_error,
)
from ..threads import ForkAware, daemon_thread
from .authentication import NONCE_BYTES, check_secret
from .connection import create_connection, enable_keepalive, numeric_address
from .interface import CompareSetResult, Entry, Listing, Store, WatchResult, check_key, check_ttl
from .tcp_protocol import ClientProtocol, Frame, decode_entry, decode_error, decode_listing

log = logging.getLogger("elasticlib.stores")

INITIAL_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
RECEIVE_BYTES = 256 * 1024
MAX_WAIT_S = 1e6  # locks and queues do not accept much longer timeouts

Reply = Frame | ElasticError


class TcpStore(Store, ForkAware):
    """Client of the `TcpStoreServer` at an address. Thread-safe.

    In a forked child, the copy is another client, which opens a connection of its own.

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

    _connection: _TcpConnection | None = None

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
        """The given address as `host:port`, with IPv6 in brackets."""
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
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        connection = self._ensure_connected()
        numbers = [connection.send_request("watch", fields, replies.put)]
        try:
            try:
                reply = replies.get(timeout=seconds)
            except queue.Empty:
                # The first reply shows whether there was a change at the last moment.
                unwatch = {"number": numbers[0]}
                numbers.append(connection.send_request("unwatch", unwatch, replies.put))
                reply = replies.get(timeout=min(self._timeout, MAX_WAIT_S))
        except queue.Empty:
            seconds += self._timeout
            raise StoreTimeoutError(
                f"{self.address} did not answer wait within {seconds:g} s"
            ) from None
        finally:
            for number in numbers:
                connection.cancel(number)
        return _is_yes(_raise_error(reply))

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> bool:
        def on_reply(reply: Reply) -> None:
            result: WatchResult = False
            with contextlib.suppress(ElasticError):
                frame = _raise_error(reply)
                result = decode_listing(frame) if frame.op == "listing" else _is_yes(frame)
            callback(result)

        fields = {"prefix": prefix, "after": after, "listing": with_listing}
        self._ensure_connected().send_request("watch", fields, on_reply)
        return True

    def close(self) -> None:
        self._check_process()
        self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.close("this store is closed")

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
            if old is not None:
                old.close("the connection was replaced")
            self.local_address = numeric_address(connection.socket.getsockname())
            if self._closed.is_set():  # another thread has closed this store
                connection.close("this store is closed")
            return connection
        finally:
            lock.release()

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
            # The reader thread reads without waiting. A sender waits for the socket up to the
            # timeout, after which `sendall` raises BlockingIOError.
            sock.settimeout(None)
            seconds, part = divmod(min(max(self._timeout, 0.001), MAX_WAIT_S), 1)
            packed = struct.pack("ll", int(seconds), int(part * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
            # The server does not reply to the proof: the first request follows it at once.
            sock.sendall(proof)
            connection = _TcpConnection(self.address, sock, protocol, self._timeout)
            READER_THREAD.add(connection)
        except TimeoutError:
            sock.close()
            raise StoreTimeoutError(
                f"{self.address} accepted the connection, but no handshake, within {timeout:.3g} s"
            ) from None
        except BaseException:
            sock.close()
            raise
        return connection


def _raise_error(reply: Reply) -> Frame:
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
        self, address: str, sock: socket.socket, protocol: ClientProtocol, timeout: float
    ) -> None:
        self.socket = sock
        self._address = address
        self._protocol = protocol
        self._timeout = timeout
        self._send_lock = threading.Lock()  # owned by the thread that sends a request
        self._state_lock = threading.Lock()  # guards `_error` and additions to `_pending`
        self._pending: dict[int, Callable[[Reply], None]] = {}  # callback of each request
        self._error: ElasticError | None = None  # why the connection was closed
        self._is_released = threading.Event()  # the reader thread has closed the socket

    @property
    def is_open(self) -> bool:
        """True if requests can be sent."""
        return self._error is None

    def request(self, op: str, fields: dict[str, Any], value: bytes = b"") -> Frame:
        """Send a request, and return its reply."""
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        number = self.send_request(op, fields, replies.put, value)
        try:
            frame = _raise_error(replies.get(timeout=min(self._timeout, MAX_WAIT_S)))
        except queue.Empty:
            raise StoreTimeoutError(
                f"{self._address} did not answer {op} within {self._timeout:g} s"
            ) from None
        finally:
            self.cancel(number)
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

        The reader thread calls `callback` once with the reply, or with the error that closed the
        connection. The callback must not block.
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

    def cancel(self, number: int) -> None:
        """Discard the reply to a request."""
        self._pending.pop(number, None)

    def close(self, reason: str) -> None:
        """End the connection. Requests in flight raise StoreConnectionError with the reason."""
        self._end(StoreConnectionError(f"{self._address}: {reason}"))
        if not READER_THREAD.is_current():
            self._is_released.wait(min(self._timeout, MAX_WAIT_S))

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

    # -- called by the reader thread ----------------------------------------------------------

    def on_readable(self) -> bool:
        """Receive data. Return False if the connection is closed."""
        broken = f"the connection to {self._address} broke"
        try:
            data = self.socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                self._end(StoreConnectionError(f"{self._address} ended the connection"))
            for frame in self._protocol.feed(data):
                self._deliver(frame)
        except BlockingIOError:
            return True
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
        return self.is_open

    def release(self) -> None:
        """Close the socket, after which the reader thread does not use it any more."""
        self.socket.close()
        self._is_released.set()

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
        for callback in callbacks:
            callback(error)
        with contextlib.suppress(OSError):  # the socket may be closed already
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the reader thread


class _ReaderThread(ForkAware):
    """The thread that reads all connections of this process. It runs while there is one."""

    def __init__(self) -> None:
        self._check_process()

    def _init_process_state(self) -> None:
        self._lock = threading.Lock()  # guards the two fields below
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None  # None if the thread does not run

    def add(self, connection: _TcpConnection) -> None:
        """Read a connection until it ends.

        Raises:
            OSError: The thread cannot be started.
        """
        self._check_process()
        with self._lock:
            selector = self._selector or selectors.DefaultSelector()
            # A thread that waits in `select` also notices a socket that is added now.
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            if self._selector is not None:
                return
            thread = daemon_thread(lambda: self._run(selector), "tcp-store-receiver")
            try:
                thread.start()
            except RuntimeError as error:
                selector.close()
                raise OSError(f"cannot start a thread to receive: {error}") from error
            self._selector, self._thread = selector, thread

    def is_current(self) -> bool:
        """Return True if the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def _run(self, selector: selectors.BaseSelector) -> None:
        with selector:
            while True:
                for key, _ in selector.select():
                    if not key.data.on_readable() and self._remove(selector, key.data):
                        return

    def _remove(self, selector: selectors.BaseSelector, connection: _TcpConnection) -> bool:
        """Release a closed connection. Return True if it was the last one."""
        with self._lock:
            selector.unregister(connection.socket)
            connection.release()
            if selector.get_map():
                return False
            self._selector = self._thread = None
            return True


READER_THREAD = _ReaderThread()  # that of this process
