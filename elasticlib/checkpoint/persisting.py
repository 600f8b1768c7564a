"""What is in memory alone when a job ends before its work is done is written where it lasts.

An agent's last act: without torch, after its workers are gone and before their memory is. Of a
state that is the same on all ranks, for a folder that all nodes share, one of them writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

import attrs

from ..clock import Clock, monotonic
from ..errors import StoreError, describe
from ..rendezvous.interface import RendezvousInfo
from ..stores.interface import ABSENT, Store
from ..threads import helper
from .memory import Found, Record, flaw, pinned, word_sum

log = logging.getLogger("elasticlib.checkpoint")

Persist = Callable[[Record, memoryview], bool]
"""Writes a pack to the folder that its record names, for its step, unless that is there or a newer
one is: whether it has written. It raises what the disk raises, or an ElasticError (as of a
generation that is no longer current). It may be called at once by several nodes, and of a state in
parts once a part: the step counts when all are there."""

WRITE_SECONDS = 600.0
"""For all that is to be written: a disk that hangs must not hold a node for ever."""
CLAIM_SECONDS = 60.0
"""For which a node that says it writes is believed, since it said so last."""
RENEW_SECONDS = 5.0
_DONE = b"done"


def to_persist(found: Iterable[Found]) -> tuple[Found, ...]:
    """Which of the snapshots in a memory are worth writing.

    The last generation's newest of each name; of a state in parts as many as are kept, as the
    ranks may not all hold the newest.
    """
    of_part: dict[tuple[str, int], list[Found]] = {}
    for one in sorted(found, key=_newness, reverse=True):
        record = one.record
        if not record.folder:
            continue
        chosen = of_part.setdefault((record.name, record.part), [])
        if len(chosen) < record.keep and record.step not in [other.record.step for other in chosen]:
            chosen.append(one)
    return tuple(one for chosen in of_part.values() for one in chosen)


def _newness(found: Found) -> tuple[int, int, bool]:
    return (found.record.generation, found.record.step, not found.owner)


def persist_all(
    memory: Path,
    found: Sequence[Found],
    persist: Persist,
    info: RendezvousInfo | None,
    *,
    seconds: float = WRITE_SECONDS,
    renewed: float = RENEW_SECONDS,
    clock: Clock = monotonic,
) -> str:
    """Write these, and return what could not be, as a sentence; empty if nothing is lost.

    Args:
        info: of the last generation, whose nodes agree by its store who writes what they share.
        renewed: after so many seconds each, that this one is at it still.
    """
    problems: list[str] = []
    left = [(one, Claim(info, one.record, clock)) for one in found]

    def write() -> None:
        while left:
            problem = _persist_one(memory, *left[0], persist, info)
            if problem:
                problems.append(problem)
            left.pop(0)

    # In a thread of its own: nothing ends a write to a disk that hangs.
    thread = helper(write, "agent-persist")
    thread.start()
    deadline = monotonic() + seconds
    while thread.is_alive() and (rest := deadline - monotonic()) > 0:
        thread.join(min(rest, renewed))
        for _, claim in left[:1]:
            claim.renew()
    late = [f"{_what(one.record)} was not there after {seconds:g} s" for one, _ in tuple(left)]
    return "; ".join([*problems, *late])


def _persist_one(
    memory: Path, found: Found, claim: Claim, persist: Persist, info: RendezvousInfo | None
) -> str:
    record = found.record
    try:
        if claim.elsewhere():
            return ""
        with pinned(memory, found) as view:
            if view is None:
                return f"{_what(record)} was not written: it is not there any more"
            damage = flaw(memory, found, lambda: word_sum(view))
            if damage:
                claim.give_up()
                return f"{_what(record)} was not written: {damage}"
            if persist(_of_now(record, info), view):
                log.info("%s was written to %s", _what(record), record.folder)
    except Exception as error:
        # Of whatever kind: how the run ended must still be told, and this with it.
        claim.give_up()
        return f"{_what(record)} was not written to {record.folder}: {describe(error)}"
    claim.done()
    return ""


def _of_now(record: Record, info: RendezvousInfo | None) -> Record:
    """The record as one of the generation that this agent was in last.

    Its workers may have taken the folder in that one, and ended before their first snapshot.
    """
    if info is None:
        return record
    return attrs.evolve(record, generation=max(record.generation, info.generation))


def _what(record: Record) -> str:
    part = f" (part {record.part} of {record.parts})" if record.parts > 1 else ""
    return f"the snapshot of step {record.step}{part}"


class Claim:
    """Which node of a generation writes one snapshot that several hold; of a folder that they do
    not share, each."""

    def __init__(self, info: RendezvousInfo | None, record: Record, clock: Clock) -> None:
        several = info is not None and bool(info.board) and info.world_size > 1
        asked = several and record.shared
        self._store = info.store if info is not None and asked else None
        board = "" if info is None else info.board
        name = quote(record.name, safe="")[:256]
        self._key = f"{board}persist/{name}/{record.generation}.{record.step}.{record.part}"
        self._clock = clock
        # Who writes and who renews are two threads.
        self._lock = threading.Lock()
        self._mine: int | None = None
        self._times = 0

    def elsewhere(self) -> bool:
        """Whether another node has written it. If not, it is for us to write: perhaps twice, but
        not never, whatever becomes of that node or the store."""
        if self._store is None:
            return False
        try:
            return self._written_elsewhere(self._store)
        except StoreError as error:
            log.info("the nodes cannot agree who writes a snapshot, so this one does: %s", error)
            self._store = None
            return False

    def _written_elsewhere(self, store: Store) -> bool:
        # By our clock: since when the other's word is the same.
        known, since = ABSENT, self._clock()
        while True:
            listing = store.list(self._key)
            said = next((entry for entry in listing.entries if entry.key == self._key), None)
            if said is not None and said.value == _DONE:
                return True
            version = ABSENT if said is None else said.version
            if version != known:
                known, since = version, self._clock()
            left = since + CLAIM_SECONDS - self._clock()
            # Of several that have waited long enough, one takes it over.
            if said is not None and left > 0:
                store.wait(self._key, after=listing.version, timeout=min(left, 1.0))
            elif self._take(store, version):
                return False

    def _take(self, store: Store, version: int) -> bool:
        self._times += 1
        answer = store.compare_set(self._key, b"writing %d" % self._times, expected=version)
        self._mine = answer.entry.version if answer.won and answer.entry is not None else None
        return answer.won

    def renew(self) -> None:
        """We are at it still, if we are: the others wait for as long again."""
        with self._lock:
            store, mine = self._store, self._mine
            if store is not None and mine is not None:
                self._say(lambda: self._take(store, mine))

    def done(self) -> None:
        with self._lock:
            self._mine = None
            self._say(lambda: self._store and self._store.set(self._key, _DONE))

    def give_up(self) -> None:
        """Another may try, unless one does already."""
        with self._lock:
            mine, self._mine = self._mine, None
            if mine is not None:
                self._say(lambda: self._store and self._store.delete(self._key, expected=mine))

    def _say(self, say: Callable[[], object]) -> None:
        try:
            say()
        except StoreError as error:
            log.info("the other nodes are not told about a snapshot: %s", error)
