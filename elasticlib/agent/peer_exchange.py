"""Exchange of small messages between the agents of a generation, through the job's store.

The store can take long to answer, so a thread makes the requests. The agent's loop calls `publish`
and `subscribe`, which return at once, and receives `PeerMessages`. A request that fails is repeated
as long as the generation is current. The thread exists only while there is something to publish,
or a subscription.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping

import attrs

from ..clock import Clock, monotonic
from ..errors import StoreError, StoreRejectedError, format_error
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT, CancelWatch, Listing, Store, WatchResult
from ..threads import daemon_thread
from .policy import Publish, Subscribe

log = logging.getLogger("elasticlib.agent")

RETRY_DELAY_S = 0.2
WAIT_TIMEOUT_S = 0.05  # one wait in a store that cannot notify; requests are delayed by it
CLOSE_TIMEOUT_S = 1.0


@attrs.frozen
class PeerMessages:
    """All messages that the nodes of a generation have published under a topic."""

    prefix: str  # identifies the generation
    topic: str
    messages: Mapping[str, bytes] | None  # by key; None if the store rejected a request


@attrs.frozen
class _TopicChanged:
    """A notification of the store: a topic has changed, perhaps with its new content."""

    topic: str
    result: WatchResult


_Request = Publish | Subscribe | _TopicChanged | None


class PeerExchange:
    """Publishes and receives messages for the agent of one node.

    One thread calls the methods. `on_messages` and `on_error` are called in the exchange's thread.

    Args:
        on_messages: receives the content of a subscribed topic, first and after each change.
        on_error: receives a message if the thread fails.
        clock: the time source of the retries.
    """

    def __init__(
        self,
        on_messages: Callable[[PeerMessages], None],
        on_error: Callable[[str], None],
        clock: Clock = monotonic,
    ) -> None:
        self._on_messages = on_messages
        self._on_error = on_error
        self._clock = clock
        self._lock = threading.Lock()  # protects _thread
        self._thread: threading.Thread | None = None  # None while there is nothing to do
        # Requests with the generation they belong to. A request None only announces a generation.
        self._requests: queue.SimpleQueue[tuple[RendezvousInfo, _Request] | None]
        self._requests = queue.SimpleQueue()  # an item None ends the thread

        self._info: RendezvousInfo | None = None  # current generation, None without peers

        # State of the thread.
        self._served: RendezvousInfo | None = None  # generation of the following fields
        self._unpublished: deque[Publish] = deque()
        self._topics: set[str] = set()  # subscribed topics
        self._stale: dict[str, Listing | None] = {}  # topics to deliver, with known content
        self._polled: dict[str, int] = {}  # topics without notifications, with delivered version
        self._watches: dict[str, CancelWatch] = {}  # by topic, of the current generation
        self._retry_at = 0.0
        self._is_store_down = False

    @property
    def prefix(self) -> str:
        """The text that identifies the generation in PeerMessages; "" without peers or a store."""
        return "" if self._info is None else self._info.exchange_prefix

    def start_generation(self, info: RendezvousInfo) -> None:
        """Use this generation. Drop unpublished messages and subscriptions of the last one."""
        has_peers = info.store is not None and info.world_size > 1 and info.exchange_prefix
        self._info = info if has_peers else None
        with self._lock:
            if self._thread is not None:
                self._requests.put((info, None))

    def publish(self, message: Publish) -> None:
        """Publish a message, if the generation has other nodes."""
        self._submit(message)

    def subscribe(self, topic: str) -> None:
        """Subscribe to the messages of a topic, if the generation has other nodes."""
        self._submit(Subscribe(topic))

    def close(self) -> None:
        """Publish the remaining messages if the store answers quickly, and end the thread."""
        self._requests.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)

    def _submit(self, request: Publish | Subscribe) -> None:
        if self._info is None:
            return
        with self._lock:
            self._requests.put((self._info, request))
            if self._thread is None:
                self._thread = daemon_thread(self._serve, "agent-peers", self._on_error)
                self._thread.start()

    # In the thread

    def _serve(self) -> None:
        while not self._exit_if_idle():
            try:
                request = self._requests.get(timeout=self._request_timeout_s())
            except queue.Empty:
                self._wait_for_changes()
            else:
                if request is None:
                    self._cancel_watches()
                    return
                self._accept(*request)
            if self._served is not None and self._served.store is not None:
                self._exchange(self._served.store, self._served.exchange_prefix)

    def _exit_if_idle(self) -> bool:
        """Return True if the thread has nothing to do, so that it must end now."""
        with self._lock:
            is_busy = self._unpublished or self._topics or not self._requests.empty()
            if not is_busy:
                self._thread = None
            return not is_busy

    def _request_timeout_s(self) -> float | None:
        if self._unpublished or self._stale:
            return max(0.0, self._retry_at - self._clock())
        return 0.0 if self._polled else None

    def _accept(self, info: RendezvousInfo, request: _Request) -> None:
        """Store a request. The first one of a generation replaces the state of the earlier one."""
        if isinstance(request, _TopicChanged):
            if info is self._served and request.topic in self._topics:
                listing = request.result if isinstance(request.result, Listing) else None
                self._stale[request.topic] = listing
                if not request.result:
                    self._retry_at = self._clock() + RETRY_DELAY_S
            return
        if info is not self._served:
            self._cancel_watches()
            self._served = info
            for content in (self._unpublished, self._topics, self._stale, self._polled):
                content.clear()
        if isinstance(request, Publish):
            self._unpublished.append(request)
        elif isinstance(request, Subscribe) and request.topic not in self._topics:
            self._topics.add(request.topic)
            self._stale[request.topic] = None

    def _exchange(self, store: Store, prefix: str) -> None:
        """Publish the queued messages, and deliver the topics that have changed.

        Stop and retry later if the store is unreachable; drop a topic after any other error.
        """
        while self._retry_at <= self._clock() and (self._unpublished or self._stale):
            topic = self._unpublished[0].topic if self._unpublished else next(iter(self._stale))
            try:
                if self._unpublished:
                    self._write(store, prefix, self._unpublished[0])
                else:
                    self._deliver(store, prefix, topic)
                self._is_store_down = False
            except Exception as error:
                # A user's store may raise any exception. The job continues without the messages.
                if isinstance(error, StoreError) and not isinstance(error, StoreRejectedError):
                    if not self._is_store_down:
                        log.info(
                            "the agents cannot exchange messages through the store, retrying: %s",
                            error,
                        )
                    self._is_store_down = True
                    self._retry_at = self._clock() + RETRY_DELAY_S
                    return
                log.info(
                    "the agents cannot exchange messages about %s, so that this generation does "
                    "without: %s",
                    *(topic.strip("/"), format_error(error)),
                )
                self._drop_topic(topic)
                self._on_messages(PeerMessages(prefix, topic, None))

    def _drop_topic(self, topic: str) -> None:
        self._unpublished = deque(item for item in self._unpublished if item.topic != topic)
        self._stale.pop(topic, None)
        self._topics.discard(topic)
        if (cancel := self._watches.pop(topic, None)) is not None:
            self._cancel(cancel)

    def _write(self, store: Store, prefix: str, message: Publish) -> None:
        key = f"{prefix}{message.topic}{message.key}"
        if message.only_if_absent:
            store.compare_set(key, message.value, expected=ABSENT)
        else:
            store.set(key, message.value)
        self._unpublished.popleft()

    def _deliver(self, store: Store, prefix: str, topic: str) -> None:
        """Deliver the content of a topic, and request a notification for its next change."""
        key_prefix = f"{prefix}{topic}"
        listing = self._stale[topic] or store.list(key_prefix)
        messages = {entry.key.removeprefix(key_prefix): entry.value for entry in listing.entries}
        self._on_messages(PeerMessages(prefix, topic, messages))
        info = self._served

        def on_change(result: WatchResult) -> None:
            if info is not None:
                self._requests.put((info, _TopicChanged(topic, result)))

        cancel = store.watch(
            key_prefix, after=listing.version, callback=on_change, with_listing=True
        )
        if cancel is None:
            self._polled[topic] = listing.version
        else:
            self._watches[topic] = cancel
        del self._stale[topic]

    def _cancel_watches(self) -> None:
        """Cancel the watches of a generation. Without a change they would stay in the store."""
        watches, self._watches = self._watches, {}
        for cancel in watches.values():
            self._cancel(cancel)

    def _cancel(self, cancel: CancelWatch) -> None:
        try:
            cancel()
        except Exception as error:  # a user's store may raise any exception
            log.info("cannot cancel a watch in the store: %s", format_error(error))

    def _wait_for_changes(self) -> None:
        """Wait for changes in a store that cannot notify."""
        info = self._served
        for topic, version in list(self._polled.items()):
            if info is None or info.store is None:
                return
            try:
                has_changed = info.store.wait(
                    f"{info.exchange_prefix}{topic}", after=version, timeout=WAIT_TIMEOUT_S
                )
            except Exception as error:
                log.info(
                    "cannot wait for messages of other agents in the store, polling it: %s",
                    format_error(error),
                )
                has_changed, self._retry_at = True, self._clock() + RETRY_DELAY_S
            if has_changed:
                del self._polled[topic]
                self._stale[topic] = None
