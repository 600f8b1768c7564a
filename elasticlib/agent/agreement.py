"""Has the workers of all nodes stop at the same call: asks ours, tells the others, hears them.

A store may take its time, and a worker is in a step for as long as that takes; so each agreement
has a thread, which only asks, and leaves its outcome to the agent's loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import attrs

from ..clock import Clock
from ..errors import ElasticError, StoreError, StoreRefused
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT, Store
from ..threads import helper
from ..workers.interface import Workers
from ..workers.messages import RESIZE, Notice
from .agreed import Need, agreed, decode_need, encode_need, more_urgent

log = logging.getLogger("elasticlib.agent")

LOOK_SECONDS = 5e-4
"""Between two looks at workers that are in a step."""
ENDLESS = 1e6
RETRY_SECONDS = 0.2
STORE_SECONDS = 0.1
"""Between two looks at what other nodes have said, while our workers are in a step."""

Told = Callable[[Need], None]


class Agreement:
    """One generation's. told: hears the outcome, once, from another thread; its call is None
    where the workers will not stop at one call, and have to be stopped otherwise."""

    def __init__(
        self, info: RendezvousInfo, workers: Workers, notice: Notice, *, clock: Clock, told: Told
    ) -> None:
        self._info = info
        self._workers = workers
        self._notice = notice
        self._clock = clock
        self._told = told
        self._deadline = clock() + notice.seconds
        self._over = threading.Event()
        # Without it they do not stop at one call, and the others must not wait for it.
        self._thread = helper(self._run, "agent-agreement", lambda _: told(Need(None)))

    def start(self) -> Agreement:
        """Begin; the workers have been notified."""
        self._thread.start()
        return self

    def sooner(self, notice: Notice) -> None:
        """They have been given another notice since: the more urgent reason and the shorter time
        hold, unless the other nodes have been told already, who would go by another answer."""
        reason = more_urgent(self._notice.reason, notice.reason)
        self._deadline = min(self._deadline, self._clock() + notice.seconds)
        self._notice = attrs.evolve(notice, reason=reason)

    def end(self) -> None:
        """The generation is over; its thread ends with the call that it is in."""
        self._over.set()

    def _run(self) -> None:
        outcome = None
        while not self._over.is_set():
            try:
                outcome = self._agree()
                break
            except StoreError as error:
                # Machines that are taken away often serve the store: it has its time to move.
                log.info("the nodes could not agree where to stop: %s", error)
                if isinstance(error, StoreRefused) or not self._left():
                    break
                self._over.wait(min(RETRY_SECONDS, self._left()))
        if not self._over.is_set():
            self._told(outcome or Need(None))

    def _agree(self) -> Need | None:
        store, nodes = self._info.store, self._info.world_size
        if nodes == 1:
            store = None
        elif store is None or not self._info.board:
            return None  # the other nodes cannot be asked
        call = self._own_call(store)
        if call is None:
            return None
        own = Need(call, self._notice.reason, self._left())
        if store is None:
            return own
        store.compare_set(self._key(), encode_need(own), expected=ABSENT)
        return self._heard(store, nodes)

    def _own_call(self, store: Store | None) -> int | None:
        """The first call at which all of ours can stop, once each of them is between two."""
        look_at = self._clock()
        while self._left() and not self._over.is_set():
            others = False
            if store is not None and self._clock() >= look_at:
                others = bool(store.list(self._keys).entries)
                look_at = self._clock() + STORE_SECONDS
            call = self._workers.earliest_stop(now=others)
            if call is not None:
                return call
            self._over.wait(LOOK_SECONDS)
        return None

    def _heard(self, store: Store, nodes: int) -> Need | None:
        while not self._over.is_set():
            listing = store.list(self._keys)
            needs = {
                int(entry.key.removeprefix(self._keys)): decode_need(entry.value)
                for entry in listing.entries
            }
            found = agreed(needs, nodes)
            left = self._left()
            if found is not None or not left:
                return found
            store.wait(self._keys, after=listing.version, timeout=min(left, 1.0))
        return None

    def _left(self) -> float:
        return max(0.0, self._deadline - self._clock())

    @property
    def _keys(self) -> str:
        return _keys(self._info)

    def _key(self) -> str:
        return f"{self._keys}{self._info.rank}"


class Agreements:
    """One after another, of the generations that this node holds.

    agreed: hears the outcome, with the attempt that it belongs to, from another thread.
    """

    def __init__(self, workers: Workers, clock: Clock, agreed: Callable[[int, Need], None]) -> None:
        self._workers = workers
        self._clock = clock
        self._agreed = agreed
        self._attempt = 0
        self._info: RendezvousInfo | None = None
        self._now: Agreement | None = None

    def begin(self, info: RendezvousInfo, attempt: int) -> None:
        """Another generation's workers start."""
        self.end()
        self._info, self._attempt = info, attempt

    def told(self, notice: Notice | None) -> None:
        """The workers have been told to save and end, for the first time or anew; None: they should
        be, and do not listen."""
        info, attempt = self._info, self._attempt
        if info is None:
            return
        if notice is None:
            _say(info, Need(None))
        elif self._now is not None:
            self._now.sooner(notice)
        elif self._workers.agrees:
            self._now = Agreement(
                info,
                self._workers,
                notice,
                clock=self._clock,
                told=lambda need: self._agreed(attempt, need),
            ).start()

    def finished(self) -> None:
        """All workers here have ended well, and can stop wherever the others do."""
        if self._info is not None:
            _say(self._info, Need(1, RESIZE, ENDLESS))

    def end(self) -> None:
        """Whatever is not agreed by now will not be."""
        if self._now is not None:
            self._now.end()
            self._now = None


def _say(info: RendezvousInfo, need: Need) -> None:
    """Let the other nodes know what nobody here will say, so that theirs wait for nothing.

    In a thread: it may take its time, and nobody waits for it.
    """
    store = info.store
    if store is None or not info.board or info.world_size == 1:
        return
    key = f"{_keys(info)}{info.rank}"

    def say() -> None:
        try:
            store.compare_set(key, encode_need(need), expected=ABSENT)
        except ElasticError as error:
            log.info("the other nodes were not told when the workers here can stop: %s", error)

    helper(say, "agent-agreement").start()


def _keys(info: RendezvousInfo) -> str:
    return f"{info.board}stop/"
