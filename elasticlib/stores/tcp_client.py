"""The client of the TCP store: one connection for all threads, made at the first operation.

A broken connection ends the operations in flight with StoreUnavailable and this client's leases
with it; the next operation connects anew. A forked child's copy is another client: it leaves its
parent's connection alone and makes one of its own. One thread reads the connections of all clients
of this process.
"""

from __future__ import annotations

import contextlib

# Else the first connection imports it, in whatever thread, and a child that is forked amid that
# waits for the end of the import for ever.
import encodings.idna  # noqa: F401
import itertools
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import (
    ConfigError,
    ElasticError,
    StoreRefused,
    StoreTimeout,
    StoreUnavailable,
    describe,
    present,
)
from ..threads import helper
from .interface import CompareSet, Entry, Listing, Store, Watched, check_key, check_ttl
from .secret import NONCE_BYTES, check_secret
from .sockets import (
    address_of,
    bound_sending,
    close_in_children,
    dial,
    keep_honest,
    renew_in_children,
)
from .tcp_protocol import (
    MAX_FRAME_BYTES,
    ClientHandshake,
    Frame,
    check_fields,
    encode,
    error_of,
    read_listing,
)

log = logging.getLogger("elasticlib.stores")

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
RECEIVE_BYTES = 256 * 1024
HEADER_ROOM = 16 * 1024
"""More than the header of any request takes, whatever its key."""
LONGEST_WAIT = 1e6
"""Seconds; a lock or a queue cannot wait for much longer than this."""

Answer = Frame | ElasticError


