"""Asks all living nodes of a job, through its store, and says what came back in time.

A question is leased, and goes when the asker does. What stands in the store of the job itself is
read beside it, for those who do not answer.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
from collections.abc import Iterable
from urllib.parse import unquote

from ..clock import Clock, monotonic
from ..errors import StoreError
from ..observe.question import (
    Answer,
    Question,
    Stacks,
    What,
    decode_answer,
    decode_stacks,
    encode_question,
)
from ..observe.status import JobView
from ..stores.interface import Entry, Store
from .keys import Keys, Read
from .notes import Notes

log = logging.getLogger("elasticlib.rendezvous")

SPARE_SECONDS = 5.0
"""For which a question stands beyond its timeout, if its asker is gone."""
PACE_SECONDS = 0.02
PACE_A_NODE = 5e-5
STILL_THERE_SECONDS = 0.5
"""Between looks whether those who have not answered live at all."""
_JOBS = re.compile(r"([^/?]+)/(?:head/document|node/.*)")


def jobs_in(store: Store) -> tuple[list[str], list[str]]:
    """The run ids of the jobs in a store, and of those in which a node lives."""
    found: dict[str, bool] = {}
    for entry in store.list("").entries:
        named = _JOBS.fullmatch(entry.key)
        if named is not None:
            run_id = unquote(named.group(1))
            found[run_id] = found.get(run_id, False) or "/node/" in entry.key
    return sorted(found), sorted(run_id for run_id, lives in found.items() if lives)


class Asker:
    """Asks one question after another of one job; `close`, or leaving it, takes back the last."""

    def __init__(self, store: Store, run_id: str, *, clock: Clock = monotonic) -> None:
        self._store = store
        self._run_id = run_id
        self._keys = Keys(run_id)
        self._clock = clock
        self._id = secrets.token_hex(8)
        self._number = 0
        self._pause = threading.Event()

    def ask(self, what: What, timeout: float, ranks: frozenset[int] | None = None) -> JobView:
        """All that the store and the nodes say within `timeout` seconds, and not later than all
        that live have answered.

        Raises:
            StoreError: the store did not answer. RendezvousMismatch: another version's job.
        """
        read = Read(self._keys, self._store.list(self._keys.job))
        document, _ = read.document(None)
        live = read.live(set())
        answers: dict[str, Answer] = {}
        if live:
            self._number += 1
            value = encode_question(Question(what, self._number, ranks))
            self._store.set(self._question, value, ttl=timeout + SPARE_SECONDS)
            answers = self._collected({node.id for node in live}, timeout)
        return JobView(
            run=self._run_id,
            document=document,
            live=live,
            note=Notes(self._store, self._keys.note).read(),
            answers=answers,
            stacks=self._texts(answers) if what is What.STACKS else {},
        )

    def close(self) -> None:
        """Nothing is asked any more. Raises StoreError."""
        if self._number:
            self._store.delete(self._question)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        # Of a store that is away the question goes with its lease.
        with contextlib.suppress(StoreError):
            self.close()

    @property
    def _question(self) -> str:
        return f"{self._keys.questions}{self._id}"

    def _collected(self, awaited: set[str], timeout: float) -> dict[str, Answer]:
        prefix = f"{self._keys.answers}{self._id}/"
        deadline = self._clock() + timeout
        looked = self._clock()
        answers: dict[str, Answer] = {}
        read: dict[str, int] = {}
        while True:
            listing = self._store.list(prefix)
            answers.update(self._read(listing.entries, prefix, read))
            now = self._clock()
            if now - looked > STILL_THERE_SECONDS:
                living = self._store.list(self._keys.node()).entries
                awaited &= {entry.key.removeprefix(self._keys.node()) for entry in living}
                looked = now
            if now >= deadline or awaited <= answers.keys():
                return answers
            # As many answers as come at once are read at once.
            self._pause.wait(PACE_SECONDS + PACE_A_NODE * len(awaited))
            left = min(deadline - self._clock(), STILL_THERE_SECONDS)
            self._store.wait(prefix, after=listing.version, timeout=max(left, 0.0))

    def _read(
        self, entries: Iterable[Entry], prefix: str, read: dict[str, int]
    ) -> dict[str, Answer]:
        """The answers to this very question that were not read before."""
        found = {}
        for entry in entries:
            if read.get(entry.key) == entry.version:
                continue
            read[entry.key] = entry.version
            try:
                answer = decode_answer(entry.value)
            except ValueError as error:
                log.warning("the answer %s is passed over: %s", entry.key, error)
                continue
            if answer.number == self._number:
                found[entry.key.removeprefix(prefix)] = answer
        return found

    def _texts(self, answers: Iterable[str]) -> dict[str, Stacks]:
        """One after another: of many nodes they are more than a store says at once."""
        found = {}
        for node in answers:
            entry = self._store.get(f"{self._keys.texts}{self._id}/{node}")
            if entry is None:
                continue
            try:
                found[node] = decode_stacks(entry.value)
            except ValueError as error:
                log.warning("the stacks of %s are passed over: %s", node, error)
        return found
