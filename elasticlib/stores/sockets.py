"""Sockets that end when the network or their process does, and what a forked child leaves alone.

A child has its parent's sockets, and none of the threads that used them. While it holds one open,
the other side cannot see the parent's end; so each is closed in the child as soon as there is a
child, and without a word, for the connection goes on being the parent's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..clock import monotonic


class Closable(Protocol):
    def close(self) -> None: ...


class Forked(Protocol):
    def begin_anew(self) -> None:
        """Be as just made: the one thread of a child calls this before all else."""


_closing: weakref.WeakSet[Closable] = weakref.WeakSet()
_renewing: weakref.WeakSet[Forked] = weakref.WeakSet()

Thing = TypeVar("Thing", bound=Closable)


def close_in_children(thing: Thing) -> Thing:
    """The thing itself, which a child closes: a socket, or what else holds a descriptor."""
    _closing.add(thing)
    return thing


def renew_in_children(owner: Forked) -> None:
    """Have the child's copy of the owner begin anew."""
    _renewing.add(owner)


def _begin_as_child() -> None:
    for thing in list(_closing):
        with contextlib.suppress(OSError):
            thing.close()
    for owner in list(_renewing):
        owner.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_child)


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


def bound_sending(connection: socket.socket, timeout: float) -> None:
    """A blocking `sendall` ends with BlockingIOError when the other side takes nothing."""
    seconds = min(max(timeout, 0.001), 1e6)
    whole = int(seconds)
    packed = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def dial(
    host: str, port: int, timeout: float, resolve: Callable[..., Any] = socket.getaddrinfo
) -> socket.socket:
    """A connection to the first address of the host that takes one. Raises OSError."""
    deadline = monotonic() + timeout
    addresses = resolve(host, port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    for tried, (family, kind, proto, _, address) in enumerate(addresses):
        # A silent address must leave time for those behind it.
        share = max(deadline - monotonic(), 0.01) / (len(addresses) - tried)
        try:
            connection = close_in_children(socket.socket(family, kind, proto))
        except OSError as error:
            failure = error  # of a family that this kernel does not have
            continue
        try:
            connection.settimeout(share)
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure or OSError(f"{host} has no address")


def listen_at(host: str, port: int) -> socket.socket:
    """A listener at the first address of the host, which does not block. Raises OSError."""
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
