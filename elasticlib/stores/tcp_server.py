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
from collections import deque
from collections.abc import Sequence
from functools import partial

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import ConfigError, ElasticError, LeaseLost, StoreRefused
from ..threads import helper
from .interface import Listing, Watched, check_key, check_ttl
from .keyspace import KeySpace, Lease, Limits, Watch
from .memory import HostedStore, Shared
from .relay import Relay, is_torchs, listen
from .secret import NONCE_BYTES, VARIABLE, check_secret
from .sockets import address_of, close_in_children, keep_honest, listen_at, renew_in_children
from .tcp_peer import RECEIVE_BYTES, Peer
from .tcp_protocol import (
    MAX_FRAME_BYTES,
    Frame,
    ServerHandshake,
    answer,
    encode,
    error_frame,
    has_long_answer,
    pack,
    pack_fields,
    whole_listing,
)

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


@attrs.frozen
class ServerLimits:
    """What one client, and all of them together, may cost the server.

    spare_descriptors: of those that this process may have, so many are for all else that it does.
    close_seconds: for the server's thread to end. unsent_bytes: above so many that a client has not
    taken yet, nothing more is done for it. held_bytes: above so many in the buffers of all
    connections, in both directions, long answers wait until there are fewer. unread_seconds: who
    leaves bytes unread, or a frame unfinished, for so long is cut; crowded_seconds: the same while
    there are more than held_bytes, largest first, until half of that is free. torch_links: clients
    of torch's store that are passed on at a time.
    """

    store: Limits = attrs.field(factory=Limits)
    frame_bytes: int = MAX_FRAME_BYTES
    connections: int = 50_000
    spare_descriptors: int = 256
    unsent_bytes: int = 1024 * 1024
    held_bytes: int = 128 * 1024 * 1024
    handshake_seconds: float = 10.0
    unread_seconds: float = 60.0
    crowded_seconds: float = 2.0
    silent_network_seconds: float = 60.0
    close_seconds: float = 10.0
    torch_links: int = 0

    def most_connections(self) -> int:
        """As many as this process may have open now; where that is little, half of it."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.connections
        return min(self.connections, max(soft - self.spare_descriptors, soft // 2))


class TcpStoreServer:
    """Serves one keyspace to `TcpStore` clients, and in this process to those of `client`.

    Args:
        host: the one address, or name, to bind.
        port: 0 for one that the system picks; `port` tells which after `start`.
        job: the job it serves; "" serves any.
        limits: what clients may cost it.
        secret: what its clients must prove to know; it is never sent. What follows the proof is
            neither encrypted nor signed.
        more_hosts: addresses to bind besides, where that can be done.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str = "",
        limits: ServerLimits | None = None,
        secret: bytes | None = None,
        more_hosts: Sequence[str] = (),
    ) -> None:
        if not host or not 0 <= port <= 65535:
            raise ConfigError(f"a server binds a named host, port 0..65535, got {host!r}, {port}")
        self.host = host
        self.port = port
        self.job = job
        self._more_hosts = more_hosts
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
            listeners = [listen_at(self.host, self.port)]
            name = listeners[0].getsockname()
            self.host, self.port = address_of(name), name[1]
            for host in self._more_hosts:
                try:
                    listeners.append(listen_at(host, self.port))
                except OSError as error:
                    log.info("the store is not served at %s as well: %s", host, error)
            self._loop = _Loop(listeners, self.job, self._secret, self._limits)
            self._loop.thread.start()
            if self._secret is None and not _is_loopback(self.host):
                log.warning(
                    "whoever reaches %s can read and change this store: to let in only those who "
                    "know a secret, set %s, to the same for all nodes",
                    self.address,
                    VARIABLE,
                )
        return self

    def client(self, address: str = "") -> HostedStore:
        """A client in this process, which needs no connection. address: of this machine, as the
        other nodes are to be told it; the server's own unless given."""
        if self._loop is None:
            raise ConfigError(
                f"the server of {self.address} is to be started before it has clients"
            )
        return HostedStore(self._loop.shared, address or self.host)

    def lead_torch_to(self, address: tuple[str, int] | None) -> None:
        """Where torch's store of the generation is, to which its clients that come to this port
        are passed on. Without one they are cut off, and the log says so."""
        if self._loop is not None:
            self._loop.relay.lead_to(address)

    @property
    def serving(self) -> bool:
        """Whether the server's thread lives."""
        return self._loop is not None and self._loop.thread.is_alive()

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
        return () if self._loop is None else self._loop.known_labels()

    def wait_closed(self, timeout: float) -> bool:
        """Block until nothing is served any more, or the timeout."""
        if self._loop is not None:
            self._loop.thread.join(timeout)
        return not self.serving

    def close(self) -> None:
        """End all connections and the thread, within some seconds: what does not end by then is
        named in the log and left behind. Closing twice is harmless."""
        if self._loop is None:
            return
        self._loop.stop()
        if not self.wait_closed(self._limits.close_seconds):
            log.error(
                "the store's server at %s has not ended within %g s; it stands %s",
                self.address,
                self._limits.close_seconds,
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


class _Loop:
    """The thread, and all that only the thread touches, but for what `shared.lock` guards, the
    news that others leave, and `stopping`."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        job: str,
        secret: bytes | None,
        limits: ServerLimits,
    ) -> None:
        self._limits = limits
        self._most = limits.most_connections()
        self._job = job
        self._secret = secret
        space = KeySpace(limits.store)
        self.shared = Shared(monotonic, space, is_served=True, rouse=self._rouse)
        self._space = space
        self._listeners = listeners
        self._peers: dict[int, Peer] = {}
        self._labels: dict[int, str] = {}
        self._unsettled: dict[int, float] = {}
        self._refused: dict[int, float] = {}
        self._dirty: set[int] = set()
        self._waiting: dict[int, bool] = {}
        self._behind: dict[int, None] = {}
        self._held = self._listed = 0
        self._next_look = 0.0
        self._accept_again: float | None = None
        self._told_of_torchs = False
        self._news: deque[tuple[int, int, Watched]] = deque()
        self._stopping = threading.Event()
        self._woken, self._wake = map(close_in_children, socket.socketpair())
        self._wake.setblocking(False)
        self._selector = close_in_children(selectors.DefaultSelector())
        self._selector.register(self._woken, selectors.EVENT_READ, lambda _: self._woken.recv(4096))
        for one in listeners:
            self._selector.register(one, selectors.EVENT_READ, partial(self._accept, one))
        self.relay = Relay(self._selector, limits.torch_links)
        self.thread = helper(self._serve, "tcp-store-server")

    def stop(self) -> None:
        self._stopping.set()
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, or has enough to wake for
            self._wake.send(b"!")

    def stands(self) -> str:
        """In which line the thread is; for people."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None:
            return "nowhere, as it has ended"
        return f"in {frame.f_code.co_filename}, line {frame.f_lineno}, {frame.f_code.co_name}"

    def known_labels(self) -> tuple[str, ...]:
        with self.shared.lock:
            return tuple(self._labels.values())

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception:
            log.exception("the store's server broke: its clients are cut off")
        finally:
            for watch, watched in self.shared.end("the server of this store is closed"):
                watch.tell(watched)
            for peer in list(self._peers.values()):
                self._drop(peer)
            self.relay.close()
            self._selector.close()
            for one in (*self._listeners, self._woken, self._wake):
                one.close()

    def _turn(self) -> None:
        self._handle(self._patience(monotonic()))
        if self._space.clock.due(monotonic()):
            # If this process stood still, its clients' refreshes lie unread: they come first.
            self._handle(0)
            while self._go_on():
                pass
            with self.shared.lock:
                self._space.end_silent_leases(monotonic())
        self._tell()
        self._flush()
        now = monotonic()
        self._end_unsettled(now)
        self._cut_off(now)

    def _patience(self, now: float) -> float:
        """Seconds that the loop may sleep if nothing arrives."""
        waiting = any(self._may_go_on(self._peers[number]) for number in self._waiting)
        if waiting or self._news or not self.shared.is_settled:
            return 0.0
        pauses = [
            LONGEST_SLEEP,
            self._space.clock.until_due(now),
            *(t - now for _, t in self._first_unsettled()),
        ]
        if self._accept_again is not None:
            pauses.append(self._accept_again - now)
        if self._behind:
            pauses.append(self._next_look - now)
        return max(min(p for p in pauses if p is not None), 0.0)

    def _handle(self, patience: float) -> None:
        for key, events in self._selector.select(patience):
            key.data(events)
        self._go_on()
        if self._accept_again is not None and monotonic() >= self._accept_again:
            self._accept_again = None
            for one in self._listeners:
                self._selector.register(one, selectors.EVENT_READ, partial(self._accept, one))

    def _go_on(self) -> bool:
        """A turn for each client that has sent more than could be handled yet; whether any had."""
        went_on = False
        for number in list(self._waiting):
            peer = self._peers.get(number)
            if peer is not None and self._may_go_on(peer):
                self._proceed(peer)
                went_on = True
        return went_on

    # -- who comes ----------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, _: int) -> None:
        for _ in range(256):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # Out of descriptors, say, or a network that is down: the listener may be ready
                # for ever, and those who are connected already must not pay. Look away a while,
                # and have half of those who are not in yet make way.
                log.warning("cannot accept a connection just now: %s", error)
                for number in list(self._unsettled)[: (len(self._unsettled) + 1) // 2]:
                    self._drop(self._peers[number])
                if self._accept_again is None:
                    for one in self._listeners:
                        self._selector.unregister(one)
                self._accept_again = monotonic() + 0.5
                return
            self._take_in(connection)

    def _take_in(self, connection: socket.socket) -> None:
        close_in_children(connection).setblocking(False)
        try:
            keep_honest(connection, self._limits.silent_network_seconds)
        except OSError:
            connection.close()
            return
        handshake = ServerHandshake(self._job, self._secret, secrets.token_bytes(NONCE_BYTES).hex())
        number = next(self.shared.owners)
        peer = Peer(number, connection, handshake, self._limits.frame_bytes)
        peer.ready = partial(self._ready, number)
        self._peers[number] = peer
        self._unsettled[number] = monotonic() + self._limits.handshake_seconds
        self._selector.register(connection, selectors.EVENT_READ, peer.ready)
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

    def _admit(self, peer: Peer, frame: Frame) -> None:
        try:
            reply = peer.handshake.hear(frame)
        except StoreRefused as error:
            self._refuse(peer, frame.id, error)
            return
        if peer.label is not None:
            peer.let_in()
            del self._unsettled[peer.number]
            with self.shared.lock:
                self._labels[peer.number] = peer.label
        self._send(peer, reply)

    # -- what arrives -------------------------------------------------------------------------

    def _ready(self, number: int, events: int) -> None:
        # By its number: what knew the peer itself would be known by it, and a circle that is left
        # keeps its buffers until the collector comes.
        peer = self._peers.get(number)
        if peer is None:
            return  # dropped earlier in this round
        if events & selectors.EVENT_READ:
            self._receive(peer)
        if events & selectors.EVENT_WRITE:
            self._dirty.add(number)

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
                else:
                    self._perform(peer, frame, now)
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

    def _perform(self, peer: Peer, frame: Frame, now: float) -> None:
        try:
            with self.shared.lock:
                reply = self._reply(peer, frame, now)
        except (StoreRefused, LeaseLost, ConfigError) as error:
            reply = error_frame(frame.id, error)
        if isinstance(reply, Listing):
            self._send_listing(peer, frame.id, reply)
        elif reply is not None:
            self._send(peer, reply)

    def _reply(self, peer: Peer, frame: Frame, now: float) -> Frame | Listing | None:
        """What a request is answered; None for a watch, which is told by `_tell`."""
        space, number, fields, client = self._space, frame.id, frame.fields, peer.number
        if frame.op == "get":
            entry = space.get(check_key(fields["key"]))
            return Listing(() if entry is None else (entry,), space.version)
        if frame.op == "write":
            return self._write(client, frame, now)
        if frame.op == "refresh":
            space.refresh(fields["key"], fields["version"], client, now)
            return answer(number, True)
        if frame.op == "list":
            return space.list(fields["prefix"])
        if frame.op == "changed":
            return answer(number, space.changed(fields["prefix"], fields["after"]))
        if frame.op == "watch":
            tell = partial(self._leave_news, client, number)
            prefix, after, listing = fields["prefix"], fields["after"], fields["listing"]
            told = space.watch(Watch(client, number, prefix, after, tell, listing))
            if told is not False:
                self._news.append((client, number, told))
            return None
        if frame.op == "unwatch":
            return answer(number, space.unwatch(client, fields["number"]))
        if frame.op == "delete":
            return answer(number, space.delete(check_key(fields["key"]), fields["expected"]))
        raise StoreRefused(f"{frame.op} is no operation here")

    def _write(self, client: int, frame: Frame, now: float) -> Frame | Listing:
        space, fields = self._space, frame.fields
        key, ttl, expected = check_key(fields["key"]), check_ttl(fields["ttl"]), fields["expected"]
        lease = None if ttl is None else Lease(client, float(ttl))
        if expected is None:
            return answer(frame.id, True, space.put(key, frame.value, lease, now).version)
        outcome = space.compare_set(key, frame.value, expected, lease, now)
        if outcome.won and outcome.entry is not None:
            return answer(frame.id, True, outcome.entry.version)
        return Listing(() if outcome.entry is None else (outcome.entry,), space.version)

    def _leave_news(self, client: int, number: int, watched: Watched) -> None:
        """By whatever thread has changed what this client watches."""
        self._news.append((client, number, watched))
        if threading.current_thread() is not self.thread:
            self._rouse()

    def _tell(self) -> None:
        """Who watches is told of the changes of this turn, and of those by this process's own."""
        if not self.shared.is_settled:
            with self.shared.lock:
                news = self.shared.settle()
            for watch, watched in news:
                watch.tell(watched)
        shown: Listing | None = None
        fields, value = "", b""
        while self._news:
            number, id, watched = self._news.popleft()
            peer = self._peers.get(number)
            if peer is None or peer.ending:
                continue
            if isinstance(watched, Listing) and watched is not shown:
                shown = watched
                frame = whole_listing(watched, self._limits.frame_bytes)
                fields, value = ("", b"") if frame is None else (pack_fields(frame), frame.value)
            # Who has not taken what it was sent already is told that there is something to list.
            room = not self._is_crowded() and peer.unsent <= self._limits.unsent_bytes
            if watched is shown and fields and room:
                self._send_bytes(peer, pack("listing", id, fields, value))
            else:
                self._send(peer, answer(id, True))

    def _pass_on(self, peer: Peer) -> None:
        """A client of torch's store is not answered: it takes what it gets for torch's words."""
        if not self._limits.torch_links and not self._told_of_torchs:
            self._told_of_torchs = True
            log.warning(
                "a script looks for torch's store at the port where elasticlib's nodes meet, and "
                "it is not there: use init_method='env://', or MASTER_ADDR and MASTER_PORT, or "
                "--rdzv-backend static"
            )
        first = peer.unread
        self._forget(peer)
        self.relay.take(peer.connection, first)

    # -- what goes out ------------------------------------------------------------------------

    def _send(self, peer: Peer, frame: Frame) -> None:
        self._send_bytes(peer, encode(frame))

    def _send_bytes(self, peer: Peer, data: bytes) -> None:
        peer.send(data, monotonic())
        self._dirty.add(peer.number)
        if peer.unsent >= FLUSH_BYTES:
            self._flush_one(peer)

    def _send_listing(self, peer: Peer, number: int, listing: Listing) -> None:
        try:
            first = peer.begin_listing(number, listing)
        except StoreRefused as error:
            first = encode(error_frame(number, error))
        self._send_bytes(peer, first)

    def _flush_one(self, peer: Peer) -> bool:
        """Whether the connection still stands."""
        if peer.flush(monotonic()):
            self._count(peer)
            return True
        self._drop(peer)
        return False

    def _flush(self) -> None:
        for peer in [self._peers[n] for n in self._dirty if n in self._peers]:
            if not self._flush_one(peer):
                continue
            reading = peer.number not in self._waiting or self._may_go_on(peer)
            events = selectors.EVENT_READ * reading | selectors.EVENT_WRITE * peer.has_more
            listen(self._selector, peer.connection, peer.events, events, peer.ready)
            peer.events = events
        self._dirty.clear()

    # -- bounds -------------------------------------------------------------------------------

    def _is_crowded(self) -> bool:
        return self._held > self._limits.held_bytes

    def _is_full_of_listings(self, peer: Peer) -> bool:
        return bool(peer.listed_bytes) or self._listed > self._limits.store.total_bytes

    def _may_go_on(self, peer: Peer) -> bool:
        """Whether there is room for what it sends next, or for the answer to what it has sent."""
        if peer.ending:
            return True
        frame = peer.waiting_frame
        # Of one listing at a time the rest waits here, and of all together not too much.
        if frame is not None and frame.op == "list" and self._is_full_of_listings(peer):
            return False
        if not self._is_crowded():
            return peer.unsent <= self._limits.unsent_bytes
        if frame is not None:
            return not peer.unsent and not has_long_answer(frame)
        # Of those that have sent a part of a frame, one at a time may send the rest.
        return not peer.has_half_a_frame or peer.number == next(iter(self._behind), None)

    def _wait_for_room(self, peer: Peer) -> None:
        """Read nothing more from it; each turn looks whether there is room again."""
        self._waiting[peer.number] = True
        self._dirty.add(peer.number)

    def _count(self, peer: Peer) -> None:
        """Keep the account of what the buffers take, and who takes it, the first one first."""
        held, listed = peer.held_bytes, peer.listed_bytes
        self._held += held - peer.counted[0]
        self._listed += listed - peer.counted[1]
        peer.counted = held, listed
        if held or listed:
            self._behind.setdefault(peer.number)
        else:
            self._behind.pop(peer.number, None)

    def _cut_off(self, now: float) -> None:
        """End the connections of those who hold bytes here for too long."""
        if not self._behind or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        limits = self._limits
        # Where it is crowded, not the least is made room: those who wait are to get on.
        enough = limits.held_bytes // 2 if self._is_crowded() else limits.held_bytes
        behind = [self._peers[number] for number in self._behind]
        for peer in sorted(behind, key=lambda peer: sum(peer.counted), reverse=True):
            waited = now - peer.behind_since(now)
            full = self._held > enough or self._listed > limits.store.total_bytes
            if waited > (limits.crowded_seconds if full else limits.unread_seconds):
                log.warning(
                    "cut off client %s: %d bytes, of answers that it does not read or of a frame "
                    "that it does not finish, lay here for %.1f s",
                    peer.label,
                    sum(peer.counted),
                    waited,
                )
                self._drop(peer)

    # -- ends ---------------------------------------------------------------------------------

    def _refuse(self, peer: Peer, number: int, error: ElasticError) -> None:
        """Say why, then end the connection once the client has had time to read it."""
        peer.end()
        self._send(peer, error_frame(number, error))
        if peer.number not in self._peers:
            return
        self._leave(peer)
        seconds = min(LINGER_SECONDS, self._limits.handshake_seconds)
        self._refused[peer.number] = monotonic() + seconds

    def _leave(self, peer: Peer) -> None:
        for numbers in (self._unsettled, self._refused, self._waiting):
            numbers.pop(peer.number, None)
        with self.shared.lock:
            self._space.depart(peer.number)
            self._labels.pop(peer.number, None)

    def _drop(self, peer: Peer) -> None:
        self._forget(peer)
        peer.connection.close()

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.number]
        self._leave(peer)
        self._held -= peer.counted[0]
        self._listed -= peer.counted[1]
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
