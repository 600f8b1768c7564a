"""Hang detector: finds workers that make no progress, and collects the evidence. Pure.

A worker hangs if it is inactive for longer than its own steps explain. In synchronous training all
ranks then make no progress, and most of them wait for one in a collective. The steps and the stacks
of all nodes show which one. If they do not, no rank is named.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..errors import RendezvousConfigError
from ..observe.formatting import format_ranks, group_stacks
from ..options import HangLimits
from ..rendezvous import store_layout
from ..workers.interface import NO_STEP, Heartbeat

MAX_HOST_CHARS = 200
PEER_REPORT_TIMEOUT_S = 3.0  # wait for the other nodes' reports after a hang was found
SUSPECT_FRACTION = 0.5  # of a limit; from here on, a hang on another node counts as one here

# A poll that is later than this fraction of a limit means that the job or its machine was paused.
# The workers could not run either, so their inactivity counts from then on.
PAUSE_FRACTION = 0.25


def timeout_for(limits: HangLimits, heartbeat: Heartbeat) -> float:
    """Return how long a worker with this heartbeat may be inactive, in seconds."""
    if heartbeat.num_steps == 0:
        return max(limits.timeout or 0.0, limits.first_step_timeout)
    if limits.timeout is not None:
        return limits.timeout
    durations = heartbeat.step_durations
    if len(durations) < limits.warmup_steps:
        return limits.first_step_timeout
    median_limit = limits.median_factor * statistics.median(durations)
    return max(limits.min_timeout, median_limit, limits.max_factor * max(durations))


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
            timeout_for(limits, heartbeat),
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
    node_rank: int = 0
    is_attached: bool = True  # the worker has called context()
    waits: bool | None = None  # the rank waits in a collective; None if that is unknown

    def __str__(self) -> str:
        at = "has made no step" if self.step == NO_STEP else f"is at step {self.step}"
        return f"rank {self.rank} on {self.host} {at}, inactive for {self.inactive_s:.1f} s"


RankProgressList = tuple[RankProgress, ...]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line \S+ in (?P<function>.*)$', re.MULTILINE)
# The function that called these says for what the rank waits.
_WAIT = re.compile(r"/(threading|queue|selectors)\.py$")
# In these files, a rank waits for other ranks,
_COLLECTIVES = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$"
    r"|/elasticlib/in_place/\w+\.py$"
)
_NO_COLLECTIVES = frozenset({"destroy_process_group", "_shutdown_backend", "_abort_process_group"})
# and in these, it may compute or wait for other ranks: DDP and FSDP communicate in the backward.
_UNCLEAR = re.compile(
    r"/torch/(autograd|cuda|distributed|nn/parallel)/[\w/]+\.py$"
    r"|/elasticlib/(checkpoint|logical|workers)/\w+\.py$"
)


def waits_in_collective(stack: str) -> bool | None:
    """Return whether a rank with this stack of `faulthandler` waits in a collective.

    Returns:
        None if the stack does not show it.
    """
    frames = (frame for frame in _FRAME.finditer(stack) if not _WAIT.search(frame["file"]))
    innermost = next(frames, None)
    if innermost is None:
        return None
    file, function = innermost["file"], innermost["function"]
    if _COLLECTIVES.search(file):
        return function not in _NO_COLLECTIVES
    return None if _UNCLEAR.search(file) else False


def reporting_ranks(progress: Iterable[RankProgress]) -> list[RankProgress]:
    """Return the ranks that report steps or may be in their first step.

    A rank without steps is left out if another rank has reported more than one step. As long as no
    rank has, the rank without steps may be in its first step, and the other ranks may wait for it.
    """
    ranks = [rank for rank in progress if rank.is_attached]
    has_two_steps = any(rank.num_steps > 1 for rank in ranks)
    return [rank for rank in ranks if rank.num_steps or not has_two_steps]


def find_hung_rank(
    progress: Iterable[RankProgress], *, num_missing: int = 0
) -> RankProgress | None:
    """Return the rank for which the others wait, or None if the evidence does not name one.

    A rank that waits in a collective is not the cause while another rank is elsewhere. Without
    such a difference, it is the rank that is behind all others.

    Args:
        progress: the progress of the known ranks.
        num_missing: nodes that have not reported theirs.
    """
    ranks = list(progress)
    suspects = [rank for rank in ranks if rank.waits is False]
    if len(suspects) == len(ranks) or not any(rank.waits for rank in ranks):
        suspects = reporting_ranks(ranks)
        if len(ranks) + num_missing > 1 and len({rank.step for rank in suspects}) == 1:
            return None
    lowest = min((rank.step for rank in suspects), default=NO_STEP)
    slowest = [rank for rank in suspects if rank.step == lowest]
    return slowest[0] if len(slowest) == 1 else None


def describe_hang(progress: Iterable[RankProgress], limit: float, *, num_missing: int = 0) -> str:
    """Return one line with the rank that hangs, the steps of the other ranks, and the limit.

    Args:
        progress: the progress of the known ranks.
        limit: the limit of inactivity in seconds.
        num_missing: nodes that have not reported theirs.
    """
    ranks = list(progress)
    hung, reporting = find_hung_rank(ranks, num_missing=num_missing), reporting_ranks(ranks)
    end = f"the limit is {limit:.1f} s (hang, --hang-timeout)"
    if num_missing:
        nodes = "1 node has" if num_missing == 1 else f"{num_missing} nodes have"
        end = f"{nodes} not reported; {end}"
    if not ranks:
        return f"hung: no worker made a step within {limit:.1f} s (hang, --hang-timeout)"
    if hung is not None:
        num_waiting = sum(rank.waits is True for rank in ranks if rank is not hung)
        if hung.waits is False and num_waiting:
            wait = "another rank waits" if num_waiting == 1 else f"{num_waiting} other ranks wait"
            return f"hung: {hung}, and is in no collective, while {wait} in one; {end}"
        return f"hung: {hung}{_describe_steps(hung.step, reporting)}; {end}"
    lowest = min((rank.step for rank in reporting), default=NO_STEP)
    slowest = [rank for rank in reporting if rank.step == lowest] or ranks
    who = str(slowest[0])
    if len(slowest) > 1:
        at = "have made no step" if lowest == NO_STEP else f"are at step {lowest}"
        seconds = max(rank.inactive_s for rank in slowest)
        numbers = format_ranks([rank.rank for rank in slowest])
        who = f"{numbers} {at}, inactive for up to {seconds:.1f} s"
    others = _describe_steps(lowest, reporting)
    all_wait = ": all wait in a collective" if all(rank.waits for rank in ranks) else ""
    return f"hung: {who}{others}; no rank stands out{all_wait}, and the stacks show more; {end}"


def _describe_steps(lowest: int, ranks: Iterable[RankProgress]) -> str:
    """Return the steps of the ranks that are beyond the lowest one, or an empty text."""
    steps = sorted({rank.step for rank in ranks if rank.step != lowest})
    if not steps:
        return ""
    first, last = steps[0], steps[-1]
    return f"; the others are at step {first}" + (f" to {last}" if last != first else "")


def encode_progress(progress: Iterable[RankProgress]) -> bytes:
    """Encode the progress of a node's ranks for the other nodes."""
    return store_layout.encode(tuple(progress))


