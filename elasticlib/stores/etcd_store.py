"""A store in an etcd that stands already: its revisions are the versions, its leases the leases.

Whether something has changed is asked of etcd's own history first and watched for only then, so
no change falls between the two; what etcd no longer remembers counts as a change.

etcd is spoken to over its JSON gateway. A request that a member was not sent goes to the next one;
one whose answer was lost is repeated only if it changes nothing. Whatever goes wrong is an error
that names the member and what was asked of it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import select
import socket
import ssl
import threading
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
    describe,
    present,
)
from ..threads import ForkAware, helper
from .connection import create_connection, enable_keepalive
from .interface import CompareSetResult, Entry, Listing, Store, check_key, check_ttl
from .key_space import check_lease, lost_lease

ETCD_PORT = 2379
LONGEST_TTL = 9_000_000_000
"""Seconds; etcd grants no more."""
MOST_STEPS = 16
"""Revisions of the past that a wait looks at one by one; beyond, it says that it cannot know."""
ATTEMPTS = 3
"""To write under a lease that is over before the write comes."""
MOST_WATCHES = 8
"""Kept open for a next wait; each is a connection and a thread."""
PAUSE = 0.05
"""Seconds before looking again where a watch broke off."""
CLOSE_SECONDS = 5.0
"""For ending the leases when closing; an etcd that is away ends them by their ttl."""
END_SECONDS = 1.0
"""To wait for a watch's thread when closing; one that still connects ends by itself later."""

Fields = Mapping[str, Any]
Found = TypeVar("Found")

# -- where it is -------------------------------------------------------------------------------


@attrs.frozen
class Member:
    """One member of an etcd cluster, as its clients see it."""

    protocol: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """`host:port`, IPv6 in brackets."""
        return join_endpoint(self.host, self.port)


def read_members(endpoints: str | Sequence[str], *, secure: bool = False) -> tuple[Member, ...]:
    """Members from `host:port,host:port`, or from a list of such; the port is 2379 unless given.

    An endpoint may begin with `http://` or `https://`; `secure` is what it is otherwise.

    Raises:
        ConfigError: none at all, no endpoint, or http where it is to be secure.
    """
    members: dict[Member, None] = {}
    for one in endpoints.split(",") if isinstance(endpoints, str) else endpoints:
        protocol, mark, rest = one.strip().rpartition("://")
        protocol = protocol if mark else "https" if secure else "http"
        if protocol not in ("http", "https"):
            raise ConfigError(f"etcd: an endpoint is reached by http or https, got {one!r}")
        if secure and protocol == "http":
            why = f"a CA or certificate is for https, and the endpoint is {one!r}"
            raise ConfigError(f"etcd: {why}")
        host, port = split_endpoint(rest.rstrip("/"), ETCD_PORT)
        if port == 0:
            raise ConfigError(f"etcd: an endpoint has a port 1..65535, got {one!r}")
        members[Member(protocol, host, port)] = None
    if not members:
        raise ConfigError("etcd: at least one endpoint HOST:PORT is needed, got none")
    return tuple(members)


def _tls(ca_cert: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_cert)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:  # TLS's own errors among them
        files = ", ".join(filter(None, (ca_cert, cert, key)))
        raise ConfigError(f"etcd: cannot use the certificates of {files}: {error}") from error
    return context


# -- its gateway -------------------------------------------------------------------------------


class Unsent(StoreConnectionError):
    """The member was not reached: nothing has happened there."""


class NoSuchRevision(StoreRejectedError):
    """The revision asked for is compacted, or of the future."""


class LeaseEnded(StoreRejectedError):
    """The lease under which something was to be written is over; nothing is written."""


class TokenRefused(StoreRejectedError):
    """The token is not, or no longer, known."""


# gRPC's codes in the JSON of an error, and words of it that say more than the code.
CODES = {4: StoreTimeoutError, 11: NoSuchRevision, 14: StoreConnectionError, 16: TokenRefused}
WORDS = {"revision of auth store is old": TokenRefused, "requested lease not found": LeaseEnded}


