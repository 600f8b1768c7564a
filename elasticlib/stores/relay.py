"""Passes clients of torch's store on to it, where they come to the port of ours.

A static job has one port that all of its nodes and scripts know. Ours is served there; a client
of torch's store, which its first bytes tell, is joined to torch's own store of the generation.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import threading

import attrs

from ..threads import helper
from .forks import close_in_children

log = logging.getLogger("elasticlib.stores")

TORCHS_FIRST = struct.pack("<BI", 0, 0x3C85F7CE)[:4]
"""How each client of torch's TCPStore begins; for a frame of ours it is a length that none has."""
BYTES_AT_ONCE = 64 * 1024
PAUSE_SECONDS = 0.1


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

    def __init__(self, client: socket.socket, store: socket.socket, first: bytes) -> None:
        self.sockets = (client, store)
        self._there = _Way(client, store, first)
        self._back = _Way(store, client)

    def move(self) -> bool:
        """Pass on what can be; whether the link goes on."""
        ended = self._there.ended or self._back.ended
        try:
            for way in (self._there, self._back):
                if way.ended or not ended:
                    way.move()
        except OSError:
            return False
        return not any(way.ended and not way.waiting for way in (self._there, self._back))

    def awaits(self, which: socket.socket) -> int:
        """The events of one of its sockets with which it can go on."""
        ended = self._there.ended or self._back.ended
        events = 0
        for way in (self._there, self._back):
            if way.sink is which and way.waiting and (way.ended or not ended):
                events |= selectors.EVENT_WRITE
            if way.source is which and not way.waiting and not ended:
                events |= selectors.EVENT_READ
        return events

    def close(self) -> None:
        for one in self.sockets:
            one.close()


class Relay:
    """Joins clients of torch's store to the one that `lead_to` has named last.

    most: links at a time; a client that is one too many is cut off, and tries again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._target: tuple[str, int] | None = None
        self._coming: list[tuple[socket.socket, bytes]] = []
        self._listeners: list[socket.socket] = []
        self._links: set[_Link] = set()
        self._closed = False
        self._pause = threading.Event()
        self._loop: threading.Thread | None = None
        self._selector = close_in_children(selectors.DefaultSelector())
        self._wake, self._woken = map(close_in_children, socket.socketpair())
        self._selector.register(self._wake, selectors.EVENT_READ, None)

    def lead_to(self, host: str, port: int) -> None:
        """The store to which who comes from now on is joined."""
        with self._lock:
            self._target = host, port

    def lead_nowhere(self) -> None:
        """Until another store is named, who comes is cut off, and tries again."""
        with self._lock:
            self._target = None

    def listen(self, host: str, port: int) -> None:
        """Have clients of torch's store alone come to another address, too. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = close_in_children(socket.create_server((host, port), family=family))
        listener.setblocking(False)
        with self._lock:
            if self._closed:
                listener.close()
                return
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, listener)
            self._start()

    def take(self, client: socket.socket, first: bytes) -> bool:
        """Have a connection, which does not block, and what has been read of it; False if it is
        the caller's still, to be closed."""
        with self._lock:
            full = len(self._links) + len(self._coming) >= self._most
            if self._closed or self._target is None or full:
                return False
            self._start()
            self._coming.append((client, first))
            self._woken.send(b"!")
        return True

    def _start(self) -> None:
        if self._loop is None:
            self._loop = helper(self._serve, "torch-relay")
            self._loop.start()

    def close(self) -> None:
        """Cut off all who are joined. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pause.set()
            if self._loop is None:
                self._release()
            else:
                self._woken.send(b"!")

    def _serve(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._join()
                    elif isinstance(key.data, socket.socket):
                        self._accept(key.data)
                    elif key.data in self._links:
                        self._turn(key.data)
        except Exception:
            log.exception("scripts are no longer passed on to torch's store at this port")
        finally:
            with self._lock:
                self._closed = True
                self._release()

    def _release(self) -> None:
        for client, _ in self._coming:
            client.close()
        for link in self._links:
            link.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors, say: the listener may be ready for ever
            log.warning("a client of torch's store is not passed on just now: %s", error)
            self._pause.wait(PAUSE_SECONDS)
            return
        close_in_children(client).setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self.take(client, b""):
            client.close()

    def _join(self) -> None:
        self._wake.recv(4096)
        with self._lock:
            coming, self._coming = self._coming, []
            target = self._target
        for client, first in coming:
            store = None if target is None else _towards(*target)
            if store is None:
                client.close()
                continue
            link = _Link(client, store, first)
            self._links.add(link)
            self._turn(link)

    def _turn(self, link: _Link) -> None:
        if link.move():
            for one in link.sockets:
                self._watch(one, link)
            return
        self._links.remove(link)
        for one in link.sockets:
            if one in self._selector.get_map():
                self._selector.unregister(one)
        link.close()

    def _watch(self, one: socket.socket, link: _Link) -> None:
        events, known = link.awaits(one), one in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(one)
        elif known:
            self._selector.modify(one, events, link)
        else:
            self._selector.register(one, events, link)


def _towards(host: str, port: int) -> socket.socket | None:
    """A connection that is being made; what becomes of it is seen when it is used."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        store = close_in_children(socket.socket(family, kind, proto))
    except OSError as error:
        log.warning("a client of torch's store is not passed on just now: %s", error)
        return None
    store.setblocking(False)
    store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    store.connect_ex(address)
    return store
