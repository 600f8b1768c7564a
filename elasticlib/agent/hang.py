"""Whether workers hang, from what they told of their steps: the rule, and the evidence. Pure.

A worker hangs that has been silent for longer than its own steps explain. What all nodes tell of
their ranks then shows which is the slowest: the one that the others wait for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..errors import ConfigError
from ..observe.formatting import format_ranks, group_stacks
from ..workers.interface import NOTHING, Heartbeat
from .policy import Command, Gather, Hung, Post, decode, encode

HANG = "hang/"
"""What is posted under it where workers hang: the pulses of each node's, under its rank."""
LONGEST_HOST = 200
OTHERS_SECONDS = 3.0
"""For the other nodes to say what they know, when one has found that its workers hang."""
WORRY = 0.5
"""Of a limit: from there on it is heard whether other nodes have found a hang."""
STOOD_STILL = 1 / 4
"""Of a limit: a look that is so much later than it was due could not be taken, as where a job is
paused as a whole, or its machine is. Its workers could not run then, either."""


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
            raise ConfigError(f"hang limits must be positive, got {self}")

    def of(self, beat: Heartbeat) -> float:
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
    now: float, began: float, beats: Mapping[int, Heartbeat], limits: HangLimits
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
    steps: int

    def __str__(self) -> str:
        at = "has made no step" if self.step == NOTHING else f"is at step {self.step}"
        return f"rank {self.rank} on {self.host} {at}, silent for {self.seconds:.1f} s"


Pulses = tuple[Pulse, ...]


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
        return f"hung: no worker made a step within {limit:.1f} s (hang, --hang-timeout)"
    others = sorted({p.step for p in all_ if p.rank != last.rank})
    where = ""
    if others == [last.step]:
        where = "; so are the others"
    elif others:
        ends = f"{others[0]}" if len(others) == 1 else f"{others[0]} to {others[-1]}"
        where = f"; the others are at step {ends}".replace(str(NOTHING), "none")
    return f"hung: {last}{where}; the limit is {limit:.1f} s (hang, --hang-timeout)"


def encode_pulses(pulses: Iterable[Pulse]) -> bytes:
    return encode(tuple(pulses))


def decode_pulses(data: bytes) -> list[Pulse]:
    """What cannot be read says nothing."""
    pulses = decode(Pulses, data) or ()
    return [attrs.evolve(pulse, host=pulse.host[:LONGEST_HOST]) for pulse in pulses]


@attrs.frozen
class DumpStacks(Command):
    """Have the workers write down where they are."""


Step = tuple["HangWatch", tuple[Command, ...]]


@attrs.frozen
class HangWatch:
    """Watches one group, and when one of its workers hangs gathers the evidence before anybody is
    stopped; each method takes an event.

    ranks: the global ones, by local rank. node: the rank of this one; others: how many more can be
    asked. began: on this machine's monotonic clock, when the workers were started, or could run
    again. due: when the next look is. found: what is too silent; since: from when on; pulses: of
    our ranks, then. stacks: by local rank, once they are there; until: how long other nodes are
    waited for from then on. said: what other nodes say, each of its ranks.
    """

    limits: HangLimits
    host: str
    ranks: Mapping[int, int]
    node: int
    others: int
    began: float
    due: float = attrs.field(default=attrs.Factory(lambda self: self.began, takes_self=True))
    hearing: bool = False
    found: Silence | None = None
    since: float = 0.0
    until: float = 0.0
    pulses: Sequence[Pulse] = ()
    stacks: Mapping[int, str] | None = None
    said: Sequence[Sequence[Pulse]] = ()

    def heard(self, posts: Mapping[str, bytes]) -> HangWatch:
        """This is what the nodes have posted."""
        said = [decode_pulses(data) for rank, data in posts.items() if rank != str(self.node)]
        return attrs.evolve(self, said=said)

    def unseen(self, now: float, beats: Mapping[int, Heartbeat]) -> str:
        """What to say where no worker has told of a step for half of what its first may take; or
        ''."""
        seconds = now - self.began
        if not beats or seconds < self.limits.of(Heartbeat()) * WORRY:
            return ""
        if any(beat.steps for beat in beats.values()):
            return ""
        return (
            f"no worker of this node has reported a step for {seconds:.0f} s, and hangs are found "
            "by the steps that are reported (hang, --hang-timeout): call "
            "elasticlib.context().step(step) after each"
        )

    def dumped(self, now: float, stacks: Mapping[int, str]) -> Step:
        """The workers have written down where they are.

        Only now do the other nodes hear of the hang: a node that heard of it before could stop the
        job while the slowest worker's stacks are being written.
        """
        watch = attrs.evolve(self, stacks=stacks, until=now + OTHERS_SECONDS)
        if not self.others:
            return watch, ()
        return watch, (Post(HANG, str(self.node), encode_pulses(self.pulses)),)

    def look(self, now: float, beats: Mapping[int, Heartbeat]) -> Step:
        """Time goes by, and this is what the workers have told by now."""
        if self.found is not None:
            return self._judge(self.found, now)
        if now < self.due:
            return self, ()
        began, late = self.began, now - self.due
        silence = longest_silence(now, began, beats, self.limits)
        if silence is not None and late > silence.limit * STOOD_STILL:
            began = now
            silence = longest_silence(now, began, beats, self.limits)
        limit = self.limits.first if silence is None else silence.limit
        watch = attrs.evolve(self, began=began, due=now + min(1.0, limit / 8))
        if silence is None or silence.share < WORRY:
            return watch, ()
        if silence.share >= 1 or self.said:
            return watch._find(now, silence, beats)
        if self.hearing or not self.others:
            return watch, ()
        return attrs.evolve(watch, hearing=True), (Gather(HANG),)

    def _find(self, now: float, silence: Silence, beats: Mapping[int, Heartbeat]) -> Step:
        pulses = [
            Pulse(
                self.ranks[local],
                self.host,
                beat.step,
                round(now - max(beat.alive, self.began), 3),
                beat.steps,
            )
            for local, beat in beats.items()
            if beat.attached
        ]
        watch = attrs.evolve(
            self,
            found=silence,
            since=now - silence.seconds,
            pulses=pulses,
        )
        return watch, (Gather(HANG), DumpStacks()) if self.others else (DumpStacks(),)

    def _judge(self, found: Silence, now: float) -> Step:
        if self.stacks is None or (len(self.said) < self.others and now < self.until):
            return self, ()
        return self, (Hung(describe_hang(self._known, found.limit), self.since, self.evidence()),)

    def evidence(self) -> str:
        """Where our workers are, of those that are furthest behind; the rarest stacks first, as
        most ranks wait for the one that hangs."""
        known = stepping(self._known)
        least = min((pulse.step for pulse in known), default=NOTHING)
        at = "before the first step" if least == NOTHING else f"at step {least}"
        behind = {pulse.rank for pulse in known if pulse.step == least}
        texts = {self.ranks[local]: text for local, text in (self.stacks or {}).items()}
        shown = group_stacks({rank: text for rank, text in texts.items() if rank in behind})
        return "\n\n".join(
            f"the stacks of {format_ranks(one.ranks)}, {at}:\n{one.text}" for one in shown
        )

    @property
    def _known(self) -> list[Pulse]:
        return [*self.pulses, *(pulse for said in self.said for pulse in said)]
