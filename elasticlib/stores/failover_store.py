"""A store that is served at the first of several places where it can be.

When it has not been heard of for a while, its clients go on to the next place, one after another,
and whoever owns that place serves there; of a single place it is asked anew whose it is. What was
read or leased at one place counts for nothing at another: it is for the job's nodes to say again
what the job was, if they are enough.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

import attrs

from ..clock import Clock, monotonic
from ..errors import (
    ConfigError,
    ElasticError,
    StoreConnectionError,
    StoreRejectedError,
    StoreTimeoutError,
)
from ..threads import ForkAware, helper
from .interface import CompareSetResult, Entry, Listing, Store, WatchResult
from .tcp_client import TcpStore
from .tcp_server import TcpStoreServer

log = logging.getLogger("elasticlib.stores")

SCAN_SECONDS = 0.5
"""For one place, when we look at which of them the store is served; for all of them together,
when that is done by one whose leases stand."""
SCAN_SHARE = 1 / 4
"""Of the patience, which is a lease: a scan takes no more, or its caller's own lease would end."""

Answer = TypeVar("Answer")


@attrs.frozen
class StoreEndpoint:
    """Where a store may be served.

    reach: a client, which connects when it is first used. serve: the server, if this place is
    ours and nobody serves there; else None.
    """

    name: str
    reach: Callable[[], TcpStore]
    serve: Callable[[], TcpStoreServer | None]


