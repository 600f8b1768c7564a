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
from ..errors import StoreError, StoreRefused, describe
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT, Listing, Store, Watched
from ..threads import helper

log = logging.getLogger("elasticlib.agent")

RETRY_SECONDS = 0.2
LOOK_SECONDS = 0.05
"""For which it waits in a store that cannot say of itself that something has changed."""
CLOSE_SECONDS = 1.0


@attrs.frozen
class Gathered:
    """What all nodes have posted under this name of a board, by the rest of their keys."""

    board: str
    name: str
    posts: Mapping[str, bytes]


@attrs.frozen
class Unheard:
    """The store refused what was asked of it: nothing more is heard under this name."""

    board: str
    name: str


@attrs.frozen
class _Open:
    store: Store
    board: str


@attrs.frozen
class _Post:
    name: str
    key: str
    value: bytes
    first: bool


@attrs.frozen
class _Gather:
    name: str


@attrs.frozen
class _Changed:
    board: str
    name: str
    seen: Watched


_Word = _Open | _Post | _Gather | _Changed


class Board:
    """One node's place to post at, and to gather what the others have posted.

    put: hears Gathered and Unheard; broke: hears a sentence, should the thread end unasked.
    """

    def __init__(
        self,
        put: Callable[[Gathered | Unheard], None],
        broke: Callable[[str], None],
        clock: Clock = monotonic,
    ) -> None:
        self.name = ""
        """Of the generation's board; empty where there are no other nodes, or no way to them."""
        self._speaker = _Speaker(put, clock)
        self._thread = helper(self._speaker.run, "agent-board", broke)

    def open(self, info: RendezvousInfo) -> None:
        """From now on speak with the nodes of this generation."""
        shared = info.store is not None and bool(info.board) and info.world_size > 1
        self.name = info.board if shared else ""
        if info.store is not None and shared:
            self._speaker.words.put(_Open(info.store, info.board))

    def post(self, name: str, key: str, value: bytes, *, first: bool = False) -> None:
        """Write it there; first: unless something stands there already."""
        self._leave(_Post(name, key, value, first))

    def gather(self, name: str) -> None:
        """Hear what stands under this name, now and whenever that changes."""
        self._leave(_Gather(name))

    def _leave(self, word: _Post | _Gather) -> None:
        if not self.name:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._speaker.words.put(word)

    def close(self) -> None:
        """Write what is left to be written, if the store takes it at once."""
        self._speaker.words.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)


class _Speaker:
    """Speaks to the store, in the board's thread."""

    def __init__(self, put: Callable[[Gathered | Unheard], None], clock: Clock) -> None:
        self.words: queue.SimpleQueue[_Word | None] = queue.SimpleQueue()
        self._put = put
        self._clock = clock
        self._store: Store | None = None
        self._board = ""
        self._posts: deque[_Post] = deque()
        self._stale: dict[str, Listing | None] = {}
        """Names to be handed on, in this order, each as the store has listed it, if it has."""
        self._polled: dict[str, int] = {}
        """Names to be waited for, each with the version that was listed."""
        self._retry_at = 0.0

    def run(self) -> None:
        while True:
            try:
                word = self.words.get(timeout=self._pause())
            except queue.Empty:
                self._poll()
            else:
                if word is None:
                    return
                self._take(word)
            self._speak()

    def _pause(self) -> float | None:
        if self._posts or self._stale:
            return max(0.0, self._retry_at - self._clock())
        return 0.0 if self._polled else None

    def _take(self, word: _Word) -> None:
        if isinstance(word, _Open):
            self._store, self._board = word.store, word.board
            self._posts.clear()
            self._stale.clear()
            self._polled.clear()
        elif isinstance(word, _Post):
            self._posts.append(word)
        elif isinstance(word, _Gather):
            self._stale[word.name] = None
        elif word.board == self._board:
            self._stale[word.name] = word.seen if isinstance(word.seen, Listing) else None
            if not word.seen:
                self._retry_at = self._clock() + RETRY_SECONDS

    def _speak(self) -> None:
        """Write and read what is due, until the store fails to answer."""
        while self._retry_at <= self._clock() and (self._posts or self._stale):
            name = self._posts[0].name if self._posts else next(iter(self._stale))
            try:
                if self._posts:
                    self._write(self._posts[0])
                    self._posts.popleft()
                else:
                    self._read(name)
            except StoreRefused as error:
                self._give_up(name, error)
            except StoreError as error:
                log.info("the other nodes are not to be reached, trying again: %s", error)
                self._retry_at = self._clock() + RETRY_SECONDS
            except Exception as error:
                # Somebody else's store may raise anything, and what is said here helps the job,
                # which goes on without it.
                self._give_up(name, error)

    def _write(self, post: _Post) -> None:
        store, key = self._store, f"{self._board}{post.name}{post.key}"
        if store is None:
            return
        if post.first:
            store.compare_set(key, post.value, expected=ABSENT)
        else:
            store.set(key, post.value)

    def _read(self, name: str) -> None:
        """Hand on what is there, and have the store say when that has changed."""
        store, board, prefix = self._store, self._board, f"{self._board}{name}"
        if store is None:
            return
        listing = self._stale[name] or store.list(prefix)
        posts = {entry.key.removeprefix(prefix): entry.value for entry in listing.entries}
        self._put(Gathered(board, name, posts))

        def changed(seen: Watched) -> None:
            self.words.put(_Changed(board, name, seen))

        if not store.watch(prefix, after=listing.version, changed=changed, listing=True):
            self._polled[name] = listing.version
        del self._stale[name]

    def _poll(self) -> None:
        """Wait for a change where the store does not tell of one."""
        for name, version in list(self._polled.items()):
            try:
                changed = self._store is None or self._store.wait(
                    f"{self._board}{name}", after=version, timeout=LOOK_SECONDS
                )
            except Exception as error:
                log.info("the store cannot be waited for, asking again: %s", describe(error))
                changed, self._retry_at = True, self._clock() + RETRY_SECONDS
            if changed:
                del self._polled[name]
                self._stale[name] = None

    def _give_up(self, name: str, error: Exception) -> None:
        log.info("the other nodes cannot be asked: %s", describe(error))
        self._posts = deque(post for post in self._posts if post.name != name)
        self._stale.pop(name, None)
        self._put(Unheard(self._board, name))
