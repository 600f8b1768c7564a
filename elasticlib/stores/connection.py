"""Sockets of the stores: name lookups and connections within a time limit, keepalive, relays.

The C library's resolver can block for half a minute, depending on its configuration. A thread that
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
from functools import partial
from typing import Any

import attrs

from ..clock import monotonic
from ..threads import ForkAware, daemon_thread, only_logged

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]
MAX_ANSWER_AGE_S = 30.0  # an answer for a caller that has given up is used for so long
RELAY_BYTES = 64 * 1024  # read at once from one side of a relay


def numeric_address(name: tuple[Any, ...]) -> str:
    """Return the address in a socket's name. A link-local address includes its scope."""
    return socket.getnameinfo(name, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def enable_keepalive(connection: socket.socket, timeout_s: float) -> None:
    """Send small frames without delay, and end the connection when the network is down.

    Args:
        connection: A TCP socket.
        timeout_s: Seconds without a reply of the peer's kernel after which the connection ends.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Three unanswered probes end an idle connection. The user timeout ends one with unsent data.
    interval = min(max(int(timeout_s / 4), 1), 32767)
    for name, value in (
        ("TCP_KEEPIDLE", interval),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", min(int(timeout_s * 1000) + 1, 2**31 - 1)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def update_selector_events(
    selector: selectors.BaseSelector,
    connection: socket.socket,
    data: object,
    reads: bool,
    writes: bool,
) -> None:
    """Make the selector wait until the socket can be read or written, or remove the socket."""
    events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
    if connection not in selector.get_map():
        if events:
            selector.register(connection, events, data)
    elif events:
        selector.modify(connection, events, data)
    else:
        selector.unregister(connection)


@attrs.define(eq=False)
class SocketRelay:
    """Two non-blocking sockets, each of which receives what the other one sends.

    The relay is the selector's data for both sockets. It ends when one of the two ends.
    """

    selector: selectors.BaseSelector
    # Bytes that were read for each of the two sockets. No more are read before these are sent.
    unsent: dict[socket.socket, bytes]

    def relay_once(self) -> bool:
        """Transfer what can be transferred now. Return False if one side is closed."""
        left, right = self.unsent
        try:
            for source, sink in ((left, right), (right, left)):
                with contextlib.suppress(BlockingIOError):
                    if not self.unsent[sink]:
                        self.unsent[sink] = source.recv(RELAY_BYTES)
                        if not self.unsent[sink]:
                            return False
                    self.unsent[sink] = self.unsent[sink][sink.send(self.unsent[sink]) :]
            for source, sink in ((left, right), (right, left)):
                reads, writes = not self.unsent[sink], bool(self.unsent[source])
                update_selector_events(self.selector, source, self, reads, writes)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close both sockets."""
        for connection in self.unsent:
            update_selector_events(self.selector, connection, self, False, False)
            connection.close()


@attrs.define(eq=False)
class _Lookup:
    answer: Future[list[AddressInfo]] = attrs.field(factory=Future)
    answered_at: float = float("inf")  # when getaddrinfo returned

    def run(self, host: str, port: int) -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:
            self.answered_at = monotonic()
            self.answer.set_exception(error)
        else:
            self.answered_at = monotonic()
            self.answer.set_result(infos)


class NameLookup(ForkAware):
    """Calls getaddrinfo with a time limit. Thread-safe.

    A lookup that outlasts its caller is shared by later callers. A name server that does not answer
    thus occupies one thread per name, and a late answer is used.
    """

    def __init__(self) -> None:
        self._check_process()

    def _init_process_state(self) -> None:
        self._lock = threading.Lock()
        self._lookups: dict[tuple[str, int], _Lookup] = {}  # lookups that no caller has received

    def addresses(self, host: str, port: int, timeout_s: float) -> list[AddressInfo]:
        """Return what `socket.getaddrinfo` returns for a stream socket.

        Raises:
            OSError: The name does not resolve, or not within `timeout_s` seconds.
        """
        with contextlib.suppress(socket.gaierror):  # a literal address needs no name server
            return socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        self._check_process()
        name = (host, port)
        lookup = self._start_lookup(name)
        if not concurrent.futures.wait([lookup.answer], timeout_s).done:
            raise OSError(f"{host} could not be resolved within {timeout_s:g} s: check DNS")
        with self._lock:
            if self._lookups.get(name) is lookup:
                del self._lookups[name]
        try:
            return lookup.answer.result()
        except socket.gaierror as error:
            message = f"{host} does not resolve ({error.strerror}): check the name"
            raise OSError(message) from error

    def _start_lookup(self, name: tuple[str, int]) -> _Lookup:
        """Start a lookup, or return one that is still running or has a recent answer."""
        with self._lock:
            lookup = self._lookups.get(name)
            if lookup is None or monotonic() - lookup.answered_at > MAX_ANSWER_AGE_S:
                lookup = _Lookup()
                try:
                    run = partial(lookup.run, *name)
                    daemon_thread(run, "name-lookup", only_logged).start()
                except RuntimeError as error:
                    raise OSError(f"cannot start a thread to resolve {name[0]}: {error}") from error
                self._lookups[name] = lookup
            return lookup


NAME_LOOKUP = NameLookup()  # the lookups of this process


def create_connection(
    host: str,
    port: int,
    timeout: float,
    resolve: Callable[[str, int, float], list[AddressInfo]] = NAME_LOOKUP.addresses,
) -> socket.socket:
    """Return a connection to the first address of the host that accepts one.

    Raises:
        OSError: The name does not resolve, or no address accepts, within `timeout` seconds.
    """
    deadline = monotonic() + timeout
    addresses = resolve(host, port, timeout)
    failure: OSError | None = None
    for num_tried, (family, kind, proto, _, address) in enumerate(addresses):
        # An address that does not answer must leave time for the remaining ones.
        share = max(deadline - monotonic(), 0.01) / (len(addresses) - num_tried)
        try:
            connection = socket.socket(family, kind, proto)
        except OSError as error:
            failure = error  # this kernel does not support the address family
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
