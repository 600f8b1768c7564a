"""Hang detector: finds workers that make no progress, and collects the evidence. Pure.

A worker hangs if it is inactive for longer than its own steps explain. The reports of all nodes
then show the slowest rank, which is the one that the other ranks wait for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..errors import ConfigError
from ..observe.formatting import format_ranks, group_stacks
from ..workers.interface import NO_STEP, Heartbeat
from .policy import AgentCommand, HangDetected, Publish, Subscribe, decode, encode

HANG_TOPIC = "hang/"  # the progress of each node's ranks, by node rank, once a worker hangs
MAX_HOST_CHARS = 200
PEER_REPORT_TIMEOUT_S = 3.0  # wait for the other nodes' reports after a hang was found
SUSPECT_FRACTION = 0.5  # of a limit; from here on, a hang on another node counts as one here

# A poll that is later than this fraction of a limit means that the job or its machine was paused.
# The workers could not run either, so their inactivity counts from then on.
PAUSE_FRACTION = 0.25


@attrs.frozen
class HangLimits:
    """Limits of inactivity, in seconds. A call of `should_stop()` and a save count as activity."""

    # Limit after the first step. None ("auto"): derive it from the worker's own steps, see below.
    timeout: float | None = None
    # "auto" takes the longest of: this factor times the median duration of the last steps,
    median_factor: float = 20.0
    # this factor times the longest of them,
    max_factor: float = 3.0
    # and this time, because a single step may include an evaluation or a compilation.
    min_timeout: float = 300.0
    # Limit until the first step, and with "auto" until `warmup_steps` durations are known.
    # Compilation, allocation and connection setup make the first steps slow.
    first_step_timeout: float = 900.0
    warmup_steps: int = 10

    def __attrs_post_init__(self) -> None:
        values = (self.median_factor, self.max_factor, self.min_timeout, self.warmup_steps)
        timeouts = (self.first_step_timeout, 1.0 if self.timeout is None else self.timeout)
        if min(*values, *timeouts) <= 0:
            raise ConfigError(f"hang limits must be positive, got {self}")

    def timeout_for(self, heartbeat: Heartbeat) -> float:
        """Return how long a worker with this heartbeat may be inactive, in seconds."""
        if heartbeat.num_steps == 0:
            return max(self.timeout or 0.0, self.first_step_timeout)
        if self.timeout is not None:
            return self.timeout
        durations = heartbeat.step_durations
        if len(durations) < self.warmup_steps:
            return self.first_step_timeout
        median_limit = self.median_factor * statistics.median(durations)
        return max(self.min_timeout, median_limit, self.max_factor * max(durations))


@attrs.frozen
class Inactivity:
    """The inactivity of a worker."""

    local_rank: int
    seconds: float
    limit: float

    @property
    def fraction(self) -> float:
        """The inactivity as a fraction of its limit."""
        return self.seconds / self.limit


def longest_inactivity(
    now: float, started_at: float, heartbeats: Mapping[int, Heartbeat], limits: HangLimits
) -> Inactivity | None:
    """Return the inactivity that is closest to its limit, or furthest beyond it.

    Workers that never called `context()` are ignored. Workers without steps are ignored if other
    workers report steps.

    Args:
        now: the time on this machine's monotonic clock.
        started_at: when the workers were started.
        heartbeats: by local rank.
        limits: the limits of inactivity.
    """
    has_steps = any(heartbeat.num_steps for heartbeat in heartbeats.values())
    inactivities = [
        Inactivity(
            local_rank,
            now - max(heartbeat.last_activity_at, started_at),
            limits.timeout_for(heartbeat),
        )
        for local_rank, heartbeat in heartbeats.items()
        if heartbeat.is_attached and (heartbeat.num_steps or not has_steps)
    ]
    return max(inactivities, key=lambda inactivity: inactivity.fraction, default=None)


@attrs.frozen
class RankProgress:
    """The progress of one rank, as its node publishes it."""

    rank: int
    host: str
    step: int  # last reported step, or NO_STEP
    inactive_s: float
    num_steps: int

    def __str__(self) -> str:
        at = "has made no step" if self.step == NO_STEP else f"is at step {self.step}"
        return f"rank {self.rank} on {self.host} {at}, inactive for {self.inactive_s:.1f} s"


RankProgressList = tuple[RankProgress, ...]


def reporting_ranks(progress: Iterable[RankProgress]) -> list[RankProgress]:
    """Return the ranks that report steps or may be in their first step.

    A rank without steps is left out if another rank has reported more than one step. As long as no
    rank has, the rank without steps may be in its first step, and the other ranks may wait for it.
    """
    ranks = list(progress)
    has_two_steps = any(rank.num_steps > 1 for rank in ranks)
    return [rank for rank in ranks if rank.num_steps or not has_two_steps]


def slowest_rank(progress: Iterable[RankProgress]) -> RankProgress | None:
    """Return the rank with the lowest step; of several, the rank inactive for the longest time."""
    return min(
        reporting_ranks(progress),
        key=lambda rank: (rank.step, -rank.inactive_s, rank.rank),
        default=None,
    )


def describe_hang(progress: Iterable[RankProgress], limit: float) -> str:
    """Return one line with the slowest rank, the steps of the other ranks, and the limit."""
    ranks = reporting_ranks(progress)
    slowest = slowest_rank(ranks)
    if slowest is None:
        return f"hung: no worker made a step within {limit:.1f} s (hang, --hang-timeout)"
    other_steps = sorted({rank.step for rank in ranks if rank.rank != slowest.rank})
    others = ""
    if other_steps == [slowest.step]:
        others = "; the others are at the same step, and the stacks show for which rank they wait"
    elif other_steps:
        first, last = other_steps[0], other_steps[-1]
        steps = f"{first}" if first == last else f"{first} to {last}"
        others = f"; the others are at step {steps}".replace(str(NO_STEP), "none")
    return f"hung: {slowest}{others}; the limit is {limit:.1f} s (hang, --hang-timeout)"


def encode_progress(progress: Iterable[RankProgress]) -> bytes:
    """Encode the progress of a node's ranks for the other nodes."""
    return encode(tuple(progress))


