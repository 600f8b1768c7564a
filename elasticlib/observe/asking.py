"""What people ask of a running job through its store, and what its agents answer.

`Asker` is for `elasticlib status` and `stacks`; each agent has an `Answerer`, a thread that only
looks and answers, whose failures never affect the job. Questions are leased, and answers go with
them. Those who do not answer are shown by what stands in the store of the job itself.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from urllib.parse import unquote

from ..clock import Clock, monotonic
from ..errors import StoreError
from ..rendezvous.document import Note
from ..rendezvous.layout import Keys, StoredJob, decode
from ..stores.interface import Entry, Store
from ..threads import helper
from .question import (
    Answer,
    Question,
    Stacks,
    What,
    decode_answer,
    decode_question,
    decode_stacks,
    encode_answer,
    encode_question,
    encode_stacks,
)
from .status import JobView
from .story import NodeStatus

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


WAIT_SECONDS = 30.0
"""After which it looks again in any case: a store that took the place of another between two
calls counts from the beginning, and what is there may look old."""
ANSWER_SECONDS = 30.0
"""For which an answer stands, if the node that gave it ends before the question does."""
REST_SECONDS = 0.05
"""After an answer, so that no flood of questions keeps a node busy."""
RETRY_SECONDS = 0.5
MOST_QUESTIONS = 16
LONGEST_ID = 64


class QuestionKeys:
    """Where a job's questions and answers stand: not among the job's own keys, which the node that
    leads reads whole at each change. No job's name begins so."""

    def __init__(self, run_id: str) -> None:
        job = Keys(run_id).job
        self.questions = f"?{job}question/"
        self.answers = f"?{job}answer/"
        self.texts = f"?{job}text/"


class Asker:
    """Asks one question after another of one job; `close`, or leaving it, takes back the last."""

    def __init__(self, store: Store, run_id: str, *, clock: Clock = monotonic) -> None:
        self._store = store
        self._run_id = run_id
        self._job = Keys(run_id)
        self._keys = QuestionKeys(run_id)
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
        read = StoredJob(self._job, self._store.list(self._job.job))
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
            note=self._note(),
            answers=answers,
            stacks=self._texts(answers) if what is What.STACKS else {},
        )

    def _note(self) -> Note:
        entry = self._store.get(self._job.note)
        return Note() if entry is None else decode(Note, entry.value, "the note")

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
                living = self._store.list(self._job.node()).entries
                awaited &= {entry.key.removeprefix(self._job.node()) for entry in living}
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


class Answerer:
    """Of one node, from `with` to its end; the store is closed by who made it, and then at the
    latest its thread ends.

    Args:
        status: where the node stands now.
        stacks: of the workers of these ranks, or of all; takes up to some seconds.
        heard: seconds since the store last took this node's word, where that is known.
        look_every: seconds between looks at a store whose `wait` is itself a poll; 0 to wait there.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node_id: str,
        *,
        status: Callable[[], NodeStatus],
        stacks: Callable[[frozenset[int] | None], Stacks],
        heard: Callable[[], float | None] = lambda: None,
        look_every: float = 0.0,
        clock: Clock = monotonic,
    ) -> None:
        self._store = store
        self._keys = QuestionKeys(run_id)
        self._me = node_id
        self._status = status
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
                self._over.wait(RETRY_SECONDS)

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
        status, now, heard = self._status(), self._clock(), self._heard()
        return Answer(
            question.number,
            status,
            state_seconds=round(max(0.0, now - status.since), 3),
            up_seconds=round(max(0.0, now - status.began), 3),
            heard=None if heard is None else round(heard, 3),
        )

    def _place(self, prefix: str, key: str) -> str:
        return f"{prefix}{key.removeprefix(self._keys.questions)}/{self._me}"
