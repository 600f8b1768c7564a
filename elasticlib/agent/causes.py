"""Why workers of a generation failed, as the nodes tell one another: bounded, and plain JSON.

The first cause is the one that the job's store took first; what other nodes then say is that
workers of theirs failed, too. No machine's clock is compared with another's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

import attrs

from ..foreign import read_json
from ..workers.exit import WorkerExit
from ..workers.messages import shorten

FIRST = "first"
ALSO = "also/"
LONGEST_TRACE = 8 * 1024
LONGEST_TAIL = 4 * 1024
LONGEST_LINE = 1024
MOST_RANKS = 64


_KINDS = {"str": (str,), "int": (int,), "tuple[int, ...]": (list, tuple)}


@attrs.frozen
class Cause:
    """The first failure of a generation.

    sentence: who, how and why. host: where. log: the folder there that holds the worker's files.
    followed: global ranks of workers that failed as well, afterwards, as far as is known. Where
    workers could not be started, it is the failure of none: rank and local_rank are -1.
    """

    host: str
    generation: int
    rank: int
    local_rank: int
    pid: int
    returncode: int
    signal: str
    sentence: str
    message: str = ""
    traceback: str = ""
    tail: str = ""
    log: str = ""
    followed: tuple[int, ...] = ()


def cause_of(failure: WorkerExit, host: str, generation: int) -> Cause:
    """What is told of this failure, in bounds."""
    first = failure.root
    return Cause(
        host=host,
        generation=generation,
        rank=first.rank,
        local_rank=first.local_rank,
        pid=first.pid,
        returncode=first.returncode,
        signal=first.signal,
        sentence=shorten(first.describe(), LONGEST_LINE),
        message=shorten(first.message, LONGEST_LINE),
        traceback=shorten(first.traceback, LONGEST_TRACE),
        tail=shorten(first.tail, LONGEST_TAIL),
        log=first.log,
    )


def cause_of_start(reason: str, host: str, generation: int) -> Cause:
    """What is told where a node could not start its workers."""
    sentence = shorten(reason, LONGEST_LINE)
    return Cause(host, generation, -1, -1, pid=0, returncode=0, signal="", sentence=sentence)


def followers(failures: Iterable[WorkerExit], cause: Cause | None) -> tuple[int, ...]:
    """The ranks of those that failed, and not first."""
    ranks = {failure.rank for failure in failures if failure.failed}
    return tuple(sorted(ranks - {cause.rank if cause is not None else -1}))


def as_dict(cause: Cause) -> dict[str, object]:
    """For people and their programs: all that is known, under plain names."""
    return attrs.asdict(cause)


def encode(cause: Cause) -> bytes:
    return json.dumps(as_dict(cause)).encode()


def decode(data: bytes) -> Cause | None:
    """A cause as a node told it; None where it is none, as another version may write others."""
    try:
        said = read_json(data)
        known = {name: said[name] for name in attrs.fields_dict(Cause) if name in said}
        cause = Cause(**known)
        kinds = {field.name: _KINDS[str(field.type)] for field in attrs.fields(Cause)}
        if not all(type(getattr(cause, name)) in kinds[name] for name in known):
            return None
        return attrs.evolve(cause, followed=tuple(int(rank) for rank in cause.followed))
    except (ValueError, TypeError, KeyError):
        return None


def encode_ranks(ranks: Collection[int]) -> bytes:
    return json.dumps(sorted(ranks)[:MOST_RANKS]).encode()


def decode_ranks(data: bytes) -> tuple[int, ...]:
    try:
        return tuple(int(rank) for rank in read_json(data))
    except (ValueError, TypeError):
        return ()


def first_cause(said: Mapping[str, bytes]) -> Cause | None:
    """What all nodes said of a generation, by the ends of their keys, as one cause."""
    cause = decode(said[FIRST]) if FIRST in said else None
    if cause is None:
        return None
    ranks = {r for key, value in said.items() if key.startswith(ALSO) for r in decode_ranks(value)}
    return attrs.evolve(cause, followed=tuple(sorted(ranks - {cause.rank})))
