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
from ..workers.interface import NO_STEP, Heartbeat
from .policy import AgentCommand, HangDetected, Publish, Subscribe, decode, encode

HANG = "hang/"
"""What is posted under it where workers hang: the pulses of each node's, under its rank."""
MAX_HOST_CHARS = 200
PEER_REPORT_TIMEOUT_S = 3.0
"""For the other nodes to say what they know, when one has found that its workers hang."""
SUSPECT_FRACTION = 0.5
"""Of a limit: from there on it is heard whether other nodes have found a hang."""
PAUSE_FRACTION = 1 / 4
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

    timeout: float | None = None
    median_factor: float = 20.0
    max_factor: float = 3.0
    min_timeout: float = 300.0
    first_step_timeout: float = 900.0
    warmup_steps: int = 10

    def __attrs_post_init__(self) -> None:
        given = (
            self.median_factor,
            self.max_factor,
            self.min_timeout,
            self.first_step_timeout,
            self.warmup_steps,
        )
        if min(given) <= 0 or (self.timeout is not None and self.timeout <= 0):
            raise ConfigError(f"hang limits must be positive, got {self}")

    def timeout_for(self, beat: Heartbeat) -> float:
        """The silence that this worker is allowed, in seconds."""
        if beat.num_steps == 0:
            return (
                self.first_step_timeout
                if self.timeout is None
                else max(self.timeout, self.first_step_timeout)
            )
        if self.timeout is not None:
            return self.timeout
        if len(beat.step_durations) < self.warmup_steps:
            return self.first_step_timeout
        paces = (
            self.median_factor * statistics.median(beat.step_durations),
            self.max_factor * max(beat.step_durations),
        )
        return max(self.min_timeout, *paces)


@attrs.frozen
class Inactivity:
    """A worker's, in seconds, and the limit that it is held to."""

    local_rank: int
    seconds: float
    limit: float

    @property
    def fraction(self) -> float:
        return self.seconds / self.limit


def longest_inactivity(
    now: float, began: float, beats: Mapping[int, Heartbeat], limits: HangLimits
) -> Inactivity | None:
    """The worker that is nearest to its limit, or furthest beyond it; None without workers.

    now, began: on this machine's monotonic clock; the workers were started then. Whoever never
    asked for its context is no part of this, nor who leaves it to others to tell of steps.
    """
    reporting_ranks = any(beat.num_steps for beat in beats.values())
    silences = [
        Inactivity(local, now - max(beat.last_activity_at, began), limits.timeout_for(beat))
        for local, beat in beats.items()
        if beat.is_attached and (beat.num_steps or not reporting_ranks)
    ]
    return max(silences, key=lambda silence: silence.fraction, default=None)


@attrs.frozen
class RankProgress:
    """What a node tells of one of its ranks. step: the last it did; seconds: for how long it has
    been silent; steps: how many it told of."""

    rank: int
    host: str
    step: int
    inactive_s: float
    num_steps: int

    def __str__(self) -> str:
        at = "has made no step" if self.step == NO_STEP else f"is at step {self.step}"
        return f"rank {self.rank} on {self.host} {at}, silent for {self.inactive_s:.1f} s"


RankProgressList = tuple[RankProgress, ...]


def reporting_ranks(pulses: Iterable[RankProgress]) -> list[RankProgress]:
    """Without those who leave it to others to tell of steps: who told of none while another told
    of two. Where others told of one, a rank may stand in its first, and they wait for it."""
    all_ = list(pulses)
    some = any(p.num_steps > 1 for p in all_)
    return [p for p in all_ if p.num_steps or not some]


def slowest_rank(pulses: Iterable[RankProgress]) -> RankProgress | None:
    """The one that is furthest behind; of several, the one that fell silent first."""
    return min(reporting_ranks(pulses), key=lambda p: (p.step, -p.inactive_s, p.rank), default=None)


def describe_hang(pulses: Iterable[RankProgress], limit: float) -> str:
    """One sentence: who is behind, how far the others are, and what was allowed."""
    all_ = reporting_ranks(pulses)
    last = slowest_rank(all_)
    if last is None:
        return f"hung: no worker made a step within {limit:.1f} s (hang, --hang-timeout)"
    others = sorted({p.step for p in all_ if p.rank != last.rank})
    where = ""
    if others == [last.step]:
        where = "; so are the others"
    elif others:
        ends = f"{others[0]}" if len(others) == 1 else f"{others[0]} to {others[-1]}"
        where = f"; the others are at step {ends}".replace(str(NO_STEP), "none")
    return f"hung: {last}{where}; the limit is {limit:.1f} s (hang, --hang-timeout)"


def encode_progress(pulses: Iterable[RankProgress]) -> bytes:
    return encode(tuple(pulses))


def decode_progress(data: bytes) -> list[RankProgress]:
    """What cannot be read says nothing."""
    pulses = decode(RankProgressList, data) or ()
    return [attrs.evolve(pulse, host=pulse.host[:MAX_HOST_CHARS]) for pulse in pulses]


