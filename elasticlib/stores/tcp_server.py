"""The server of the TCP store: one thread, no socket that blocks, every buffer bounded.

What has arrived is answered before any lease ends, so a server that was stopped for a while
ends nobody's lease on waking; a lease whose owner's connection ends, ends with it.
"""

from __future__ import annotations

import contextlib
import heapq
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
from collections import deque
from collections.abc import Sequence

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import ConfigError, StoreRejectedError
from ..threads import helper
from .authentication import NONCE_BYTES, SECRET_ENV, check_secret
from .connection import (
    SocketRelay,
    enable_keepalive,
    numeric_address,
    update_selector_events,
)
from .interface import Listing, WatchResult
from .key_space import KeySpace, Limits
from .tcp_protocol import (
    HEADER_ROOM,
    MAX_FRAME_BYTES,
    ServerEnd,
    answer,
    has_long_answer,
    listing_frame,
    pack,
    to_json,
)

log = logging.getLogger("elasticlib.stores")

LONGEST_SLEEP = 3600.0
FRAMES_A_TURN = 64
"""Of one client, before it is the others' turn."""
FLUSH_BYTES = 64 * 1024
"""So many are sent at once, not at the end of the turn."""
RECEIVE_BYTES = 256 * 1024
CROWDED_RECEIVE_BYTES = 4096
LINGER_BYTES = 1024 * 1024
"""Of what a client that was refused goes on sending, so much is read and dropped, for closing over
unread bytes would take the refusal from it."""
LINGER_SECONDS = 2.0
"""For which a refused client may read why, and is then cut."""
ACCEPT_PAUSE = 0.5
"""Seconds without accepting, where that has failed."""
LOOK_SECONDS = 0.5
"""Between two looks for clients that are to be cut."""
TORCHS_FIRST = struct.pack("<BI", 0, 0x3C85F7CE)[:4]
"""How each client of torch's TCPStore begins; for a frame of ours it is a length that none has."""


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


def _listen_at(host: str, port: int) -> socket.socket:
    """A listener at the first address of the host, which does not block. Raises OSError."""
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
class _Peer:
    """A client's connection.

    deadline: when it is cut,
    if it is not in by then or was refused. awaits: whether the selector waits to read and to write.
    dropped: bytes that came after it was refused. held, listed: of its end, in the server's
    account. goal: once so many bytes are sent and so many requests performed, nothing is left of
    what lay here at `behind_since`.
    """

    number: int
    connection: socket.socket
    end: ServerEnd
    deadline: float
    awaits: tuple[bool, bool] = True, False
    dropped: int = 0
    held: int = 0
    listed: int = 0
    sent: int = 0
    goal: tuple[int, int] = (0, 0)
    behind_since: float = 0.0

    def waited(self, now: float) -> float:
        """Seconds for which bytes have lain here: of a request that is not whole or not handled,
        or that the client has not taken. Who gets on all the time is never behind."""
        end = self.end
        if self.sent >= self.goal[0] and end.performed >= self.goal[1]:
            asks = end.request is not None or bool(end.unread)
            self.goal = self.sent + (len(end.unsent) or end.has_more), end.performed + asks
            self.behind_since = now
        return now - self.behind_since


