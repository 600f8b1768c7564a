"""The client of the TCP store: one connection for all threads, made at the first operation.

A broken connection ends the operations in flight with StoreUnavailable and this client's leases
with it; the next operation connects anew. A forked child's copy is another client: it leaves its
parent's connection alone and makes one of its own.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..clock import monotonic
from ..endpoint import join_endpoint
from ..errors import ConfigError, StoreRefused, StoreTimeout, StoreUnavailable, present
from .forks import renew_in_children
from .interface import CompareSet, Entry, Listing, Store, Watched, check_key, check_ttl
from .link import LONGEST_WAIT, Answer, Link
from .secret import check_secret
from .wire import MAX_FRAME_BYTES, Frame, check_fields

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
LISTING_TRIES = 10
HEADER_ROOM = 16 * 1024
"""More than the header of any request takes, whatever its key."""


class TcpStore(Store):
    """A client of the `TcpStoreServer` at an address.

    Args:
        host: a name or a literal address; all that it resolves to are tried.
        port: where the server listens.
        job: whose store it is to be; a server of another job refuses by name.
        timeout: seconds for the answer to one operation, beside those of connecting where it has to
            connect first; `wait` beyond its own.
        connect_timeout: seconds to go on trying to connect; `timeout` unless given.
        secret: what the server must prove to know, as this client does; it is never sent. What
            follows the proof is neither encrypted nor signed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str = "",
        timeout: float = 60.0,
        connect_timeout: float | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._job = job
        self._timeout = timeout
        self._connect_timeout = timeout if connect_timeout is None else connect_timeout
        if not host or not 0 < port <= 65535:
            raise ConfigError(f"a store is at a host and a port 1..65535, got {host!r}, {port}")
        if not (timeout > 0 and self._connect_timeout > 0):
            raise ConfigError(f"timeouts are positive, got {timeout} and {connect_timeout}")
        self._secret = check_secret(secret)
        self._closed = threading.Event()
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Have no connection, and no lock that a thread may hold; a closed store stays closed."""
        self.label = f"{os.getpid()}@{socket.gethostname()}/{secrets.token_hex(4)}"
        self._connecting = threading.Lock()
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self._closed.set()
        self._link: Link | None = None
        self._local_address: str | None = None

    @property
    def address(self) -> str:
        """`host:port` as given, IPv6 in brackets."""
        return join_endpoint(self._host, self._port)

    @property
    def local_address(self) -> str | None:
        """This machine's literal address towards the store; None before the first connection."""
        return self._local_address

    def connect(self, timeout: float | None = None) -> None:
        """Connect now, if there is no connection; every operation does so by itself.

        timeout: seconds, in place of this store's own connect_timeout.
        """
        self._live_link(timeout)

    def get(self, key: str) -> Entry | None:
        answer = self._request("get", {"key": check_key(key)})
        return self._entry(key, answer)

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        fields = {"key": check_key(key), "ttl": check_ttl(ttl)}
        answer = self._request("set", fields, bytes(value))
        return Entry(key, bytes(value), answer.fields["version"])

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        fields = {"key": check_key(key), "ttl": check_ttl(ttl), "expected": expected}
        answer = self._request("compare_set", fields, bytes(value))
        if answer.op == "written":
            return CompareSet(True, Entry(key, bytes(value), answer.fields["version"]))
        return CompareSet(False, self._entry(key, answer))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        answer = self._request("delete", {"key": check_key(key), "expected": expected})
        return bool(answer.fields["yes"])

    def refresh(self, key: str, version: int) -> None:
        self._request("refresh", {"key": check_key(key), "version": version})

    def list(self, prefix: str) -> Listing:
        for _ in range(LISTING_TRIES):
            listing = self._paged(prefix)
            if listing is not None:
                return listing
        raise StoreUnavailable(
            f"{self.address} forgot the rest of a listing of {prefix!r} {LISTING_TRIES} times "
            "before it was asked for: too many clients list too much there at once"
        )

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        patience = min(max(timeout, 0.0), LONGEST_WAIT)
        fields = {"prefix": prefix, "after": after, "timeout": patience}
        return bool(self._request("wait", fields, patience=patience).fields["yes"])

    def watch(
        self, prefix: str, *, after: int, changed: Callable[[Watched], None], listing: bool = False
    ) -> bool:
        fields = {"prefix": prefix, "after": after, "listing": listing}
        check_fields("watch", fields)

        def answered(answer: Answer) -> None:
            changed(self._watched(answer))

        self._live_link().call_back("watch", fields, answered)
        return True

    def _watched(self, answer: Answer) -> Watched:
        if not isinstance(answer, Frame):
            return False
        if answer.op != "listing" or answer.fields["rest"] is not None:
            return bool(answer.fields.get("yes", True))
        try:
            return self._listing(answer)
        except StoreRefused:
            return False

    def _paged(self, prefix: str) -> Listing | None:
        """All pages, which are of one moment; None if the server has forgotten those to come."""
        answer = self._request("list", {"prefix": prefix})
        entries = list(self._listing(answer).entries)
        while (rest := answer.fields["rest"]) is not None:
            # After a new connection the server knows of no listing, and says so.
            answer = self._request("rest", {"number": rest})
            if answer.op == "absent":
                return None
            entries += self._listing(answer).entries
        return Listing(tuple(entries), answer.fields["version"])

    def _listing(self, answer: Frame) -> Listing:
        entries = []
        at = 0
        for key, version, size in answer.fields["rows"]:
            entries.append(Entry(key, answer.value[at : at + size], version))
            at += size
        if at != len(answer.value):
            raise StoreRefused(
                f"{self.address}: a listing of {at} bytes came with {len(answer.value)}"
            )
        return Listing(tuple(entries), answer.fields["version"])

    def close(self) -> None:
        self._closed.set()
        link = self._link
        if link is not None:
            link.close("this store is closed")

    def _entry(self, key: str, answer: Frame) -> Entry | None:
        if answer.op == "absent":
            return None
        return Entry(key, answer.value, answer.fields["version"])

    def _request(
        self, op: str, fields: Mapping[str, Any], value: bytes = b"", *, patience: float = 0.0
    ) -> Frame:
        # The server would end the connection, and all leases with it, over one bad frame.
        if len(value) > MAX_FRAME_BYTES - HEADER_ROOM:
            raise StoreRefused(
                f"a value is at most {MAX_FRAME_BYTES - HEADER_ROOM} bytes, got {len(value)} "
                f"for key {fields['key']!r}"
            )
        check_fields(op, fields)
        answer = self._live_link().request(op, fields, value, patience=patience)
        if answer.op not in _ANSWERS[op]:
            raise StoreRefused(f"{self.address} answered {op} with {answer.op}")
        return answer

    def _live_link(self, patience: float | None = None) -> Link:
        link = self._link
        if link is None or not link.alive:
            return self._connected(self._connect_timeout if patience is None else patience)
        return link

    def _connected(self, patience: float) -> Link:
        deadline = monotonic() + patience
        connecting = self._connecting
        if not connecting.acquire(timeout=min(patience, LONGEST_WAIT)):
            raise StoreTimeout(f"{self.address} was not reached within {patience:g} s")
        try:
            if self._link is None or not self._link.alive:
                self._replace(self._open_until(deadline, patience))
            return present(self._link, f"the connection to {self.address}")
        finally:
            connecting.release()

    def _replace(self, link: Link) -> None:
        old, self._link = self._link, link
        if old is not None:
            old.close("the connection was replaced")
        self._local_address = link.local_address
        if self._closed.is_set():  # while we connected
            link.close("this store is closed")

    def _open_until(self, deadline: float, patience: float) -> Link:
        """A link, however often connecting fails before the deadline."""
        pause = FIRST_PAUSE
        hello = {"job": self._job, "client": self.label}
        while True:
            if self._closed.is_set():
                raise StoreUnavailable(f"{self.address}: this store is closed")
            left = max(deadline - monotonic(), 0.01)
            try:
                return Link.open(
                    self._host,
                    self._port,
                    hello,
                    secret=self._secret,
                    connect=left,
                    timeout=self._timeout,
                )
            except StoreTimeout:
                raise
            except OSError as error:
                left = deadline - monotonic()
                if left <= pause:
                    raise StoreUnavailable(
                        f"{self.address} was not reached within {patience:g} s: {error}"
                    ) from error
            self._closed.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE)


_ANSWERS: Mapping[str, frozenset[str]] = {
    "get": frozenset({"entry", "absent"}),
    "set": frozenset({"written"}),
    "compare_set": frozenset({"written", "lost", "absent"}),
    "delete": frozenset({"answer"}),
    "refresh": frozenset({"answer"}),
    "list": frozenset({"listing"}),
    "rest": frozenset({"listing", "absent"}),
    "wait": frozenset({"answer"}),
}
