"""Passes clients of torch's store on to it, where they come to the port of ours.

A static job has one port that all of its nodes and scripts know. Ours is served there; a client
of torch's store, which its first bytes tell, is joined to torch's own store of the generation, by
the thread and the selector of our server.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct

import attrs

from .sockets import close_in_children

log = logging.getLogger("elasticlib.stores")

TORCHS_FIRST = struct.pack("<BI", 0, 0x3C85F7CE)[:4]
"""How each client of torch's TCPStore begins; for a frame of ours it is a length that none has."""
BYTES_AT_ONCE = 64 * 1024


def is_torchs(first: bytes) -> bool:
    """Whether a connection that begins so is one of torch's."""
    return first.startswith(TORCHS_FIRST)


@attrs.define(eq=False)
class _Way:
    """One direction of a link, and what was read of it and is not passed on yet."""

    source: socket.socket
    sink: socket.socket
    waiting: bytes = b""
    ended: bool = False

    def move(self) -> None:
        """Pass on what there is; no more is read before it was taken. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            if not self.waiting and not self.ended:
                self.waiting = self.source.recv(BYTES_AT_ONCE)
                self.ended = not self.waiting
            if self.waiting:
                self.waiting = self.waiting[self.sink.send(self.waiting) :]


class _Link:
    """A client and its connection to the store: over as soon as one of them has ended, and what
    that one had sent before is passed on."""

    def __init__(self, relay: Relay, client: socket.socket, store: socket.socket, first: bytes):
        self._relay = relay
        self._ways = (_Way(client, store, first), _Way(store, client))
        self._events = {client: 0, store: 0}

    def turn(self, _: int = 0) -> None:
        """Pass on what can be, and wait for what cannot be yet; or end."""
        if self not in self._relay.links:
            return  # it ended earlier in this round
        ended = any(way.ended for way in self._ways)
        try:
            for way in self._ways:
                if way.ended or not ended:
                    way.move()
        except OSError:
            self.close()
            return
        if any(way.ended and not way.waiting for way in self._ways):
            self.close()
            return
        ended = any(way.ended for way in self._ways)
        for one in self._events:
            self._await(one, ended)

    def _await(self, one: socket.socket, ended: bool) -> None:
        events = 0
        for way in self._ways:
            if way.sink is one and way.waiting and (way.ended or not ended):
                events |= selectors.EVENT_WRITE
            if way.source is one and not way.waiting and not ended:
                events |= selectors.EVENT_READ
        listen(self._relay.selector, one, self._events[one], events, self.turn)
        self._events[one] = events

    def close(self) -> None:
        self._relay.links.discard(self)
        for one, events in self._events.items():
            listen(self._relay.selector, one, events, 0, self.turn)
            one.close()


class Relay:
    """Joins clients of torch's store to the one that `lead_to` has named last.

    selector: of the thread that calls all but `lead_to`. most: links at a time; a client that is
    one too many is cut off, and tries again.
    """

    def __init__(self, selector: selectors.BaseSelector, most: int) -> None:
        self.selector = selector
        self.links: set[_Link] = set()
        self._most = most
        self._target: tuple[socket.AddressFamily, tuple[object, ...]] | None = None

    def lead_to(self, address: tuple[str, int] | None) -> None:
        """The store to which who comes from now on is joined; without one they are cut off, and
        try again."""
        if address is not None:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            self._target = found[0][0], found[0][4]
        else:
            self._target = None

    def take(self, client: socket.socket, first: bytes) -> None:
        """Have a connection, which does not block, and what has been read of it."""
        store = self._towards_store() if len(self.links) < self._most else None
        if store is None:
            client.close()
            return
        link = _Link(self, client, store, first)
        self.links.add(link)
        link.turn()

    def close(self) -> None:
        """Cut off all who are joined."""
        for link in list(self.links):
            link.close()

    def _towards_store(self) -> socket.socket | None:
        """A connection that is being made; what becomes of it is seen when it is used."""
        if self._target is None:
            return None
        family, address = self._target
        try:
            store = close_in_children(socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:
            log.warning("a client of torch's store is not passed on just now: %s", error)
            return None
        store.setblocking(False)
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        store.connect_ex(address)
        return store


def listen(
    selector: selectors.BaseSelector,
    connection: socket.socket,
    before: int,
    events: int,
    ready: object,
) -> None:
    """Have the selector wait for these events, where it waits for those before."""
    if events == before:
        return
    if not events:
        selector.unregister(connection)
    elif not before:
        selector.register(connection, events, ready)
    else:
        selector.modify(connection, events, ready)
