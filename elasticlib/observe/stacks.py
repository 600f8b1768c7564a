"""The Python stacks of a job's workers, asked of its agents through the job's store.

`Asker` is for `elasticlib stacks`; each agent has an `Answerer`, a thread that only looks and
answers, whose failures never affect the job. Questions are leased, and answers go with them.

Whoever may write into the store may ask. What is read here comes from others, so it is read
strictly, within bounds, and nothing of it is ever executed; fields that nobody knows are skipped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from ..clock import monotonic
from ..errors import StoreError
from ..rendezvous.membership import Node
from ..rendezvous.store_layout import JobListing, StoreKeys
from ..stores.interface import Entry, Store
from ..visible import visible_line
from .event import read_object
from .published import Turning, beside, read_field
from .wording import grouped, ranks_of, spans

log = logging.getLogger("elasticlib.observe")

VERSION = 1
LONGEST_QUESTION = 64 * 1024
LONGEST_STACKS = 64 * 1024
"""Characters of one rank's."""
LONGEST_TEXTS = 1024 * 1024
"""Bytes of all stacks of a node, packed; where they are more, each is cut until they are not."""
MOST_UNPACKED = 64 * 1024 * 1024


@attrs.frozen
class Question:
    """number: counts the questions that are asked under one key. ranks: those whose stacks are
    wanted; None for all."""

    number: int
    ranks: frozenset[int] | None = None


@attrs.frozen
class Stacks:
    """Of one node's workers, by rank. silent: those that were asked and wrote nothing in time.
    mute: those that cannot be asked, with the name of each process."""

    texts: Mapping[int, str]
    silent: tuple[int, ...] = ()
    mute: Mapping[int, str] = attrs.field(factory=dict)


# -- as bytes --------------------------------------------------------------------------------------


def encode_question(question: Question) -> bytes:
    ranks = None if question.ranks is None else sorted(question.ranks)
    return _dump({"number": question.number, "ranks": ranks})


def decode_question(data: bytes) -> Question:
    """Raises ValueError, naming what is wrong with it."""
    if len(data) > LONGEST_QUESTION:
        raise ValueError(f"a question is at most {LONGEST_QUESTION} bytes, got {len(data)}")
    said = read_object(data, "a question", VERSION)
    ranks = said.get("ranks")
    chosen = None if ranks is None else frozenset(_ranks(ranks, "a question's ranks"))
    return Question(read_field("number", said.get("number"), (int,)), chosen)


def encode_stacks(stacks: Stacks) -> bytes:
    """Packed: the stacks of ranks that do the same differ in little but their addresses."""
    longest = LONGEST_STACKS
    while True:
        texts = {str(rank): _cut(text, longest) for rank, text in stacks.texts.items()}
        mute = {str(rank): name for rank, name in stacks.mute.items()}
        packed = zlib.compress(_dump({"texts": texts, "silent": list(stacks.silent), "mute": mute}))
        if len(packed) <= LONGEST_TEXTS or longest == 0:
            return packed
        longest //= 2


def decode_stacks(data: bytes) -> Stacks:
    """Raises ValueError, naming what is wrong with it."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MOST_UNPACKED)
    except zlib.error as error:
        raise ValueError(f"stacks come packed by zlib, got {data[:60]!r}") from error
    if not unpacker.eof:
        raise ValueError(f"stacks are cut short, or more than {MOST_UNPACKED} bytes")
    said = read_object(text, "stacks", VERSION)
    silent = _ranks(said.get("silent"), "silent ranks")
    return Stacks(_by_rank(said, "texts"), silent, _by_rank(said, "mute"))


def _ranks(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(rank) is int and rank >= 0 for rank in value):
        raise ValueError(f"{what} are whole numbers, got {value!r:.60}")
    return tuple(value)


def _by_rank(said: Mapping[str, Any], name: str) -> dict[int, str]:
    found = said.get(name)
    if not isinstance(found, dict) or not all(
        key.isascii() and key.isdigit() and len(key) < 10 and isinstance(text, str)
        for key, text in found.items()
    ):
        raise ValueError(f"the {name} of stacks are texts by rank, got {found!r:.60}")
    return {int(key): text for key, text in found.items()}


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}...\n"


def _dump(said: Mapping[str, Any]) -> bytes:
    return json.dumps({"v": VERSION, **said}, separators=(",", ":")).encode()


# -- who asks --------------------------------------------------------------------------------------

SPARE_SECONDS = 5.0
"""For which a question stands beyond its timeout, if its asker is gone."""
PACE_SECONDS = 0.02
PACE_A_NODE = 5e-5
STILL_THERE_SECONDS = 0.5
"""Between looks whether those who have not answered live at all."""


class QuestionKeys:
    """Where a job's questions and answers stand."""

    def __init__(self, run_id: str) -> None:
        self.questions = beside(run_id, "question")
        self.answers = beside(run_id, "answer")
        self.texts = beside(run_id, "text")


@attrs.frozen
class JobStacks:
    """live: the nodes that were asked. stacks: of those that answered, by node id."""

    live: tuple[Node, ...]
    stacks: Mapping[str, Stacks]


