"""What happened on one node, as one value and one line of JSON: the schema of `events.jsonl`.

A line is an object. These keys are in each: v, the version of this schema; kind; run, the job's
id; node, this node's id; generation, 0 before the first; wall, seconds since 1970 by the node's
clock, to show to people; at, seconds by its monotonic clock, for differences within one node's
file. rank is there where it is about one worker. All other keys are facts of the kind, in `KINDS`.
Readers skip kinds and keys that they do not know: a new version only ever adds, or has another v.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

VERSION = 1
LONGEST = 64 * 1024
"""Bytes of a line, at most; longer texts in it are cut."""
LARGEST = 2**62
"""Larger numbers than this are nobody's steps, seconds or generations."""

KINDS: Mapping[str, Mapping[str, str]] = {
    "run.began": {
        "host": "the node's name",
        "pid": "the agent's process",
        "slots": "workers on this node",
        "settings": "those that somebody gave, by name, as text",
        "endpoint": "where this node serves the job's store, empty if it does not",
        "logs": "the folder of the workers' logs, empty if none is kept",
        "lease": "seconds of silence after which the others take a node for lost",
        "versions": "of elasticlib, torch and Python, by name",
    },
    "rendezvous.began": {
        "why": "what ended the generation before, or that the node is new",
        "planned": "whether nodes come or go on purpose, and nothing has failed or was lost",
    },
    "generation.began": {
        "seconds": "from the end of the last workers, or from the run's beginning",
        "imports": "seconds of these until the node had imported torch and what else it needs to "
        "start workers, and asked for a place; 0 after its first rendezvous",
        "attempt": "how often this agent had started its workers before, as in attempt_N",
        "node_rank": "this node's, among the nodes",
        "nodes": "how many there are",
        "ranks": "first and last global rank of this node's workers",
        "world": "workers in the job",
        "role": "first rank of this node's workers among those of their role; and how many in all",
        "restarts": "of the job so far",
        "max_restarts": "its budget",
        "cause": "why this generation was sought, in words",
        "why": "start, failure, loss or resize; null where the rendezvous does not say",
    },
    "worker.began": {
        "local_rank": "its place on the node",
        "name": "such as pid 123",
        "attempt": "in which it was started, an earlier one where it was kept",
    },
    "worker.ended": {
        "local_rank": "its place on the node",
        "code": "exit code; negative for a signal",
        "ok": "whether it succeeded",
        "stopped": "whether this agent had asked it to end",
        "how": "in words",
        "error": "what it wrote of its failure, else how it ended; empty if it succeeded",
        "traceback": "of its failure, empty if it left none",
        "uptime": "seconds since its generation's start",
    },
    "failure": {
        "reason": "in words",
        "failure": "its kind: ordinary, killed or hang",
        "silent": "of a hang, seconds for which a worker here had given no sign of life; else null",
    },
    "stopping": {
        "why": "in words, empty if the workers are not asked to save",
        "seconds": "for the workers to save, 0 if not asked",
        "because": "of what they are stopped, in words",
    },
    "stopped": {"seconds": "that it took", "left": "what would not die, empty if nothing"},
    "drain.asked": {"signal": "its name", "why": "for the workers"},
    "restored": {
        "step": "of the state that the workers took up",
        "source": "memory (this node's), peer (another node's) or disk",
        "seconds": "that it took, from when the last of this node's workers asked for it",
        "after": "seconds from the start of the workers until then",
    },
    "training.began": {
        "step": "the first of this node's workers in their generation, the smallest",
        "seconds": "from the start of the workers to the end of that step, of the slowest",
    },
    "steps": {
        "step": "the last of this node's workers, the smallest of them",
        "per_second": "since the line before, or the first step; null if not known",
        "silent": "seconds since the quietest worker made one",
        "loss": "the lowest rank's last, null if it names none; text where it is no number",
        "samples_per_second": "of this node's workers together, since the line before; null if "
        "not known",
    },
    "snapshot": {
        "step": "the newest that this node's workers keep whole in its memory",
        "count": "snapshots since the line before, this one included",
    },
    "saved": {
        "step": "of the newest checkpoint that became durable",
        "count": "checkpoints since the line before, this one included",
    },
    "run.ended": {
        "state": "succeeded, failed, stopped or drained",
        "reason": "in words",
        "exit_code": "of the launcher; 75 after a drain, whatever --drain-exit-code says",
        "cause": "the first failure over all nodes: host, rank, what; null without",
        "expelled": "whether the job goes on without this node, whose end is not the job's",
    },
    "lost": {"events": "how many could not be written here, as the disk was full or too slow"},
}
"""Kind by kind the facts it comes with, and what each means."""

COMMON = ("v", "kind", "run", "node", "generation", "wall", "at", "rank")


_WORDS: Mapping[str, str] = {"failure": "reason", "worker.ended": "how", "drain.asked": "why"}


@attrs.frozen
class Mark:
    """Something at one moment. kind: of the event (`failure`, `worker.ended`, `saved`, `snapshot`,
    `restored`, `drain.asked`, `lost`). words: a sentence, or the step."""

    at: float
    kind: str
    node: str
    words: str
    rank: int | None = None
    step: int | None = None
    traceback: str = ""  # of a worker that failed, if it left one


