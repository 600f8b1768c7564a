"""Answers, on each node, what people ask of the job through its store.

A thread that only looks and answers: at rest it is one wait in the store, and nothing that becomes
of it is felt by the job. Questions are leased by who asks, and answers go with them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from ..clock import Clock, monotonic
from ..errors import StoreError
from ..observe.question import (
    Answer,
    Question,
    Stacks,
    What,
    decode_question,
    encode_answer,
    encode_stacks,
)
from ..observe.standing import NodeStanding
from ..stores.interface import Entry, Store
from ..threads import helper
from .backoff import backoff
from .keys import Keys

log = logging.getLogger("elasticlib.rendezvous")

WAIT_SECONDS = 30.0
"""After which it looks again in any case: a store that took the place of another between two
calls counts from the beginning, and what is there may look old."""
ANSWER_SECONDS = 30.0
"""For which an answer stands, if the node that gave it ends before the question does."""
REST_SECONDS = 0.05
"""After an answer, so that no flood of questions keeps a node busy."""
MOST_QUESTIONS = 16
LONGEST_ID = 64


class Answerer:
    """Of one node, from `with` to its end; the store is closed by who made it, and then at the
    latest its thread ends.

    Args:
        standing: where the node stands now.
        stacks: of the workers of these ranks, or of all; takes up to some seconds.
        heard: seconds since the store last took this node's word, where that is known.
        look_every: seconds between looks at a store whose `wait` is itself a poll; 0 to wait there.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        node_id: str,
        *,
        standing: Callable[[], NodeStanding],
        stacks: Callable[[frozenset[int] | None], Stacks],
        heard: Callable[[], float | None] = lambda: None,
        look_every: float = 0.0,
        clock: Clock = monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = node_id
        self._standing = standing
        self._stacks = stacks
        self._heard = heard
        self._look_every = look_every
        self._clock = clock
        self._over = threading.Event()
        self._seen: dict[str, int] = {}
        self._thread = helper(self._run, "agent-answers")

    def __enter__(self) -> Answerer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _run(self) -> None:
        failures = 0
        while not self._over.is_set():
            try:
                listing = self._store.list(self._keys.questions)
                answered = self._answer_all(listing.entries)
                failures = 0
                self._wait(listing.version)
                self._over.wait(REST_SECONDS * answered)
            except Exception as error:
                # Whatever it is, it is worth no more than an answer; the job goes on.
                failures += 1
                level = logging.DEBUG if isinstance(error, StoreError) else logging.WARNING
                log.log(level if failures == 1 else logging.DEBUG, "no answers: %s", error)
                self._over.wait(backoff(failures))

    def _wait(self, version: int) -> None:
        prefix = self._keys.questions
        if not self._look_every:
            self._store.wait(prefix, after=version, timeout=WAIT_SECONDS)
            return
        while not self._over.wait(self._look_every):
            if self._store.wait(prefix, after=version, timeout=0.0):
                return

    def _answer_all(self, entries: Iterable[Entry]) -> bool:
        """Whether there was anything to answer; what is asked no more is forgotten."""
        asked = {entry.key: entry for entry in entries}
        for key in self._seen.keys() - asked.keys():
            del self._seen[key]
            for place in (self._keys.answers, self._keys.texts):
                self._store.delete(self._place(place, key))
        new = [entry for entry in asked.values() if self._seen.get(entry.key) != entry.version]
        # Whoever may write here may ask; the latest are answered, however many there are.
        for entry in sorted(new, key=lambda entry: entry.version)[-MOST_QUESTIONS:]:
            self._seen[entry.key] = entry.version
            self._answer(entry)
        return bool(new)

    def _answer(self, entry: Entry) -> None:
        try:
            question = decode_question(entry.value)
            if len(entry.key) > len(self._keys.questions) + LONGEST_ID:
                raise ValueError(f"its key is {entry.key:.100}")
        except ValueError as error:
            log.debug("a question is passed over: %s", error)
            return
        if question.what is What.STACKS:
            text = encode_stacks(self._stacks(question.ranks))
            self._store.set(self._place(self._keys.texts, entry.key), text, ttl=ANSWER_SECONDS)
        answer = encode_answer(self._now(question))
        self._store.set(self._place(self._keys.answers, entry.key), answer, ttl=ANSWER_SECONDS)

    def _now(self, question: Question) -> Answer:
        standing, now, heard = self._standing(), self._clock(), self._heard()
        return Answer(
            question.number,
            standing,
            state_seconds=round(max(0.0, now - standing.since), 3),
            up_seconds=round(max(0.0, now - standing.began), 3),
            heard=None if heard is None else round(heard, 3),
        )

    def _place(self, prefix: str, key: str) -> str:
        return f"{prefix}{key.removeprefix(self._keys.questions)}/{self._me}"