class TcpStore(Store):
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
    """

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
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Have no connection, and no lock that a thread may hold; a closed store stays closed."""
        self.label = f"{os.getpid()}@{socket.gethostname()}/{secrets.token_hex(4)}"
        self._connecting = threading.Lock()
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self._closed.set()
        self._link: _Link | None = None
        self._local_address: str | None = None

    @property
    def address(self) -> str:
        """`host:port` as given, IPv6 in brackets."""
        return join_endpoint(self._host, self._port)

    @property
    def local_address(self) -> str | None:
        """This machine's literal address towards the store; None before the first connection."""
        return self._local_address

    def connect(self, timeout: float | None = None) -> None:
        """Connect now, if there is no connection; every operation does so by itself.

        timeout: seconds, in place of this store's own connect_timeout.
        """
        self._live_link(timeout)

    def get(self, key: str) -> Entry | None:
        (found,) = self._request("get", key=check_key(key))
        return next(iter(self._listing(found).entries), None)

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        written = self._write(key, value, None, ttl)
        if written.op != "answer":
            raise StoreRefused(f"{self.address} answered set with a {written.op}")
        return Entry(key, bytes(value), written.fields["version"])

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        outcome = self._write(key, value, int(expected), ttl)
        if outcome.op == "answer":
            return CompareSet(True, Entry(key, bytes(value), outcome.fields["version"]))
        return CompareSet(False, next(iter(self._listing(outcome).entries), None))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        return self._is_so("delete", key=check_key(key), expected=expected)

    def refresh(self, key: str, version: int) -> None:
        self._is_so("refresh", key=check_key(key), version=version)

    def list(self, prefix: str) -> Listing:
        pages = [self._listing(page) for page in self._request("list", prefix=prefix)]
        entries = itertools.chain.from_iterable(page.entries for page in pages)
        return Listing(tuple(entries), pages[0].version)

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        seconds = min(max(timeout, 0.0), LONGEST_WAIT)
        if not seconds:
            return self._is_so("changed", prefix=prefix, after=after)
        check_fields("watch", fields := {"prefix": prefix, "after": after, "listing": False})
        link = self._live_link()
        told: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        number = link.ask("watch", fields, told.put)
        try:
            with contextlib.suppress(queue.Empty):
                return self._told_yes(told.get(timeout=seconds))
            # Whether it was changed at the end is the server's to say: what it told is on its way.
            asked = link.request("unwatch", {"number": number}, "wait", seconds)
            with contextlib.suppress(queue.Empty):
                return self._told_yes(told.get_nowait())
            return bool(asked[0].fields["yes"])
        finally:
            link.forget(number)

    def watch(
        self, prefix: str, *, after: int, changed: Callable[[Watched], None], listing: bool = False
    ) -> bool:
        check_fields("watch", fields := {"prefix": prefix, "after": after, "listing": listing})
        self._live_link().ask("watch", fields, lambda told: changed(self._watched(told)))
        return True

    def close(self) -> None:
        self._closed.set()
        link = self._link
        if link is not None:
            link.close("this store is closed")

    def _told_yes(self, told: Answer) -> bool:
        if isinstance(told, ElasticError):
            raise type(told)(str(told))
        return self._watched(told) is not False

    def _watched(self, told: Answer) -> Watched:
        if not isinstance(told, Frame):
            return False
        if told.op != "listing":
            return bool(told.fields.get("yes", False))
        try:
            return True if told.fields["more"] else self._listing(told)
        except StoreRefused:
            return False

    def _listing(self, frame: Frame) -> Listing:
        if frame.op != "listing":
            raise StoreRefused(f"{self.address} answered with {frame.op}, and a listing was due")
        try:
            return read_listing(frame)
        except StoreRefused as error:
            raise StoreRefused(f"{self.address}: {error}") from None

    def _write(self, key: str, value: bytes, expected: int | None, ttl: float | None) -> Frame:
        # The server would end the connection, and all leases with it, over one bad frame.
        if len(value) > MAX_FRAME_BYTES - HEADER_ROOM:
            raise StoreRefused(
                f"a value is at most {MAX_FRAME_BYTES - HEADER_ROOM} bytes, got {len(value)} "
                f"for key {key!r}"
            )
        fields = {"key": check_key(key), "ttl": check_ttl(ttl), "expected": expected}
        return self._request("write", bytes(value), **fields)[0]

    def _is_so(self, op: str, **fields: Any) -> bool:
        (told,) = self._request(op, **fields)
        if told.op != "answer":
            raise StoreRefused(f"{self.address} answered {op} with a {told.op}")
        return bool(told.fields["yes"])

    def _request(self, op: str, value: bytes = b"", **fields: Any) -> Sequence[Frame]:
        check_fields(op, fields)
        return self._live_link().request(op, fields, value=value)

    # -- connecting ---------------------------------------------------------------------------

    def _live_link(self, patience: float | None = None) -> _Link:
        link = self._link
        if link is None or not link.alive:
            return self._connected(self._connect_timeout if patience is None else patience)
        return link

    def _connected(self, patience: float) -> _Link:
        deadline = monotonic() + patience
        connecting = self._connecting
        if not connecting.acquire(timeout=min(patience, LONGEST_WAIT)):
            raise StoreTimeout(f"{self.address} was not reached within {patience:g} s")
        try:
            if self._link is None or not self._link.alive:
                self._replace(self._open_until(deadline, patience))
            return present(self._link, f"the connection to {self.address}")
        finally:
            connecting.release()

    def _replace(self, link: _Link) -> None:
        old, self._link = self._link, link
        if old is not None:
            old.close("the connection was replaced")
        self._local_address = address_of(link.connection.getsockname())
        if self._closed.is_set():  # while we connected
            link.close("this store is closed")

    def _open_until(self, deadline: float, patience: float) -> _Link:
        """A link, however often connecting fails before the deadline."""
        pause = FIRST_PAUSE
        while True:
            if self._closed.is_set():
                raise StoreUnavailable(f"{self.address}: this store is closed")
            try:
                return self._open(max(deadline - monotonic(), 0.01))
            except StoreTimeout:
                raise
            except OSError as error:
                if deadline - monotonic() <= pause:
                    raise StoreUnavailable(
                        f"{self.address} was not reached within {patience:g} s: {error}"
                    ) from error
            self._closed.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _open(self, patience: float) -> _Link:
        """Connect and be let in. Raises OSError or StoreError."""
        deadline = monotonic() + patience
        nonce = secrets.token_bytes(NONCE_BYTES).hex()
        hands = ClientHandshake(self.address, self._job, self.label, self._secret, nonce)
        connection = dial(self._host, self._port, patience)
        try:
            data = hands.begin()
            while not hands.done:
                connection.settimeout(max(deadline - monotonic(), 0.001))
                connection.sendall(data)
                if not (received := connection.recv(4096)):
                    raise ConnectionResetError(
                        f"{self.address} ended the connection before it answered"
                    )
                data = hands.receive(received)
            # It is read by the receiver; whoever sends waits for the socket, within the timeout.
            connection.settimeout(None)
            keep_honest(connection, self._timeout)
            bound_sending(connection, self._timeout)
            link = _Link(self.address, connection, hands, self._timeout)
            RECEIVER.add(link)
        except TimeoutError:
            connection.close()
            raise StoreTimeout(
                f"{self.address} took the connection, but not the handshake, within "
                f"{patience:.3g} s"
            ) from None
        except BaseException:
            connection.close()
            raise
        return link


