"""Each node's status in the job's store, beside its lease, for all who may read there.

A node writes its status when its state changes, and now and then while its workers make steps;
nobody asks it. What is read here comes from others, so it is read strictly, within bounds, and
nothing of it is ever executed.
"""

from __future__ import annotations

import abc
import json
import logging
import threading
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import attrs

from ..clock import Clock, monotonic, wall
from ..errors import StoreConnectionError, StoreTimeoutError, describe
from ..rendezvous.store_layout import StoreKeys
from ..stores.interface import Store
from ..threads import helper
from .event import LARGEST, cut, read_object
from .history import JobState
from .story import NodeStatus, WorkerStatus

if typing.TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("elasticlib.observe")

VERSION = 1
LONGEST = 512 * 1024
"""Bytes of one node's status."""
LONGEST_TEXT = 2048
MOST_WORKERS = 2048

STANDS_SECONDS = 60.0
"""For which a status outlives its node. It is longer than the node's lease, which says whether the
node lives and costs an operation a second; this one costs one in AGAIN_SECONDS."""
AGAIN_SECONDS = 20.0
"""Between writes of what has not changed."""
STEPS_SECONDS = 2.0
"""Between writes while workers make steps and the job is small."""
STEPS_SECONDS_A_NODE = 0.01
"""The same, for each node of a large one: all of them together write a hundred times a second."""
SOON_SECONDS = 0.2
"""Between writes while the state changes."""
RETRY_SECONDS = 2.0


@attrs.frozen
class Published:
    """A node's status, with what only its own clock can tell.

    state_seconds: for how long its state has lasted. up_seconds: since its agent began. heard:
    since the store last took its word, None where it does not know. loop_silent: for which its
    agent's loop had not turned. age: seconds since all of this was written to a store, as
    `StatusReader` has it; None where it was not read there.
    """

    status: NodeStatus
    state_seconds: float
    up_seconds: float
    heard: float | None = None
    loop_silent: float = 0.0
    age: float | None = None

    @property
    def lasted(self) -> float:
        """Seconds for which the state has lasted by now."""
        return round(self.state_seconds + (self.age or 0.0), 3)

    @property
    def up(self) -> float:
        """Seconds since the node's agent began, as of now."""
        return round(self.up_seconds + (self.age or 0.0), 3)

    @classmethod
    def at(cls, now: float, status: NodeStatus, **known: float | None) -> Published:
        """now: by the clock that the status has its times from."""
        lasted = {"state_seconds": now - status.since, "up_seconds": now - status.began}
        seconds = {"heard": None, "loop_silent": 0.0, **known, **lasted}
        ages = {name: None if s is None else round(max(0.0, s), 3) for name, s in seconds.items()}
        return cls(status, **ages)  # type: ignore[arg-type]


_OF_NO_OTHER_CLOCK = ("since", "began")
_AGES = ("state_seconds", "up_seconds", "heard", "loop_silent")


def encode(published: Published, written: float) -> bytes:
    """written: seconds since 1970. Long texts are cut, and so are more workers than a node has."""
    status = attrs.asdict(published.status, recurse=False)
    for name in _OF_NO_OTHER_CLOCK:
        del status[name]
    status["state"] = published.status.state.value
    status["workers"] = [attrs.asdict(one) for one in published.status.workers[:MOST_WORKERS]]
    ages = {name: getattr(published, name) for name in _AGES}
    said = {"v": VERSION, "written": written, **ages, **status}
    return json.dumps(cut(said, LONGEST_TEXT), separators=(",", ":")).encode()


def decode(data: bytes, age: Callable[[float], float]) -> Published:
    """age: of what was written at so many seconds since 1970, by its writer's clock. Raises
    ValueError, naming what is wrong with it."""
    if len(data) > LONGEST:
        raise ValueError(f"a status is at most {LONGEST} bytes, got {len(data)}")
    said = read_object(data, "a status", VERSION)
    state, workers = said.get("state"), said.get("workers")
    if state not in [one.value for one in JobState]:
        raise ValueError(f"nobody knows the state {state!r:.60}")
    if not isinstance(workers, list) or not all(isinstance(one, dict) for one in workers):
        raise ValueError(f"a status's workers are a list of objects, got {workers!r:.60}")
    status = NodeStatus(
        **_fields(NodeStatus, said, without=("state", "workers", *_OF_NO_OTHER_CLOCK)),
        state=JobState(state),
        workers=tuple(WorkerStatus(**_fields(WorkerStatus, one)) for one in workers),
    )
    ages = _fields(Published, said, without=("status", "age"))
    written = read_field("written", said.get("written"), (float,))
    return Published(status, **ages, age=round(max(0.0, age(written)), 3))


