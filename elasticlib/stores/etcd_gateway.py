"""Requests to etcd's JSON gateway, from the first member that takes them, and watches of ranges.

A request that a member was not sent goes to the next one; one whose answer was lost is repeated
only where it says that it may be. Whatever goes wrong is an error that names the member and what
was asked of it.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar

from ..clock import monotonic
from ..errors import ConfigError, StoreError, StoreRefused, StoreTimeout, StoreUnavailable, describe
from ..threads import helper
from .etcd_access import (
    Access,
    Answer,
    LeaseEnded,
    Member,
    NoSuchRevision,
    Request,
    TokenRefused,
    Unsent,
)
from .sockets import close_in_children, keep_honest

API = "/v3/"
"""etcd 3.4 and later."""

# gRPC's codes in the JSON of an error.
DEADLINE_EXCEEDED, OUT_OF_RANGE, UNAVAILABLE, UNAUTHENTICATED = 4, 11, 14, 16
OLD_TOKEN = "revision of auth store is old"
NO_LEASE = "requested lease not found"

MOST_WATCHES = 8
"""Kept open for a next wait; each is a connection and a thread."""
END_SECONDS = 1.0
"""To wait for a watch's thread when closing; one that still connects ends by itself later."""

Found = TypeVar("Found")


class _Connection:
    """To one member, kept alive from one request to the next; for one thread at a time."""

    def __init__(self, member: Member, tls: ssl.SSLContext | None) -> None:
        self.member = member
        self._http = (
            HTTPConnection(member.host, member.port)
            if tls is None
            else HTTPSConnection(member.host, member.port, context=tls)
        )

        # It knows none any more once the answer is the last one, of which more may be to come.
        self._socket: socket.socket | None = None

    def ask(self, request: Request, seconds: tuple[float, float], token: str | None) -> Answer:
        """The answer to one request. seconds: to connect in, and to be answered in."""
        with self._named(request, seconds[1]):
            text = self._post(request, seconds, token).read()
        try:
            fields = json.loads(text)
            # Of a stream of one message.
            fields = fields.get("result", fields)
            return Answer(int(fields["header"]["revision"]), fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._no_etcd(text) from None

    def stream(
        self, request: Request, seconds: tuple[float, float], token: str | None
    ) -> HTTPResponse:
        """An answer without an end, a message a line. It may be silent from now on, but the
        network may not be for long past the seconds that there were to be answered in."""
        with self._named(request, seconds[1]):
            # A member cut off from the others ends it, where it would be silent otherwise.
            response = self._post(request, seconds, token, {"Grpc-Metadata-Hasleader": "true"})
            if self._socket is not None:
                self._socket.settimeout(None)
                keep_honest(self._socket, seconds[1])
        return response

    def shut(self) -> None:
        """Wake whoever reads, from another thread."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself
                # The plain socket's own: that of TLS would take its state from under the reader.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()

    def _post(
        self,
        request: Request,
        seconds: tuple[float, float],
        token: str | None,
        more: Mapping[str, str] | None = None,
    ) -> HTTPResponse:
        headers = {"Content-Type": "application/json", **(more or {})}
        if token is not None:
            headers["Authorization"] = token
        self._reach(seconds[0])
        self._http.sock.settimeout(seconds[1])
        self._http.request("POST", API + request.path, json.dumps(request.body), headers)
        response = self._http.getresponse()
        if response.status != 200:
            raise self._refusal(response.status, response.read(), request)
        return response

    def _reach(self, seconds: float) -> None:
        if self._http.sock is not None:
            poll = select.poll()
            poll.register(self._http.sock, select.POLLIN)
            if not poll.poll(0):
                return
            self._http.close()  # nothing was asked: what is there to read is its end
        self._http.timeout = seconds
        name = self.member.address
        try:
            self._http.connect()
            self._socket = close_in_children(self._http.sock)
        except ssl.SSLCertVerificationError as error:
            raise StoreRefused(
                f"{name} shows a certificate that is not trusted: {error}"
            ) from error
        except TimeoutError:
            raise Unsent(f"{name} took no connection within {seconds:.3g} s") from None
        except OSError as error:
            raise Unsent(f"{name} was not reached: {error}") from error

    @contextlib.contextmanager
    def _named(self, request: Request, seconds: float) -> Iterator[None]:
        """What goes wrong after connecting is the store's error, and names what was asked."""
        name = self.member.address
        try:
            yield
        except StoreError:
            raise
        except TimeoutError as error:
            raise StoreTimeout(
                f"{name} did not answer within {seconds:.3g} s: {request.what}"
            ) from error
        except (OSError, HTTPException) as error:
            raise StoreUnavailable(
                f"the connection to {name} broke, to {request.what}: {describe(error)}"
            ) from error

    def _refusal(self, status: int, text: bytes, request: Request) -> StoreError:
        name = self.member.address
        try:
            fields = json.loads(text)
            code, message = int(fields["code"]), str(fields["error"])
        except (ValueError, TypeError, KeyError):
            if status >= 500:
                return StoreUnavailable(f"{name}: HTTP {status}, {request.what}")
            return self._no_etcd(text)
        sentence = f"{name} would not {request.what}: {message}"
        if code == UNAUTHENTICATED or OLD_TOKEN in message:
            return TokenRefused(sentence)
        if NO_LEASE in message:
            return LeaseEnded(sentence)
        kinds = {
            DEADLINE_EXCEEDED: StoreTimeout,
            OUT_OF_RANGE: NoSuchRevision,
            UNAVAILABLE: StoreUnavailable,
        }
        return kinds.get(code, StoreRefused)(sentence)

    def _no_etcd(self, text: bytes) -> StoreError:
        shown = text.decode(errors="replace").strip()[:200]
        return StoreRefused(f"{self.member.address} answers, but not as an etcd: {shown!r}")


class Gateway:
    """All connections of one store, each used by one thread at a time.

    Args:
        access: the members and the credentials.
        timeout: seconds for one request, over all members tried.
    """

    def __init__(self, access: Access, timeout: float) -> None:
        self.access = access
        self.timeout = timeout
        self._tls = _tls(access)
        self._state = threading.Lock()
        self._first = 0
        self._idle: list[_Connection] = []
        self._token: str | None = None
        self._closed = False

    def ask(self, request: Request, *, timeout: float | None = None) -> Answer:
        """The answer of the first member that is reached, within the gateway's own timeout."""

        def ask(connection: _Connection, seconds: tuple[float, float]) -> Answer:
            return self._signed_in(
                connection, seconds, lambda token: connection.ask(request, seconds, token)
            )

        connection, answer = self._in_turn(request, ask, timeout or self.timeout)
        with self._state:
            if not self._closed:
                self._idle.append(connection)
                return answer
        connection.close()
        return answer

    def stream(self, request: Request) -> tuple[_Connection, HTTPResponse]:
        """An endless answer of the first member that is reached, in a connection of its own."""

        def open_stream(connection: _Connection, seconds: tuple[float, float]) -> HTTPResponse:
            return self._signed_in(
                connection, seconds, lambda token: connection.stream(request, seconds, token)
            )

        return self._in_turn(request, open_stream, self.timeout)

    def close(self) -> None:
        """Let go of the idle connections; those in use end with their requests."""
        with self._state:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _in_turn(
        self,
        request: Request,
        attempt: Callable[[_Connection, tuple[float, float]], Found],
        timeout: float,
    ) -> tuple[_Connection, Found]:
        deadline = monotonic() + timeout
        members = self.access.members
        first, failures, silent = self._first, [], False
        for tried in range(len(members)):
            number = (first + tried) % len(members)
            left = max(deadline - monotonic(), 0.01)
            # A silent member must leave time for those behind it.
            share = left / (len(members) - tried)
            connection = self._take(members[number])
            try:
                found = attempt(connection, (share, share if request.repeatable else left))
            except BaseException as error:
                # Also after a refusal, which is rare, and then leaves nothing half read.
                connection.close()
                lost = isinstance(error, (StoreUnavailable, StoreTimeout))
                if not lost or not (request.repeatable or isinstance(error, Unsent)):
                    raise
                silent = silent or isinstance(error, StoreTimeout)
                failures.append(str(error))
            else:
                self._first = number
                return connection, found
        why = "; ".join(failures)
        if silent:
            raise StoreTimeout(f"no etcd could {request.what} within {timeout:g} s: {why}")
        raise StoreUnavailable(f"no etcd could {request.what}: {why}")

    def _signed_in(
        self,
        connection: _Connection,
        seconds: tuple[float, float],
        send: Callable[[str | None], Found],
    ) -> Found:
        """What `send` returns, given a token where there is a user."""
        user = self.access.user
        if user is None:
            return send(None)
        if (token := self._token) is not None:
            try:
                return send(token)
            except TokenRefused:
                # Tokens end after minutes, and when etcd starts again.
                self._token = None
        body = {"name": user, "password": self.access.password}
        request = Request("auth/authenticate", body, f"let user {user!r} sign in")
        token = connection.ask(request, seconds, None).fields.get("token")
        if not isinstance(token, str):
            raise StoreRefused(f"{connection.member.address} gave user {user!r} no token")
        self._token = token
        return send(token)

    def _take(self, member: Member) -> _Connection:
        with self._state:
            for at, connection in enumerate(self._idle):
                if connection.member == member:
                    del self._idle[at]
                    return connection
        return _Connection(member, self._tls if member.protocol == "https" else None)


def _tls(access: Access) -> ssl.SSLContext | None:
    if all(member.protocol == "http" for member in access.members):
        return None
    try:
        context = ssl.create_default_context(cafile=access.ca_cert)
        if access.cert is not None:
            context.load_cert_chain(access.cert, access.key)
    except OSError as error:  # TLS's own errors among them
        files = ", ".join(filter(None, (access.ca_cert, access.cert, access.key)))
        raise ConfigError(f"etcd: cannot use the certificates of {files}: {error}") from error
    return context


class Watch:
    """The changes of one range from revision `start` on, read by a thread.

    It remembers one number, the revision of the newest change since its start: so whoever asks
    later than the change still hears of it, and nobody who waits holds up another.
    """

    def __init__(self, gateway: Gateway, span: Mapping[str, Any], start: int) -> None:
        self.start = start
        self.waiting = 0
        self.ended: StoreError | None = None
        """Why it sees nothing any more."""
        self._gateway = gateway
        body = {"create_request": {**span, "start_revision": start}}
        self._request = Request("watch", body, "watch", repeatable=True)
        self._state = threading.Condition()
        self._newest = 0
        self._connection: _Connection | None = None
        self.thread = helper(self._run, "etcd-watch")
        self.thread.start()

    def changed(self, after: int, timeout: float) -> bool:
        """Whether a change past `after` was seen, by `timeout` or until the watch ended."""
        with self._state:
            self._state.wait_for(lambda: self._newest > after or self.ended is not None, timeout)
            return self._newest > after

    def end(self, error: StoreError) -> None:
        """See nothing any more; whoever waits wakes."""
        with self._state:
            self.ended = self.ended or error
            self._state.notify_all()
            connection = self._connection
        if connection is not None:
            connection.shut()

    def _run(self) -> None:
        try:
            connection, response = self._gateway.stream(self._request)
            with contextlib.closing(connection), contextlib.closing(response):
                with self._state:
                    self._connection = connection
                    over = self.ended is not None
                if not over:
                    self._listen(connection.member.address, response)
        except StoreError as error:
            self.end(error)
        finally:
            # A watch that hears nothing is never taken for a quiet one.
            self.end(StoreUnavailable("the watch failed"))

    def _listen(self, name: str, response: HTTPResponse) -> None:
        try:
            while line := response.readline():
                message = json.loads(line)
                result = message.get("result") if isinstance(message, dict) else None
                if not isinstance(result, dict):
                    raise StoreUnavailable(f"{name} ended the watch: {line[:200]!r}")
                self._hear(result)
        # One that is shut under TLS reads as a ValueError.
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreUnavailable(f"the watch at {name} broke: {describe(error)}") from error
        raise StoreUnavailable(f"{name} ended the watch")

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message.get("canceled"):
            if "compact_revision" in message:
                raise NoSuchRevision(f"the changes from revision {self.start} on are compacted")
            raise StoreRefused(f"etcd would not watch: {message.get('cancel_reason', 'no reason')}")
        newest = max((int(e["kv"]["mod_revision"]) for e in message.get("events", ())), default=0)
        if newest:
            with self._state:
                self._newest = max(newest, self._newest)
                self._state.notify_all()


class Watches:
    """The watches of one store, at most one a range."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._state = threading.Lock()
        self._watches: dict[str, Watch] = {}
        self._closed: StoreError | None = None

    @contextlib.contextmanager
    def entered(self, span: Mapping[str, Any], start: int) -> Iterator[Watch]:
        """A watch of the range that sees all from `start` on."""
        with self._state:
            if self._closed is not None:
                raise StoreUnavailable(str(self._closed))
            watch = self._watches.pop(span["key"], None)
            if watch is not None and (watch.ended is not None or watch.start > start):
                watch.end(StoreUnavailable("another watch took its place"))
                watch = None
            if watch is None:
                self._end_idle()
                watch = Watch(self._gateway, span, start)
            # The last place is that of the one used last.
            self._watches[span["key"]] = watch
            watch.waiting += 1
        try:
            yield watch
        finally:
            with self._state:
                watch.waiting -= 1

    def close(self, error: StoreError) -> None:
        """End all of them with the error, and take no more."""
        with self._state:
            self._closed = error
            watches = list(self._watches.values())
            self._watches.clear()
        for watch in watches:
            watch.end(error)
        for watch in watches:
            watch.thread.join(END_SECONDS)

    def _end_idle(self) -> None:
        idle = [key for key, watch in self._watches.items() if not watch.waiting]
        for key in idle[: max(len(self._watches) - MOST_WATCHES + 1, 0)]:
            self._watches.pop(key).end(StoreUnavailable("the watch was not used"))
