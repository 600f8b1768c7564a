"""What the TCP store's server answers, without sockets: frames come in, frames go out.

Clients are numbers. A wait is held here until something under its prefix changes, its client
departs, or its time is over; the leases of a client that departs end with it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from ..errors import ConfigError, ElasticError, LeaseLost, StoreRefused
from .pages import Pages
from .state import MAX_KEY_BYTES, KeySpace, Lease, Limits, check_key, check_ttl
from .wire import MAX_FRAME_BYTES, Frame

MAX_WAITS = 1000
"""How many waits one client may have pending."""
MAX_WAITS_IN_ALL = 100_000

KINDS: Mapping[str, type[ElasticError]] = {
    "refused": StoreRefused,
    "lease lost": LeaseLost,
    "bad argument": ConfigError,
}
"""The errors that a server answers with, by the name that they have in a frame."""

_KIND_OF = {error: kind for kind, error in KINDS.items()}

Outgoing = tuple[int, Frame]


def error_frame(number: int, error: ElasticError) -> Frame:
    """The answer that raises the same error at the client; 0 is for the whole connection."""
    return Frame("error", number, {"kind": _KIND_OF[type(error)], "message": str(error)})


def error_of(frame: Frame) -> ElasticError:
    """The error that an error frame stands for."""
    return KINDS.get(frame.fields["kind"], StoreRefused)(frame.fields["message"])


@attrs.frozen
class _Call:
    client: int
    frame: Frame
    now: float

    @property
    def id(self) -> int:
        return self.frame.id

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.frame.fields

    @property
    def value(self) -> bytes:
        return self.frame.value


@attrs.frozen
class _Wait:
    """For a change past this version; listing: whether the answer is what is there then."""

    after: int
    listing: bool = False


class StoreService:
    """A keyspace, the waits on it, and the answers to each operation."""

    def __init__(
        self,
        limits: Limits,
        frame_bytes: int = MAX_FRAME_BYTES,
        most_waits: int = MAX_WAITS_IN_ALL,
    ) -> None:
        self._most_waits = most_waits
        self._wait_count = 0
        self._space = KeySpace(limits)
        self._pages = Pages(min(frame_bytes, MAX_FRAME_BYTES) - 1024, limits.total_bytes)
        self._waits: dict[str, dict[tuple[int, int], _Wait]] = {}
        self._held: dict[int, dict[int, str]] = {}
        self._deadlines: list[tuple[float, int, int]] = []
        self._told = 0

    def answer(self, client: int, frame: Frame, now: float) -> Frame | None:
        """The answer to an operation; None for a wait, whose answer `settle` gives."""
        operation = _OPERATIONS.get(frame.op)
        if operation is None:
            return error_frame(frame.id, StoreRefused(f"{frame.op} is no operation here"))
        try:
            return operation(self, _Call(client, frame, now))
        except (StoreRefused, LeaseLost, ConfigError) as error:
            return error_frame(frame.id, error)

    def depart(self, client: int) -> None:
        """The client's connection ended: so do its leases, its waits and its listings."""
        self._space.end_leases_of(client)
        self._pages.depart(client)
        for number, prefix in self._held.pop(client, {}).items():
            self._forget_wait(client, number, prefix)

    def end_silent_leases(self, now: float) -> None:
        """Take a look at the leases. First answer all that has arrived, it may be a refresh."""
        self._space.end_silent_leases(now)

    def look_is_due(self, now: float) -> bool:
        """Whether `end_silent_leases` is worth calling."""
        return self._space.clock.due(now)

    def settle(
        self, now: float, may_list: Callable[[int], bool] = lambda _: True
    ) -> Iterator[Outgoing]:
        """The answers to waits whose change came, or whose time is over.

        may_list: whether that client may be sent a listing; else it is told to ask for it.
        """
        yield from self._woken(may_list)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, client, number = heapq.heappop(self._deadlines)
            if self._release(client, number):
                yield client, Frame("answer", number, {"yes": False})

    def until_due(self, now: float) -> float | None:
        """Seconds until a look or a wait's deadline; None when nothing is pending."""
        if self._told != self._space.version:
            return 0.0
        look = self._space.clock.until_due(now)
        if not self._deadlines:
            return look
        deadline = max(self._deadlines[0][0] - now, 0.0)
        return deadline if look is None else min(look, deadline)

    def _woken(self, may_list: Callable[[int], bool]) -> Iterator[Outgoing]:
        if self._told == self._space.version:
            return
        touched = [p for p in self._waits if self._space.changed(p, self._told)]
        self._told = self._space.version
        for prefix in touched:
            listing: Frame | None = None
            for (client, number), wait in list(self._waits.get(prefix, {}).items()):
                # A wait that came behind the change, in the same turn, goes on waiting; and who
                # was told of another may have been found gone.
                if not self._space.changed(prefix, wait.after):
                    continue
                if not self._release(client, number):
                    continue
                wanted = wait.listing and may_list(client)
                if wanted and listing is None:
                    listing = self._if_short(prefix)
                if wanted and listing is not None:
                    yield client, attrs.evolve(listing, id=number)
                else:
                    yield client, Frame("answer", number, {"yes": True})

    def _hold(self, call: _Call, wait: _Wait, deadline: float = math.inf) -> None:
        held = self._held.setdefault(call.client, {})
        if len(held) >= MAX_WAITS or call.id in held:
            raise StoreRefused(f"a client has at most {MAX_WAITS} waits, each with its own id")
        if self._wait_count >= self._most_waits:
            raise StoreRefused(f"all clients together have at most {self._most_waits} waits")
        self._wait_count += 1
        prefix = held[call.id] = call.fields["prefix"]
        self._waits.setdefault(prefix, {})[call.client, call.id] = wait
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, call.client, call.id))
            self._tidy()

    def _release(self, client: int, number: int) -> bool:
        prefix = self._held.get(client, {}).pop(number, None)
        if prefix is None:
            return False
        self._forget_wait(client, number, prefix)
        return True

    def _forget_wait(self, client: int, number: int, prefix: str) -> None:
        self._wait_count -= 1
        waits = self._waits[prefix]
        del waits[client, number]
        if not waits:
            del self._waits[prefix]

    def _tidy(self) -> None:
        # Deadlines of waits that were answered stay until they pass; long ones must not pile up.
        if len(self._deadlines) > 1000 + 2 * self._wait_count:
            self._deadlines = [
                (deadline, client, number)
                for deadline, client, number in self._deadlines
                if number in self._held.get(client, {})
            ]
            heapq.heapify(self._deadlines)

    def _get(self, call: _Call) -> Frame:
        entry = self._space.get(check_key(call.fields["key"]))
        if entry is None:
            return Frame("absent", call.id)
        return Frame("entry", call.id, {"version": entry.version}, entry.value)

    def _set(self, call: _Call) -> Frame:
        lease = _lease(call.client, call.fields["ttl"])
        entry = self._space.put(call.fields["key"], call.value, lease, call.now)
        return Frame("written", call.id, {"version": entry.version})

    def _compare_set(self, call: _Call) -> Frame:
        fields = call.fields
        key, lease = check_key(fields["key"]), _lease(call.client, fields["ttl"])
        outcome = self._space.compare_set(key, call.value, fields["expected"], lease, call.now)
        if outcome.entry is None:
            return Frame("absent", call.id)
        version = {"version": outcome.entry.version}
        if outcome.won:
            return Frame("written", call.id, version)
        return Frame("lost", call.id, version, outcome.entry.value)

    def _delete(self, call: _Call) -> Frame:
        key = check_key(call.fields["key"])
        removed = self._space.delete(key, call.fields["expected"])
        return Frame("answer", call.id, {"yes": removed})

    def _refresh(self, call: _Call) -> Frame:
        self._space.refresh(call.fields["key"], call.fields["version"], call.client, call.now)
        return Frame("answer", call.id, {"yes": True})

    def _list(self, call: _Call) -> Frame:
        first = self._pages.first(call.client, self._space.list(call.fields["prefix"]))
        return attrs.evolve(first, id=call.id)

    def _rest(self, call: _Call) -> Frame:
        return attrs.evolve(self._pages.next(call.client, call.fields["number"]), id=call.id)

    def _if_short(self, prefix: str) -> Frame | None:
        """What is there, if one page holds it; else whoever wants it must ask for each."""
        listing = self._space.list(prefix)
        return self._pages.first(0, listing) if self._pages.is_one_page(listing) else None

    def _wait(self, call: _Call) -> Frame | None:
        if self._has_changed(call):
            return Frame("answer", call.id, {"yes": True})
        self._hold(call, _Wait(call.fields["after"]), call.now + call.fields["timeout"])
        return None

    def _watch(self, call: _Call) -> Frame | None:
        listing = call.fields["listing"]
        if self._has_changed(call):
            found = self._if_short(call.fields["prefix"]) if listing else None
            return attrs.evolve(found or Frame("answer", 0, {"yes": True}), id=call.id)
        self._hold(call, _Wait(call.fields["after"], listing))
        return None

    def _has_changed(self, call: _Call) -> bool:
        prefix = call.fields["prefix"]
        # Kept for as long as the wait: no key begins with a longer one.
        if len(prefix) > MAX_KEY_BYTES:
            raise StoreRefused(
                f"a prefix to wait for is at most {MAX_KEY_BYTES} long, got {len(prefix)}"
            )
        return self._space.changed(prefix, call.fields["after"])


def _lease(client: int, ttl: float | None) -> Lease | None:
    return None if check_ttl(ttl) is None else Lease(client, float(ttl or 0))


_Operation = Callable[[StoreService, _Call], "Frame | None"]

_OPERATIONS: Mapping[str, _Operation] = {
    "get": StoreService._get,
    "set": StoreService._set,
    "compare_set": StoreService._compare_set,
    "delete": StoreService._delete,
    "refresh": StoreService._refresh,
    "list": StoreService._list,
    "rest": StoreService._rest,
    "wait": StoreService._wait,
    "watch": StoreService._watch,
}
