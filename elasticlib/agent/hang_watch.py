"""Watches for workers that hang, and gathers the evidence before anybody is stopped.

A thread that only looks: at the steps that workers tell of, and when one has been silent too long,
or another node says so of its own, at their stacks and at what all nodes know. Then it tells.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import attrs

from ..clock import Clock
from ..errors import ElasticError
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import Store
from ..threads import helper
from ..workers.interface import Workers
from ..workers.spec import WorkerGroup
from .hang import (
    HangLimits,
    Pulse,
    Silence,
    decode_pulses,
    describe_hang,
    encode_pulses,
    longest_silence,
    slowest,
)

log = logging.getLogger("elasticlib.agent")

OTHERS_SECONDS = 3.0
"""For the other nodes to say what they know, when one has found that its workers hang."""
WORRY = 0.5
"""Of a limit: from there on it looks whether other nodes have found a hang."""
STOOD_STILL = 1 / 4
"""Of a limit: whoever looks so much later than it meant to could not have run, as where a job is
paused as a whole, or its machine is. Its workers could not then, either."""
LINES = 40


class HangWatch:
    """Of one group after another; `hung` hears the attempt and a sentence, from another thread.

    broke: hears it, likewise, if nobody watches any more because that thread has ended.
    """

    def __init__(
        self,
        workers: Workers,
        limits: HangLimits,
        host: str,
        *,
        clock: Clock,
        hung: Callable[[int, str], None],
        broke: Callable[[str], object] | None = None,
    ) -> None:
        self._workers = workers
        self._limits = limits
        self._host = host
        self._clock = clock
        self._hung = hung
        self._broke = broke
        self._over = threading.Event()
        self._since = clock()

    @property
    def silent(self) -> float:
        """Seconds since the last sign of life of the worker for which a hang was found last."""
        return self._clock() - self._since

    def begin(self, info: RendezvousInfo, group: WorkerGroup, attempt: int) -> None:
        """Watch the workers that have just been started."""
        self.end()
        self._over = over = threading.Event()
        watch = _Watch(
            workers=self._workers,
            limits=self._limits,
            host=self._host,
            clock=self._clock,
            info=info,
            group=group,
            over=over,
            began=self._clock(),
        )

        def run() -> None:
            reason = watch.run()
            if reason and not over.is_set():
                self._since = watch.since
                self._hung(attempt, reason)

        helper(run, "agent-hang", self._broke).start()

    def end(self) -> None:
        """Those workers are being stopped, or have ended."""
        self._over.set()


@attrs.define(kw_only=True)
class _Watch:
    """One group's; `over` is set when it is not to be watched any more."""

    _workers: Workers
    _limits: HangLimits
    _host: str
    _clock: Clock
    _info: RendezvousInfo
    _group: WorkerGroup
    _over: threading.Event
    _began: float
    since: float = 0.0

    def run(self) -> str:
        """The sentence when they hang; empty when it is over before."""
        due = self._began
        while not self._over.is_set():
            late = self._clock() - due
            silence = self._silence()
            if silence is not None and late > silence.limit * STOOD_STILL:
                self._began = self._clock()
                silence = self._silence()
            if silence is not None and (silence.share >= 1 or self._others_hang(silence)):
                self.since = self._clock() - silence.seconds
                return self._evidence(silence.limit)
            limit = self._limits.first if silence is None else silence.limit
            wait = min(1.0, limit / 8)
            due = self._clock() + wait
            self._over.wait(wait)
        return ""

    def _silence(self) -> Silence | None:
        beats = self._workers.beats()
        return longest_silence(self._clock(), self._began, beats, self._limits)

    def _others_hang(self, silence: Silence) -> bool:
        store = self._store
        if store is None or silence.share < WORRY:
            return False
        try:
            return bool(store.list(self._keys).entries)
        except ElasticError as error:
            log.debug("what other nodes know is not to be had: %s", error)
            return False

    def _evidence(self, limit: float) -> str:
        pulses = self._pulses()
        stacks = self._workers.dump_stacks()
        pulses += self._asked(pulses)
        reason = describe_hang(pulses, limit)
        last = slowest(pulses)
        for local_rank, text in stacks.items():
            rank = self._group.worker(local_rank).rank
            if last is not None and rank == last.rank:
                shown = "\n".join(text.splitlines()[:LINES])
                log.warning("the stacks of rank %d, the slowest:\n%s", rank, shown)
        return reason

    def _pulses(self) -> list[Pulse]:
        now = self._clock()
        return [
            Pulse(
                self._group.worker(local).rank,
                self._host,
                beat.step,
                round(now - max(beat.alive, self._began), 3),
                beat.steps,
            )
            for local, beat in self._workers.beats().items()
            if beat.attached
        ]

    def _asked(self, own: list[Pulse]) -> list[Pulse]:
        """What the other nodes say of theirs, having been told of ours."""
        store, deadline = self._store, self._clock() + OTHERS_SECONDS
        if store is None:
            return []
        key = f"{self._keys}{self._info.rank}"
        try:
            store.set(key, encode_pulses(own))
            while True:
                listing = store.list(self._keys)
                said = [e for e in listing.entries if e.key != key]
                left = deadline - self._clock()
                if len(said) >= self._info.world_size - 1 or left <= 0 or self._over.is_set():
                    return [pulse for entry in said for pulse in decode_pulses(entry.value)]
                store.wait(self._keys, after=listing.version, timeout=min(left, 1.0))
        except ElasticError as error:
            log.info("the other nodes were not asked about the hang: %s", error)
            return []

    @property
    def _store(self) -> Store | None:
        """Where the other nodes are asked, if there are any."""
        alone = self._info.world_size == 1 or not self._info.board
        return None if alone else self._info.store

    @property
    def _keys(self) -> str:
        return f"{self._info.board}hang/"