def _fields(kind: type, said: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the class's fields as they are in `said`, but for those in `without`."""
    found = {}
    for name, hint in _hints(kind).items():
        if name in without:
            continue
        if name not in said:
            raise ValueError(f"the field {name} is missing")
        found[name] = read_field(name, said[name], typing.get_args(hint) or (hint,))
    return found


_hints = cache(typing.get_type_hints)


def read_field(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """A value of one of these types. JSON has no subclasses: a bool is no number here."""
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    if not fits or (type(value) in (int, float) and not -LARGEST < value < LARGEST):
        raise ValueError(f"the field {name} is {value!r:.60}")
    return value


# -- in the store ----------------------------------------------------------------------------------


def beside(run_id: str, what: str) -> str:
    """Begins keys of a job that are not among its own, which the node that leads reads whole at
    each change. No job's name begins so."""
    return f"?{StoreKeys(run_id).job_prefix}{what}/"


class StatusReader:
    """Reads what the nodes of a job have published, once or again and again.

    How old a status is at the first look is by the wall clocks of two machines. Once another has
    been seen to come, it is by how these differ, and so by this machine's clock alone.
    """

    def __init__(self, store: Store, run_id: str, *, clock: Clock = wall) -> None:
        self._store, self._clock = store, clock
        self._prefix = beside(run_id, "status")
        self._written: dict[str, float] = {}
        self._apart: dict[str, float] = {}

    def read(self) -> dict[str, Published]:
        """By node id, in one listing; what is none of theirs is passed over. Raises StoreError."""
        found = {}
        for entry in self._store.list(self._prefix).entries:
            node = entry.key.removeprefix(self._prefix)
            try:
                found[node] = decode(entry.value, partial(self._age, node))
            except ValueError as error:
                log.warning("the status of %s is passed over: %s", node, error)
        return found

    def _age(self, node: str, written: float) -> float:
        age = self._clock() - written
        if self._written.setdefault(node, written) != written:
            # It came since the look before, so no more than this is between the clocks.
            self._written[node] = written
            self._apart[node] = min(age, self._apart.get(node, age))
        return age - self._apart.get(node, 0.0)


class Turning(abc.ABC):
    """Takes one turn after another in a thread, from `with` to its end. Failures never affect the
    job: the first one is logged as a warning, and the turn is tried again. An unreachable store is
    logged at DEBUG only, because the agent reports it. The store is closed by its owner, and then
    at the latest the thread ends.

    Args:
        name: name of the thread.
        consequence: what does not work while turns fail, as a part of a sentence.
        retry: seconds until the next try.
    """

    def __init__(self, name: str, consequence: str, retry: float) -> None:
        self._consequence, self._retry = consequence, retry
        self._over, self._woken = False, threading.Event()
        self._thread = helper(self._run, name)

    @abc.abstractmethod
    def _turn(self) -> float:
        """Do what is due; seconds until the next turn."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self.wake()

    def wake(self) -> None:
        """It may be time for another turn; does not wait."""
        self._woken.set()

    def _run(self) -> None:
        has_warned = False
        while not self._over:
            try:
                pause = self._turn()
            except Exception as error:
                pause, level = self._retry, logging.DEBUG
                if not has_warned and not isinstance(
                    error, StoreConnectionError | StoreTimeoutError
                ):
                    has_warned, level = True, logging.WARNING
                what, why = self._consequence, describe(error)
                log.log(level, "%s: %s; trying again every %g s", what, why, self._retry)
            self._woken.wait(pause)
            self._woken.clear()


class Publisher(Turning):
    """Keeps one node's status in the store. With the store's client the status goes.

    look: what is so now.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        node_id: str,
        look: Callable[[], Published],
        *,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__("agent-status", "elasticlib status cannot show this node", RETRY_SECONDS)
        self._store = store
        self._key = f"{beside(run_id, 'status')}{node_id}"
        self._look = look
        self._clock = clock
        self._written_at = float("-inf")
        self._last: NodeStatus | None = None

    def _turn(self) -> float:
        """Publish what there is, if it is time; seconds until the next look."""
        found, now = self._look(), self._clock()
        status = _without_ages(found.status)
        steps = max(STEPS_SECONDS, STEPS_SECONDS_A_NODE * status.nodes)
        due = self._written_at + _pause(self._last, status, steps)
        if now < due:
            return min(due - now, steps)
        self._last = None  # unless it is written
        self._store.set(self._key, encode(found, wall()), ttl=STANDS_SECONDS)
        self._written_at, self._last = now, status
        return steps


def _pause(last: NodeStatus | None, status: NodeStatus, steps: float) -> float:
    """Seconds from one write to the next."""
    if last is None or (last.state, last.generation) != (status.state, status.generation):
        return SOON_SECONDS
    return AGAIN_SECONDS if status == last else steps


def _without_ages(status: NodeStatus) -> NodeStatus:
    workers = (attrs.evolve(worker, silent=None) for worker in status.workers)
    return attrs.evolve(status, workers=tuple(workers))