class Asker:
    """Asks one question after another of one job; leaving it takes back the last."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._job = StoreKeys(run_id)
        self._keys = QuestionKeys(run_id)
        self._id = secrets.token_hex(8)
        self._question = f"{self._keys.questions}{self._id}"
        self._number = 0
        self._pause = threading.Event()

    def ask(self, timeout: float, ranks: frozenset[int] | None = None) -> JobStacks:
        """All stacks that come within `timeout` seconds; it ends once all that live have answered.

        Raises:
            StoreError: the store did not answer.
        """
        live = JobListing(self._job, self._store.list(self._job.node())).live_nodes()
        if not live:
            return JobStacks(live, {})
        self._number += 1
        value = encode_question(Question(self._number, ranks))
        self._store.set(self._question, value, ttl=timeout + SPARE_SECONDS)
        return JobStacks(live, self._texts(self._answers({node.id for node in live}, timeout)))

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        # Of a store that is away the question goes with its lease.
        with contextlib.suppress(StoreError):
            if self._number:
                self._store.delete(self._question)

    def _answers(self, awaited: set[str], timeout: float) -> set[str]:
        """The nodes that have answered."""
        prefix = f"{self._keys.answers}{self._id}/"
        deadline = monotonic() + timeout
        looked = monotonic()
        while True:
            listing = self._store.list(prefix)
            found = {
                entry.key.removeprefix(prefix) for entry in listing.entries if self._is_new(entry)
            }
            now = monotonic()
            if now - looked > STILL_THERE_SECONDS:
                living = self._store.list(self._job.node()).entries
                awaited &= {entry.key.removeprefix(self._job.node()) for entry in living}
                looked = now
            if now >= deadline or awaited <= found:
                return found
            # As many answers as come at once are read at once.
            self._pause.wait(PACE_SECONDS + PACE_A_NODE * len(awaited))
            left = min(deadline - monotonic(), STILL_THERE_SECONDS)
            self._store.wait(prefix, after=listing.version, timeout=max(left, 0.0))

    def _is_new(self, entry: Entry) -> bool:
        """Whether it answers this very question."""
        try:
            return bool(
                read_object(entry.value, "an answer", VERSION).get("number") == self._number
            )
        except ValueError as error:
            log.warning("the answer %s is passed over: %s", entry.key, error)
            return False

    def _texts(self, answered: Iterable[str]) -> dict[str, Stacks]:
        """One after another: of many nodes they are more than a store says at once."""
        found = {}
        for node in answered:
            entry = self._store.get(f"{self._keys.texts}{self._id}/{node}")
            if entry is None:
                continue
            try:
                found[node] = decode_stacks(entry.value)
            except ValueError as error:
                log.warning("the stacks of %s are passed over: %s", node, error)
        return found


# -- who answers -----------------------------------------------------------------------------------

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


class Answerer(Turning):
    """Of one node.

    Args:
        stacks: of the workers of these ranks, or of all; takes up to some seconds.
        look_every: seconds between looks at a store whose `wait` is itself a poll; 0 to wait there.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node_id: str,
        stacks: Callable[[frozenset[int] | None], Stacks],
        *,
        look_every: float = 0.0,
    ) -> None:
        super().__init__(
            "agent-answers", "elasticlib stacks gets no answer from this node", RETRY_SECONDS
        )
        self._store = store
        self._keys = QuestionKeys(run_id)
        self._me = node_id
        self._stacks = stacks
        self._look_every = look_every
        self._seen: dict[str, int] = {}

    def _turn(self) -> float:
        listing = self._store.list(self._keys.questions)
        answered = self._answer_all(listing.entries)
        self._wait(listing.version)
        return REST_SECONDS * answered

    def _wait(self, version: int) -> None:
        prefix = self._keys.questions
        if not self._look_every:
            self._store.wait(prefix, after=version, timeout=WAIT_SECONDS)
            return
        while not self._woken.wait(self._look_every):
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
        packed = encode_stacks(self._stacks(question.ranks))
        # Whoever waits is woken by the answer, and finds what it promises.
        for prefix, value in (
            (self._keys.texts, packed),
            (self._keys.answers, _dump({"number": question.number})),
        ):
            self._store.set(self._place(prefix, entry.key), value, ttl=ANSWER_SECONDS)

    def _place(self, prefix: str, key: str) -> str:
        return f"{prefix}{key.removeprefix(self._keys.questions)}/{self._me}"


# -- for people ------------------------------------------------------------------------------------


def stack_lines(view: JobStacks, wanted: frozenset[int] | None) -> list[str]:
    """A job's stacks, and who does not show any; wanted: the ranks that were asked for."""
    texts = {rank: text for one in view.stacks.values() for rank, text in one.texts.items()}
    lines: list[str] = []
    for group in grouped(texts):
        lines += [f"{ranks_of(group.ranks)}:"]
        lines += [f"  {line}" if line else "" for line in group.text.splitlines()] + [""]
    lines += _missing(view)
    known = texts.keys() | {
        rank for one in view.stacks.values() for rank in (*one.silent, *one.mute)
    }
    if wanted is not None and wanted - known:
        lines.append(f"no node that answered has a worker of rank {spans(wanted - known)}")
    return [visible_line(line) for line in lines]


def _missing(view: JobStacks) -> list[str]:
    lines = []
    hosts = {node.id: node.host for node in view.live}
    for node, one in view.stacks.items():
        host = hosts.get(node, node)
        if one.silent:
            lines.append(
                f"{host}: rank {spans(one.silent)} wrote nothing within a second: it is stopped, "
                "blocks signals or handles these itself, or no processor has time for it"
            )
        if one.mute:
            names = ", ".join(one.mute.values())
            lines.append(
                f"{host}: rank {spans(one.mute)} ({names}) is no Python program that elasticlib "
                f"started, and cannot be asked; on {host}, py-spy dump --pid PID may show it"
            )
    for node_id, host in hosts.items():
        if node_id not in view.stacks:
            lines.append(f"{host} does not answer")
    return lines
