"""A store that is served at the first of several endpoints where that is possible.

If the current endpoint does not answer for the failover timeout, each client moves to the next
endpoint, and the node that owns that endpoint starts a server there. With a single endpoint, a node
checks again whether the endpoint is its own. What was read or leased at one endpoint does not count
at another: the nodes of the job restore its state there if there are enough of them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
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
from ..event_loop import EventLoop
from ..threads import ForkAware, daemon_thread, only_logged
from .interface import CancelWatch, CompareSetResult, Entry, Listing, Store, WatchResult
from .tcp_client import TcpStore
from .tcp_server import TcpStoreServer

log = logging.getLogger("elasticlib.stores")

SCAN_TIMEOUT_S = 0.5  # for connecting to one endpoint, and for trying all endpoints at once
# A scan must be shorter than the lease of its caller, which is as long as the failover timeout.
SCAN_FRACTION = 1 / 4

Reply = TypeVar("Reply")


@attrs.frozen
class StoreEndpoint:
    """An endpoint at which a store may be served."""

    name: str
    connect: Callable[[], TcpStore]  # returns a client, which connects when it is first used
    # Returns a server, if the endpoint is this node's and no server is there; else None.
    start_server: Callable[[], TcpStoreServer | None]


class FailoverStore(Store, ForkAware):
    """A client of a store that is served at one of several endpoints. Thread-safe.

    A store that is garbage-collected without `close` ends its connection. A server that it has
    started keeps running until it is closed.

    Args:
        endpoints: The endpoints in the order in which they are tried, which is the same on all
            nodes.
        failover_timeout: Seconds without a reply after which the next endpoint is tried.
        clock: Returns monotonic time in seconds.
        hosted: The server that this node has started at the first endpoint, and a client of it.
            With these, the store stays there until `yield_to_other_server`.

    Raises:
        ConfigError: There is no endpoint.
    """

    event_loop: EventLoop

    def __init__(
        self,
        endpoints: Sequence[StoreEndpoint],
        *,
        failover_timeout: float,
        clock: Clock = monotonic,
        hosted: tuple[TcpStoreServer, TcpStore] | None = None,
    ) -> None:
        if not endpoints:
            raise ConfigError("a store needs at least one endpoint, got none")
        self._endpoints = tuple(endpoints)
        self._failover_timeout = failover_timeout
        self._clock = clock
        self._closed = False
        self._index = 0  # of the current endpoint
        self._never_moves = hosted is not None
        self._check_process()
        if hosted:
            hosted[1].use_event_loop(self.event_loop)
        self._server: TcpStoreServer | None = hosted[0] if hosted else None  # if this node serves
        self._store: TcpStore | None = hosted[1] if hosted else None  # client of the endpoint
        self._last_reply_at = clock()
        self._move_reason = ""  # the error of operations that a move has interrupted
        self._rejecting: set[int] = set()  # endpoints that have rejected this client

    def _init_process_state(self) -> None:
        if self._pid:
            self.event_loop.close_after_fork()
        self.event_loop = EventLoop()  # of all clients
        # A client that is freed with this store ends its own connection.
        weakref.finalize(self, self.event_loop.abandon).atexit = False
        self._move_lock = threading.RLock()  # guards moves
        self._server = None
        self._probed: set[int] = set()  # endpoints that `try_other_endpoints` tries now

    @property
    def server(self) -> TcpStoreServer | None:
        """The server at the current endpoint, if it belongs to this node."""
        self._check_process()
        return self._server

    @property
    def local_address(self) -> str | None:
        """This machine's address on the connection to the store; None before the first one."""
        return None if self._store is None else self._store.local_address

    def connect(self) -> None:
        """Open the connection if there is none. Each operation does this by itself."""
        self._call_current_store(lambda store: store.connect())

    def get(self, key: str) -> Entry | None:
        return self._call_current_store(lambda store: store.get(key))

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        return self._call_current_store(lambda store: store.set(key, value, ttl=ttl))

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        return self._call_current_store(
            lambda store: store.compare_set(key, value, expected=expected, ttl=ttl)
        )

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        return self._call_current_store(lambda store: store.delete(key, expected=expected))

    def refresh(self, key: str, version: int) -> None:
        self._call_current_store(lambda store: store.refresh(key, version))

    def list(self, prefix: str) -> Listing:
        return self._call_current_store(lambda store: store.list(prefix))

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        return self._call_current_store(
            lambda store: store.wait(prefix, after=after, timeout=timeout)
        )

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch | None:
        return self._call_current_store(
            lambda store: store.watch(
                prefix, after=after, callback=callback, with_listing=with_listing
            )
        )

    def try_other_endpoints(self, accept: Callable[[Store, bool], bool]) -> bool:
        """Move to another endpoint if one is accepted, see `Store.try_other_endpoints`.

        Each endpoint is tried in a thread of its own. Those that do not answer within half a second
        in total are skipped.
        """
        self._check_process()
        store, index = self._store, self._index
        probes = [
            (number, self._start_probe(number, accept, number < index))
            for number in range(len(self._endpoints))
            if number != index and number not in self._probed and not self._closed
        ]
        deadline = monotonic() + min(SCAN_TIMEOUT_S, self._failover_timeout * SCAN_FRACTION)
        has_moved = False
        for number, probe in probes:
            try:
                other = probe.result(0.0 if has_moved else max(deadline - monotonic(), 0.0))
            except FutureTimeoutError:
                other = None if probe.cancel() else probe.result()
            if other is not None:
                has_moved = self._switch_if_current(number, other, store) or has_moved
        return has_moved

    def yield_to_other_server(self) -> bool:
        """Leave the server of this node if it has no other client and another server answers.

        Another server answers if the name of the endpoint now resolves to another machine.

        Returns:
            True if the store has moved.
        """
        store = self._store
        # A name lookup can take long, so it happens without the lock.
        if not self._is_only_client() or (other := self._connect_to(self._index)) is None:
            return False
        with self._move_lock:
            if self._is_only_client():
                return self._switch_if_current(self._index, other, store)
        other.close()
        return False

    def close(self) -> None:
        # Without the lock, because its owner may be connecting.
        self._check_process()
        self._closed = True
        for part in (self._store, self._server):
            if part is not None:
                part.close()
        self.event_loop.close()

    def _new_client(self, number: int) -> TcpStore:
        """Return a client of an endpoint, which is not connected."""
        store = self._endpoints[number].connect()
        store.use_event_loop(self.event_loop)
        return store

    def _is_only_client(self) -> bool:
        """Return True if this node serves the store, and no other client is connected."""
        self._check_process()
        with self._move_lock:
            server, store = self._server, self._store
            if self._closed or server is None or store is None:
                return False
            return set(server.labels) <= {store.label}

    def _call_current_store(self, operation: Callable[[TcpStore], Reply]) -> Reply:
        """Run an operation at the current endpoint. After an error, move if it was silent too long.

        Operations are not repeated at another endpoint.
        """
        store = self._get_current_client()
        try:
            try:
                store.connect()
            except StoreRejectedError as error:
                # An endpoint of another job is as unusable as one that does not answer.
                self._record_rejection(self._index, error)
                raise StoreConnectionError(str(error)) from error
            reply = operation(store)
        except (StoreConnectionError, StoreTimeoutError) as error:
            if store is not self._store and not self._closed:
                # Another thread has moved, which interrupted this operation.
                raise StoreConnectionError(self._move_reason) from error
            self._move_if_silent(store, error)
            raise
        if store is self._store:
            self._last_reply_at = self._clock()
            self._rejecting.discard(self._index)
        return reply

    def _record_rejection(self, number: int, error: StoreRejectedError) -> None:
        """Log the first rejection of an endpoint. Raise the error if all endpoints reject."""
        if number not in self._rejecting:
            log.warning(
                "the store at %s rejects this node, which tries the other endpoints: %s",
                self._endpoints[number].name,
                error,
            )
        self._rejecting.add(number)
        if len(self._rejecting) == len(self._endpoints):
            raise error

    def _get_current_client(self) -> TcpStore:
        """Return the client of the current endpoint, and choose an endpoint at the first call."""
        self._check_process()
        with self._move_lock:
            if self._store is None and not self._closed:
                self._choose_endpoint()
            store = None if self._closed else self._store
        if store is None:
            raise StoreConnectionError("this store is closed")
        return store

    def _choose_endpoint(self) -> None:
        """Use the first endpoint at which a server answers, or else move to the first endpoint."""
        for number in range(len(self._endpoints)):
            store = self._connect_to(number)
            if store is not None:
                self._switch(number, store)
                return
        self._move_to(0)

    def _move_if_silent(
        self, store: TcpStore, error: StoreConnectionError | StoreTimeoutError
    ) -> None:
        """Move to the next endpoint if the current one has been silent for `failover_timeout`."""
        with self._move_lock:
            silent_s = self._clock() - self._last_reply_at
            stays = self._never_moves or silent_s < self._failover_timeout
            if store is not self._store or stays or self._closed:
                return
            following = (self._index + 1) % len(self._endpoints)
            if following != self._index:
                here, there = self._endpoints[self._index].name, self._endpoints[following].name
                log.warning(
                    "the store at %s has not answered for %.1f s: moving to the store at %s",
                    here,
                    silent_s,
                    there,
                )
            self._move_reason = str(error)
            self._move_to(following)

    def _move_to(self, number: int) -> None:
        # The old server is closed first, because a node serves at no more than one endpoint.
        self._switch(self._index, None)
        server = self._endpoints[number].start_server()
        self._switch(number, self._new_client(number), server)

    def _switch_if_current(self, number: int, other: TcpStore, left: TcpStore | None) -> bool:
        """Switch to the client `other` if `left` is still current, or else close `other`.

        Return True if the store has switched.
        """
        with self._move_lock:
            if left is self._store and not self._closed:
                name = self._endpoints[number].name
                self._move_reason = f"the job now uses the store at {name}"
                self._switch(number, other)
                return True
        other.close()
        return False

    def _switch(
        self, number: int, store: TcpStore | None, server: TcpStoreServer | None = None
    ) -> None:
        """Make an endpoint the current one, and close the previous client and server."""
        old, self._never_moves = (self._store, self._server), False
        if store is not None and number != self._index:
            log.info("this node now uses the store at %s", self._endpoints[number].name)
        self._index, self._store, self._server = number, store, server
        self._last_reply_at = self._clock()
        for part in old:
            if part is not None:
                part.close()
        if self._closed:  # another thread has closed this store
            self.close()

    def _start_probe(
        self, number: int, accept: Callable[[Store, bool], bool], is_earlier: bool
    ) -> Future[TcpStore | None]:
        """Start a thread that connects to an endpoint and calls `accept`.

        Returns:
            The future client, or None if the endpoint is not accepted. If the caller cancels the
            future, the thread closes the client.
        """
        future: Future[TcpStore | None] = Future()
        self._probed.add(number)

        def probe() -> None:
            store = self._new_client(number)
            is_accepted = False
            try:
                store.connect(SCAN_TIMEOUT_S)
                is_accepted = accept(store, is_earlier)
            except ElasticError as error:
                # For example, the store of another version, which cannot be read.
                log.debug("cannot use the store at %s: %s", self._endpoints[number].name, error)
            finally:
                self._probed.discard(number)
                is_awaited = future.set_running_or_notify_cancel()
                if not (is_accepted and is_awaited):
                    store.close()
                if is_awaited:
                    future.set_result(store if is_accepted else None)

        try:
            daemon_thread(probe, "store-elsewhere", only_logged).start()
        except RuntimeError as error:
            self._probed.discard(number)
            raise StoreConnectionError(f"no thread to try other endpoints: {error}") from error
        return future

    def _connect_to(self, number: int) -> TcpStore | None:
        """Return a connected client of an endpoint, or None if it does not answer or rejects."""
        store = self._new_client(number)
        try:
            store.connect(SCAN_TIMEOUT_S)
        except (StoreConnectionError, StoreTimeoutError):
            store.close()
            return None
        except StoreRejectedError as error:
            store.close()
            self._record_rejection(number, error)
            return None
        return store
