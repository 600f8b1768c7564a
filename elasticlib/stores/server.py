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
import sys
import threading
from collections.abc import Collection

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import ConfigError, ElasticError, StoreRefused
from ..threads import helper
from .admission import Admission
from .forks import close_in_children, renew_in_children
from .peer import RECEIVE_BYTES, Peer, address_of, keep_honest
from .relay import Relay, is_torchs
from .secret import NONCE_BYTES, VARIABLE, check_secret
from .service import MAX_WAITS_IN_ALL, StoreService, error_frame
from .state import Limits
from .wire import MAX_FRAME_BYTES, Frame

log = logging.getLogger("elasticlib.stores")

LONGEST_SLEEP = 3600.0
FRAMES_A_TURN = 64
"""Of one client, before it is the others' turn."""
FLUSH_BYTES = 64 * 1024
"""So many are sent at once, not at the end of the turn."""
CROWDED_RECEIVE_BYTES = 4096
LINGER_SECONDS = 2.0
"""For which a refused client may read why, and is then cut."""
LOOK_SECONDS = 0.5
"""Between two looks for clients that are to be cut."""
LONG_ANSWERS = frozenset({"get", "compare_set", "list", "watch"})
"""Operations whose answers carry values."""


@attrs.frozen
class ServerLimits:
    """What one client, and all of them together, may cost the server.

    spare_descriptors: of those that this process may have, so many are for all else that it does.
    close_seconds: for the server's thread to end. unsent_bytes: above so many that a client has not
    taken yet, nothing more is done for it. held_bytes: above so many in the buffers of all
    connections, in both directions, long answers wait until there are fewer. unread_seconds: who
    leaves bytes unread, or a frame unfinished, for so long is cut; crowded_seconds: the same while
    there are more than held_bytes, largest first, until half of that is free.
    """

    store: Limits = attrs.field(factory=Limits)
    frame_bytes: int = MAX_FRAME_BYTES
    connections: int = 50_000
    spare_descriptors: int = 256
    waits: int = MAX_WAITS_IN_ALL
    unsent_bytes: int = 1024 * 1024
    held_bytes: int = 128 * 1024 * 1024
    handshake_seconds: float = 10.0
    unread_seconds: float = 60.0
    crowded_seconds: float = 2.0
    silent_network_seconds: float = 60.0
    close_seconds: float = 10.0

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
        relay: has the connections that clients of torch's store make to this port. Without it
            they are cut off, and the log says so.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str = "",
        limits: ServerLimits | None = None,
        secret: bytes | None = None,
        relay: Relay | None = None,
    ) -> None:
        if not host or not 0 <= port <= 65535:
            raise ConfigError(f"a server binds a named host, port 0..65535, got {host!r}, {port}")
        self.host = host
        self.port = port
        self.job = job
        self._limits = limits or ServerLimits()
        self._secret = check_secret(secret)
        self._relay = relay
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
            self._loop.relay = self._relay
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
        """End all connections and the thread, within some seconds: what does not end by then is
        named in the log and left behind. Closing twice is harmless."""
        seconds = self._limits.close_seconds
        if self._loop is not None and not self._loop.stop(seconds):
            log.error(
                "the store's server at %s has not ended within %g s; it stands %s",
                self.address,
                seconds,
                self._loop.stands(),
            )

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
        self._service = StoreService(limits.store, limits.frame_bytes, limits.waits)
        self.relay: Relay | None = None
        self._told_of_torchs = False
        self._listener = listener
        self._peers: dict[int, Peer] = {}
        self._unsettled: dict[int, float] = {}
        self._refused: dict[int, float] = {}
        self._dirty: set[int] = set()
        self._waiting: dict[int, bool] = {}
        self._behind: dict[int, None] = {}
        self._held = 0
        self._next_look = 0.0
        self._accepted = 0
        self._accept_again: float | None = None
        self._labels: dict[int, str] = {}
        self._labels_changed = threading.Condition()
        self._stopping = threading.Event()
        self._wake, self._woken = map(close_in_children, socket.socketpair())
        self._selector = close_in_children(selectors.DefaultSelector())
        self._thread = helper(self._serve, "tcp-store-server")

    def start(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Whether the thread has ended within so many seconds."""
        if not self._stopping.is_set():
            self._stopping.set()
            with contextlib.suppress(OSError):  # the thread has ended by itself
                self._woken.send(b"!")
        return self.wait_stopped(seconds)

    def stands(self) -> str:
        """In which line the thread is; for people."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "nowhere, as it has ended"
        return f"in {frame.f_code.co_filename}, line {frame.f_lineno}, {frame.f_code.co_name}"

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
            while self._go_on():
                pass
            self._service.end_silent_leases(monotonic())
        now = monotonic()
        for number, frame in self._service.settle(now, self._takes_long_answers):
            # Who is dropped in here has no waits left.
            self._send(self._peers[number], frame, now)
        self._flush()
        now = monotonic()
        self._end_unsettled(now)
        self._cut_off(now)

    def _patience(self, now: float) -> float:
        """Seconds that the loop may sleep if nothing arrives."""
        if any(self._may_go_on(self._peers[number]) for number in self._waiting):
            return 0.0
        # A client may wait for longer than a selector can.
        pauses = [
            LONGEST_SLEEP,
            self._service.until_due(now),
            *(t - now for _, t in self._first_unsettled()),
        ]
        if self._accept_again is not None:
            pauses.append(self._accept_again - now)
        if self._behind:
            pauses.append(self._next_look - now)
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
        self._go_on()
        if self._accept_again is not None and monotonic() >= self._accept_again:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)

    def _go_on(self) -> bool:
        """A turn for each client that has sent more than could be handled yet; whether any had."""
        went_on = False
        for number in list(self._waiting):
            peer = self._peers.get(number)
            if peer is not None and self._may_go_on(peer):
                self._proceed(peer)
                went_on = True
        return went_on

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
        oldest, _ = self._first_unsettled()[0]
        if oldest != newcomer.number:
            self._drop(self._peers[oldest])
        if len(self._peers) > most:
            self._refuse(newcomer, 0, StoreRefused(f"serves at most {most} connections"))

    def _receive(self, peer: Peer) -> None:
        if peer.number in self._waiting:
            return  # what it has sent before comes first
        if not self._may_go_on(peer):
            self._wait_for_room(peer)
            return
        little = self._is_crowded() and not peer.has_half_a_frame
        if not peer.receive(CROWDED_RECEIVE_BYTES if little else RECEIVE_BYTES):
            self._drop(peer)
        elif not peer.ending:
            self._proceed(peer)

    def _proceed(self, peer: Peer) -> None:
        """Handle what has arrived of it, as far as it is its turn and there is room."""
        if self._waiting.pop(peer.number, False):
            self._dirty.add(peer.number)  # it is to be read from again
        now = monotonic()
        try:
            for _ in range(FRAMES_A_TURN):
                frame = peer.next_frame(now)
                if frame is None or not self._may_go_on(peer):
                    break
                peer.handled()
                if peer.label is None:
                    self._admit(peer, frame)
                elif (answer := self._service.answer(peer.number, frame, now)) is not None:
                    self._send(peer, answer, now)
                if peer.ending or peer.number not in self._peers:
                    return
            if peer.next_frame(now) is not None:
                self._wait_for_room(peer)
        except StoreRefused as error:
            if peer.label is None and is_torchs(peer.unread):
                self._pass_on(peer)
            else:
                self._refuse(peer, 0, error)
        else:
            self._count(peer)

    def _pass_on(self, peer: Peer) -> None:
        """A client of torch's store is not answered: it takes what it gets for torch's words."""
        if self.relay is None and not self._told_of_torchs:
            self._told_of_torchs = True
            log.warning(
                "a script looks for torch's store at the port where elasticlib's nodes meet, and "
                "it is not there: use init_method='env://', or MASTER_ADDR and MASTER_PORT, or "
                "--rdzv-backend static"
            )
        first = peer.unread
        self._forget(peer)
        if self.relay is None or not self.relay.take(peer.connection, first):
            peer.connection.close()

    # -- bounds -------------------------------------------------------------------------------

    def _is_crowded(self) -> bool:
        return self._held > self._limits.held_bytes

    def _may_go_on(self, peer: Peer) -> bool:
        """Whether there is room for what it sends next, or for the answer to what it has sent."""
        if peer.ending:
            return True
        if not self._is_crowded():
            return peer.unsent <= self._limits.unsent_bytes
        frame = peer.waiting_frame
        if frame is not None:
            return not peer.unsent and frame.op not in LONG_ANSWERS
        # Of those that have sent a part of a frame, one at a time may send the rest.
        return not peer.has_half_a_frame or peer.number == next(iter(self._behind), None)

    def _takes_long_answers(self, number: int) -> bool:
        """Whether this client may be sent what is there, in place of that there is something."""
        unsent = self._peers[number].unsent
        return not self._is_crowded() and unsent <= self._limits.unsent_bytes

    def _wait_for_room(self, peer: Peer) -> None:
        """Read nothing more from it; each turn looks whether there is room again."""
        self._waiting[peer.number] = True
        self._dirty.add(peer.number)

    def _count(self, peer: Peer) -> None:
        """Keep the account of what the buffers take, and who takes it, the first one first."""
        size = peer.held_bytes
        self._held += size - peer.counted
        peer.counted = size
        if size:
            self._behind.setdefault(peer.number)
        else:
            self._behind.pop(peer.number, None)

    def _cut_off(self, now: float) -> None:
        """End the connections of those who hold bytes here for too long."""
        if not self._behind or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        # Where it is crowded, not the least is made room: those who wait are to get on.
        enough = self._limits.held_bytes // 2 if self._is_crowded() else self._limits.held_bytes
        behind = [self._peers[number] for number in self._behind]
        for peer in sorted(behind, key=lambda peer: peer.counted, reverse=True):
            waited = now - peer.behind_since(now)
            too_long = self._held > enough and waited > self._limits.crowded_seconds
            if too_long or waited > self._limits.unread_seconds:
                log.warning(
                    "cut off client %s: %d bytes, of answers that it does not read or of a frame "
                    "that it does not finish, lay here for %.1f s",
                    peer.label,
                    peer.counted,
                    waited,
                )
                self._drop(peer)

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
        self._send(peer, answer, monotonic())

    def _send(self, peer: Peer, frame: Frame, now: float) -> None:
        peer.send(frame, now)
        self._dirty.add(peer.number)
        if peer.unsent < FLUSH_BYTES:
            return
        if peer.flush(now):
            self._count(peer)
        else:
            self._drop(peer)

    def _flush(self) -> None:
        now = monotonic()
        for peer in [self._peers[n] for n in self._dirty if n in self._peers]:
            if not peer.flush(now):
                self._drop(peer)
                continue
            self._count(peer)
            reading = peer.number not in self._waiting or self._may_go_on(peer)
            events = selectors.EVENT_READ * reading | selectors.EVENT_WRITE * bool(peer.unsent)
            if events != peer.events:
                self._listen_for(peer, events)
        self._dirty.clear()

    def _listen_for(self, peer: Peer, events: int) -> None:
        if not events:
            self._selector.unregister(peer.connection)
        elif not peer.events:
            self._selector.register(peer.connection, events, peer)
        else:
            self._selector.modify(peer.connection, events, peer)
        peer.events = events

    def _refuse(self, peer: Peer, number: int, error: ElasticError) -> None:
        """Say why, then end the connection once the client has had time to read it."""
        peer.end()
        self._send(peer, error_frame(number, error), monotonic())
        if peer.number not in self._peers:
            return
        self._leave(peer)
        seconds = min(LINGER_SECONDS, self._limits.handshake_seconds)
        self._refused[peer.number] = monotonic() + seconds

    def _leave(self, peer: Peer) -> None:
        self._service.depart(peer.number)
        for numbers in (self._unsettled, self._refused, self._waiting):
            numbers.pop(peer.number, None)
        with self._labels_changed:
            self._labels.pop(peer.number, None)
            self._labels_changed.notify_all()

    def _drop(self, peer: Peer) -> None:
        self._forget(peer)
        peer.connection.close()

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.number]
        self._leave(peer)
        self._held -= peer.counted
        self._behind.pop(peer.number, None)
        if peer.events:
            self._selector.unregister(peer.connection)

    def _first_unsettled(self) -> list[tuple[int, float]]:
        """Who is to go first, and when, of those refused and of those who are not in yet."""
        # In each all have the same patience, so the first to come is the first to go.
        return [next(iter(one.items())) for one in (self._refused, self._unsettled) if one]

    def _end_unsettled(self, now: float) -> None:
        """Drop those who did not finish their handshake, or linger after a refusal."""
        while due := [number for number, deadline in self._first_unsettled() if deadline <= now]:
            for number in due:
                self._drop(self._peers[number])