@attrs.frozen
class Request:
    """What to ask: a path below `/v3/`, its body with bytes in base64, and words for errors.

    repeatable: whether it may be asked again, elsewhere, when its answer was lost.
    """

    path: str
    body: Fields = attrs.field(repr=False)  # large, or a password
    what: str
    repeatable: bool = False


class _Connection(HTTPConnection):
    """To one member, kept alive from one request to the next; for one thread at a time."""

    lasting: socket.socket
    """`sock` is None once the answer is the last one, of which more may be to come."""

    def __init__(self, member: Member, tls: ssl.SSLContext | None) -> None:
        super().__init__(member.host, member.port)
        self.member = member
        self._tls = tls

    def post(
        self, request: Request, seconds: tuple[float, float], token: str | None
    ) -> HTTPResponse:
        """The answer, of which the body is yet to be read. seconds: to connect in, if need be, and
        to be answered in."""
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = token
        if request.path == "watch":
            # A member cut off from the others ends it, where it would be silent otherwise.
            headers["Grpc-Metadata-Hasleader"] = "true"
        self._reach(*seconds)
        self.sock.settimeout(seconds[1])
        self.request("POST", "/v3/" + request.path, json.dumps(request.body), headers)
        response = self.getresponse()
        if response.status != 200:
            raise self._refusal(response.status, response.read(), request)
        return response

    def _reach(self, seconds: float, silent: float) -> None:
        if self.sock is not None:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if not poll.poll(0):
                return
            self.close()  # nothing was asked: what is there to read is its end
        name = self.member.address
        try:
            self.sock = create_connection(self.host, self.port, seconds)
            if self._tls is not None:
                self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
            enable_keepalive(self.sock, silent)
        except ssl.SSLCertVerificationError as error:
            why = f"{name} shows a certificate that is not trusted: {error}"
            raise StoreRejectedError(why) from error
        except TimeoutError:
            raise Unsent(f"{name} accepted no connection within {seconds:.3g} s") from None
        except OSError as error:
            raise Unsent(f"{name} could not be reached: {error}") from error
        self.lasting = self.sock

    def read(self, response: HTTPResponse) -> Fields:
        """The one message of the answer, with the revision of the whole store as it was given."""
        text = response.read()
        try:
            fields = json.loads(text)
            fields = fields.get("result", fields)  # of a stream of one message
            int(fields["header"]["revision"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._no_etcd(text) from None
        return dict(fields)

    @contextlib.contextmanager
    def named(self, request: Request, seconds: float) -> Iterator[None]:
        """What goes wrong after connecting is the store's error, and names what was asked."""
        name = self.member.address
        try:
            yield
        except StoreError:
            raise
        except TimeoutError as error:
            raise StoreTimeoutError(
                f"{name} did not answer within {seconds:.3g} s: {request.what}"
            ) from error
        except (OSError, HTTPException) as error:
            raise StoreConnectionError(
                f"the connection to {name} broke, to {request.what}: {describe(error)}"
            ) from error

    def _refusal(self, status: int, text: bytes, request: Request) -> StoreError:
        name = self.member.address
        try:
            fields = json.loads(text)
            code, message = int(fields["code"]), str(fields["error"])
        except (ValueError, TypeError, KeyError):
            if status >= 500:
                return StoreConnectionError(f"{name}: HTTP {status}, {request.what}")
            return self._no_etcd(text)
        worded = (kind for words, kind in WORDS.items() if words in message)
        kind = next(worded, CODES.get(code, StoreRejectedError))
        return kind(f"{name} refused to {request.what}: {message}")

    def _no_etcd(self, text: bytes) -> StoreError:
        shown = text.decode(errors="replace").strip()[:200]
        return StoreRejectedError(f"{self.member.address} answers, but is not etcd: {shown!r}")


@attrs.define(eq=False)
class _Gateway:
    """All connections of one store. timeout: seconds for one request, over all members tried."""

    members: Sequence[Member]
    timeout: float
    _tls: ssl.SSLContext | None
    _sign_in: Request | None
    _token: str | None = attrs.field(default=None, init=False, repr=False)
    _idle: dict[Member, list[_Connection]] = attrs.field(factory=lambda: defaultdict(list))
    _closed: bool = False

    def ask(self, request: Request, timeout: float | None = None) -> Fields:
        """The answer of the first member that is reached, within the gateway's own timeout."""
        connection, fields = self._in_turn(request, timeout or self.timeout, _Connection.read)
        self._idle[connection.member].append(connection)
        if self._closed:
            self.close()
        return fields

    def stream(self, request: Request) -> tuple[_Connection, HTTPResponse]:
        """An endless answer, a message a line, in a connection of its own."""
        connection, response = self._in_turn(request, self.timeout, lambda _, response: response)
        # It may be silent from now on; the network may not.
        connection.lasting.settimeout(None)
        return connection, response

    def close(self) -> None:
        """Let go of the idle connections; those in use end with their requests."""
        self._closed = True
        for idle in self._idle.values():
            with contextlib.suppress(IndexError):  # until none is left
                while True:
                    idle.pop().close()

    def _in_turn(
        self,
        request: Request,
        timeout: float,
        take: Callable[[_Connection, HTTPResponse], Found],
    ) -> tuple[_Connection, Found]:
        deadline, members = monotonic() + timeout, self.members
        failures: list[BaseException] = []
        for tried, member in enumerate(members):
            left = max(deadline - monotonic(), 0.01)
            # A silent member must leave time for those behind it.
            share = left / (len(members) - tried)
            seconds = (share, share if request.repeatable else left)
            try:
                connection = self._idle[member].pop()
            except IndexError:
                connection = _Connection(member, self._tls if member.protocol == "https" else None)
            try:
                with connection.named(request, seconds[1]):
                    found = take(connection, self._post(connection, request, seconds))
            except BaseException as error:
                # Also after a refusal, which is rare, and then leaves nothing half read.
                connection.close()
                lost = isinstance(error, StoreConnectionError | StoreTimeoutError)
                if not (lost and (request.repeatable or isinstance(error, Unsent))):
                    raise
                failures.append(error)
            else:
                self.members = (*members[tried:], *members[:tried])
                return connection, found
        why = "; ".join(map(str, failures))
        if any(isinstance(error, StoreTimeoutError) for error in failures):
            raise StoreTimeoutError(f"no etcd could {request.what} within {timeout:g} s: {why}")
        raise StoreConnectionError(f"no etcd could {request.what}: {why}")

    def _post(
        self, connection: _Connection, request: Request, seconds: tuple[float, float]
    ) -> HTTPResponse:
        """The response to the request, with a token where there is a user."""
        if (sign_in := self._sign_in) is None:
            return connection.post(request, seconds, None)
        if (token := self._token) is not None:
            try:
                return connection.post(request, seconds, token)
            except TokenRefused:
                # Tokens end after minutes, and when etcd starts again.
                self._token = None
        fields = connection.read(connection.post(sign_in, seconds, None))
        token = self._token = fields.get("token")
        if not isinstance(token, str):
            user = sign_in.body["name"]
            raise StoreRejectedError(f"{connection.member.address} gave no token to user {user!r}")
        return connection.post(request, seconds, token)


class _Watch:
    """The changes of one range from revision `start` on, read by a thread.

    It remembers one number, the revision of the newest change: so whoever asks later than the
    change still hears of it, and nobody who waits holds up another.
    """

    def __init__(self, gateway: _Gateway, span: Fields, start: int) -> None:
        self.waiting = 0
        self.ended: StoreError | None = None
        """Why it sees nothing any more."""
        body = {"create_request": {**span, "start_revision": start}}
        run = partial(self._run, gateway, Request("watch", body, "watch", repeatable=True))
        self._state = threading.Condition()
        # Who has looked at an earlier time only may have missed what came before the start.
        self._newest = start - 1
        self._socket: socket.socket | None = None
        # One that hears nothing any more is never taken for a quiet one.
        self.thread = helper(run, "etcd-watch", lambda why: self.end(StoreConnectionError(why)))
        self.thread.start()

    def changed(self, after: int, timeout: float) -> bool:
        """Whether there may be a change past `after`, by `timeout` or until the watch ended."""
        with self._state:
            self.waiting += 1
            self._state.wait_for(lambda: self._newest > after or self.ended is not None, timeout)
            self.waiting -= 1
            return self._newest > after

    def end(self, error: StoreError) -> None:
        """See nothing any more; whoever waits wakes."""
        with self._state:
            self.ended = self.ended or error
            self._state.notify_all()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it may have ended by itself
                # The plain socket's own: that of TLS would take its state from under the reader.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _run(self, gateway: _Gateway, request: Request) -> None:
        try:
            connection, response = gateway.stream(request)
            with contextlib.closing(connection), contextlib.closing(response):
                self._socket, name = connection.lasting, connection.member.address
                # What is read once it has ended is of no use to anybody.
                while self.ended is None and (line := response.readline()):
                    self._hear(name, line)
                self.end(StoreConnectionError(f"{name} ended the watch"))
        except StoreError as error:
            self.end(error)
        # One that is shut under TLS reads as a ValueError.
        except (OSError, HTTPException, ValueError) as error:
            self.end(StoreConnectionError(f"the watch at {name} broke: {describe(error)}"))

    def _hear(self, name: str, line: bytes) -> None:
        message = json.loads(line)
        result = message.get("result") if isinstance(message, dict) else None
        if not isinstance(result, dict):
            raise StoreConnectionError(f"{name} ended the watch: {line[:200]!r}")
        if "compact_revision" in result:
            raise NoSuchRevision(f"{name} no longer has the revision to watch from")
        if result.get("canceled"):
            raise StoreRejectedError(f"{name} refused the watch: {result.get('cancel_reason')}")
        newest = max((int(e["kv"]["mod_revision"]) for e in result.get("events", ())), default=0)
        with self._state:
            self._newest = max(newest, self._newest)
            self._state.notify_all()


# -- the store ---------------------------------------------------------------------------------


class EtcdStore(Store, ForkAware):
    """A client of an etcd, version 3.4 or later, over its JSON gateway.

    etcd grants leases in whole seconds, at least one and a half times its election timeout (2 s
    as it comes), and looks for ended ones twice a second: a ttl is rounded up, and a lease ends up
    to a second late, never early. When etcd starts again or elects a leader, all leases begin anew.

    Args:
        endpoints: `host:port,host:port` or a list of such, tried in turn; port 2379 unless
            given, IPv6 in brackets, `https://` in front where it is spoken without a CA of its own.
        prefix: of all keys in etcd, so that others may use it too.
        timeout: seconds for each request to etcd, of which a leased write makes several; `wait`
            beyond its own.
        user, password: where etcd asks for them.
        ca_cert: a file with the authorities to trust. https is spoken where one is given.
        cert, key: files with this client's certificate and its key, where etcd asks for them.
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
        # It ends in a slash, so that the keys of /a and /ab are never confused.
        self._prefix = check_key(prefix.rstrip("/") + "/")
        members = read_members(endpoints, secure=bool(ca_cert or cert))
        self.address = ",".join(member.address for member in members)
        tls = _tls(ca_cert, cert, key) if any(m.protocol == "https" for m in members) else None
        login = {"name": user, "password": password}
        what = f"let user {user!r} sign in"
        sign_in = None if user is None else Request("auth/authenticate", login, what)
        self._reach = partial(_Gateway, members, timeout, tls, sign_in)
        self._closed = threading.Event()
        self._check_process()

    def _init_process_state(self) -> None:
        self._gateway = self._reach()
        self._watches: dict[str, _Watch] = {}
        self._state = threading.Lock()
        self._leases: dict[str, tuple[int, int]] = {}
        before, self._closed = self._closed, threading.Event()
        if before.is_set():
            self._closed.set()

    def get(self, key: str) -> Entry | None:
        return next(iter(self._entries(self._find(check_key(key)))), None)

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        return present(self._write(key, bytes(value), None, ttl, f"set {key!r}").entry, key)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        return self._write(key, bytes(value), expected, ttl, f"compare and set {key!r}")

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        answer = self._change("delete_range", check_key(key), expected, {}, f"delete {key!r}")
        gone = any("deleted" in result for result in _results(answer, "response_delete_range"))
        if gone:
            self._wrote(key, _revision(answer), 0)
        return gone

    def refresh(self, key: str, version: int) -> None:
        found: Fields = next(iter(self._find(check_key(key)).get("kvs", ())), {})
        held, lease = self._leases.get(key, (0, 0))
        try:
            at = int(found["mod_revision"]) if found else None
            check_lease(key, version, at, is_leased=int(found.get("lease", 0)) > 0)
            if held != version:
                whose = "it belongs to another client, or its write was not confirmed"
                raise lost_lease(key, version, whose)
            answer = self._ask("lease/keepalive", {"ID": str(lease)}, f"refresh {key!r}")
            if int(answer.get("TTL", 0)) <= 0:
                raise lost_lease(key, version, "it has ended")
        except LeaseLostError:
            if held == version:
                self._wrote(key, version + 1, 0)
            raise

    def list(self, prefix: str) -> Listing:
        answer = self._ask("kv/range", self._span(prefix), f"list {prefix!r}", repeatable=True)
        return Listing(self._entries(answer), _revision(answer))

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        deadline = monotonic() + min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        span = self._span(prefix)
        # An etcd without any change is at revision 1.
        while (seen := self._look(span, prefix, max(after, 1))) is not None:
            left = deadline - monotonic()
            if left <= 0:
                return False
            watch = self._watching(span, seen + 1)
            if watch.changed(seen, left):
                return True
            if watch.ended is None:
                return False
            if type(watch.ended) is StoreRejectedError:
                raise StoreRejectedError(str(watch.ended))
            # What else has ended it may pass, or is met by looking again: not at once.
            self._closed.wait(PAUSE)
        return True

    def close(self) -> None:
        self._check_process()
        self._closed.set()
        with self._state:
            watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.end(self._closed_error())
        for watch in watches.values():
            watch.thread.join(END_SECONDS)
        self._end_leases()
        self._gateway.close()

    # -- waiting ------------------------------------------------------------------------------

    def _look(self, span: Fields, prefix: str, after: int) -> int | None:
        """The revision up to which nothing has changed in the range; None if something has.

        Where nothing newer stands, equal numbers of keys then and now mean the same keys. What was
        written and deleted between was written at one of the steps.
        """
        newer = {"min_mod_revision": str(after + 1), "limit": "1", "keys_only": True}
        what = f"look for changes under {prefix!r}"
        answer = self._ask("kv/range", {**span, **newer}, what, repeatable=True)
        revision = _revision(answer)
        # A version from the future is of an etcd that stood here before this one.
        if answer.get("kvs") or not after <= revision <= after + MOST_STEPS:
            return None
        if revision == after:
            return revision
        asked = [{"revision": str(at), "count_only": True} for at in (after, revision)]
        for step in range(after + 1, revision + 1):
            asked.append({**newer, "revision": str(step), "min_mod_revision": str(step)})
        body = {"success": [{"request_range": {**span, **one}} for one in asked]}
        try:
            history = self._ask("kv/txn", body, what, repeatable=True)
        except NoSuchRevision:
            return None
        then, now, *steps = _results(history, "response_range")
        same = then.get("count", "0") == now.get("count", "0")
        return revision if same and not any(step.get("kvs") for step in steps) else None

    def _watching(self, span: Fields, start: int) -> _Watch:
        """A watch of the range that sees all from `start` on, or says that something came before;
        the last place is that of the one used last."""
        with self._state:
            if self._closed.is_set():
                raise self._closed_error()
            watch = self._watches.pop(span["key"], None)
            if watch is None or watch.ended is not None:
                idle = [key for key, one in self._watches.items() if not one.waiting]
                for key in idle[: max(len(self._watches) - MOST_WATCHES + 1, 0)]:
                    self._watches.pop(key).end(StoreConnectionError("the watch was not used"))
                watch = _Watch(self._gateway, span, start)
            self._watches[span["key"]] = watch
            return watch

    # -- leases -------------------------------------------------------------------------------

    def _write(
        self, key: str, value: bytes, expected: int | None, ttl: float | None, what: str
    ) -> CompareSetResult:
        check_key(key)
        check_ttl(ttl)
        for attempt in range(1, ATTEMPTS + 1):
            lease = 0 if ttl is None else self._grant(key, ttl)
            fields = {"value": _base64(value), "lease": str(lease)}
            try:
                answer = self._change("put", key, expected, fields, what)
                break
            except LeaseEnded:
                # We stood still for longer than it lasts, and nothing is written: with another.
                if attempt == ATTEMPTS:
                    raise
        if answer.get("succeeded"):
            self._wrote(key, _revision(answer), lease)
            return CompareSetResult(True, Entry(key, value, _revision(answer)))
        self._end_leases(lease)
        (there,) = _results(answer, "response_range")
        return CompareSetResult(False, next(iter(self._entries(there)), None))

    def _grant(self, key: str, ttl: float) -> int:
        seconds = min(math.ceil(ttl), LONGEST_TTL)
        answer = self._ask("lease/grant", {"TTL": str(seconds)}, f"grant {key!r} a lease")
        return int(answer["ID"])

    def _wrote(self, key: str, version: int, lease: int) -> None:
        """The key changed at this version: its older lease is over, and this one, if any, ours."""
        with self._state:
            # Two threads may hear of their writes in the other order.
            (_, over), kept = sorted([self._leases.pop(key, (0, 0)), (version, lease)])
            if kept[1]:
                self._leases[key] = kept
        self._end_leases(over)

    def _end_leases(self, *leases: int) -> None:
        """End these, and all once this is closed; one that cannot be ended ends by its ttl."""
        if self._closed.is_set():
            with self._state:
                held, self._leases = self._leases, {}
            leases = (*leases, *(lease for _, lease in held.values()))
        seconds = min(self._gateway.timeout, CLOSE_SECONDS)
        with contextlib.suppress(
            StoreConnectionError, StoreTimeoutError
        ):  # nor would the others be
            for lease in filter(None, leases):
                request = Request("lease/revoke", {"ID": str(lease)}, "end a lease")
                with contextlib.suppress(StoreRejectedError):  # it is over already
                    self._gateway.ask(request, seconds)

    # -- what is asked, and answered ----------------------------------------------------------

    def _closed_error(self) -> StoreConnectionError:
        return StoreConnectionError(f"{self.address}: this store is closed")

    def _ask(self, path: str, body: Fields, what: str, *, repeatable: bool = False) -> Fields:
        self._check_process()
        if self._closed.is_set():
            raise self._closed_error()
        return self._gateway.ask(Request(path, body, what, repeatable))

    def _change(
        self, operation: str, key: str, expected: int | None, more: Fields, what: str
    ) -> Fields:
        """What a transaction says that puts, or deletes, if the key is at version `expected`, and
        else tells what is there; any version will do for None."""
        one = self._one(key)
        body = {**one, **more}
        if expected is None:  # without a transaction, which takes longer
            said = self._ask(f"kv/{operation.replace('_', '')}", body, what)
            return {**said, "succeeded": True, "responses": [{f"response_{operation}": said}]}
        condition = {"target": "MOD", "result": "EQUAL", "mod_revision": str(expected)}
        branches = {
            "success": [{f"request_{operation}": body}],
            "failure": [{"request_range": one}],
        }
        return self._ask("kv/txn", {"compare": [{**one, **condition}], **branches}, what)

    def _find(self, key: str) -> Fields:
        return self._ask("kv/range", self._one(key), f"get {key!r}", repeatable=True)

    def _entries(self, answer: Fields) -> tuple[Entry, ...]:
        return tuple(map(self._entry, answer.get("kvs", ())))

    def _entry(self, found: Fields) -> Entry:
        try:
            key = base64.b64decode(found["key"]).decode().removeprefix(self._prefix)
        except UnicodeDecodeError:
            why = f"{self.address} has a key that is not text: {found['key']}"
            raise StoreRejectedError(why) from None
        return Entry(key, base64.b64decode(found.get("value", "")), int(found["mod_revision"]))

    def _one(self, key: str) -> Fields:
        return {"key": _base64((self._prefix + key).encode())}

    def _span(self, prefix: str) -> Fields:
        start = (self._prefix + prefix).encode()
        # The last byte of UTF-8 is never the last of all bytes.
        return {"key": _base64(start), "range_end": _base64(start[:-1] + bytes([start[-1] + 1]))}


def _revision(answer: Fields) -> int:
    return int(answer["header"]["revision"])


def _results(answer: Fields, kind: str) -> Sequence[Fields]:
    return [response.get(kind, {}) for response in answer.get("responses", ())]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
