"""Whether workers hang, from what they told of their steps: the rule, and what the nodes say.

A worker hangs that has been silent for longer than its own steps explain. What all nodes tell of
their ranks then shows which is the slowest: the one that the others wait for.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping

import attrs

from ..errors import ConfigError
from ..foreign import read_json
from ..workers.messages import NOTHING, Beat

LONGEST_HOST = 200


@attrs.frozen
class HangLimits:
    """When silence is a hang.

    seconds: after so many, once a worker has made its first step. None is `auto`, which goes by the
    worker's own steps: once it knows the durations of `steps` of them, silence is a hang after
    `times` their median, `peaks` times the longest of the last, and `floor` seconds, whichever is
    longest. Until then, and in either case until the first step, it is one after `first` seconds:
    what is compiled, allocated or connected in the first few steps tells nothing of the others. A
    single step may be long for a reason, too, as one with an evaluation or another compilation:
    hence the floor. A call of `should_stop()` or a save is a sign of life as a step is.
    """

    seconds: float | None = None
    times: float = 20.0
    peaks: float = 3.0
    floor: float = 300.0
    first: float = 900.0
    steps: int = 10

    def __attrs_post_init__(self) -> None:
        given = (self.times, self.peaks, self.floor, self.first, self.steps)
        if min(given) <= 0 or (self.seconds is not None and self.seconds <= 0):
            raise ConfigError(f"limits of a hang are positive, got {self}")

    def of(self, beat: Beat) -> float:
        """The silence that this worker is allowed, in seconds."""
        if beat.steps == 0:
            return self.first if self.seconds is None else max(self.seconds, self.first)
        if self.seconds is not None:
            return self.seconds
        if len(beat.durations) < self.steps:
            return self.first
        paces = (self.times * statistics.median(beat.durations), self.peaks * max(beat.durations))
        return max(self.floor, *paces)


@attrs.frozen
class Silence:
    """A worker's, in seconds, and the limit that it is held to."""

    local_rank: int
    seconds: float
    limit: float

    @property
    def share(self) -> float:
        return self.seconds / self.limit


def longest_silence(
    now: float, began: float, beats: Mapping[int, Beat], limits: HangLimits
) -> Silence | None:
    """The worker that is nearest to its limit, or furthest beyond it; None without workers.

    now, began: on this machine's monotonic clock; the workers were started then. Whoever never
    asked for its context is no part of this, nor who leaves it to others to tell of steps.
    """
    stepping = any(beat.steps for beat in beats.values())
    silences = [
        Silence(local, now - max(beat.alive, began), limits.of(beat))
        for local, beat in beats.items()
        if beat.attached and (beat.steps or not stepping)
    ]
    return max(silences, key=lambda silence: silence.share, default=None)


@attrs.frozen
class Pulse:
    """What a node tells of one of its ranks. step: the last it did; seconds: for how long it has
    been silent; steps: how many it told of."""

    rank: int
    host: str
    step: int
    seconds: float
    steps: int = 0

    def __str__(self) -> str:
        at = "has made no step" if self.step == NOTHING else f"is at step {self.step}"
        return f"rank {self.rank} on {self.host} {at}, silent for {self.seconds:.1f} s"


def stepping(pulses: Iterable[Pulse]) -> list[Pulse]:
    """Without those who leave it to others to tell of steps: who told of none while another told
    of two. Where others told of one, a rank may stand in its first, and they wait for it."""
    all_ = list(pulses)
    some = any(p.steps > 1 for p in all_)
    return [p for p in all_ if p.steps or not some]


def slowest(pulses: Iterable[Pulse]) -> Pulse | None:
    """The one that is furthest behind; of several, the one that fell silent first."""
    return min(stepping(pulses), key=lambda p: (p.step, -p.seconds, p.rank), default=None)


def describe_hang(pulses: Iterable[Pulse], limit: float) -> str:
    """One sentence: who is behind, how far the others are, and what was allowed."""
    all_ = stepping(pulses)
    last = slowest(all_)
    if last is None:
        return f"hung: no worker made a step within {limit:.1f} s (--hang-timeout)"
    others = sorted({p.step for p in all_ if p.rank != last.rank})
    where = ""
    if others:
        ends = f"{others[0]}" if len(others) == 1 else f"{others[0]} to {others[-1]}"
        where = f"; the others are at step {ends}".replace(str(NOTHING), "none")
    return f"hung: {last}{where}; allowed are {limit:.1f} s (--hang-timeout)"


def encode_pulses(pulses: Iterable[Pulse]) -> bytes:
    return json.dumps([attrs.asdict(pulse) for pulse in pulses]).encode()


def decode_pulses(data: bytes) -> list[Pulse]:
    """What cannot be read says nothing."""
    try:
        return [
            Pulse(
                int(said["rank"]),
                str(said["host"])[:LONGEST_HOST],
                int(said["step"]),
                float(said["seconds"]),
                int(said.get("steps", 0 if int(said["step"]) == NOTHING else 1)),
            )
            for said in read_json(data)
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