class TcpStoreServer:
    """Serves one keyspace to `TcpStore` clients.

    Args:
        host: the one address, or name, to bind.
        port: 0 for one that the system picks; `port` tells which after `start`.
        job: the job it serves; "" serves any.
        limits: what clients may cost it.
        secret: what its clients must prove to know; it is never sent. What follows the proof is
            neither encrypted nor signed.
        extra_hosts: addresses to bind besides, where that can be done.
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
        self._more_hosts = extra_hosts
        self._limits = limits or ServerLimits()
        self._secret = check_secret(secret)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._torchs: tuple[socket.AddressFamily, tuple[object, ...]] | None = None
        # The server's thread owns all of the following.
        stored = self._limits.store
        # What can be written can be read: it fits an answer.
        value_bytes = min(stored.value_bytes, self._limits.frame_bytes - HEADER_ROOM)
        self._space = KeySpace(attrs.evolve(stored, value_bytes=value_bytes))
        self._numbers = itertools.count(1)
        self._news: deque[tuple[int, int, WatchResult]] = deque()  # client, its watch, what changed
        self._peers: dict[int, _Peer] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._dirty: set[_Peer] = set()
        self._waiting: dict[_Peer, None] = {}
        self._behind: dict[_Peer, None] = {}
        self._held = self._listed = 0
        self._next_look = 0.0
        self._accept_again = math.inf
        self._links: set[SocketRelay] = set()
        self._told_of_torchs = False

    def start(self) -> TcpStoreServer:
        """Bind, listen and serve in a thread. A server that runs is left as it is.

        Raises:
            ConfigError: the server was closed, or its thread has ended.
            OSError: the bind failed.
        """
        if self.is_serving and not self._stopping.is_set():
            return self
        if self._thread is not None or self._stopping.is_set():
            raise ConfigError(
                f"the server of {self.address} is closed and cannot be started again: create a new "
                "TcpStoreServer"
            )
        self._listeners = [_listen_at(self.host, self.port)]
        name = self._listeners[0].getsockname()
        self.host, self.port = numeric_address(name), name[1]
        for host in self._more_hosts:
            try:
                self._listeners.append(_listen_at(host, self.port))
            except OSError as error:
                log.info("cannot also serve the store at %s: %s", host, error)
        self._most = self._limits.most_connections()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listen(True)
        self._thread = helper(self._serve, "tcp-store-server")
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
        """Where torch's store of the generation is, to which its clients that come to this port
        are passed on. Without one they are cut off, and the log says so."""
        found = address and socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        self._torchs = (found[0][0], found[0][4]) if found else None

    @property
    def is_serving(self) -> bool:
        """Whether the server's thread lives."""
        return self._thread is not None and self._thread.is_alive()

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
        if not self.is_serving:
            return ()
        # The list is made in one step, whatever the thread does.
        return tuple(peer.end.label for peer in list(self._peers.values()) if peer.end.is_in)

    def wait_closed(self, timeout: float) -> bool:
        """Block until nothing is served any more, or the timeout."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_serving

    def close(self) -> None:
        """End all connections and the thread, within some seconds: what does not end by then is
        named in the log and left behind. Closing twice is harmless."""
        self._stopping.set()
        if self._thread is None or not self.is_serving:
            return  # it has ended, or is in the process of which this one is a forked child
        with contextlib.suppress(OSError):  # the thread has ended already
            self._wake.send(b"!")
        if not self.wait_closed(self._limits.close_seconds):
            stands = "no longer running"
            if (frame := sys._current_frames().get(self._thread.ident or 0)) is not None:
                code = frame.f_code
                stands = f"in {code.co_filename}, line {frame.f_lineno}, {code.co_name}"
            log.error(
                "the store's server at %s has not ended within %g s; it is %s",
                self.address,
                self._limits.close_seconds,
                stands,
            )

    def __enter__(self) -> TcpStoreServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception:
            log.exception("the store's server failed: its clients are disconnected")
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer)
            for link in self._links:
                link.close()
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
            self._space.expire_leases(monotonic())
        self._tell()
        self._flush()
        now = monotonic()
        while (stranger := self._first_stranger()) is not None and stranger.deadline <= now:
            self._drop(stranger)
        if self._behind and now >= self._next_look:
            self._cut_off(now)

    def _patience(self, now: float) -> float:
        """Seconds that the loop may sleep if nothing arrives."""
        if self._news or self._space.has_changed or any(map(self._may_go_on, self._waiting)):
            return 0.0
        look, stranger = self._space.clock.until_due(now), self._first_stranger()
        pause = min(
            LONGEST_SLEEP if look is None else look,
            LONGEST_SLEEP if stranger is None else stranger.deadline - now,
            self._next_look - now if self._behind else LONGEST_SLEEP,
            self._accept_again - now,
        )
        return max(pause, 0.0)

    def _handle(self, patience: float) -> None:
        for key, events in self._selector.select(patience):
            if isinstance(key.data, _Peer):
                if key.data.number not in self._peers:
                    continue  # dropped earlier in this round
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
                if events & selectors.EVENT_WRITE:
                    self._dirty.add(key.data)
            elif isinstance(key.data, SocketRelay):
                self._turn_link(key.data)
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            else:
                self._accept(key.data)
        self._go_on()
        if monotonic() >= self._accept_again:
            self._accept_again = math.inf
            self._listen(True)

    def _go_on(self) -> bool:
        """A turn for each client that has sent more than could be handled yet; whether any had."""
        ready = [peer for peer in self._waiting if self._may_go_on(peer)]
        for peer in ready:
            if peer in self._waiting and self._may_go_on(peer):
                self._proceed(peer)
        return bool(ready)

    # -- who comes ----------------------------------------------------------------------------

    def _listen(self, accepts: bool) -> None:
        for one in self._listeners:
            update_selector_events(self._selector, one, one, accepts, False)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(256):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                # Out of descriptors, say, or a network that is down: the listener may be ready
                # for ever, at the cost of the connected clients. Stop listening for a while, and
                # cut half of the clients that are not in yet.
                log.warning("cannot accept a connection at the moment: %s", error)
                strangers = [peer for peer in self._peers.values() if not peer.end.is_in]
                for peer in strangers[: (len(strangers) + 1) // 2]:
                    self._drop(peer)
                self._listen(False)
                self._accept_again = monotonic() + ACCEPT_PAUSE
                return
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        limits = self._limits
        try:
            enable_keepalive(connection, limits.silent_network_seconds)
        except OSError:
            connection.close()
            return
        nonce = secrets.token_bytes(NONCE_BYTES).hex()
        end = ServerEnd(self.job, self._secret, nonce, limits.frame_bytes)
        deadline = monotonic() + limits.handshake_seconds
        number = next(self._numbers)
        peer = _Peer(number, connection, end, deadline)
        self._peers[number] = peer
        heapq.heappush(self._deadlines, (deadline, number))
        self._selector.register(connection, selectors.EVENT_READ, peer)
        # At the limit, a client that is not in yet makes way; where all are, the newcomer does.
        if len(self._peers) > self._most:
            stranger = self._first_stranger()
            if stranger is not None and stranger is not peer:
                self._drop(stranger)
            else:
                end.refuse(StoreRejectedError(f"serves at most {self._most} connections"))
                self._linger(peer)

    def _first_stranger(self) -> _Peer | None:
        """Of the clients that are not in yet, or were refused, the one to be cut first."""
        while self._deadlines:
            deadline, number = self._deadlines[0]
            peer = self._peers.get(number)
            if peer is not None and peer.deadline == deadline and not peer.end.is_in:
                return peer
            heapq.heappop(self._deadlines)
        return None

    # -- what arrives -------------------------------------------------------------------------

    def _receive(self, peer: _Peer) -> None:
        if peer in self._waiting:
            return  # what it has sent before comes first
        if not self._may_go_on(peer):
            self._wait_for_room(peer)
            return
        end = peer.end
        little = self._is_crowded() and not end.has_half_a_frame
        try:
            data = peer.connection.recv(CROWDED_RECEIVE_BYTES if little else RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if end.refused:
            peer.dropped += len(data)
        if not data or peer.dropped > LINGER_BYTES:
            self._drop(peer)
        elif not end.refused:
            end.receive(data)
            self._proceed(peer)

    def _proceed(self, peer: _Peer) -> None:
        """Perform what a client has asked for, as far as it is its turn and there is room."""
        self._waiting.pop(peer, None)
        self._dirty.add(peer)
        end, now = peer.end, monotonic()
        if not end.is_in and end.unread.startswith(TORCHS_FIRST):
            self._pass_on(peer)
            return
        for _ in range(FRAMES_A_TURN):
            request = end.next_request()
            if request is None:
                break
            if not self._may_go_on(peer):
                self._wait_for_room(peer)
                break
            watched = end.perform(self._space, peer.number, now)
            if watched is not False:
                self._news.append((peer.number, request.id, watched))
            if len(end.unsent) >= FLUSH_BYTES and not self._flush_one(peer):
                return
        else:
            self._wait_for_room(peer)  # now it is the others' turn
        if end.refused:
            self._linger(peer)
        if end.held_bytes >= FLUSH_BYTES:
            self._count(peer)

    def _tell(self) -> None:
        """Tell watchers of the changes of this turn."""
        for watch, watched in self._space.news():
            self._news.append((watch.owner, watch.number, watched))
        shown: Listing | None = None
        fields, value = "", b""
        while self._news:
            number, id, watched = self._news.popleft()
            peer = self._peers.get(number)
            if peer is None or peer.end.refused:
                continue
            if isinstance(watched, Listing) and watched is not shown:
                shown = watched  # the same for all who watch for it
                frame = listing_frame(0, watched.version, watched.entries, False)
                fields, value = to_json(frame.fields), frame.value
            fits = len(fields) + len(value) <= self._limits.frame_bytes - HEADER_ROOM
            # A client that has not taken what it was sent only learns that it can list.
            room = not self._is_crowded() and len(peer.end.unsent) <= self._limits.unsent_bytes
            if watched is shown and fits and room:
                peer.end.unsent += pack("listing", id, fields, value)
            else:
                peer.end.send(answer(id, True))
            self._dirty.add(peer)
            if len(peer.end.unsent) >= FLUSH_BYTES:
                self._flush_one(peer)

    # -- clients of torch's store -------------------------------------------------------------

    def _pass_on(self, peer: _Peer) -> None:
        """Join a client of torch's store to that store. We do not answer it: it would take our
        words for torch's.

        A static job has one port that all of its nodes and scripts know. Our store is served
        there, and torch's store of the generation elsewhere.
        """
        if not self._limits.torch_links and not self._told_of_torchs:
            self._told_of_torchs = True
            log.warning(
                "a script looks for torch's store at the port of elasticlib's store, and it is not "
                "there: use init_method='env://', or MASTER_ADDR and MASTER_PORT, or "
                "--rdzv-backend static"
            )
        if self._torchs is None or len(self._links) >= self._limits.torch_links:
            self._drop(peer)  # it tries again
            return
        family, address = self._torchs
        try:
            store = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            log.warning("cannot forward a client to torch's store at the moment: %s", error)
            self._drop(peer)
            return
        self._drop(peer, close=False)
        store.setblocking(False)
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        store.connect_ex(address)  # what becomes of it is seen when it is used
        link = SocketRelay(self._selector, {peer.connection: b"", store: bytes(peer.end.unread)})
        self._links.add(link)
        self._turn_link(link)

    def _turn_link(self, link: SocketRelay) -> None:
        if link in self._links and not link.turn():
            self._links.discard(link)
            link.close()

    # -- what goes out ------------------------------------------------------------------------

    def _flush(self) -> None:
        for peer in list(self._dirty):
            if peer.number not in self._peers or not self._flush_one(peer):
                continue
            reads = peer not in self._waiting or self._may_go_on(peer)
            awaits = reads, peer.end.has_more
            if awaits != peer.awaits:
                peer.awaits = awaits
                update_selector_events(self._selector, peer.connection, peer, *awaits)
        self._dirty.clear()

    def _flush_one(self, peer: _Peer) -> bool:
        """Send what the connection takes; whether it still stands."""
        end = peer.end
        if end.has_more and not end.unsent:
            end.add_page()
        try:
            if end.unsent:
                count = peer.connection.send(end.unsent)
                del end.unsent[:count]
                peer.sent += count
            if end.refused and not end.unsent:
                peer.connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return False
        self._count(peer)
        return True

    # -- bounds -------------------------------------------------------------------------------

    def _is_crowded(self) -> bool:
        return self._held > self._limits.held_bytes

    def _may_go_on(self, peer: _Peer) -> bool:
        """Whether there is room for what it sends next, or for the answer to what it has sent."""
        end = peer.end
        request = end.request
        if end.refused:
            return True
        # Of one listing at a time the rest waits here, and of all together not too much.
        is_full = end.listed_bytes or self._listed > self._limits.store.total_bytes
        if request is not None and request.op == "list" and is_full:
            return False
        if not self._is_crowded():
            return len(end.unsent) <= self._limits.unsent_bytes
        if request is not None:
            return not end.unsent and not has_long_answer(request)
        # Of those that have sent a part of a frame, one at a time may send the rest.
        return not end.has_half_a_frame or peer is next(iter(self._behind), None)

    def _wait_for_room(self, peer: _Peer) -> None:
        """Read nothing more from it; each turn looks whether there is room again."""
        self._waiting[peer] = None
        self._dirty.add(peer)

    def _count(self, peer: _Peer) -> None:
        """Keep the account of what the buffers hold, and for which clients, in their order."""
        held, listed = peer.end.held_bytes, peer.end.listed_bytes
        if held == peer.held and listed == peer.listed:
            return
        self._held += held - peer.held
        self._listed += listed - peer.listed
        peer.held, peer.listed = held, listed
        if held or listed:
            self._behind.setdefault(peer)
        else:
            self._behind.pop(peer, None)

    def _cut_off(self, now: float) -> None:
        """Cut clients whose bytes have lain here for too long, the largest first."""
        self._next_look = now + LOOK_SECONDS
        limits = self._limits
        # Where it is crowded, more than the least room is made, so that waiting clients get on.
        enough = limits.held_bytes // 2 if self._is_crowded() else limits.held_bytes
        for peer in sorted(self._behind, key=lambda peer: peer.held + peer.listed, reverse=True):
            waited = peer.waited(now)
            full = self._held > enough or self._listed > limits.store.total_bytes
            if waited > (limits.crowded_seconds if full else limits.unread_seconds):
                log.warning(
                    "disconnected client %s: for %.1f s it left %d bytes of answers unread, or of "
                    "a frame unfinished",
                    peer.end.label,
                    waited,
                    peer.held + peer.listed,
                )
                self._drop(peer)

    # -- ends ---------------------------------------------------------------------------------

    def _linger(self, peer: _Peer) -> None:
        """Give a refused client some time to read why."""
        self._leave(peer)
        peer.deadline = monotonic() + min(LINGER_SECONDS, self._limits.handshake_seconds)
        heapq.heappush(self._deadlines, (peer.deadline, peer.number))
        self._dirty.add(peer)

    def _leave(self, peer: _Peer) -> None:
        self._waiting.pop(peer, None)
        self._space.depart(peer.number)

    def _drop(self, peer: _Peer, *, close: bool = True) -> None:
        del self._peers[peer.number]
        self._leave(peer)
        self._held -= peer.held
        self._listed -= peer.listed
        self._behind.pop(peer, None)
        update_selector_events(self._selector, peer.connection, peer, False, False)
        if close:
            peer.connection.close()
