"""What the nodes of a generation tell one another, under keys of the job's store.

A store may take its time to answer, so one thread speaks to it: the agent's loop leaves word here,
and what comes back is an event in its inbox. What cannot be written or read is tried again for as
long as the generation is this node's.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Mapping

import attrs

from ..clock import Clock, monotonic
from ..errors import StoreError, StoreRejectedError, describe
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT, Listing, Store, WatchResult
from ..threads import helper
from .policy import Publish, Subscribe

log = logging.getLogger("elasticlib.agent")

RETRY_SECONDS = 0.2
LOOK_SECONDS = 0.05
"""For which it waits in a store that cannot say of itself that something has changed."""
CLOSE_SECONDS = 1.0


@attrs.frozen
class PeerMessages:
    """What all nodes have posted under this name of a board, by their keys; None: the store refused
    what was asked of it, and nothing more is heard under this name."""

    prefix: str
    topic: str
    messages: Mapping[str, bytes] | None


@attrs.frozen
class _Changed:
    """The store says that something has changed under a name, and what is there, if it can."""

    board: str
    name: str
    seen: WatchResult


class PeerExchange:
    """One node's place to post at, and to gather what the others have posted.

    put: hears what is gathered; broke: hears a sentence, should the thread end unasked.
    """

    def __init__(
        self,
        put: Callable[[PeerMessages], None],
        broke: Callable[[str], None],
        clock: Clock = monotonic,
    ) -> None:
        self.prefix = ""
        """Of the generation's board; empty where there are no other nodes, or no way to them."""
        self._words: queue.SimpleQueue[RendezvousInfo | Publish | Subscribe | _Changed | None]
        self._words = queue.SimpleQueue()
        self._put = put
        self._clock = clock
        self._thread = helper(self._serve, "agent-board", broke)
        # What follows is the thread's.
        self._info: RendezvousInfo | None = None
        self._posts: deque[Publish] = deque()
        self._heard: set[str] = set()
        self._stale: dict[str, Listing | None] = {}
        """Names to be handed on, in this order, each as the store has listed it, if it has."""
        self._polled: dict[str, int] = {}
        """Names to be waited for, each with the version that was listed."""
        self._retry_at = 0.0
        self._unreached = False

    def start_generation(self, info: RendezvousInfo) -> None:
        """From now on speak with the nodes of this generation."""
        shared = info.store is not None and info.world_size > 1
        self.prefix = info.exchange_prefix if shared else ""
        self._words.put(info)

    def submit(self, word: Publish | Subscribe) -> None:
        """As the word says, if there are other nodes."""
        if not self.prefix:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._words.put(word)

    def close(self) -> None:
        """Write what is left to be written, if the store takes it at once."""
        self._words.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _serve(self) -> None:
        while True:
            try:
                word = self._words.get(timeout=self._pause())
            except queue.Empty:
                self._poll()
            else:
                if word is None:
                    return
                self._take(word)
            if self._info is not None and self._info.store is not None:
                self._speak(self._info.store, self._info.exchange_prefix)

    def _pause(self) -> float | None:
        if self._posts or self._stale:
            return max(0.0, self._retry_at - self._clock())
        return 0.0 if self._polled else None

    def _take(self, word: RendezvousInfo | Publish | Subscribe | _Changed) -> None:
        if isinstance(word, RendezvousInfo):
            self._info = word
            for about in (self._posts, self._heard, self._stale, self._polled):
                about.clear()
        elif isinstance(word, Publish):
            self._posts.append(word)
        elif isinstance(word, Subscribe):
            if word.topic not in self._heard:
                self._heard.add(word.topic)
                self._stale[word.topic] = None
        elif self._info is not None and word.board == self._info.exchange_prefix:
            self._stale[word.name] = word.seen if isinstance(word.seen, Listing) else None
            if not word.seen:
                self._retry_at = self._clock() + RETRY_SECONDS

    def _speak(self, store: Store, board: str) -> None:
        """Write and read what is due, until the store fails to answer."""
        while self._retry_at <= self._clock() and (self._posts or self._stale):
            name = self._posts[0].topic if self._posts else next(iter(self._stale))
            try:
                if self._posts:
                    self._write(store, board, self._posts[0])
                else:
                    self._read(store, board, name)
                self._unreached = False
            except Exception as error:
                # Somebody else's store may raise anything. What is said here helps the job, which
                # goes on without it.
                if isinstance(error, StoreError) and not isinstance(error, StoreRejectedError):
                    if not self._unreached:
                        log.info("cannot reach the other nodes, retrying: %s", error)
                    self._unreached = True
                    self._retry_at = self._clock() + RETRY_SECONDS
                    return
                log.info("cannot ask the other nodes: %s", describe(error))
                self._posts = deque(post for post in self._posts if post.topic != name)
                self._stale.pop(name, None)
                self._heard.discard(name)
                self._put(PeerMessages(board, name, None))

    def _write(self, store: Store, board: str, post: Publish) -> None:
        key = f"{board}{post.topic}{post.key}"
        if post.only_if_absent:
            store.compare_set(key, post.value, expected=ABSENT)
        else:
            store.set(key, post.value)
        self._posts.popleft()

    def _read(self, store: Store, board: str, name: str) -> None:
        """Hand on what is there, and have the store say when that has changed."""
        prefix = f"{board}{name}"
        listing = self._stale[name] or store.list(prefix)
        posts = {entry.key.removeprefix(prefix): entry.value for entry in listing.entries}
        self._put(PeerMessages(board, name, posts))

        def changed(seen: WatchResult) -> None:
            self._words.put(_Changed(board, name, seen))

        if not store.watch(prefix, after=listing.version, callback=changed, with_listing=True):
            self._polled[name] = listing.version
        del self._stale[name]

    def _poll(self) -> None:
        """Wait for a change where the store does not tell of one."""
        info = self._info
        for name, version in list(self._polled.items()):
            if info is None or info.store is None:
                return
            try:
                changed = info.store.wait(
                    f"{info.exchange_prefix}{name}", after=version, timeout=LOOK_SECONDS
                )
            except Exception as error:
                log.info("cannot wait for changes in the store, polling it: %s", describe(error))
                changed, self._retry_at = True, self._clock() + RETRY_SECONDS
            if changed:
                del self._polled[name]
                self._stale[name] = None