@attrs.frozen
class Event:
    """One line; facts hold text, numbers, truth values, null, and lists and objects of these.

    Files may have been written by anybody, so a fact is read by its type: one that is missing, or
    of another type than the schema has it, is not known.
    """

    kind: str
    run: str
    node: str
    generation: int
    wall: float
    at: float
    rank: int | None = None
    facts: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def possible(self) -> bool:
        """Whether it has a time and a generation that can be."""
        times = max(abs(self.at), abs(self.wall))
        return 0 <= self.generation < LARGEST and times < LARGEST

    @property
    def mark(self) -> Mark | None:
        """What a reader is shown of it; None where that is nothing, as it did what it was to do."""
        kind, step = self.kind, self.count("step")
        words = self.text(_WORDS.get(kind, ""))
        if kind in ("saved", "snapshot") and step is not None:
            words = f"step {step}"
        elif kind == "restored":
            words = f"step {step} from {self.text('source') or 'an unknown place'}"
        elif kind == "lost":
            words = f"{self.count('events') or 0} events could not be written"
        elif kind not in _WORDS or (kind == "worker.ended" and self.as_it_should):
            return None
        traceback = self.text("traceback")
        return Mark(self.at, kind, self.node, words, self.rank, step, traceback)

    @property
    def as_it_should(self) -> bool:
        """Of `worker.ended`: whether it succeeded, or had been asked to end."""
        return self.says("ok") or self.says("stopped")

    def number(self, name: str) -> float | None:
        """A finite number, or None."""
        return _as_number(self.facts.get(name))

    def value(self, name: str) -> float | None:
        """A number of whatever size, or one that is none: JSON has no word for these, so they are
        written as text. None where it is neither."""
        return _as_value(self.facts.get(name))

    def seconds(self, name: str) -> float | None:
        """A number that is not negative, or None."""
        found = self.number(name)
        return None if found is None or found < 0 else found

    def count(self, name: str) -> int | None:
        """A whole number that is not negative, or None."""
        return _as_count(self.facts.get(name))

    def text(self, name: str) -> str:
        """A text, empty where there is none."""
        value = self.facts.get(name)
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> dict[str, str]:
        """Texts by name, empty where there are none."""
        value = self.facts.get(name)
        if not isinstance(value, Mapping):
            return {}
        return {str(key): str(item) for key, item in value.items()}

    def pair(self, name: str) -> tuple[int, int] | None:
        """Two whole numbers, or None."""
        value = self.facts.get(name)
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            return None
        first, last = map(_as_count, value)
        return None if first is None or last is None else (first, last)

    def says(self, name: str) -> bool:
        """Whether this is said to be true."""
        return self.facts.get(name) is True


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -LARGEST < value < LARGEST else None


def _as_value(value: object) -> float | None:
    if isinstance(value, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    return _as_number(value)


def _as_count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
        return None
    return value


def encode(event: Event) -> bytes:
    """The event's line, with its end; long texts are cut so that it stays within bounds."""
    head = {
        "v": VERSION,
        "kind": event.kind,
        "run": event.run,
        "node": event.node,
        "generation": event.generation,
        "wall": round(event.wall, 6),
        "at": round(event.at, 6),
    }
    if event.rank is not None:
        head["rank"] = event.rank
    room = LONGEST
    while True:
        facts = {name: cut(value, room) for name, value in event.facts.items()}
        line = json.dumps({**head, **facts}, separators=(",", ":"), default=str).encode() + b"\n"
        if len(line) <= LONGEST or room == 0:
            return line
        room //= 4


def cut(value: Any, room: int) -> Any:
    """With texts of so many characters at most, and lists and objects of about so many items."""
    if isinstance(value, str) and len(value) > room:
        return value[:room] + "..."
    if isinstance(value, Mapping):
        return {str(key): cut(item, room) for key, item in list(value.items())[: room + 1]}
    if isinstance(value, (list, tuple)):
        return [cut(item, room) for item in value[: room + 1]]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return value


def decode(line: bytes | str) -> Event:
    """The event of one line.

    Raises:
        ValueError: it is none, or is of a version that this code does not read.
    """
    found = read_object(line, "an event", VERSION)
    types = {"kind": str, "run": str, "node": str, "generation": int, "wall": float, "at": float}
    common: dict[str, Any] = {}
    for name, wanted in types.items():
        value = found.get(name)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = _as_float(name, value)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"an event's {name} is a {wanted.__name__}, got {value!r}")
        common[name] = value
    rank = found.get("rank")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool)):
        raise ValueError(f"an event's rank is a number, got {rank!r}")
    facts = {name: value for name, value in found.items() if name not in COMMON}
    return Event(**common, rank=rank, facts=facts)


def read_object(data: bytes | str, what: str, version: int) -> dict[str, Any]:
    """A JSON object of this version; ValueError for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:  # brackets can be nested too deep
        raise ValueError(f"{what} is an object of JSON, got {data[:60]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} is an object of JSON, got {data[:60]!r}")
    if found.get("v") != version:
        raise ValueError(
            f"{what} of version {version} is read here, got {found.get('v')!r:.20}: use the "
            "version of elasticlib that wrote it"
        )
    return found


def _as_float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError as error:
        size = f"a number of {value.bit_length()} bits"
        raise ValueError(f"an event's {name} is a float, got {size}") from error
