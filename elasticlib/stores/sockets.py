"""Sockets that notice a network that is down, and what the TCP store does with sockets."""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import Any

import attrs

JOINED_BYTES = 64 * 1024
"""Read at once of what is passed on."""


def address_of(name: tuple[Any, ...]) -> str:
    """The address in a socket's name; a link-local one with its scope, without which it is none."""
    return socket.getnameinfo(name, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def keep_honest(connection: socket.socket, timeout: float) -> None:
    """No delay for small frames, and an end within about `timeout` for a silent network."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Three probes unanswered end an idle connection; the user timeout ends one with data in it.
    pause = min(max(int(timeout / 4), 1), 32767)
    for name, value in (
        ("TCP_KEEPIDLE", pause),
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", min(int(timeout * 1000) + 1, 2**31 - 1)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def await_events(
    selector: selectors.BaseSelector, one: socket.socket, data: object, reads: bool, writes: bool
) -> None:
    """Have the selector wait until the socket can be read or written, or for nothing any more."""
    events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
    if one not in selector.get_map():
        if events:
            selector.register(one, events, data)
    elif events:
        selector.modify(one, events, data)
    else:
        selector.unregister(one)


@attrs.define(eq=False)
class Joined:
    """Two sockets that do not block, each of which gets what the other one sends; the selector's
    data for both. They are over as soon as one of them has ended.

    unsent: for each of the two, what was read for it; no more is read before it was taken.
    """

    selector: selectors.BaseSelector
    unsent: dict[socket.socket, bytes]

    def turn(self) -> bool:
        """Pass on what can be, and wait for what cannot be yet; whether it goes on."""
        one, other = self.unsent
        try:
            for source, sink in ((one, other), (other, one)):
                with contextlib.suppress(BlockingIOError):
                    if not self.unsent[sink]:
                        self.unsent[sink] = source.recv(JOINED_BYTES)
                        if not self.unsent[sink]:
                            return False
                    self.unsent[sink] = self.unsent[sink][sink.send(self.unsent[sink]) :]
        except OSError:
            return False
        ahead, back = bool(self.unsent[other]), bool(self.unsent[one])
        await_events(self.selector, one, self, not ahead, back)
        await_events(self.selector, other, self, not back, ahead)
        return True

    def close(self) -> None:
        for one in self.unsent:
            await_events(self.selector, one, self, False, False)
            one.close()
