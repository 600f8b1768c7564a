"""What is asked of a job's agents through its store, and what each of them answers: as JSON.

Whoever may write into the store may ask. What is read here comes from others, so it is read
strictly, within bounds, and nothing of it is ever executed; fields that nobody knows are skipped.
"""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Mapping
from typing import Any

import attrs

from .history import JobState
from .story import NodeStatus, WorkerStatus

VERSION = 1
LONGEST_QUESTION = 64 * 1024
LONGEST_STACKS = 64 * 1024
"""Characters of one rank's."""
LONGEST_TEXTS = 1024 * 1024
"""Bytes of all stacks of a node, packed; where they are more, each is cut until they are not."""
MOST_UNPACKED = 64 * 1024 * 1024


class What(enum.Enum):
    """STANDING: where the node and its workers stand. STACKS: what their threads are doing."""

    STANDING = "standing"
    STACKS = "stacks"


@attrs.frozen
class Question:
    """number: counts the questions that are asked under one key. ranks: those whose stacks are
    wanted; None for all."""

    what: What
    number: int
    ranks: frozenset[int] | None = None


@attrs.frozen
class Answer:
    """What a node says of itself, all ages by its own clock; number: of the question.

    state_seconds: for how long its state has lasted. up_seconds: since its agent
    began. heard: since the store last took its word; None where it does not know.
    """

    number: int
    status: NodeStatus
    state_seconds: float
    up_seconds: float
    heard: float | None = None


@attrs.frozen
class Stacks:
    """Of one node's workers, by rank. silent: those that were asked and wrote nothing in time.
    mute: those that cannot be asked, with the name of each process."""

    texts: Mapping[int, str]
    silent: tuple[int, ...] = ()
    mute: Mapping[int, str] = attrs.field(factory=dict)


def encode_question(question: Question) -> bytes:
    ranks = None if question.ranks is None else sorted(question.ranks)
    said = {"what": question.what.value, "number": question.number, "ranks": ranks}
    return _dump({"v": VERSION, **said})


def decode_question(data: bytes) -> Question:
    """Raises ValueError, naming what is wrong with it."""
    if len(data) > LONGEST_QUESTION:
        raise ValueError(f"a question is at most {LONGEST_QUESTION} bytes, got {len(data)}")
    said = _loaded(data, "a question")
    what = said.get("what")
    if what not in [one.value for one in What]:
        raise ValueError(f"nobody knows the question {what!r}")
    ranks = said.get("ranks")
    if ranks is not None and not (isinstance(ranks, list) and all(map(_is_count, ranks))):
        raise ValueError(f"a question's ranks are whole numbers, got {ranks!r}")
    chosen = None if ranks is None else frozenset(ranks)
    return Question(What(what), _field(said, "number", _COUNT), chosen)


def encode_answer(answer: Answer) -> bytes:
    status = attrs.asdict(answer.status)
    del status["since"], status["began"]  # of a clock that is nobody else's
    said = {name: getattr(answer, name) for name in ("number", *_AGES)}
    return _dump({"v": VERSION, **said, **status, "state": answer.status.state.value})


def decode_answer(data: bytes) -> Answer:
    """Raises ValueError, naming what is wrong with it."""
    said = _loaded(data, "an answer")
    state = said.get("state")
    if state not in [one.value for one in JobState]:
        raise ValueError(f"nobody knows the state {state!r}")
    workers = said.get("workers")
    if not isinstance(workers, list) or not all(isinstance(one, dict) for one in workers):
        raise ValueError(f"an answer's workers are a list of objects, got {workers!r}")
    # An earlier version does not tell of it, and answers while its run goes on.
    said = {"expelled": False, **said}
    told = {name: _field(said, name, kinds) for name, kinds in _STANDING.items()}
    status = NodeStatus(
        **told,
        state=JobState(state),
        workers=tuple(
            WorkerStatus(**{name: _field(one, name, kinds) for name, kinds in _WORKER.items()})
            for one in workers
        ),
    )
    ages = {name: _field(said, name, kinds) for name, kinds in _AGES.items()}
    return Answer(_field(said, "number", _COUNT), status, **ages)


def encode_stacks(stacks: Stacks) -> bytes:
    """Packed: the stacks of ranks that do the same differ in little but their addresses."""
    longest = LONGEST_STACKS
    while True:
        texts = {str(rank): _cut(text, longest) for rank, text in stacks.texts.items()}
        mute = {str(rank): name for rank, name in stacks.mute.items()}
        said = {"v": VERSION, "texts": texts, "silent": list(stacks.silent), "mute": mute}
        packed = zlib.compress(_dump(said))
        if len(packed) <= LONGEST_TEXTS or longest == 0:
            return packed
        longest //= 2


def decode_stacks(data: bytes) -> Stacks:
    """Raises ValueError, naming what is wrong with it."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MOST_UNPACKED)
    except zlib.error as error:
        raise ValueError(f"stacks come packed by zlib, got {_shown(data)}") from error
    if not unpacker.eof:
        raise ValueError(f"stacks are cut short, or more than {MOST_UNPACKED} bytes")
    said = _loaded(text, "stacks")
    silent = said.get("silent")
    if not (isinstance(silent, list) and all(map(_is_count, silent))):
        raise ValueError(f"silent ranks are whole numbers, got {silent!r}")
    return Stacks(_by_rank(said, "texts"), tuple(silent), _by_rank(said, "mute"))


def _by_rank(said: Mapping[str, Any], name: str) -> dict[int, str]:
    found = said.get(name)
    if not isinstance(found, dict) or not all(
        key.isascii() and key.isdigit() and len(key) < 10 and isinstance(text, str)
        for key, text in found.items()
    ):
        raise ValueError(f"the {name} of stacks are texts by rank, got {found!r:.60}")
    return {int(key): text for key, text in found.items()}


_TEXT: tuple[type, ...] = (str,)
_COUNT: tuple[type, ...] = (int,)
_MAYBE_COUNT: tuple[type, ...] = (int, type(None))
_SECONDS: tuple[type, ...] = (int, float)
_MAYBE_NUMBER: tuple[type, ...] = (int, float, type(None))
_AGES = {"state_seconds": _SECONDS, "up_seconds": _SECONDS, "heard": _MAYBE_NUMBER}
_STANDING: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("run", "node", "host", "reason"), _TEXT),
    **dict.fromkeys(("pid", "slots", "generation", "nodes", "world", "restarts"), _COUNT),
    **dict.fromkeys(("node_rank", "max_restarts", "saved", "snapshot", "exit_code"), _MAYBE_COUNT),
    "step": _MAYBE_COUNT,
    "per_second": _MAYBE_NUMBER,
    "expelled": (bool,),
}
_WORKER: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "local_rank"), _COUNT),
    "name": _TEXT,
    "running": (bool,),
    **dict.fromkeys(("step", "saved"), _MAYBE_COUNT),
    **dict.fromkeys(("per_second", "silent"), _MAYBE_NUMBER),
}


def _field(said: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    value = said.get(name)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"the field {name} is {value!r:.60}")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}...\n"


def _dump(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _loaded(data: bytes, what: str) -> dict[str, Any]:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is JSON, got {_shown(data)}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{what} is a JSON object, got {_shown(data)}")
    if said.get("v") != VERSION:
        raise ValueError(f"{what} of version {VERSION} is read here, got {said.get('v')!r:.20}")
    return said


def _shown(data: bytes) -> str:
    return repr(data[:60])
