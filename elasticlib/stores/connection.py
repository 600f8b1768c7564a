"""Sockets of the stores: name lookups and connections within a time limit, keepalive, relays.

The C library's resolver can block for half a minute, as its own configuration says. A thread that
refreshes a lease must not wait for so long, so names are resolved in threads of their own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from ..clock import monotonic
from ..threads import ForkAware, helper

JOINED_BYTES = 64 * 1024
"""Read at once of what is passed on."""


def numeric_address(name: tuple[Any, ...]) -> str:
    """The address in a socket's name; a link-local one with its scope, without which it is none."""
    return socket.getnameinfo(name, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def enable_keepalive(connection: socket.socket, timeout: float) -> None:
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


def update_selector_events(
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
class SocketRelay:
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
        update_selector_events(self.selector, one, self, not ahead, back)
        update_selector_events(self.selector, other, self, not back, ahead)
        return True

    def close(self) -> None:
        for one in self.unsent:
            update_selector_events(self.selector, one, self, False, False)
            one.close()


# -- name lookups ---------------------------------------------------------------------------------

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]
MAX_ANSWER_AGE_S = 30.0  # an answer that came after its caller had given up is used for so long


@attrs.define(eq=False)
class _Lookup:
    """One call of getaddrinfo in a thread of its own, and when it returned."""

    answer: Future[list[AddressInfo]] = attrs.field(factory=Future)
    answered_at: float = float("inf")

    def run(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:
            self.answered_at = monotonic()
            self.answer.set_exception(error)
        else:
            self.answered_at = monotonic()
            self.answer.set_result(found)


class NameLookup(ForkAware):
    """Calls getaddrinfo so that no caller waits longer than it wants to. Thread-safe.

    A call that outlasts its caller is shared by the callers after it, so that a name server which
    does not answer occupies one thread per name, and a slow one is heard in the end.
    """

    def __init__(self) -> None:
        self._check_process()

    def _init_process_state(self) -> None:
        self._lock = threading.Lock()
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    def addresses(self, host: str, port: int, timeout_s: float) -> list[AddressInfo]:
        """Return what `socket.getaddrinfo` returns for a stream socket.

        Raises:
            OSError: the name does not resolve, or not within `timeout_s` seconds.
        """
        with contextlib.suppress(socket.gaierror):  # a literal address needs no name server
            return socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        self._check_process()
        name = (host, port)
        lookup = self._begin(name)
        if not concurrent.futures.wait([lookup.answer], timeout_s).done:
            raise OSError(f"{host} could not be resolved within {timeout_s:g} s: check DNS")
        with self._lock:
            if self._lookups.get(name) is lookup:
                del self._lookups[name]
        try:
            return lookup.answer.result()
        except socket.gaierror as error:
            why = f"{host} does not resolve ({error.strerror}): check the name"
            raise OSError(why) from error

    def _begin(self, name: tuple[str, int]) -> _Lookup:
        with self._lock:
            lookup = self._lookups.get(name)
            if lookup is None or monotonic() - lookup.answered_at > MAX_ANSWER_AGE_S:
                lookup = _Lookup()
                try:
                    helper(lambda: lookup.run(*name), "name-lookup").start()
                except RuntimeError as error:
                    raise OSError(f"cannot start a thread to resolve {name[0]}: {error}") from error
                self._lookups[name] = lookup
            return lookup


NAME_LOOKUP = NameLookup()
"""The lookups of this process."""


def create_connection(
    host: str,
    port: int,
    timeout: float,
    resolve: Callable[[str, int, float], list[AddressInfo]] = NAME_LOOKUP.addresses,
) -> socket.socket:
    """Return a connection to the first address of the host that accepts one.

    Raises:
        OSError: the name does not resolve, or no address accepts, within `timeout` seconds.
    """
    deadline = monotonic() + timeout
    addresses = resolve(host, port, timeout)
    failure: OSError | None = None
    for tried, (family, kind, proto, _, address) in enumerate(addresses):
        # A silent address must leave time for those behind it.
        share = max(deadline - monotonic(), 0.01) / (len(addresses) - tried)
        try:
            connection = socket.socket(family, kind, proto)
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