class _Link:
    """A connection that was let in, from then to its end, shared by all threads of one store.

    Each request waits for the answer of its own number; when the connection ends, all requests in
    flight end with StoreUnavailable, and the link is never used again.
    """

    def __init__(
        self, name: str, connection: socket.socket, hands: ClientHandshake, timeout: float
    ) -> None:
        self.connection = connection
        self._name = name
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._pending: dict[int, Callable[[Answer], None]] = {}
        self._ended: ElasticError | None = None
        self._reader = hands.reader
        self._gone = threading.Event()

    @property
    def alive(self) -> bool:
        """Whether requests can still be made."""
        return self._ended is None

    def request(
        self,
        op: str,
        fields: dict[str, Any],
        said: str = "",
        patience: float = 0.0,
        *,
        value: bytes = b"",
    ) -> Sequence[Frame]:
        """All frames of the answer to one request.

        said, patience: what the caller asks for, and the seconds that it has spent on it, where an
        error is to name these.
        """
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        number = self.ask(op, fields, answers.put, value)
        frames: list[Frame] = []
        try:
            while not frames or frames[-1].fields.get("more"):
                answer = answers.get(timeout=min(self._timeout, LONGEST_WAIT))
                if isinstance(answer, ElasticError):
                    # Its own traceback for each thread that it is raised in.
                    raise type(answer)(str(answer))
                frames.append(answer)
        except queue.Empty:
            seconds = self._timeout + patience
            raise StoreTimeout(
                f"{self._name} did not answer {said or op} within {seconds:g} s"
            ) from None
        finally:
            self.forget(number)
        return frames

    def ask(
        self,
        op: str,
        fields: dict[str, Any],
        answered: Callable[[Answer], None],
        value: bytes = b"",
    ) -> int:
        """Ask, and have each frame of the answer, or the error that ended the connection, passed
        to `answered` in the receiver's thread, however long that takes; it must not block."""
        number = next(self._numbers)
        with self._state:
            if self._ended is not None:
                raise StoreUnavailable(str(self._ended))
            self._pending[number] = answered
        try:
            self._send(encode(Frame(op, number, fields, value)))
        except BaseException:
            self.forget(number)
            raise
        return number

    def forget(self, number: int) -> None:
        """Whatever is still answered to that request is passed to nobody."""
        self._pending.pop(number, None)

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

    def hear(self) -> bool:
        """Take what has arrived; whether the connection goes on."""
        try:
            data = self.connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            if not data:
                self._end(StoreUnavailable(f"{self._name} ended the connection"))
                return False
            for frame in self._reader.feed(data):
                self._deliver(frame)
        except BlockingIOError:
            return True
        except StoreRefused as error:
            self._end(StoreRefused(f"{self._name} sent what is no frame of ours: {error}"))
        except OSError as error:
            self._end(StoreUnavailable(f"the connection to {self._name} broke: {error}"))
        except Exception as error:
            # A bug of whoever is called with an answer costs its own connection, and no other.
            log.exception("what was to be told of a store's answer broke")
            self._end(StoreUnavailable(f"the connection to {self._name} broke: {describe(error)}"))
        return self._ended is None

    def gone(self, error: Exception | None = None) -> None:
        """Nothing more is heard of it."""
        if error is not None:
            why = f"the connection to {self._name} cannot be listened to: {describe(error)}"
            self._end(StoreUnavailable(why))
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


class _Receiver:
    """The thread that reads all links of this process; it is there while there is one."""

    def __init__(self) -> None:
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Have no thread and listen to nothing: a child's sockets are closed for it."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._coming: deque[_Link] = deque()
        self._wake: socket.socket | None = None

    def add(self, link: _Link) -> None:
        """From now on it hears what arrives, until its connection ends. Raises OSError."""
        with self._lock:
            if self._thread is None:
                self._start()
            self._coming.append(link)
            with contextlib.suppress(BlockingIOError):  # full: it is going to wake anyway
                present(self._wake, "what wakes the receiver").send(b"\0")

    def is_current(self) -> bool:
        """Whether the caller is called by the receiver."""
        return threading.current_thread() is self._thread

    def _start(self) -> None:
        waking, woken = (close_in_children(end) for end in socket.socketpair())
        waking.setblocking(False)
        woken.setblocking(False)
        thread = helper(lambda: self._listen(waking, woken), "tcp-store-receiver")
        try:
            thread.start()
        except RuntimeError as error:
            waking.close()
            woken.close()
            raise OSError(f"no thread to receive with: {error}") from error
        self._wake, self._thread = waking, thread

    def _listen(self, waking: socket.socket, woken: socket.socket) -> None:
        with waking, woken, close_in_children(selectors.DefaultSelector()) as selector:
            selector.register(woken, selectors.EVENT_READ)
            while self._take_in(selector):
                for key, _ in selector.select():
                    if key.data is None:
                        woken.recv(4096)
                    elif not key.data.hear():
                        selector.unregister(key.data.connection)
                        key.data.gone()

    def _take_in(self, selector: selectors.BaseSelector) -> bool:
        """Whether there is anything to listen to."""
        with self._lock:
            while self._coming:
                link = self._coming.popleft()
                try:
                    selector.register(link.connection, selectors.EVENT_READ, link)
                except (OSError, ValueError, KeyError) as error:
                    link.gone(error)
            if len(selector.get_map()) > 1:
                return True
            self._thread = self._wake = None
            return False


RECEIVER = _Receiver()
"""This process's."""