@attrs.frozen
class DumpStacks(AgentCommand):
    """Have the workers write down where they are."""


Transition = tuple["HangDetector", tuple[AgentCommand, ...]]


@attrs.frozen
class HangDetector:
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
    node_rank: int
    num_peers: int
    started_at: float
    next_poll_at: float = attrs.field(
        default=attrs.Factory(lambda self: self.started_at, takes_self=True)
    )
    is_subscribed: bool = False
    suspect: Inactivity | None = None
    inactive_since: float = 0.0
    peer_deadline: float = 0.0
    own_progress: Sequence[RankProgress] = ()
    stacks: Mapping[int, str] | None = None
    peer_reports: Sequence[Sequence[RankProgress]] = ()

    def on_peer_reports(self, posts: Mapping[str, bytes]) -> HangDetector:
        """This is what the nodes have posted."""
        said = [
            decode_progress(data) for rank, data in posts.items() if rank != str(self.node_rank)
        ]
        return attrs.evolve(self, peer_reports=said)

    def no_steps_warning(self, now: float, beats: Mapping[int, Heartbeat]) -> str:
        """What to say where no worker has told of a step for half of what its first may take; or
        ''."""
        seconds = now - self.started_at
        if not beats or seconds < self.limits.timeout_for(Heartbeat()) * SUSPECT_FRACTION:
            return ""
        if any(beat.num_steps for beat in beats.values()):
            return ""
        return (
            f"no worker of this node has reported a step for {seconds:.0f} s, and hangs are found "
            "by the steps that are reported (hang, --hang-timeout): call "
            "elasticlib.context().step(step) after each"
        )

    def on_stacks(self, now: float, stacks: Mapping[int, str]) -> Transition:
        """The workers have written down where they are.

        Only now do the other nodes hear of the hang: a node that heard of it before could stop the
        job while the slowest worker's stacks are being written.
        """
        watch = attrs.evolve(self, stacks=stacks, peer_deadline=now + PEER_REPORT_TIMEOUT_S)
        if not self.num_peers:
            return watch, ()
        return watch, (Publish(HANG, str(self.node_rank), encode_progress(self.own_progress)),)

    def poll(self, now: float, beats: Mapping[int, Heartbeat]) -> Transition:
        """Time goes by, and this is what the workers have told by now."""
        if self.suspect is not None:
            return self._decide(self.suspect, now)
        if now < self.next_poll_at:
            return self, ()
        began, late = self.started_at, now - self.next_poll_at
        silence = longest_inactivity(now, began, beats, self.limits)
        if silence is not None and late > silence.limit * PAUSE_FRACTION:
            began = now
            silence = longest_inactivity(now, began, beats, self.limits)
        limit = self.limits.first_step_timeout if silence is None else silence.limit
        watch = attrs.evolve(self, started_at=began, next_poll_at=now + min(1.0, limit / 8))
        if silence is None or silence.fraction < SUSPECT_FRACTION:
            return watch, ()
        if silence.fraction >= 1 or self.peer_reports:
            return watch._suspect(now, silence, beats)
        if self.is_subscribed or not self.num_peers:
            return watch, ()
        return attrs.evolve(watch, is_subscribed=True), (Subscribe(HANG),)

    def _suspect(
        self, now: float, silence: Inactivity, beats: Mapping[int, Heartbeat]
    ) -> Transition:
        pulses = [
            RankProgress(
                self.ranks[local],
                self.host,
                beat.step,
                round(now - max(beat.last_activity_at, self.started_at), 3),
                beat.num_steps,
            )
            for local, beat in beats.items()
            if beat.is_attached
        ]
        watch = attrs.evolve(
            self,
            suspect=silence,
            inactive_since=now - silence.seconds,
            own_progress=pulses,
        )
        return watch, (Subscribe(HANG), DumpStacks()) if self.num_peers else (DumpStacks(),)

    def _decide(self, found: Inactivity, now: float) -> Transition:
        if self.stacks is None or (
            len(self.peer_reports) < self.num_peers and now < self.peer_deadline
        ):
            return self, ()
        return self, (
            HangDetected(
                describe_hang(self._all_progress, found.limit),
                self.inactive_since,
                self.stack_report(),
            ),
        )

    def stack_report(self) -> str:
        """Where our workers are, of those that are furthest behind; the rarest stacks first, as
        most ranks wait for the one that hangs."""
        known = reporting_ranks(self._all_progress)
        least = min((pulse.step for pulse in known), default=NO_STEP)
        at = "before the first step" if least == NO_STEP else f"at step {least}"
        behind = {pulse.rank for pulse in known if pulse.step == least}
        texts = {self.ranks[local]: text for local, text in (self.stacks or {}).items()}
        shown = group_stacks({rank: text for rank, text in texts.items() if rank in behind})
        return "\n\n".join(
            f"the stacks of {format_ranks(one.ranks)}, {at}:\n{one.text}" for one in shown
        )

    @property
    def _all_progress(self) -> list[RankProgress]:
        return [*self.own_progress, *(pulse for said in self.peer_reports for pulse in said)]
