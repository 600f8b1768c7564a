"""A store in an existing etcd: its revisions are the versions, and its leases the leases.

A wait first checks etcd's history for changes and only then watches, so no change is missed between
the two. Revisions that etcd has compacted count as a change.

The client uses etcd's JSON gateway. A request that has not reached a member is sent to the next
one. A request without a reply is only repeated if it changes nothing. Errors name the member and
the request.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import socket
import ssl
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, TypeVar

import attrs

from ..clock import monotonic
from ..endpoint import join_endpoint, split_endpoint
from ..errors import (
    ConfigError,
    LeaseLostError,
    StoreConnectionError,
    StoreError,
    StoreRejectedError,
    StoreTimeoutError,
    format_error,
    require_not_none,
)
from ..threads import ForkAware, daemon_thread
from .connection import create_connection, enable_keepalive
from .interface import CompareSetResult, Entry, Listing, Store, check_key, check_ttl
from .key_space import check_lease, lost_lease

ETCD_PORT = 2379
MAX_TTL_S = 9_000_000_000  # etcd grants no longer leases
MAX_HISTORY = 16  # revisions that a wait reads one by one; if it missed more, it returns True
LEASED_WRITE_ATTEMPTS = 3  # the lease of a write can expire before the write
MAX_WATCHES = 8  # open watches for later waits; each uses a connection and a thread
RETRY_DELAY_S = 0.05  # after a watch has failed
CLOSE_TIMEOUT_S = 5.0  # for ending the leases; otherwise etcd ends them after their ttl
WATCH_END_TIMEOUT_S = 1.0  # for the end of a watch's thread, which may still be connecting

Fields = Mapping[str, Any]
Reply = TypeVar("Reply")

# -- members -----------------------------------------------------------------------------------


@attrs.frozen
class Member:
    """The address of one member of an etcd cluster."""

    protocol: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """The address as `host:port`, with IPv6 in brackets."""
        return join_endpoint(self.host, self.port)


def read_members(endpoints: str | Sequence[str], *, secure: bool = False) -> tuple[Member, ...]:
    """Parse endpoints of the form `[http[s]://]HOST[:PORT]`; the default port is 2379.

    Args:
        endpoints: Endpoints separated by commas, or a list of them.
        secure: Use https where no protocol is given, and reject http.

    Returns:
        The members without duplicates.

    Raises:
        ConfigError: There is no endpoint, or one is invalid or uses http although `secure` is True.
    """
    members: dict[Member, None] = {}
    for endpoint in endpoints.split(",") if isinstance(endpoints, str) else endpoints:
        protocol, mark, rest = endpoint.strip().rpartition("://")
        protocol = protocol if mark else "https" if secure else "http"
        if protocol not in ("http", "https"):
            raise ConfigError(f"etcd: an endpoint is reached by http or https, got {endpoint!r}")
        if secure and protocol == "http":
            raise ConfigError(
                f"etcd: a CA or certificate is for https, and the endpoint is {endpoint!r}"
            )
        host, port = split_endpoint(rest.rstrip("/"), ETCD_PORT)
        if port == 0:
            raise ConfigError(f"etcd: an endpoint has a port 1..65535, got {endpoint!r}")
        members[Member(protocol, host, port)] = None
    if not members:
        raise ConfigError("etcd: at least one endpoint HOST:PORT is needed, got none")
    return tuple(members)


def _make_tls(ca_cert: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_cert)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:  # includes ssl.SSLError
        files = ", ".join(filter(None, (ca_cert, cert, key)))
        raise ConfigError(f"etcd: cannot use the certificates of {files}: {error}") from error
    return context


# -- JSON gateway ------------------------------------------------------------------------------


class RequestNotSentError(StoreConnectionError):
    """The request has not reached the member, and so has no effect."""


class RevisionGoneError(StoreRejectedError):
    """The requested revision is compacted or does not exist yet."""


class EtcdLeaseExpiredError(StoreRejectedError):
    """The lease of a write has expired before the write, which has no effect."""


class TokenRejectedError(StoreRejectedError):
    """The member does not know the authentication token, or no longer."""


# The gRPC codes in the JSON of an error, and messages that are more specific than the code.
ERROR_OF_CODE = {
    4: StoreTimeoutError,
    11: RevisionGoneError,
    14: StoreConnectionError,
    16: TokenRejectedError,
}
ERROR_OF_MESSAGE = {
    "revision of auth store is old": TokenRejectedError,
    "requested lease not found": EtcdLeaseExpiredError,
}


@attrs.frozen
class Request:
    """A request to the gateway."""

    path: str  # below /v3/
    body: Fields = attrs.field(repr=False)  # with bytes in base64; it may contain a password
    description: str  # for error messages
    is_idempotent: bool = False  # can be repeated after its reply was lost


class _Connection(HTTPConnection):
    """A persistent connection to one member, which one thread uses at a time."""

    connection_socket: socket.socket  # `sock` is None while the last reply is still being read

    def __init__(self, member: Member, tls: ssl.SSLContext | None) -> None:
        super().__init__(member.host, member.port)
        self.member = member
        self._tls = tls

    def post(
        self, request: Request, timeouts: tuple[float, float], token: str | None
    ) -> HTTPResponse:
        """Send a request, and return the response, whose body has not been read yet.

        Args:
            request: The request.
            timeouts: Seconds to connect, and seconds to wait for data.
            token: The authentication token, if there is a user.
        """
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = token
        if request.path == "watch":
            # A member without a leader then ends the watch; otherwise it would send nothing.
            headers["Grpc-Metadata-Hasleader"] = "true"
        self._connect(*timeouts)
        self.sock.settimeout(timeouts[1])
        self.request("POST", "/v3/" + request.path, json.dumps(request.body), headers)
        response = self.getresponse()
        if response.status != 200:
            raise self._error_of(response.status, response.read(), request)
        return response

    def _connect(self, timeout_s: float, keepalive_timeout_s: float) -> None:
        if self.sock is not None:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if not poll.poll(0):
                return
            self.close()  # without a request, only the end can be read
        name = self.member.address
        try:
            self.sock = create_connection(self.host, self.port, timeout_s)
            if self._tls is not None:
                self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
            enable_keepalive(self.sock, keepalive_timeout_s)
        except ssl.SSLCertVerificationError as error:
            raise StoreRejectedError(
                f"{name} shows a certificate that is not trusted: {error}"
            ) from error
        except TimeoutError:
            raise RequestNotSentError(
                f"{name} accepted no connection within {timeout_s:.3g} s"
            ) from None
        except OSError as error:
            raise RequestNotSentError(f"{name} could not be reached: {error}") from error
        self.connection_socket = self.sock

    def read(self, response: HTTPResponse) -> Fields:
        """Return the only message of a response, which contains the revision of the store."""
        text = response.read()
        try:
            fields = json.loads(text)
            fields = fields.get("result", fields)  # if the response is a stream of one message
            int(fields["header"]["revision"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._not_etcd_error(text) from None
        return dict(fields)

    @contextlib.contextmanager
    def translate_errors(self, request: Request, timeout_s: float) -> Iterator[None]:
        """Raise errors of the connection as errors of the store that name the request."""
        name = self.member.address
        try:
            yield
        except StoreError:
            raise
        except TimeoutError as error:
            raise StoreTimeoutError(
                f"{name} did not answer within {timeout_s:.3g} s: {request.description}"
            ) from error
        except (OSError, HTTPException) as error:
            raise StoreConnectionError(
                f"the connection to {name} broke, to {request.description}: {format_error(error)}"
            ) from error

    def _error_of(self, status: int, text: bytes, request: Request) -> StoreError:
        name = self.member.address
        try:
            fields = json.loads(text)
            code, message = int(fields["code"]), str(fields["error"])
        except (ValueError, TypeError, KeyError):
            if status >= 500:
                return StoreConnectionError(f"{name}: HTTP {status}, {request.description}")
            return self._not_etcd_error(text)
        specific = (kind for text, kind in ERROR_OF_MESSAGE.items() if text in message)
        error = next(specific, ERROR_OF_CODE.get(code, StoreRejectedError))
        return error(f"{name} refused to {request.description}: {message}")

    def _not_etcd_error(self, text: bytes) -> StoreError:
        shown = text.decode(errors="replace").strip()[:200]
        return StoreRejectedError(f"{self.member.address} answers, but is not etcd: {shown!r}")


@attrs.define(eq=False)
class _Gateway:
    """All connections of one store. Thread-safe."""

    members: Sequence[Member]  # the member that answered last is the first
    timeout: float  # seconds for one request to all members together
    _tls: ssl.SSLContext | None
    _sign_in: Request | None  # if there is a user
    _token: str | None = attrs.field(default=None, init=False, repr=False)
    # Connections that no thread uses.
    _idle: dict[Member, list[_Connection]] = attrs.field(factory=lambda: defaultdict(list))
    _closed: bool = False

    def ask(self, request: Request, timeout: float | None = None) -> Fields:
        """Return the reply of the first member that answers."""
        connection, fields = self._try_members(request, timeout or self.timeout, _Connection.read)
        self._idle[connection.member].append(connection)
        if self._closed:
            self.close()
        return fields

    def stream(self, request: Request) -> tuple[_Connection, HTTPResponse]:
        """Return a connection of its own, and an endless response with one message per line."""
        connection, response = self._try_members(
            request, self.timeout, lambda _, response: response
        )
        # The stream can be idle for any time. Keepalive ends it if the network is down.
        connection.connection_socket.settimeout(None)
        return connection, response

    def close(self) -> None:
        """Close the idle connections. Connections in use are closed after their requests."""
        self._closed = True
        for idle in list(self._idle.values()):
            with contextlib.suppress(IndexError):  # raised when the list is empty
                while True:
                    idle.pop().close()

    def _try_members(
        self,
        request: Request,
        timeout: float,
        read: Callable[[_Connection, HTTPResponse], Reply],
    ) -> tuple[_Connection, Reply]:
        """Send a request to one member after the other, until one of them replies.

        Returns:
            The connection to that member, which the caller owns, and the result of `read`.
        """
        deadline, members = monotonic() + timeout, self.members
        failures: list[BaseException] = []
        for num_tried, member in enumerate(members):
            left_s = max(deadline - monotonic(), 0.01)
            # A member that does not answer must leave time for the remaining ones.
            share_s = left_s / (len(members) - num_tried)
            timeouts = (share_s, share_s if request.is_idempotent else left_s)
            try:
                connection = self._idle[member].pop()
            except IndexError:
                connection = _Connection(member, self._tls if member.protocol == "https" else None)
            try:
                with connection.translate_errors(request, timeouts[1]):
                    reply = read(connection, self._post(connection, request, timeouts))
            except BaseException as error:
                # An error reply, which is rare, would leave the connection usable.
                connection.close()
                is_lost = isinstance(error, StoreConnectionError | StoreTimeoutError)
                if not (
                    is_lost and (request.is_idempotent or isinstance(error, RequestNotSentError))
                ):
                    raise
                failures.append(error)
            else:
                self.members = (*members[num_tried:], *members[:num_tried])
                return connection, reply
        reasons = "; ".join(map(str, failures))
        if any(isinstance(error, StoreTimeoutError) for error in failures):
            raise StoreTimeoutError(
                f"no etcd could {request.description} within {timeout:g} s: {reasons}"
            )
        raise StoreConnectionError(f"no etcd could {request.description}: {reasons}")

    def _post(
        self, connection: _Connection, request: Request, timeouts: tuple[float, float]
    ) -> HTTPResponse:
        """Send a request, and sign in first if necessary."""
        if (sign_in := self._sign_in) is None:
            return connection.post(request, timeouts, None)
        if (token := self._token) is not None:
            try:
                return connection.post(request, timeouts, token)
            except TokenRejectedError:
                # Tokens expire after some minutes, and with a restart of etcd.
                self._token = None
        fields = connection.read(connection.post(sign_in, timeouts, None))
        token = self._token = fields.get("token")
        if not isinstance(token, str):
            user = sign_in.body["name"]
            raise StoreRejectedError(f"{connection.member.address} gave no token to user {user!r}")
        return connection.post(request, timeouts, token)


class _Watch:
    """A watch of one range of keys from a revision on, which a thread reads.

    It only stores the revision of the newest change, so a wait that starts after the change notices
    it too, and any number of threads can wait.
    """

    def __init__(self, gateway: _Gateway, key_range: Fields, start: int) -> None:
        self.num_waiting = 0  # threads in `wait`
        self.error: StoreError | None = None  # why the watch is over
        body = {"create_request": {**key_range, "start_revision": start}}
        run = partial(self._run, gateway, Request("watch", body, "watch", is_idempotent=True))
        self._state = threading.Condition()
        # A wait for an earlier revision returns True: there may be changes before the start.
        self._newest_revision = start - 1
        self._socket: socket.socket | None = None  # set once the watch is connected
        # If the thread fails, the watch ends, so that no wait relies on it.
        self.thread = daemon_thread(
            run, "etcd-watch", lambda why: self.end(StoreConnectionError(why))
        )
        self.thread.start()

    def wait(self, after: int, timeout: float) -> bool:
        """Wait for a change after a revision, up to `timeout` seconds or until the watch ends.

        Returns:
            True if there may be a change.
        """
        with self._state:
            self.num_waiting += 1
            self._state.wait_for(
                lambda: self._newest_revision > after or self.error is not None, timeout
            )
            self.num_waiting -= 1
            return self._newest_revision > after

    def end(self, error: StoreError) -> None:
        """End the watch and all waits for it."""
        with self._state:
            self.error = self.error or error
            self._state.notify_all()
        self._end_stream()

    def abandon(self) -> None:
        """End the watch without taking a lock. No thread may wait for it."""
        self.error = self.error or StoreConnectionError("this store was not closed")
        self._end_stream()

    def _end_stream(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the connection may be closed already
                # The method of a TLS socket would discard state that the reader still uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _run(self, gateway: _Gateway, request: Request) -> None:
        try:
            connection, response = gateway.stream(request)
            with contextlib.closing(connection), contextlib.closing(response):
                self._socket, name = connection.connection_socket, connection.member.address
                while self.error is None and (line := response.readline()):
                    self._on_message(name, line)
                self.end(StoreConnectionError(f"{name} ended the watch"))
        except StoreError as error:
            self.end(error)
        # Reading from a TLS socket after its shutdown raises ValueError.
        except (OSError, HTTPException, ValueError) as error:
            self.end(StoreConnectionError(f"the watch at {name} broke: {format_error(error)}"))

    def _on_message(self, name: str, line: bytes) -> None:
        message = json.loads(line)
        result = message.get("result") if isinstance(message, dict) else None
        if not isinstance(result, dict):
            raise StoreConnectionError(f"{name} ended the watch: {line[:200]!r}")
        if "compact_revision" in result:
            raise RevisionGoneError(f"{name} no longer has the revision to watch from")
        if result.get("canceled"):
            raise StoreRejectedError(f"{name} refused the watch: {result.get('cancel_reason')}")
        newest = max((int(e["kv"]["mod_revision"]) for e in result.get("events", ())), default=0)
        with self._state:
            self._newest_revision = max(newest, self._newest_revision)
            self._state.notify_all()


# -- store -------------------------------------------------------------------------------------


def _abandon(gateway: _Gateway, watches: Mapping[str, _Watch], pid: int) -> None:
    """End the connections of a store that the garbage collector has freed.

    The collector runs in any thread and at any line, so this neither takes a lock nor blocks.
    """
    gateway.close()
    if pid == os.getpid():  # In a forked child, the watches are those of the parent.
        for watch in watches.values():
            watch.abandon()


class EtcdStore(Store, ForkAware):
    """A client of a store in etcd 3.4 or later, over etcd's JSON gateway. Thread-safe.

    In a forked child, the copy is another client. A store that is garbage-collected without `close`
    ends its connections, and its leases expire.

    etcd grants leases of whole seconds, of at least one and a half election timeouts (by default
    2 s), and checks them twice a second. A ttl is therefore rounded up, and a lease expires up to a
    second late, and never early. All leases start again if etcd restarts or elects a leader.

    Args:
        endpoints: `HOST:PORT,HOST:PORT` or a list of endpoints, which are tried in turn. The
            default port is 2379. IPv6 addresses are in brackets. `https://` before the host is
            necessary if there is no `ca_cert` or `cert`.
        prefix: Prefix of all keys in etcd, so that others can use it too.
        timeout: Seconds for each request to etcd. A write with a ttl consists of several requests.
        user: User name, if etcd requires one.
        password: Password of the user.
        ca_cert: File with the certificate authorities to trust. The client then uses https.
        cert: File with the certificate of this client, if etcd requires one.
        key: File with the key of that certificate.

    Raises:
        ConfigError: An argument is invalid, or contradicts another.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        prefix: str = "/elasticlib/",
        timeout: float = 60.0,
        user: str | None = None,
        password: str | None = None,
        ca_cert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ) -> None:
        if not 0 < timeout < float("inf"):
            raise ConfigError(f"a timeout is a positive number of seconds, got {timeout}")
        pairs = {"cert and key": (cert, key), "user and password": (user, password)}
        for names, values in pairs.items():
            if values.count(None) == 1:
                raise ConfigError(f"etcd: {names} go together, got one of them")
        # It ends with a slash, because otherwise /ab would be under /a.
        self._prefix = check_key(prefix.rstrip("/") + "/")
        members = read_members(endpoints, secure=bool(ca_cert or cert))
        self.address = ",".join(member.address for member in members)
        tls = _make_tls(ca_cert, cert, key) if any(m.protocol == "https" for m in members) else None
        login = {"name": user, "password": password}
        action = f"let user {user!r} sign in"
        sign_in = None if user is None else Request("auth/authenticate", login, action)
        self._new_gateway = partial(_Gateway, members, timeout, tls, sign_in)
        self._closed = threading.Event()  # set by `close`
        self._check_process()

    def _init_process_state(self) -> None:
        self._gateway = self._new_gateway()
        self._state_lock = threading.Lock()  # guards the two fields below
        self._watches: dict[str, _Watch] = {}  # by first key; the one used last is the last
        weakref.finalize(self, _abandon, self._gateway, self._watches, os.getpid()).atexit = False
        self._leases: dict[str, tuple[int, int]] = {}  # version and lease of each key
        before, self._closed = self._closed, threading.Event()
        if before.is_set():
            self._closed.set()

    def get(self, key: str) -> Entry | None:
        return next(iter(self._entries(self._read_key(check_key(key)))), None)

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        return require_not_none(
            self._write(key, bytes(value), None, ttl, f"set {key!r}").entry, key
        )

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        return self._write(key, bytes(value), expected, ttl, f"compare and set {key!r}")

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        answer = self._change("delete_range", check_key(key), expected, {}, f"delete {key!r}")
        gone = any("deleted" in result for result in _results(answer, "response_delete_range"))
        if gone:
            self._record_lease(key, _revision(answer), 0)
        return gone

    def refresh(self, key: str, version: int) -> None:
        found: Fields = next(iter(self._read_key(check_key(key)).get("kvs", ())), {})
        leased_at, lease = self._leases.get(key, (0, 0))
        try:
            at = int(found["mod_revision"]) if found else None
            check_lease(key, version, at, is_leased=int(found.get("lease", 0)) > 0)
            if leased_at != version:
                whose = "it belongs to another client, or its write was not confirmed"
                raise lost_lease(key, version, whose)
            answer = self._ask("lease/keepalive", {"ID": str(lease)}, f"refresh {key!r}")
            if int(answer.get("TTL", 0)) <= 0:
                raise lost_lease(key, version, "it has ended")
        except LeaseLostError:
            if leased_at == version:
                self._record_lease(key, version + 1, 0)
            raise

    def list(self, prefix: str) -> Listing:
        answer = self._ask(
            "kv/range", self._key_range(prefix), f"list {prefix!r}", is_idempotent=True
        )
        return Listing(self._entries(answer), _revision(answer))

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        deadline = monotonic() + min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        key_range = self._key_range(prefix)
        # The revision of an empty etcd is 1.
        while (seen := self._find_unchanged_revision(key_range, prefix, max(after, 1))) is not None:
            left = deadline - monotonic()
            if left <= 0:
                return False
            watch = self._get_watch(key_range, seen + 1)
            if watch.wait(seen, left):
                return True
            if watch.error is None:
                return False
            if type(watch.error) is StoreRejectedError:
                raise StoreRejectedError(str(watch.error))
            # Another error may be temporary. If it is not, the next request raises it.
            self._closed.wait(RETRY_DELAY_S)
        return True

    def close(self) -> None:
        self._check_process()
        self._closed.set()
        with self._state_lock:
            watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.end(self._closed_error())
        for watch in watches.values():
            watch.thread.join(WATCH_END_TIMEOUT_S)
        self._end_leases()
        self._gateway.close()

    # -- waiting ------------------------------------------------------------------------------

    def _find_unchanged_revision(self, key_range: Fields, prefix: str, after: int) -> int | None:
        """Return a revision up to which nothing in the range has changed, or None after a change.

        If no key is newer than `after`, an equal number of keys then and now means the same keys. A
        key that was written and deleted in between is found at one of the revisions in between.
        """
        newer = {"min_mod_revision": str(after + 1), "limit": "1", "keys_only": True}
        what = f"look for changes under {prefix!r}"
        answer = self._ask("kv/range", {**key_range, **newer}, what, is_idempotent=True)
        revision = _revision(answer)
        # A newer version belongs to another etcd that was at this address before.
        if answer.get("kvs") or not after <= revision <= after + MAX_HISTORY:
            return None
        if revision == after:
            return revision
        queries = [{"revision": str(at), "count_only": True} for at in (after, revision)]
        for step in range(after + 1, revision + 1):
            queries.append({**newer, "revision": str(step), "min_mod_revision": str(step)})
        body = {"success": [{"request_range": {**key_range, **query}} for query in queries]}
        try:
            history = self._ask("kv/txn", body, what, is_idempotent=True)
        except RevisionGoneError:
            return None
        then, now, *steps = _results(history, "response_range")
        same = then.get("count", "0") == now.get("count", "0")
        return revision if same and not any(step.get("kvs") for step in steps) else None

    def _get_watch(self, key_range: Fields, start: int) -> _Watch:
        """Return an active watch of the range that starts at revision `start` or earlier."""
        with self._state_lock:
            if self._closed.is_set():
                raise self._closed_error()
            watch = self._watches.pop(key_range["key"], None)
            if watch is None or watch.error is not None:
                idle = [key for key, other in self._watches.items() if not other.num_waiting]
                for key in idle[: max(len(self._watches) - MAX_WATCHES + 1, 0)]:
                    self._watches.pop(key).end(StoreConnectionError("the watch was not used"))
                watch = _Watch(self._gateway, key_range, start)
            self._watches[key_range["key"]] = watch
            return watch

    # -- leases -------------------------------------------------------------------------------

    def _write(
        self, key: str, value: bytes, expected: int | None, ttl: float | None, what: str
    ) -> CompareSetResult:
        check_key(key)
        check_ttl(ttl)
        for attempt in range(1, LEASED_WRITE_ATTEMPTS + 1):
            lease = 0 if ttl is None else self._grant(key, ttl)
            fields = {"value": _base64(value), "lease": str(lease)}
            try:
                answer = self._change("put", key, expected, fields, what)
                break
            except EtcdLeaseExpiredError:
                # This process was stopped for longer than the ttl. It tries again with a new lease.
                if attempt == LEASED_WRITE_ATTEMPTS:
                    raise
            except StoreConnectionError:
                if self._closed.is_set():
                    self._end_leases(lease)
                raise
        if answer.get("succeeded"):
            self._record_lease(key, _revision(answer), lease)
            return CompareSetResult(True, Entry(key, value, _revision(answer)))
        self._end_leases(lease)
        (there,) = _results(answer, "response_range")
        return CompareSetResult(False, next(iter(self._entries(there)), None))

    def _grant(self, key: str, ttl: float) -> int:
        seconds = min(math.ceil(ttl), MAX_TTL_S)
        answer = self._ask("lease/grant", {"TTL": str(seconds)}, f"grant {key!r} a lease")
        return int(answer["ID"])

    def _record_lease(self, key: str, version: int, lease: int) -> None:
        """Record the lease that a key has since `version`, 0 for none, and end the older lease."""
        with self._state_lock:
            # Two threads can receive the replies to their writes in reverse order.
            (_, old), current = sorted([self._leases.pop(key, (0, 0)), (version, lease)])
            if current[1]:
                self._leases[key] = current
        self._end_leases(old)

    def _end_leases(self, *leases: int) -> None:
        """End these leases, or all leases if the store is closed. Ignore errors: leases expire."""
        if self._closed.is_set():
            with self._state_lock:
                owned, self._leases = self._leases, {}
            leases = (*leases, *(lease for _, lease in owned.values()))
        seconds = min(self._gateway.timeout, CLOSE_TIMEOUT_S)
        with contextlib.suppress(
            StoreConnectionError, StoreTimeoutError
        ):  # the others would fail too
            for lease in filter(None, leases):
                request = Request("lease/revoke", {"ID": str(lease)}, "end a lease")
                with contextlib.suppress(StoreRejectedError):  # it has expired already
                    self._gateway.ask(request, seconds)

    # -- requests and replies -----------------------------------------------------------------

    def _closed_error(self) -> StoreConnectionError:
        return StoreConnectionError(f"{self.address}: this store is closed")

    def _ask(self, path: str, body: Fields, what: str, *, is_idempotent: bool = False) -> Fields:
        self._check_process()
        if self._closed.is_set():
            raise self._closed_error()
        return self._gateway.ask(Request(path, body, what, is_idempotent))

    def _change(
        self, operation: str, key: str, expected: int | None, more: Fields, what: str
    ) -> Fields:
        """Put or delete a key, in a transaction if its version must be `expected`.

        Returns:
            The reply of a transaction. If the version differs, it contains the current entry.
        """
        key_range = self._key(key)
        body = {**key_range, **more}
        if expected is None:  # a transaction would take longer
            reply = self._ask(f"kv/{operation.replace('_', '')}", body, what)
            return {**reply, "succeeded": True, "responses": [{f"response_{operation}": reply}]}
        condition = {"target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}
        branches = {
            "success": [{f"request_{operation}": body}],
            "failure": [{"request_range": key_range}],
        }
        return self._ask("kv/txn", {"compare": [{**key_range, **condition}], **branches}, what)

    def _read_key(self, key: str) -> Fields:
        return self._ask("kv/range", self._key(key), f"get {key!r}", is_idempotent=True)

    def _entries(self, answer: Fields) -> tuple[Entry, ...]:
        return tuple(map(self._entry, answer.get("kvs", ())))

    def _entry(self, found: Fields) -> Entry:
        try:
            key = base64.b64decode(found["key"]).decode().removeprefix(self._prefix)
        except UnicodeDecodeError:
            raise StoreRejectedError(
                f"{self.address} has a key that is not text: {found['key']}"
            ) from None
        return Entry(key, base64.b64decode(found.get("value", "")), int(found["mod_revision"]))

    def _key(self, key: str) -> Fields:
        return {"key": _base64((self._prefix + key).encode())}

    def _key_range(self, prefix: str) -> Fields:
        start = (self._prefix + prefix).encode()
        # The last byte of UTF-8 is never 0xFF.
        return {"key": _base64(start), "range_end": _base64(start[:-1] + bytes([start[-1] + 1]))}


def _revision(answer: Fields) -> int:
    return int(answer["header"]["revision"])


def _results(answer: Fields, kind: str) -> Sequence[Fields]:
    return [response.get(kind, {}) for response in answer.get("responses", ())]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