class FailoverStore(Store, ForkAware):
    """A client of the store at whichever of its places that is served at.

    Args:
        places: in the order in which they are tried; the same on all nodes.
        failover_timeout: seconds without an answer after which the next place is tried.
        hosted: what serves at the first place already, and a client of it: there it stays until
            `follow`.
    """

    def __init__(
        self,
        places: Sequence[StoreEndpoint],
        *,
        failover_timeout: float,
        clock: Clock = monotonic,
        hosted: tuple[TcpStoreServer, TcpStore] | None = None,
    ) -> None:
        if not places:
            raise ConfigError("a store needs at least one endpoint, got none")
        self._places = tuple(places)
        self._patience = failover_timeout
        self._clock = clock
        self._closed = False
        self._at = 0
        self._stays = hosted is not None
        self._check_process()
        self._server: TcpStoreServer | None = None if hosted is None else hosted[0]
        self._store: TcpStore | None = None if hosted is None else hosted[1]
        self._heard_at = clock()
        self._why_left = ""  # for those who still ask there
        self._refused: set[int] = set()

    def _init_process_state(self) -> None:
        self._moving = threading.RLock()
        self._server = None
        self._probed: set[int] = set()

    @property
    def server(self) -> TcpStoreServer | None:
        """The server where we are, if it is ours."""
        self._check_process()
        return self._server

    @property
    def local_address(self) -> str | None:
        """This machine's literal address towards the store; None before the first connection."""
        return None if self._store is None else self._store.local_address

    def connect(self) -> None:
        """Connect now, if there is no connection; every operation does so by itself."""
        self._ask(lambda store: store.connect())

    def get(self, key: str) -> Entry | None:
        return self._ask(lambda store: store.get(key))

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        return self._ask(lambda store: store.set(key, value, ttl=ttl))

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        return self._ask(lambda store: store.compare_set(key, value, expected=expected, ttl=ttl))

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        return self._ask(lambda store: store.delete(key, expected=expected))

    def refresh(self, key: str, version: int) -> None:
        self._ask(lambda store: store.refresh(key, version))

    def list(self, prefix: str) -> Listing:
        return self._ask(lambda store: store.list(prefix))

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        return self._ask(lambda store: store.wait(prefix, after=after, timeout=timeout))

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> bool:
        return self._ask(
            lambda store: store.watch(
                prefix, after=after, callback=callback, with_listing=with_listing
            )
        )

    def try_other_endpoints(self, accept: Callable[[Store, bool], bool]) -> bool:
        """As in the contract; `accept` is called in threads of its own, one for each place, and a
        place that has not answered within SCAN_SECONDS in all is passed over this time."""
        self._check_process()
        store, at = self._store, self._at
        probes = [
            (number, self._probe(number, accept, number < at))
            for number in range(len(self._places))
            if number != at and number not in self._probed and not self._closed
        ]
        deadline = monotonic() + min(SCAN_SECONDS, self._patience * SCAN_SHARE)
        went = False
        for number, probe in probes:
            try:
                found = probe.result(0.0 if went else max(deadline - monotonic(), 0.0))
            except NotYet:
                found = None if probe.cancel() else probe.result()
            if found is not None:
                went = self._prefer(number, found, store) or went
        return went

    def follow(self) -> bool:
        """Where the place that we serve at has come to be another's, and is served there: leave
        our own server for it, if nobody else is with us; whether that was done."""
        store = self._store
        # Without the lock: to look up a name may take long, and others speak to our server.
        if not self._is_alone() or (found := self._reached(self._at)) is None:
            return False
        with self._moving:
            if self._is_alone():
                return self._prefer(self._at, found, store)
        found.close()
        return False

    def _is_alone(self) -> bool:
        """Whether we serve here, and for nobody but ourselves."""
        self._check_process()
        with self._moving:
            server, store = self._server, self._store
            if self._closed or server is None or store is None:
                return False
            return set(server.labels) <= {store.label}

    def close(self) -> None:
        # Without the lock: whoever holds it may be trying to connect.
        self._check_process()
        self._closed = True
        store, server = self._store, self._server
        if store is not None:
            store.close()
        if server is not None:
            server.close()

    def _ask(self, question: Callable[[TcpStore], Answer]) -> Answer:
        store = self._here()
        try:
            try:
                store.connect()
            except StoreRejectedError as error:
                # A place of another job is as good as none; where all are, that is the answer.
                self._refuse(self._at, error)
                raise StoreConnectionError(str(error)) from error
            answer = question(store)
        except (StoreConnectionError, StoreTimeoutError) as error:
            if store is not self._store and not self._closed:
                # Another thread has moved us; that our question ended with it says nothing.
                raise StoreConnectionError(self._why_left) from error
            self._miss(store, error)
            raise
        if store is self._store:
            self._heard_at = self._clock()
            self._refused.discard(self._at)
        return answer

    def _refuse(self, number: int, error: StoreRejectedError) -> None:
        if number not in self._refused:
            log.warning("cannot use the store at %s: %s", self._places[number].name, error)
        self._refused.add(number)
        if len(self._refused) == len(self._places):
            raise error

    def _here(self) -> TcpStore:
        self._check_process()
        with self._moving:
            if self._store is None and not self._closed:
                self._arrive()
            store = None if self._closed else self._store
        if store is None:
            raise StoreConnectionError("this store is closed")
        return store

    def _arrive(self) -> None:
        """Go where it is served already; where it is not, to the first place."""
        for number in range(len(self._places)):
            found = self._reached(number)
            if found is not None:
                self._settle(number, found)
                return
        self._go_to(0)

    def _miss(self, store: TcpStore, error: StoreConnectionError | StoreTimeoutError) -> None:
        with self._moving:
            away = self._clock() - self._heard_at
            stays = self._stays or away < self._patience
            if store is not self._store or stays or self._closed:
                return
            there = (self._at + 1) % len(self._places)
            if there != self._at:
                here, on = self._places[self._at].name, self._places[there].name
                log.warning(
                    "no answer from %s for %.1f s: moving to the store at %s", here, away, on
                )
            self._why_left = str(error)
            self._go_to(there)

    def _prefer(self, number: int, found: TcpStore, left: TcpStore | None) -> bool:
        """Be there from now on, if we still are at the store to be left; else leave what is found;
        which of the two."""
        with self._moving:
            if left is self._store and not self._closed:
                self._why_left = f"the job now uses the store at {self._places[number].name}"
                self._settle(number, found)
                return True
        found.close()
        return False

    def _go_to(self, number: int) -> None:
        # Ours is the place only if nobody serves there, and no place serves two of ours.
        self._settle(self._at, None)
        server = self._places[number].serve()
        self._settle(number, self._places[number].reach(), server)

    def _settle(
        self, number: int, store: TcpStore | None, server: TcpStoreServer | None = None
    ) -> None:
        """Be there, and leave where we were."""
        left, self._stays = (self._store, self._server), False
        if store is not None and number != self._at:
            log.info("now using the store at %s", self._places[number].name)
        self._at, self._store, self._server = number, store, server
        self._heard_at = self._clock()
        for one in left:
            if one is not None:
                one.close()
        if self._closed:  # while we moved
            self.close()

    def _probe(
        self, number: int, accept: Callable[[Store, bool], bool], earlier: bool
    ) -> Future[TcpStore | None]:
        """In a thread of its own: the store at that place, if one is served there and accepted.
        Whoever cancels the future before that leaves it to the thread to close the store."""
        future: Future[TcpStore | None] = Future()
        self._probed.add(number)

        def look() -> None:
            found = self._places[number].reach()
            accepted = False
            try:
                found.connect(SCAN_SECONDS)
                accepted = accept(found, earlier)
            except ElasticError as error:
                # What stands there may be another version's, too, and is not ours to read.
                log.debug("cannot use the store at %s: %s", self._places[number].name, error)
            finally:
                self._probed.discard(number)
                heard = future.set_running_or_notify_cancel()
                if not (accepted and heard):
                    found.close()
                if heard:
                    future.set_result(found if accepted else None)

        try:
            helper(look, "store-elsewhere").start()
        except RuntimeError as error:
            self._probed.discard(number)
            raise StoreConnectionError(f"no thread to try other endpoints: {error}") from error
        return future

    def _reached(self, number: int) -> TcpStore | None:
        """The store at that place, if one is served there that does not refuse us."""
        store = self._places[number].reach()
        try:
            store.connect(SCAN_SECONDS)
        except (StoreConnectionError, StoreTimeoutError):
            store.close()
            return None
        except StoreRejectedError as error:
            store.close()
            self._refuse(number, error)
            return None
        return store
