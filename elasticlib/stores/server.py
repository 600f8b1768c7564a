"""The server of the TCP store: one thread, no socket that blocks, every buffer bounded.

What has arrived is answered before any lease ends, so a server that was stopped for a while
ends nobody's lease on waking; a lease whose owner's connection ends, ends with it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import secrets
import selectors
import socket
import threading
from collections.abc import Collection

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import ConfigError, ElasticError, StoreRefused
from .admission import Admission
from .forks import close_in_children, renew_in_children
from .peer import Peer, address_of, keep_honest
from .secret import NONCE_BYTES, VARIABLE, check_secret
from .service import StoreService, error_frame
from .state import Limits
from .wire import MAX_FRAME_BYTES, Frame

log = logging.getLogger("elasticlib.stores")

LONGEST_SLEEP = 3600.0


@attrs.frozen
class ServerLimits:
    """What one client, and all of them together, may cost the server.

    spare_descriptors: of those that this process may have, so many are for all else that it does.
    """

    store: Limits = attrs.field(factory=Limits)
    frame_bytes: int = MAX_FRAME_BYTES
    connections: int = 50_000
    spare_descriptors: int = 256
    unsent_bytes: int = 64 * 1024 * 1024
    handshake_seconds: float = 10.0
    silent_network_seconds: float = 60.0

    def most_connections(self) -> int:
        """As many as this process may have open now; where that is little, half of it."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.connections
        return min(self.connections, max(soft - self.spare_descriptors, soft // 2))


class TcpStoreServer:
    """Serves one keyspace to `TcpStore` clients.

    Args:
        host: the one address, or name, to bind.
        port: 0 for one that the system picks; `port` tells which after `start`.
        job: the job it serves; "" serves any.
        limits: what clients may cost it.
        secret: what its clients must prove to know; it is never sent. What follows the proof is
            neither encrypted nor signed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str = "",
        limits: ServerLimits | None = None,
        secret: bytes | None = None,
    ) -> None:
        if not host or not 0 <= port <= 65535:
            raise ConfigError(f"a server binds a named host, port 0..65535, got {host!r}, {port}")
        self.host = host
        self.port = port
        self.job = job
        self._limits = limits or ServerLimits()
        self._secret = check_secret(secret)
        self._loop: _Loop | None = None
        renew_in_children(self)

    def begin_anew(self) -> None:
        """In a forked child nothing serves: the parent does, and the child is free to start."""
        self._loop = None

    def start(self) -> TcpStoreServer:
        """Bind, listen and serve in a thread. Raises the OSError of a failed bind unchanged."""
        if self._loop is None:
            listener = _listen(self.host, self.port)
            name = listener.getsockname()
            self.host, self.port = address_of(name), name[1]
            self._loop = _Loop(listener, self.job, self._secret, self._limits)
            self._loop.start()
            if self._secret is None and not _is_loopback(self.host):
                log.warning(
                    "whoever reaches %s can read and change this store: to let in only those who "
                    "know a secret, set %s, to the same for all nodes",
                    self.address,
                    VARIABLE,
                )
        return self

    @property
    def serving(self) -> bool:
        """Whether the server's thread lives."""
        return self._loop is not None and self._loop.serving

    @property
    def address(self) -> str:
        """`host:port`, IPv6 in brackets."""
        return join_endpoint(self.host, self.port)

    @property
    def clients(self) -> int:
        """How many clients are connected, past their handshake."""
        return len(self.labels)

    @property
    def labels(self) -> tuple[str, ...]:
        """The `TcpStore.label` of every client that is connected."""
        return () if self._loop is None else self._loop.labels()

    def wait_alone(self, own: Collection[str], timeout: float) -> bool:
        """Block until only clients whose labels are in `own` are connected, or the timeout."""
        return self._loop is None or self._loop.wait_alone(frozenset(own), timeout)

    def wait_closed(self, timeout: float) -> bool:
        """Block until nothing is served any more, or the timeout."""
        return self._loop is None or self._loop.wait_stopped(timeout)

    def close(self) -> None:
        """End all connections and the thread. Closing twice is harmless."""
        if self._loop is not None:
            self._loop.stop()

    def __enter__(self) -> TcpStoreServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = close_in_children(socket.socket(family, kind, proto))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class _Loop:
    """The thread, and all that only the thread touches, but for `_labels` and `_stopping`."""

    def __init__(
        self, listener: socket.socket, job: str, secret: bytes | None, limits: ServerLimits
    ) -> None:
        self._limits = limits
        self._most = limits.most_connections()
        self._job = job
        self._secret = secret
        self._service = StoreService(limits.store, limits.frame_bytes)
        self._listener = listener
        self._peers: dict[int, Peer] = {}
        self._unsettled: dict[int, float] = {}
        self._dirty: set[int] = set()
        self._accepted = 0
        self._accept_again: float | None = None
        self._labels: dict[int, str] = {}
        self._labels_changed = threading.Condition()
        self._stopping = threading.Event()
        self._wake, self._woken = map(close_in_children, socket.socketpair())
        self._selector = close_in_children(selectors.DefaultSelector())
        self._thread = threading.Thread(target=self._serve, name="tcp-store-server", daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self._thread.start()

    def stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            with contextlib.suppress(OSError):  # the thread has ended by itself
                self._woken.send(b"!")
        self._thread.join()

    @property
    def serving(self) -> bool:
        return self._thread.is_alive()

    def wait_stopped(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def labels(self) -> tuple[str, ...]:
        with self._labels_changed:
            return tuple(self._labels.values())

    def wait_alone(self, own: frozenset[str], timeout: float) -> bool:
        with self._labels_changed:
            return self._labels_changed.wait_for(
                lambda: own.issuperset(self._labels.values()), timeout
            )

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception:
            log.exception("the store's server broke: its clients are cut off")
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer)
            self._selector.close()
            self._listener.close()
            self._wake.close()
            self._woken.close()

    def _turn(self) -> None:
        self._handle(self._patience(monotonic()))
        if self._service.look_is_due(monotonic()):
            # If this process stood still, its clients' refreshes lie unread: they come first.
            self._handle(0)
            self._service.end_silent_leases(monotonic())
        now = monotonic()
        for number, frame in self._service.settle(now):
            self._send(self._peers[number], frame)
        self._end_unsettled(now)
        self._flush()

    def _patience(self, now: float) -> float:
        """Seconds that the loop may sleep if nothing arrives."""
        # A client may wait for longer than a selector can.
        pauses = [
            LONGEST_SLEEP,
            self._service.until_due(now),
            *(t - now for t in self._first_unsettled()),
        ]
        if self._accept_again is not None:
            pauses.append(self._accept_again - now)
        return max(min(p for p in pauses if p is not None), 0.0)

    def _handle(self, patience: float) -> None:
        for key, events in self._selector.select(patience):
            if isinstance(key.data, Peer):
                # A peer may have been dropped earlier in this round.
                if events & selectors.EVENT_READ and key.data.number in self._peers:
                    self._receive(key.data)
                if events & selectors.EVENT_WRITE:
                    self._dirty.add(key.data.number)
            elif key.data is self._listener:
                self._accept()
        if self._accept_again is not None and monotonic() >= self._accept_again:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)

    def _accept(self) -> None:
        for _ in range(256):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # Out of descriptors, say, or a network that is down: the listener may be ready
                # for ever, and those who are connected already must not pay. Look away a while,
                # and have half of those who are not in yet make way.
                log.warning("cannot accept a connection just now: %s", error)
                for number in list(self._unsettled)[: (len(self._unsettled) + 1) // 2]:
                    self._drop(self._peers[number])
                self._selector.unregister(self._listener)
                self._accept_again = monotonic() + 0.5
                return
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        close_in_children(connection).setblocking(False)
        try:
            keep_honest(connection, self._limits.silent_network_seconds)
        except OSError:
            connection.close()
            return
        self._accepted += 1
        admission = Admission(self._job, self._secret, secrets.token_bytes(NONCE_BYTES).hex())
        peer = Peer(self._accepted, connection, admission, self._limits.frame_bytes)
        self._peers[peer.number] = peer
        self._unsettled[peer.number] = monotonic() + self._limits.handshake_seconds
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._make_room(peer)

    def _make_room(self, newcomer: Peer) -> None:
        """At the limit, who is not in yet makes way; where all others are, the newcomer does."""
        most = self._most
        if len(self._peers) <= most:
            return
        oldest = next(iter(self._unsettled))
        if oldest != newcomer.number:
            self._drop(self._peers[oldest])
        if len(self._peers) > most:
            self._refuse(newcomer, 0, StoreRefused(f"serves at most {most} connections"))

    def _receive(self, peer: Peer) -> None:
        frames = peer.receive()
        if frames is None:
            self._drop(peer)
            return
        try:
            for frame in frames:
                if peer.label is None:
                    self._admit(peer, frame)
                else:
                    self._answer(peer, frame)
                if peer.ending:
                    return
        except StoreRefused as error:
            self._refuse(peer, 0, error)

    def _answer(self, peer: Peer, frame: Frame) -> None:
        reply = self._service.answer(peer.number, frame, monotonic())
        if reply is not None:
            self._send(peer, reply)

    def _admit(self, peer: Peer, frame: Frame) -> None:
        try:
            answer = peer.admission.hear(frame)
        except StoreRefused as error:
            self._refuse(peer, frame.id, error)
            return
        if peer.label is not None:
            peer.let_in()
            del self._unsettled[peer.number]
            with self._labels_changed:
                self._labels[peer.number] = peer.label
        self._send(peer, answer)

    def _send(self, peer: Peer, frame: Frame) -> None:
        peer.send(frame)
        self._dirty.add(peer.number)

    def _flush(self) -> None:
        for peer in [self._peers[n] for n in self._dirty if n in self._peers]:
            if not peer.flush() or peer.unsent > self._limits.unsent_bytes:
                self._drop(peer)
            elif bool(peer.unsent) != peer.watching_writes:
                peer.watching_writes = bool(peer.unsent)
                events = selectors.EVENT_READ | selectors.EVENT_WRITE * peer.watching_writes
                self._selector.modify(peer.connection, events, peer)
        self._dirty.clear()

    def _refuse(self, peer: Peer, number: int, error: ElasticError) -> None:
        """Say why, then end the connection once the client has had time to read it."""
        self._send(peer, error_frame(number, error))
        peer.ending = True
        self._leave(peer)
        self._unsettled[peer.number] = monotonic() + self._limits.handshake_seconds

    def _leave(self, peer: Peer) -> None:
        self._service.depart(peer.number)
        self._unsettled.pop(peer.number, None)
        with self._labels_changed:
            self._labels.pop(peer.number, None)
            self._labels_changed.notify_all()

    def _drop(self, peer: Peer) -> None:
        del self._peers[peer.number]
        self._leave(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _first_unsettled(self) -> list[float]:
        # All have the same patience, so the first to come is the first to go.
        return [next(iter(self._unsettled.values()))] if self._unsettled else []

    def _end_unsettled(self, now: float) -> None:
        """Drop those who did not finish their handshake, or linger after a refusal."""
        while any(deadline <= now for deadline in self._first_unsettled()):
            self._drop(self._peers[next(iter(self._unsettled))])