def decode_progress(data: bytes) -> list[RankProgress]:
    """Decode the progress that a node has published.

    Returns an empty list if the data are invalid.
    """
    ranks = decode(RankProgressList, data) or ()
    return [attrs.evolve(rank, host=rank.host[:MAX_HOST_CHARS]) for rank in ranks]


@attrs.frozen
class DumpStacks(AgentCommand):
    """Make the workers write their Python stacks."""


HangTransition = tuple["HangDetector", tuple[AgentCommand, ...]]


@attrs.frozen
class HangDetector:
    """Observes one group. If a worker hangs, it collects evidence before any worker is stopped.

    Each method takes an event, and returns the next state. Times are on this machine's monotonic
    clock.
    """

    limits: HangLimits
    host: str
    ranks: Mapping[int, int]  # global ranks by local rank
    node_rank: int
    num_peers: int  # other nodes that can report
    started_at: float  # when the workers were started, or could run again after a pause
    next_poll_at: float = attrs.field(
        default=attrs.Factory(lambda self: self.started_at, takes_self=True)
    )
    is_subscribed: bool = False  # to the reports of other nodes
    suspect: Inactivity | None = None  # the worker that hangs
    inactive_since: float = 0.0  # when the suspect was active last
    own_progress: Sequence[RankProgress] = ()  # of this node's ranks, when the hang was found
    stacks: Mapping[int, str] | None = None  # by local rank, None until they are written
    peer_deadline: float = 0.0  # end of the wait for the other nodes
    peer_reports: Sequence[Sequence[RankProgress]] = ()  # of each other node

    def on_peer_reports(self, messages: Mapping[str, bytes]) -> HangDetector:
        """Store the progress that the other nodes have published."""
        own = str(self.node_rank)
        reports = [decode_progress(data) for node, data in messages.items() if node != own]
        return attrs.evolve(self, peer_reports=reports)

    def no_steps_warning(self, now: float, heartbeats: Mapping[int, Heartbeat]) -> str:
        """Return a warning if no worker reports steps, or an empty string.

        The warning is returned only after half of the limit for the first step.
        """
        seconds = now - self.started_at
        is_early = seconds < self.limits.timeout_for(Heartbeat()) * SUSPECT_FRACTION
        has_steps = any(heartbeat.num_steps for heartbeat in heartbeats.values())
        if not heartbeats or is_early or has_steps:
            return ""
        return (
            f"no worker of this node has reported a step for {seconds:.0f} s, and hangs are found "
            "by the steps that are reported (hang, --hang-timeout): call "
            "elasticlib.context().step(step) after each"
        )

    def on_stacks(self, now: float, stacks: Mapping[int, str]) -> HangTransition:
        """Store the stacks of the workers, and report the hang to the other nodes.

        The report waits for the stacks: a node that learns of the hang could stop the job while
        the slowest worker's stacks are being written.
        """
        detector = attrs.evolve(self, stacks=stacks, peer_deadline=now + PEER_REPORT_TIMEOUT_S)
        if not self.num_peers:
            return detector, ()
        report = encode_progress(self.own_progress)
        return detector, (Publish(HANG_TOPIC, str(self.node_rank), report),)

    def poll(self, now: float, heartbeats: Mapping[int, Heartbeat]) -> HangTransition:
        """React to the time, and to the workers' current heartbeats."""
        if self.suspect is not None:
            return self._report_hang_if_complete(self.suspect, now)
        if now < self.next_poll_at:
            return self, ()
        started_at, late_s = self.started_at, now - self.next_poll_at
        inactivity = longest_inactivity(now, started_at, heartbeats, self.limits)
        if inactivity is not None and late_s > inactivity.limit * PAUSE_FRACTION:
            started_at = now
            inactivity = longest_inactivity(now, started_at, heartbeats, self.limits)
        limit = self.limits.first_step_timeout if inactivity is None else inactivity.limit
        next_poll_at = now + min(1.0, limit / 8)
        detector = attrs.evolve(self, started_at=started_at, next_poll_at=next_poll_at)
        if inactivity is None or inactivity.fraction < SUSPECT_FRACTION:
            return detector, ()
        if inactivity.fraction >= 1 or self.peer_reports:
            return detector._start_collecting(now, inactivity, heartbeats)
        if self.is_subscribed or not self.num_peers:
            return detector, ()
        return attrs.evolve(detector, is_subscribed=True), (Subscribe(HANG_TOPIC),)

    def _start_collecting(
        self, now: float, inactivity: Inactivity, heartbeats: Mapping[int, Heartbeat]
    ) -> HangTransition:
        """Record which worker hangs, and request the stacks and the other nodes' reports."""
        progress = [
            RankProgress(
                self.ranks[local_rank],
                self.host,
                heartbeat.step,
                round(now - max(heartbeat.last_activity_at, self.started_at), 3),
                heartbeat.num_steps,
            )
            for local_rank, heartbeat in heartbeats.items()
            if heartbeat.is_attached
        ]
        inactive_since = now - inactivity.seconds
        detector = attrs.evolve(
            self, suspect=inactivity, inactive_since=inactive_since, own_progress=progress
        )
        return detector, (Subscribe(HANG_TOPIC), DumpStacks()) if self.num_peers else (
            DumpStacks(),
        )

    def _report_hang_if_complete(self, suspect: Inactivity, now: float) -> HangTransition:
        is_waiting = len(self.peer_reports) < self.num_peers and now < self.peer_deadline
        if self.stacks is None or is_waiting:
            return self, ()
        reason = describe_hang(self._all_progress, suspect.limit)
        return self, (HangDetected(reason, self.inactive_since, self.stack_report()),)

    def stack_report(self) -> str:
        """Return the stacks of those ranks of this node that are at the job's lowest step.

        The rarest stacks come first, because most ranks wait for the one that hangs.
        """
        ranks = reporting_ranks(self._all_progress)
        step = min((rank.step for rank in ranks), default=NO_STEP)
        at = "before the first step" if step == NO_STEP else f"at step {step}"
        slowest = {rank.rank for rank in ranks if rank.step == step}
        texts = {self.ranks[local_rank]: text for local_rank, text in (self.stacks or {}).items()}
        groups = group_stacks({rank: text for rank, text in texts.items() if rank in slowest})
        return "\n\n".join(
            f"the stacks of {format_ranks(group.ranks)}, {at}:\n{group.text}" for group in groups
        )

    @property
    def _all_progress(self) -> list[RankProgress]:
        return [*self.own_progress, *(rank for report in self.peer_reports for rank in report)]
