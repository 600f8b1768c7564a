"""A store in an etcd that stands already: its revisions are the versions, its leases the leases.

Whether something has changed is asked of etcd's own history first and watched for only then, so
no change falls between the two; what etcd no longer remembers counts as a change.
"""

from __future__ import annotations

import base64
import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..clock import monotonic
from ..errors import ConfigError, LeaseLost, StoreError, StoreRefused, StoreUnavailable
from .etcd_access import Access, Answer, LeaseEnded, NoSuchRevision, Request, read_members
from .interface import CompareSet, Entry, Listing, Store, check_key, check_ttl
from .keyspace import check_lease, lost_lease
from .sockets import renew_in_children

if TYPE_CHECKING:
    from .etcd_gateway import Watch

LONGEST_TTL = 9_000_000_000
"""Seconds; etcd grants no more."""

LONGEST_WAIT = 1e6
"""Seconds; a lock cannot wait for much longer than this."""

MOST_STEPS = 16
"""Revisions of the past that a wait looks at one by one; beyond, it says that it cannot know."""

ATTEMPTS = 3
"""To write under a lease that is over before the write comes."""
CLOSE_SECONDS = 5.0
"""For ending the leases when closing; an etcd that is away ends them by their ttl."""

PAUSE = 0.05
"""Seconds before looking again where a watch broke off."""