def decode_progress(data: bytes) -> list[RankProgress]:
    """Decode the progress that a node has published.

    Returns an empty list if the data are invalid.
    """
    try:
        ranks = store_layout.decode(RankProgressList, data, "a published value")
    except RendezvousConfigError:
        return []
    return [attrs.evolve(rank, host=rank.host[:MAX_HOST_CHARS]) for rank in ranks]


@attrs.frozen
class HangFinding:
    """Workers make no progress."""

    reason: str
    inactive_since: float
    stacks: str = ""  # of the slowest rank, if it is on this node
    node_rank: int = -1  # group rank of the node whose worker hangs; -1 if the evidence names none
    rank: int = -1  # the worker's global rank
    host: str = ""  # name of that node's host


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
    suspect: Inactivity | None = None  # the worker that hangs
    inactive_since: float = 0.0  # when the suspect was active last
    own_progress: Sequence[RankProgress] = ()  # of this node's ranks, when the hang was found
    stacks: Mapping[int, str] | None = None  # by local rank, None until they are written
    peer_deadline: float = 0.0  # end of the wait for the other nodes
    peer_reports: Sequence[Sequence[RankProgress]] = ()  # of each other node

    @property
    def due_at(self) -> float:
        """The time of the next poll."""
        if self.suspect is None:
            return self.next_poll_at
        return float("inf") if self.stacks is None else self.peer_deadline

    def on_peer_reports(self, messages: Mapping[int, bytes]) -> HangDetector:
        """Store the progress that the other nodes have published, by node rank."""
        own = self.node_rank
        reports = [decode_progress(data) for node, data in messages.items() if node != own]
        return attrs.evolve(self, peer_reports=reports)

    def no_steps_warning(self, now: float, heartbeats: Mapping[int, Heartbeat]) -> str:
        """Return a warning if no worker reports steps, or an empty string.

        The warning is returned only after half of the limit for the first step.
        """
        seconds = now - self.started_at
        is_early = seconds < timeout_for(self.limits, Heartbeat()) * SUSPECT_FRACTION
        has_steps = any(heartbeat.num_steps for heartbeat in heartbeats.values())
        if not heartbeats or is_early or has_steps:
            return ""
        return (
            f"no worker of this node has reported a step for {seconds:.0f} s, and hangs are found "
            "by the steps that are reported (hang, --hang-timeout): call "
            "elasticlib.context().step(step) after each"
        )

    def on_stacks(self, now: float, stacks: Mapping[int, str]) -> tuple[HangDetector, bytes]:
        """Store the stacks of the workers. Return also what the other nodes must know.

        It is published after the stacks are there: a node that learns of the hang could stop the
        job while the slowest worker's stacks are being written.
        """
        texts = {self.ranks[local_rank]: text for local_rank, text in stacks.items()}
        progress = [
            attrs.evolve(rank, waits=waits_in_collective(texts.get(rank.rank, "")))
            for rank in self.own_progress
        ]
        detector = attrs.evolve(
            self,
            stacks=stacks,
            own_progress=progress,
            peer_deadline=now + (PEER_REPORT_TIMEOUT_S if self.num_peers else 0.0),
        )
        return detector, encode_progress(progress)

    def poll(
        self, now: float, heartbeats: Mapping[int, Heartbeat]
    ) -> tuple[HangDetector, HangFinding | bool]:
        """React to the time, and to the workers' current heartbeats.

        Returns:
            The next state; and True if the stacks of the workers are needed, or what was found.
        """
        if self.suspect is not None:
            return self, self._finding_if_complete(self.suspect, now) or False
        if now < self.next_poll_at:
            return self, False
        started_at, late_s = self.started_at, now - self.next_poll_at
        inactivity = longest_inactivity(now, started_at, heartbeats, self.limits)
        if inactivity is not None and late_s > inactivity.limit * PAUSE_FRACTION:
            started_at = now
            inactivity = longest_inactivity(now, started_at, heartbeats, self.limits)
        limit = self.limits.first_step_timeout if inactivity is None else inactivity.limit
        next_poll_at = now + min(1.0, limit / 8)
        detector = attrs.evolve(self, started_at=started_at, next_poll_at=next_poll_at)
        if inactivity is None or inactivity.fraction < SUSPECT_FRACTION:
            return detector, False
        if inactivity.fraction >= 1 or self.peer_reports:
            return detector._with_suspect(now, inactivity, heartbeats), True
        return detector, False

    def _with_suspect(
        self, now: float, inactivity: Inactivity, heartbeats: Mapping[int, Heartbeat]
    ) -> HangDetector:
        """Record which worker hangs, and the progress of all."""
        progress = [
            RankProgress(
                self.ranks[local_rank],
                self.host,
                heartbeat.step,
                round(now - max(heartbeat.last_activity_at, self.started_at), 3),
                heartbeat.num_steps,
                self.node_rank,
                heartbeat.is_attached,
            )
            for local_rank, heartbeat in heartbeats.items()
        ]
        inactive_since = now - inactivity.seconds
        return attrs.evolve(
            self, suspect=inactivity, inactive_since=inactive_since, own_progress=progress
        )

    def _finding_if_complete(self, suspect: Inactivity, now: float) -> HangFinding | None:
        is_waiting = len(self.peer_reports) < self.num_peers and now < self.peer_deadline
        if self.stacks is None or is_waiting:
            return None
        progress, stacks = self._all_progress, self.stack_report()
        num_missing = max(0, self.num_peers - len(self.peer_reports))
        reason = describe_hang(progress, suspect.limit, num_missing=num_missing)
        finding = HangFinding(reason, self.inactive_since, stacks)
        hung = find_hung_rank(progress)
        if hung is None or num_missing:
            # The ranks of a node that has not reported may be the cause.
            return finding
        return attrs.evolve(finding, node_rank=hung.node_rank, rank=hung.rank, host=hung.host)

    def stack_report(self) -> str:
        """Return the stacks of those ranks of this node that hang or are at the job's lowest step.

        The rarest stacks come first, because most ranks wait for the one that hangs.
        """
        ranks = reporting_ranks(self._all_progress)
        step = min((rank.step for rank in ranks), default=NO_STEP)
        at = "before the first step" if step == NO_STEP else f"at step {step}"
        slowest = {rank.rank for rank in ranks if rank.step == step}
        slowest |= {hung.rank for hung in [find_hung_rank(self._all_progress)] if hung}
        texts = {self.ranks[local_rank]: text for local_rank, text in (self.stacks or {}).items()}
        groups = group_stacks({rank: text for rank, text in texts.items() if rank in slowest})
        return "\n\n".join(
            f"the stacks of {format_ranks(group.ranks)}, {at}:\n{group.text}" for group in groups
        )

    @property
    def _all_progress(self) -> list[RankProgress]:
        return [*self.own_progress, *(rank for report in self.peer_reports for rank in report)]
