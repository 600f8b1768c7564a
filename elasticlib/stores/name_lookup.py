"""Looks up host names, and connects to them, within a time limit.

The C library's resolver blocks for as long as its own configuration says, which may be half a
minute; a thread that keeps a lease must not wait for so long.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from ..clock import monotonic
from ..threads import helper
from .forks import ForkAware

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

    def _begin_in_process(self) -> None:
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


def dial(
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
