"""The client of the TCP store: one connection for all threads, made at the first operation.

A broken connection ends the operations in flight with StoreConnectionError and this client's leases
with it; the next operation connects anew. A forked child's copy is another client: it leaves its
parent's connection alone and makes one of its own. One thread reads the connections of all clients
of this process.
"""

from __future__ import annotations

import contextlib

# Else the first connection imports it, in whatever thread, and a child that is forked amid that
# waits for the end of the import for ever.
import encodings.idna  # noqa: F401
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import (
    ConfigError,
    ElasticError,
    StoreConnectionError,
    StoreRejectedError,
    StoreTimeoutError,
    describe,
)
from ..threads import ForkAware, helper
from .authentication import NONCE_BYTES, check_secret
from .connection import create_connection, enable_keepalive, numeric_address
from .interface import CompareSetResult, Entry, Listing, Store, WatchResult, check_key, check_ttl
from .tcp_protocol import ClientEnd, Frame, error_of, read_entry, read_listing

log = logging.getLogger("elasticlib.stores")

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
RECEIVE_BYTES = 256 * 1024
LONGEST_WAIT = 1e6
"""Seconds; a lock or a queue cannot wait for much longer than this."""

Answer = Frame | ElasticError


class TcpStore(Store, ForkAware):
    """A client of the `TcpStoreServer` at an address.

    Args:
        host: a name or a literal address; all that it resolves to are tried.
        port: where the server listens.
        job: whose store it is to be; a server of another job refuses by name.
        timeout: seconds for the answer to one operation, beside those of connecting where it has to
            connect first; `wait` beyond its own.
        connect_timeout: seconds to go on trying to connect; `timeout` unless given.
        secret: what the server must prove to know, as this client does; it is never sent. What
            follows the proof is neither encrypted nor signed.

    local_address: this machine's literal address towards the store; None before the first
    connection.
    """

    _link: _Link | None = None

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
        self._closed = threading.Event()
        self._check_process()

    def _init_process_state(self) -> None:
        self._label = f"{os.getpid()}@{socket.gethostname()}/{secrets.token_hex(4)}"
        self._connecting = threading.Lock()
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self._closed.set()
        if self._link is not None:
            # Without a shutdown, which would end the connection of the parent.
            self._link.connection.close()
        self._link = None
        self.local_address: str | None = None

    @property
    def label(self) -> str:
        """This client's own name, as the server knows it."""
        self._check_process()
        return self._label

    @property
    def address(self) -> str:
        """`host:port` as given, IPv6 in brackets."""
        return join_endpoint(self._host, self._port)

    def connect(self, timeout: float | None = None) -> None:
        """Connect now, if there is no connection; every operation does so by itself.

        timeout: seconds, in place of this store's own connect_timeout.
        """
        self._live_link(timeout)

    def get(self, key: str) -> Entry | None:
        return read_entry(key, self._live_link().request("get", {"key": check_key(key)})[0])

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        fields = {"key": check_key(key), "ttl": check_ttl(ttl), "expected": None}
        (written,) = self._live_link().request("write", fields, bytes(value))
        return Entry(key, bytes(value), written.fields["version"])

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        fields = {"key": check_key(key), "ttl": check_ttl(ttl), "expected": int(expected)}
        (outcome,) = self._live_link().request("write", fields, bytes(value))
        if outcome.fields["yes"]:
            return CompareSetResult(True, Entry(key, bytes(value), outcome.fields["version"]))
        return CompareSetResult(False, read_entry(key, outcome))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        (answer,) = self._live_link().request(
            "delete", {"key": check_key(key), "expected": expected}
        )
        return bool(answer.fields["yes"])

    def refresh(self, key: str, version: int) -> None:
        self._live_link().request("refresh", {"key": check_key(key), "version": version})

    def list(self, prefix: str) -> Listing:
        pages = self._live_link().request("list", {"prefix": prefix})
        try:
            return read_listing(pages)
        except StoreRejectedError as error:
            raise StoreRejectedError(f"{self.address}: {error}") from None

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        seconds = min(max(timeout, 0.0), LONGEST_WAIT)
        fields = {"prefix": prefix, "after": after, "listing": False}
        told: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        link = self._live_link()
        numbers = [link.ask("watch", fields, told.put)]
        try:
            try:
                answer = told.get(timeout=seconds)
            except queue.Empty:
                # Whether it was changed at the end is the server's to say, in its first answer.
                numbers.append(link.ask("unwatch", {"number": numbers[0]}, told.put))
                answer = told.get(timeout=min(self._timeout, LONGEST_WAIT))
        except queue.Empty:
            seconds += self._timeout
            raise StoreTimeoutError(
                f"{self.address} did not answer wait within {seconds:g} s"
            ) from None
        finally:
            for number in numbers:
                link.forget(number)
        return _says_yes(_frame(answer))

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> bool:
        def told(answer: Answer) -> None:
            watched: WatchResult = False
            with contextlib.suppress(ElasticError):
                frame = _frame(answer)
                watched = read_listing([frame]) if frame.op == "listing" else _says_yes(frame)
            callback(watched)

        fields = {"prefix": prefix, "after": after, "listing": with_listing}
        self._live_link().ask("watch", fields, told)
        return True

    def close(self) -> None:
        self._check_process()
        self._closed.set()
        link = self._link
        if link is not None:
            link.close("this store is closed")

    # -- connecting ---------------------------------------------------------------------------

    def _live_link(self, patience: float | None = None) -> _Link:
        self._check_process()
        link = self._link
        if link is not None and link.alive:
            return link
        patience = self._connect_timeout if patience is None else patience
        deadline = monotonic() + patience
        connecting = self._connecting
        if not connecting.acquire(timeout=min(patience, LONGEST_WAIT)):
            raise StoreTimeoutError(f"{self.address} could not be reached within {patience:g} s")
        try:
            old = self._link
            if old is not None and old.alive:
                return old
            self._link = link = self._open_until(deadline, patience)
            if old is not None:
                old.close("the connection was replaced")
            self.local_address = numeric_address(link.connection.getsockname())
            if self._closed.is_set():  # while we connected
                link.close("this store is closed")
            return link
        finally:
            connecting.release()

    def _open_until(self, deadline: float, patience: float) -> _Link:
        """A link, however often connecting fails before the deadline."""
        pause = FIRST_PAUSE
        while True:
            if self._closed.is_set():
                raise StoreConnectionError(f"{self.address}: this store is closed")
            try:
                return self._open(max(deadline - monotonic(), 0.01))
            except StoreTimeoutError:
                raise
            except OSError as error:
                if deadline - monotonic() <= pause:
                    raise StoreConnectionError(
                        f"{self.address} could not be reached within {patience:g} s: {error}"
                    ) from error
            self._closed.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _open(self, patience: float) -> _Link:
        """Connect and be let in. Raises OSError or StoreError."""
        deadline = monotonic() + patience
        nonce = secrets.token_bytes(NONCE_BYTES).hex()
        end = ClientEnd(self.address, self._job, self._label, self._secret, nonce)
        connection = create_connection(self._host, self._port, patience)
        try:
            data = end.hello
            while not end.is_in:
                connection.settimeout(max(deadline - monotonic(), 0.001))
                connection.sendall(data)
                if not (received := connection.recv(4096)):
                    raise ConnectionResetError(
                        f"{self.address} ended the connection before it answered"
                    )
                data = end.shake_hands(received)
            enable_keepalive(connection, self._timeout)
            # It is read by the receiver. Whoever sends waits for the socket, up to the timeout,
            # which ends `sendall` with BlockingIOError.
            connection.settimeout(None)
            seconds, part = divmod(min(max(self._timeout, 0.001), LONGEST_WAIT), 1)
            packed = struct.pack("ll", int(seconds), int(part * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
            link = _Link(self.address, connection, end, self._timeout)
            RECEIVER.add(link)
        except TimeoutError:
            connection.close()
            raise StoreTimeoutError(
                f"{self.address} accepted the connection, but no handshake, within {patience:.3g} s"
            ) from None
        except BaseException:
            connection.close()
            raise
        return link


def _frame(answer: Answer) -> Frame:
    """The answer, unless it is an error."""
    if isinstance(answer, ElasticError):
        # Its own traceback for each thread that it is raised in.
        raise type(answer)(str(answer))
    return answer


def _says_yes(frame: Frame) -> bool:
    return bool(frame.fields.get("yes", False))


class _Link:
    """A connection that was let in, from then to its end, shared by all threads of one store.

    Each request waits for the answer of its own number; when the connection ends, all requests in
    flight end with StoreConnectionError, and the link is never used again.
    """

    def __init__(
        self, name: str, connection: socket.socket, end: ClientEnd, timeout: float
    ) -> None:
        self.connection = connection
        self._name = name
        self._protocol = end
        self._timeout = timeout
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._pending: dict[int, Callable[[Answer], None]] = {}
        self._ended: ElasticError | None = None
        self._gone = threading.Event()

    @property
    def alive(self) -> bool:
        """Whether requests can still be made."""
        return self._ended is None

    def request(self, op: str, fields: dict[str, Any], value: bytes = b"") -> Sequence[Frame]:
        """All frames of the answer to one request."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        number = self.ask(op, fields, answers.put, value)
        frames: list[Frame] = []
        try:
            while not frames or frames[-1].fields.get("more"):
                frames.append(self.answer(op, answers))
        finally:
            self.forget(number)
        return frames

    def answer(self, op: str, answers: queue.SimpleQueue[Answer]) -> Frame:
        """Wait for the next of the answers to requests of this kind."""
        try:
            frame = _frame(answers.get(timeout=min(self._timeout, LONGEST_WAIT)))
        except queue.Empty:
            raise StoreTimeoutError(
                f"{self._name} did not answer {op} within {self._timeout:g} s"
            ) from None
        if frame.op != ("listing" if op == "list" else "answer"):
            raise StoreRejectedError(f"{self._name} answered {op} with a {frame.op}")
        return frame

    def ask(
        self,
        op: str,
        fields: dict[str, Any],
        answered: Callable[[Answer], None],
        value: bytes = b"",
    ) -> int:
        """Ask, and have each frame of the answer, or the error that ended the connection, passed
        to `answered` in the receiver's thread, however long that takes; it must not block."""
        number, data = self._protocol.ask(op, fields, value)
        with self._state:
            if self._ended is not None:
                raise StoreConnectionError(str(self._ended))
            self._pending[number] = answered
        try:
            self._send(data)
        except BaseException:
            self.forget(number)
            raise
        return number

    def forget(self, number: int) -> None:
        """Whatever is still answered to that request is passed to nobody."""
        self._pending.pop(number, None)

    def close(self, reason: str) -> None:
        """End the connection; requests in flight raise StoreConnectionError with the reason."""
        self._end(StoreConnectionError(f"{self._name}: {reason}"))
        if not RECEIVER.is_current():
            self._gone.wait(min(self._timeout, LONGEST_WAIT))

    def _send(self, data: bytes) -> None:
        if not self._sending.acquire(timeout=min(self._timeout, LONGEST_WAIT)):
            raise StoreTimeoutError(f"{self._name} accepted no request within {self._timeout:g} s")
        try:
            self.connection.sendall(data)
        except BlockingIOError:
            self._end(StoreConnectionError(f"{self._name} took no data within {self._timeout:g} s"))
        except OSError as error:
            self._end(StoreConnectionError(f"the connection to {self._name} broke: {error}"))
        finally:
            self._sending.release()

    # -- as the receiver calls it -------------------------------------------------------------

    def hear(self) -> bool:
        """Take what has arrived; whether the connection goes on. Where not, it is closed."""
        try:
            data = self.connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                self._end(StoreConnectionError(f"{self._name} ended the connection"))
            for frame in self._protocol.feed(data):
                self._deliver(frame)
        except BlockingIOError:
            return True
        except StoreRejectedError as error:
            self._end(StoreRejectedError(f"{self._name} sent no frame of elasticlib: {error}"))
        except OSError as error:
            self._end(StoreConnectionError(f"the connection to {self._name} broke: {error}"))
        except Exception as error:
            # A bug of whoever is called with an answer costs its own connection, and no other.
            log.exception("a callback for a store's answer failed")
            self._end(
                StoreConnectionError(f"the connection to {self._name} broke: {describe(error)}")
            )
        return self.alive

    def gone(self) -> None:
        """Nothing more is heard of it."""
        self.connection.close()
        self._gone.set()

    def _deliver(self, frame: Frame) -> None:
        if frame.op == "error" and frame.id == 0:
            error = error_of(frame)
            self._end(type(error)(f"{self._name}: {error}"))
            return
        more = frame.op == "listing" and frame.fields["more"]
        answered = self._pending.get(frame.id) if more else self._pending.pop(frame.id, None)
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


class _Receiver(ForkAware):
    """The thread that reads all links of this process; it is there while there is one."""

    def __init__(self) -> None:
        self._check_process()

    def _init_process_state(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None

    def add(self, link: _Link) -> None:
        """From now on it hears what arrives, until its connection ends. Raises OSError."""
        self._check_process()
        with self._lock:
            selector = self._selector or selectors.DefaultSelector()
            # A selector that waits in the thread takes it in at once.
            selector.register(link.connection, selectors.EVENT_READ, link)
            if self._selector is not None:
                return
            thread = helper(lambda: self._listen(selector), "tcp-store-receiver")
            try:
                thread.start()
            except RuntimeError as error:
                selector.close()
                raise OSError(f"cannot start a thread to receive: {error}") from error
            self._selector, self._thread = selector, thread

    def is_current(self) -> bool:
        """Whether the caller is called by the receiver."""
        return threading.current_thread() is self._thread

    def _listen(self, selector: selectors.BaseSelector) -> None:
        with selector:
            while True:
                for key, _ in selector.select():
                    if not key.data.hear() and self._is_last(selector, key.data):
                        return

    def _is_last(self, selector: selectors.BaseSelector, link: _Link) -> bool:
        """Listen no more to a link that has ended; whether there is no other."""
        with self._lock:
            selector.unregister(link.connection)
            link.gone()
            if selector.get_map():
                return False
            self._selector = self._thread = None
            return True


RECEIVER = _Receiver()
"""This process's."""