class EtcdStore(Store):
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
        # It ends in a slash, so that the keys of /a and /ab are never confused.
        self._prefix = check_key(prefix.rstrip("/") + "/")
        members = read_members(endpoints, secure=bool(ca_cert or cert))
        access = Access(members, ca_cert, cert, key, user, password)
        self.address = access.address
        self._access, self._timeout = access, timeout
        self._closed = threading.Event()
        self.begin_anew()
        renew_in_children(self)

    def begin_anew(self) -> None:
        """Be another client, with no connection and no lock that a thread may hold."""
        # Who uses no etcd is spared the time that it takes to import HTTP and TLS.
        from .etcd_gateway import Gateway, Watches

        self._gateway = Gateway(self._access, self._timeout)
        self._watches = Watches(self._gateway)
        self._state = threading.Lock()
        self._leases: dict[str, tuple[int, int]] = {}
        was_closed, self._closed = self._closed.is_set(), threading.Event()
        if was_closed:
            self.close()

    def get(self, key: str) -> Entry | None:
        return self._entry(self._find(check_key(key)))

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        def write(body: Mapping[str, Any]) -> Answer:
            return self._ask("kv/put", body, f"set {key!r}")

        answer, lease = self._put(key, bytes(value), ttl, write)
        self._wrote(key, answer.revision, lease)
        return Entry(key, bytes(value), answer.revision)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSet:
        condition = self._at_version(check_key(key), expected)
        otherwise = {"failure": [{"request_range": self._one(key)}]}

        def write(body: Mapping[str, Any]) -> Answer:
            swap = {**condition, "success": [{"request_put": body}], **otherwise}
            return self._ask("kv/txn", swap, f"compare and set {key!r}")

        answer, lease = self._put(key, bytes(value), ttl, write)
        if answer.fields.get("succeeded"):
            self._wrote(key, answer.revision, lease)
            return CompareSet(True, Entry(key, bytes(value), answer.revision))
        if lease is not None:
            self._revoke(lease)
        return CompareSet(False, self._entry(_first(_results(answer, "response_range")[0])))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        what = f"delete {key!r}"
        if expected is None:
            answer = self._ask("kv/deleterange", self._one(check_key(key)), what)
            gone = int(answer.fields.get("deleted", 0)) > 0
        else:
            removal = {"success": [{"request_delete_range": self._one(check_key(key))}]}
            answer = self._ask("kv/txn", {**self._at_version(key, expected), **removal}, what)
            results = _results(answer, "response_delete_range")
            gone = any(int(result.get("deleted", 0)) > 0 for result in results)
        if gone:
            self._wrote(key, answer.revision, None)
        return gone

    def refresh(self, key: str, version: int) -> None:
        found = self._find(check_key(key))
        held, lease = self._leases.get(key, (0, 0))
        try:
            at = None if found is None else _version(found)
            check_lease(key, version, at, leased=bool(int((found or {}).get("lease", 0))))
            if held != version:
                whose = "it belongs to another client, or its writing was not heard"
                raise lost_lease(key, version, whose)
            answer = self._ask("lease/keepalive", {"ID": str(lease)}, f"refresh {key!r}")
            if int(answer.fields.get("TTL", 0)) <= 0:
                raise lost_lease(key, version, "it has ended")
        except LeaseLost:
            if held == version:
                self._wrote(key, version, None)
            raise

    def list(self, prefix: str) -> Listing:
        answer = self._ask("kv/range", self._span(prefix), f"list {prefix!r}", repeatable=True)
        entries = (self._entry(found) for found in answer.fields.get("kvs", ()))
        return Listing(tuple(entry for entry in entries if entry is not None), answer.revision)

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        deadline = monotonic() + min(max(timeout, 0.0), LONGEST_WAIT)
        span = self._span(prefix)
        # An etcd without any change is at revision 1.
        after = max(after, 1)
        while True:
            seen = self._look(span, prefix, after)
            if seen is None:
                return True
            left = deadline - monotonic()
            if left <= 0:
                return False
            with self._watches.entered(span, seen + 1) as watch:
                if watch.changed(after, left):
                    return True
            if watch.ended is None:
                return False
            self._pause_after(watch)

    def close(self) -> None:
        self._closed.set()
        self._watches.close(StoreUnavailable(self._closed_sentence))
        with self._state:
            leases, self._leases = self._leases, {}
        deadline = monotonic() + min(self._gateway.timeout, CLOSE_SECONDS)
        with contextlib.suppress(StoreError):  # the first that fails stands for the others
            for _, lease in leases.values():
                self._revoke(lease, max(deadline - monotonic(), 0.01), strict=True)
        self._gateway.close()

    def _look(self, span: Mapping[str, Any], prefix: str, after: int) -> int | None:
        """The revision up to which nothing has changed in the range; None if something has."""
        newer = {"min_mod_revision": str(after + 1), "limit": "1", "keys_only": True}
        what = f"look for changes under {prefix!r}"
        answer = self._ask("kv/range", {**span, **newer}, what, repeatable=True)
        revision = answer.revision
        # A version from the future is of an etcd that stood here before this one.
        if answer.fields.get("kvs") or not after <= revision <= after + MOST_STEPS:
            return None
        if revision == after:
            return revision
        try:
            history = self._ask("kv/txn", _history(span, after, revision), what, repeatable=True)
        except NoSuchRevision:
            return None
        then, now, *steps = _results(history, "response_range")
        same = then.get("count", "0") == now.get("count", "0")
        return revision if same and not any(step.get("kvs") for step in steps) else None

    def _pause_after(self, watch: Watch) -> None:
        """Raise what will not pass; else go on, not at once, by looking again."""
        error = watch.ended
        if isinstance(error, StoreRefused) and not isinstance(error, NoSuchRevision):
            raise StoreRefused(str(error))
        if self._closed.wait(PAUSE):
            raise StoreUnavailable(self._closed_sentence)

    @property
    def _closed_sentence(self) -> str:
        return f"{self.address}: this store is closed"

    def _ask(
        self, path: str, body: Mapping[str, Any], what: str, *, repeatable: bool = False
    ) -> Answer:
        if self._closed.is_set():
            raise StoreUnavailable(self._closed_sentence)
        return self._gateway.ask(Request(path, body, what, repeatable))

    def _find(self, key: str) -> Mapping[str, Any] | None:
        answer = self._ask("kv/range", self._one(key), f"get {key!r}", repeatable=True)
        return _first(answer.fields)

    def _entry(self, found: Mapping[str, Any] | None) -> Entry | None:
        if found is None:
            return None
        try:
            key = base64.b64decode(found["key"]).decode().removeprefix(self._prefix)
        except UnicodeDecodeError:
            raise StoreRefused(
                f"{self.address} has a key that is no text: {found['key']}"
            ) from None
        return Entry(key, base64.b64decode(found.get("value", "")), _version(found))

    def _one(self, key: str) -> Mapping[str, Any]:
        return {"key": _text(self._prefix + key)}

    def _span(self, prefix: str) -> Mapping[str, Any]:
        start = (self._prefix + prefix).encode()
        # The last byte of UTF-8 is never the last of all bytes.
        return {"key": _base64(start), "range_end": _base64(start[:-1] + bytes([start[-1] + 1]))}

    def _at_version(self, key: str, version: int) -> Mapping[str, Any]:
        condition = {"target": "MOD", "result": "EQUAL", "mod_revision": str(version)}
        return {"compare": [{**self._one(key), **condition}]}

    def _put(
        self,
        key: str,
        value: bytes,
        ttl: float | None,
        write: Callable[[Mapping[str, Any]], Answer],
    ) -> tuple[Answer, int | None]:
        """What etcd answered to the write, and the lease of what was written."""
        for attempt in range(1, ATTEMPTS + 1):
            body, lease = self._put_body(key, value, ttl)
            try:
                return write(body), lease
            except LeaseEnded:
                # We stood still for longer than it lasts, and nothing is written: with another.
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("ATTEMPTS is positive")

    def _put_body(
        self, key: str, value: bytes, ttl: float | None
    ) -> tuple[Mapping[str, Any], int | None]:
        """The request to write, and its lease, which etcd has granted by then."""
        body = {**self._one(check_key(key)), "value": _base64(value)}
        if check_ttl(ttl) is None:
            return body, None
        seconds = min(math.ceil(ttl or 0), LONGEST_TTL)
        answer = self._ask("lease/grant", {"TTL": str(seconds)}, f"grant {key!r} a lease")
        lease = int(answer.fields["ID"])
        return {**body, "lease": str(lease)}, lease

    def _wrote(self, key: str, version: int, lease: int | None) -> None:
        """The key changed at this version: its older lease is over, and this one is ours."""
        with self._state:
            held, old = self._leases.get(key, (0, 0))
            # Two threads may hear of their writes in the other order.
            late = held > version or (lease is not None and self._closed.is_set())
            if late:
                over = lease
            else:
                over = old or None
                self._leases.pop(key, None)
                if lease is not None:
                    self._leases[key] = (version, lease)
        if over is not None:
            self._revoke(over)

    def _revoke(self, lease: int, timeout: float | None = None, *, strict: bool = False) -> None:
        """End a lease; one that cannot be ended ends by its ttl."""
        request = Request("lease/revoke", {"ID": str(lease)}, "end a lease")
        try:
            self._gateway.ask(request, timeout=timeout)
        except StoreRefused:
            pass  # it is over already
        except StoreError:
            if strict:
                raise


def _history(span: Mapping[str, Any], after: int, revision: int) -> Mapping[str, Any]:
    """A question for the number of keys then and now, and for what each step between wrote.

    Where nothing newer stands, equal numbers mean the same keys. What was written and deleted
    between was written at one of the steps.
    """
    asked = [{"revision": str(at), "count_only": True} for at in (after, revision)]
    for step in range(after + 1, revision + 1):
        written = {"min_mod_revision": str(step), "limit": "1", "keys_only": True}
        asked.append({"revision": str(step), **written})
    return {"success": [{"request_range": {**span, **one}} for one in asked]}


def _results(answer: Answer, kind: str) -> Sequence[Mapping[str, Any]]:
    return [response.get(kind, {}) for response in answer.fields.get("responses", ())]


def _first(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next(iter(fields.get("kvs", ())), None)


def _version(found: Mapping[str, Any]) -> int:
    return int(found["mod_revision"])


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _text(text: str) -> str:
    return _base64(text.encode())
