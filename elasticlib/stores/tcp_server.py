"""Server of the TCP store: one thread, sockets that do not block, and bounded buffers.

Requests that have arrived are executed before any lease expires, so no lease is lost because this
process was stopped for a while. The leases of a client end with its connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import math
import resource
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import ConfigError, StoreRejectedError, format_error
from ..threads import daemon_thread
from .authentication import NONCE_BYTES, SECRET_ENV, check_secret
from .connection import SocketRelay, enable_keepalive, numeric_address, update_selector_events
from .key_space import KeySpace, KeySpaceLimits, Listing
from .tcp_protocol import MAX_FRAME_BYTES, MAX_HEADER_BYTES, EncodedListing, ServerProtocol

log = logging.getLogger("elasticlib.stores")

MAX_SELECT_S = 3600.0
RECEIVE_BYTES = 256 * 1024  # read at once from one client, before other clients are served
FLUSH_BYTES = 64 * 1024  # a longer reply is sent at once, and not at the end of the turn
ACCEPT_RETRY_DELAY_S = 0.5  # after accepting has failed
# The first four bytes of a client of torch's TCPStore. As a frame length they are never valid.
TORCH_OPENING = struct.pack("<BI", 0, 0x3C85F7CE)[:4]


@attrs.frozen
class ServerLimits:
    """The resources that clients can use.

    A client with more than `max_client_buffer_bytes` of unsent replies and incomplete requests is
    disconnected. If all clients together have more than `max_buffered_bytes`, the clients with the
    largest buffers are disconnected.
    """

    store: KeySpaceLimits = attrs.field(factory=KeySpaceLimits)
    max_frame_bytes: int = MAX_FRAME_BYTES
    max_client_buffer_bytes: int = 32 * 1024 * 1024
    max_buffered_bytes: int = 128 * 1024 * 1024
    max_connections: int = 50_000
    reserved_descriptors: int = 256  # file descriptors for everything else in this process
    max_torch_relays: int = 0  # clients of torch's store that are forwarded at a time
    handshake_timeout_s: float = 10.0
    keepalive_timeout_s: float = 60.0  # a connection whose network is down ends after this time
    close_timeout_s: float = 10.0

    def available_connections(self) -> int:
        """Return the number of connections that the limit of file descriptors allows now."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.max_connections
        return min(self.max_connections, max(soft - self.reserved_descriptors, soft // 2))


def _listen_at(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


@attrs.define(eq=False)
class _ClientConnection:
    number: int  # owner of the client's leases and watches in the key space
    socket: socket.socket
    protocol: ServerProtocol
    handshake_deadline: float
    counted_bytes: int = 0  # its part of the server's `_buffered_bytes`
    awaits_write: bool = False  # the selector waits until the socket can be written


class TcpStoreServer:
    """Server of a store in the memory of this process, for clients of class `TcpStore`.

    Args:
        host: The address, or a name of it, to bind.
        port: The port to bind; 0 for any free port, which `port` contains after `start`.
        job: The job whose store this is; "" serves any job.
        limits: The resources that clients can use.
        secret: The secret that clients must prove to know. It is never sent. The data after the
            handshake is neither encrypted nor signed.
        extra_hosts: Further addresses to bind. One that cannot be bound is logged.

    Raises:
        ConfigError: The host, the port or the secret is invalid.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str = "",
        limits: ServerLimits | None = None,
        secret: bytes | None = None,
        extra_hosts: Sequence[str] = (),
    ) -> None:
        if not host or not 0 <= port <= 65535:
            raise ConfigError(f"a server binds a named host, port 0..65535, got {host!r}, {port}")
        self.host = host
        self.port = port
        self.job = job
        self._extra_hosts = extra_hosts
        self._limits = limits or ServerLimits()
        self._secret = check_secret(secret)
        self._thread: threading.Thread | None = None  # set by `start`
        self._is_closing = threading.Event()  # set by `close`
        self._failure = ""  # why the thread has ended, if it has failed; set by the thread
        self._on_failure: Callable[[str], object] = lambda _: None  # set by `report_failure_to`
        # Address of torch's store, to which its clients are forwarded.
        self._torch_store: tuple[socket.AddressFamily, tuple[object, ...]] | None = None
        # The server's thread owns the following fields.
        stored = self._limits.store
        # A value that can be written also fits into a reply.
        value_bytes = min(stored.value_bytes, self._limits.max_frame_bytes - MAX_HEADER_BYTES)
        self._space = KeySpace(attrs.evolve(stored, value_bytes=value_bytes))
        self._numbers = itertools.count(1)  # numbers of the clients
        self._clients: dict[int, _ClientConnection] = {}
        self._unauthenticated: dict[_ClientConnection, None] = {}  # the oldest is the first
        self._unflushed: set[_ClientConnection] = set()  # clients whose send buffer has changed
        self._buffered_bytes = 0  # bytes in the buffers of all clients
        self._accept_again_at = math.inf  # when to listen again after accepting has failed
        self._relays: set[SocketRelay] = set()  # connections of torch's clients
        self._has_warned_of_torch = False

    def start(self) -> TcpStoreServer:
        """Bind, listen and serve in a new thread. Does nothing if the server is running.

        Returns:
            The server itself.

        Raises:
            ConfigError: The server was closed, or its thread has failed.
            OSError: The address cannot be bound.
        """
        if self.is_serving and not self._is_closing.is_set():
            return self
        if self._thread is not None or self._is_closing.is_set():
            raise ConfigError(
                f"the server of {self.address} is closed and cannot be started again: create a new "
                "TcpStoreServer"
            )
        self._listeners = [_listen_at(self.host, self.port)]
        name = self._listeners[0].getsockname()
        self.host, self.port = numeric_address(name), name[1]
        for host in self._extra_hosts:
            try:
                self._listeners.append(_listen_at(host, self.port))
            except OSError as error:
                log.info("the store at %s is not served at %s as well: %s", self.host, host, error)
        self._max_clients = self._limits.available_connections()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._set_accepting(True)
        self._thread = daemon_thread(self._serve, "tcp-store-server", self._fail)
        self._thread.start()
        if self._secret is None and not ipaddress.ip_address(self.host).is_loopback:
            log.warning(
                "anyone who can reach %s can read and change this store: to admit only nodes "
                "that know a secret, set %s to the same value on all nodes",
                self.address,
                SECRET_ENV,
            )
        return self

    def forward_torch_clients_to(self, address: tuple[str, int] | None) -> None:
        """Forward clients of torch's TCPStore that connect to this server to another address.

        Args:
            address: Host and port of torch's store. If None, its clients are disconnected.
        """
        infos = address and socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        self._torch_store = (infos[0][0], infos[0][4]) if infos else None

    def report_failure_to(self, on_failure: Callable[[str], object]) -> None:
        """Call a function with the reason if the thread of the server fails, or has failed before.

        Nobody can use the store then. An error that concerns one client ends only its connection,
        and is no failure of the server.

        Args:
            on_failure: Receives one sentence, in the thread of the server or in this one. It may be
                called twice.
        """
        self._on_failure = on_failure
        if self._failure:
            on_failure(self._failure)

    @property
    def is_serving(self) -> bool:
        """True while the thread of the server is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def address(self) -> str:
        """The host and the port as one text, with IPv6 in brackets."""
        return join_endpoint(self.host, self.port)

    @property
    def clients(self) -> int:
        """The number of authenticated clients."""
        return len(self.labels)

    @property
    def labels(self) -> tuple[str, ...]:
        """The `TcpStore.label` of each authenticated client."""
        if not self.is_serving:
            return ()
        clients = list(self._clients.values())  # a copy, because the thread changes the dict
        return tuple(c.protocol.label for c in clients if c.protocol.is_authenticated)

    def wait_closed(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the server has stopped. Return True if it has."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_serving

    def close(self) -> None:
        """Disconnect all clients and stop the thread, or log where it is if it does not stop.

        Closing a closed server does nothing.
        """
        self._is_closing.set()
        if self._thread is None or not self.is_serving:
            return  # it has stopped, or this is a forked child of its process
        with contextlib.suppress(OSError):  # the thread has just stopped
            self._wake_writer.send(b"!")
        if not self.wait_closed(self._limits.close_timeout_s):
            position = "no longer running"
            if (frame := sys._current_frames().get(self._thread.ident or 0)) is not None:
                code = frame.f_code
                position = f"in {code.co_filename}, line {frame.f_lineno}, {code.co_name}"
            log.error(
                "the store's server at %s has not stopped within %g s and is abandoned; its "
                "thread is %s",
                self.address,
                self._limits.close_timeout_s,
                position,
            )

    def __enter__(self) -> TcpStoreServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- event loop ---------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._run_once()
        except Exception as error:
            reason = (
                f"the store's server at {self.address} failed, and its clients are disconnected: "
                f"{format_error(error)}"
            )
            log.exception("%s", reason)
            self._fail(reason)
        finally:
            for client in list(self._clients.values()):
                self._disconnect(client)
            for relay in self._relays:
                relay.close()
            self._selector.close()
            for sock in (*self._listeners, self._wake_reader, self._wake_writer):
                sock.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._on_failure(reason)

    def _run_once(self) -> None:
        self._handle_events(self._select_timeout(monotonic()))
        if self._space.lease_timers.is_due(monotonic()):
            # If this process was stopped, refreshes of its clients are waiting in their sockets.
            self._handle_events(0.0)
            self._space.expire_leases(monotonic())
        self._notify_watchers()
        for client in list(self._unflushed):
            self._flush(client)
        self._unflushed.clear()
        now = monotonic()
        while (oldest := self._oldest_unauthenticated()) and oldest.handshake_deadline <= now:
            self._disconnect(oldest)
        if now >= self._accept_again_at:
            self._accept_again_at = math.inf
            try:
                self._set_accepting(True)
            except OSError as error:
                self._pause_accepting(error)

    def _select_timeout(self, now: float) -> float:
        if self._space.has_notifications:
            return 0.0
        lease, client = self._space.lease_timers.until_due(now), self._oldest_unauthenticated()
        timeout = min(
            MAX_SELECT_S if lease is None else lease,
            MAX_SELECT_S if client is None else client.handshake_deadline - now,
            self._accept_again_at - now,
        )
        return max(timeout, 0.0)

    def _handle_events(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            if isinstance(key.data, _ClientConnection):
                client = key.data
                if events & selectors.EVENT_READ and client.number in self._clients:
                    self._receive_or_disconnect(client)
                if events & selectors.EVENT_WRITE and client.number in self._clients:
                    self._unflushed.add(client)
            elif isinstance(key.data, SocketRelay):
                self._run_relay(key.data)
            elif key.fileobj is self._wake_reader:
                self._wake_reader.recv(4096)
            else:
                self._accept(key.data)

    # -- new connections ----------------------------------------------------------------------

    def _set_accepting(self, accepts: bool) -> None:
        for listener in self._listeners:
            update_selector_events(self._selector, listener, listener, accepts, False)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(256):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                self._pause_accepting(error)
                return
            try:
                self._add_client(connection)
            except OSError as error:
                connection.close()
                self._pause_accepting(error)
                return

    def _pause_accepting(self, error: OSError) -> None:
        """Accept no connection for a while, and disconnect half of the unauthenticated clients.

        For example, no descriptor is left, or the kernel watches no more of them for this user. The
        listener stays readable, so it has to be ignored.
        """
        log.warning(
            "the store's server at %s cannot accept a connection, retrying in %g s: %s",
            *(self.address, ACCEPT_RETRY_DELAY_S, error),
        )
        for client in list(self._unauthenticated)[: len(self._unauthenticated) // 2 + 1]:
            self._disconnect(client)
        self._set_accepting(False)
        self._accept_again_at = monotonic() + ACCEPT_RETRY_DELAY_S

    def _add_client(self, connection: socket.socket) -> None:
        """Serve a new connection.

        Raises:
            OSError: The kernel cannot watch the connection.
        """
        connection.setblocking(False)
        limits = self._limits
        try:
            enable_keepalive(connection, limits.keepalive_timeout_s)
        except OSError:
            connection.close()
            return
        nonce = secrets.token_bytes(NONCE_BYTES).hex()
        protocol = ServerProtocol(self.job, self._secret, nonce, limits.max_frame_bytes)
        deadline = monotonic() + limits.handshake_timeout_s
        client = _ClientConnection(next(self._numbers), connection, protocol, deadline)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._clients[client.number] = client
        self._unauthenticated[client] = None
        if len(self._clients) > self._max_clients:
            oldest = self._oldest_unauthenticated()
            if oldest is not None and oldest is not client:
                self._disconnect(oldest)
            else:
                error = StoreRejectedError(f"serves at most {self._max_clients} connections")
                protocol.reject(error)
                self._end_rejected(client)

    def _oldest_unauthenticated(self) -> _ClientConnection | None:
        return next(iter(self._unauthenticated), None)

    # -- requests and replies -----------------------------------------------------------------

    def _receive_or_disconnect(self, client: _ClientConnection) -> None:
        """Execute the requests of one client. An error there must not end the other clients."""
        try:
            self._receive(client)
        except Exception as error:
            log.exception(
                "disconnected client %s, whose request failed: %s",
                *(client.protocol.label, format_error(error)),
            )
            if client.number in self._clients:
                self._disconnect(client)

    def _receive(self, client: _ClientConnection) -> None:
        try:
            data = client.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect(client)
            return
        protocol, now = client.protocol, monotonic()
        protocol.receive(data)
        if client in self._unauthenticated and protocol.receive_buffer.startswith(TORCH_OPENING):
            self._relay_to_torch(client)
            return
        while (request := protocol.next_request()) is not None:
            protocol.execute_request(request, self._space, client.number, now)
            if len(protocol.send_buffer) >= FLUSH_BYTES and not self._flush(client):
                return
        if protocol.is_rejected:
            self._end_rejected(client)
            return
        if protocol.is_authenticated:
            self._unauthenticated.pop(client, None)
        self._unflushed.add(client)

    def _notify_watchers(self) -> None:
        listing: Listing | None = None  # the listing that `encoded` contains
        encoded: EncodedListing | None = None
        for watch, result in self._space.take_notifications():
            client = self._clients.get(watch.owner)
            if client is None:
                continue
            # All watches of a prefix have the same listing, which is encoded once.
            if isinstance(result, Listing) and result is not listing:
                listing, encoded = result, EncodedListing.of(result)
            client.protocol.notify(watch.number, encoded if result is listing else None)
            if len(client.protocol.send_buffer) >= FLUSH_BYTES:
                self._flush(client)
            else:
                self._unflushed.add(client)

    def _flush(self, client: _ClientConnection) -> bool:
        """Send what the socket accepts, and enforce the limits. Return False if disconnected."""
        if client.number not in self._clients:
            return False
        buffer = client.protocol.send_buffer
        try:
            with contextlib.suppress(BlockingIOError):
                if buffer:
                    del buffer[: client.socket.send(buffer)]
            if client.awaits_write != bool(buffer):
                client.awaits_write = bool(buffer)
                update_selector_events(self._selector, client.socket, client, True, bool(buffer))
        except OSError:
            self._disconnect(client)
            return False
        return self._enforce_client_limit(client)

    # -- limits -------------------------------------------------------------------------------

    def _enforce_client_limit(self, client: _ClientConnection) -> bool:
        """Update the count of a client's buffered bytes, and enforce its limit and the total.

        Return False if this client is disconnected.
        """
        size = client.protocol.buffered_bytes
        self._buffered_bytes += size - client.counted_bytes
        client.counted_bytes = size
        limit = self._limits.max_client_buffer_bytes
        if size > limit:
            self._disconnect_over_limit(client, f"one client has at most {limit} bytes")
            return False
        self._enforce_total_buffer_limit()  # many clients can request long replies within one turn
        return client.number in self._clients

    def _enforce_total_buffer_limit(self) -> None:
        """Disconnect the clients with the largest buffers until the total is within its limit."""
        limit = self._limits.max_buffered_bytes
        while (size := self._buffered_bytes) > limit:
            largest = max(self._clients.values(), key=lambda client: client.counted_bytes)
            reason = f"all clients together have at most {limit} bytes, and they have {size}"
            self._disconnect_over_limit(largest, reason)

    def _disconnect_over_limit(self, client: _ClientConnection, reason: str) -> None:
        log.warning(
            "disconnected client %s, which has %d bytes of unread replies and incomplete requests: "
            "%s",
            client.protocol.label,
            client.counted_bytes,
            reason,
        )
        self._disconnect(client)

    # -- end of connections -------------------------------------------------------------------

    def _end_rejected(self, client: _ClientConnection) -> None:
        """Send what the socket accepts of the error, and disconnect the rejected client."""
        if self._flush(client):
            with contextlib.suppress(OSError):
                client.socket.shutdown(socket.SHUT_WR)
                # Closing a socket with unread data would discard the error.
                client.socket.recv(RECEIVE_BYTES)
            self._disconnect(client)

    def _disconnect(self, client: _ClientConnection) -> None:
        self._forget(client)
        client.socket.close()

    def _forget(self, client: _ClientConnection) -> None:
        """Stop serving a client, and end its leases and watches. Its socket stays open."""
        del self._clients[client.number]
        self._unauthenticated.pop(client, None)
        self._space.remove_owner(client.number)
        self._buffered_bytes -= client.counted_bytes
        update_selector_events(self._selector, client.socket, client, False, False)

    # -- clients of torch's store -------------------------------------------------------------

    def _relay_to_torch(self, client: _ClientConnection) -> None:
        """Connect a client of torch's TCPStore to torch's store, without answering it here.

        A static job has one port that all nodes and scripts know. This server listens there, and
        torch's store of the generation listens elsewhere. The client is disconnected if there is no
        such store, or if too many connections are forwarded.
        """
        if not self._limits.max_torch_relays and not self._has_warned_of_torch:
            self._has_warned_of_torch = True
            log.warning(
                "a script tried to reach torch's store at the port of elasticlib's store (%s) and "
                "was disconnected: use init_method='env://', or MASTER_ADDR and MASTER_PORT, or "
                "--rdzv-backend static",
                self.address,
            )
        if self._torch_store is None or len(self._relays) >= self._limits.max_torch_relays:
            self._disconnect(client)  # torch's client tries again
            return
        family, address = self._torch_store
        try:
            upstream = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            log.warning("disconnected a client of torch's store, which tries again: %s", error)
            self._disconnect(client)
            return
        self._forget(client)
        upstream.setblocking(False)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        upstream.connect_ex(address)  # a failure is noticed when the socket is used
        unsent = {client.socket: b"", upstream: bytes(client.protocol.receive_buffer)}
        relay = SocketRelay(self._selector, unsent)
        self._relays.add(relay)
        self._run_relay(relay)

    def _run_relay(self, relay: SocketRelay) -> None:
        if relay in self._relays and not relay.relay_once():
            self._relays.discard(relay)
            relay.close()
