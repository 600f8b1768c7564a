"""Stop procedure of one group of workers: its stages, and the call at which all ranks stop. Pure.

With a notice, all ranks of the job stop at the same call of `should_stop`. Each node proposes the
first call at which its own workers can still stop. The nodes agree on the largest proposal. No
worker has passed that call: each one was blocked in an earlier call, or will call again. Ranks
count their calls alike, because they make their steps together.

Workers that do not exit by themselves get SIGTERM and then SIGKILL, see `StopTimeouts`. Workers
that can regroup have stopped once they have left their group: at the agreed call, or when they
learn that the group is over.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

import attrs

from ..errors import ConfigError
from ..workers.interface import DRAIN, PREEMPTED, RESIZE, RESTART, STOP_REASONS, StopNotice
from .policy import (
    AgentCommand,
    LeaveGroup,
    Publish,
    SignalWorkers,
    StopAtCall,
    Subscribe,
    WorkersStopped,
    decode,
    encode,
)

STOP_TOPIC = "stop/"  # the StopProposal of each node, by its rank
GROUP_BROKEN_TOPIC = "over/"  # nodes whose workers leave at once, because a collective failed
_URGENCY = (PREEMPTED, DRAIN, RESTART, RESIZE)  # most urgent first


class StopStage(enum.IntEnum):
    """A stage of the stop sequence. It follows only from the time since the stop was requested."""

    NOTICE = 0  # workers have the notice to save and exit
    TERM = 1  # SIGTERM was sent
    KILL = 2  # SIGKILL was sent
    GIVE_UP = 3  # a worker still exists


@attrs.frozen
class StopTimeouts:
    """Timeouts of the stop sequence, in seconds.

    Attributes:
        shutdown_timeout: The delay between SIGTERM and SIGKILL.
        kill_timeout: How long a worker may exist after SIGKILL.
        notice_timeout: The delay between a stop notice and SIGTERM, for workers that call
            `should_stop`.

    Raises:
        ConfigError: A timeout is negative.
    """

    shutdown_timeout: float = 30.0
    kill_timeout: float = 10.0
    notice_timeout: float = 0.0

    def __attrs_post_init__(self) -> None:
        if min(self.shutdown_timeout, self.kill_timeout, self.notice_timeout) < 0:
            raise ConfigError(
                f"stop timeouts must be seconds >= 0, got notice_timeout={self.notice_timeout}, "
                f"shutdown_timeout={self.shutdown_timeout} "
                f"and kill_timeout={self.kill_timeout}"
            )

    def with_notice(self, seconds: float) -> StopTimeouts:
        """Return these timeouts with another notice timeout.

        Args:
            seconds: How long notified workers may take to save and exit.
        """
        return attrs.evolve(self, notice_timeout=seconds)

    def stage_at(self, elapsed: float) -> StopStage:
        """Return the stage of a stop.

        Args:
            elapsed: Seconds since the stop was requested.
        """
        for stage in (StopStage.NOTICE, StopStage.TERM, StopStage.KILL):
            if elapsed < self._end_of_stage(stage):
                return stage
        return StopStage.GIVE_UP

    def time_to_next_stage(self, elapsed: float) -> float:
        """Return the seconds until the next stage; 0 in the last one.

        Args:
            elapsed: Seconds since the stop was requested.
        """
        return max(0.0, self._end_of_stage(min(self.stage_at(elapsed), StopStage.KILL)) - elapsed)

    def _end_of_stage(self, stage: StopStage) -> float:
        return sum((self.notice_timeout, self.shutdown_timeout, self.kill_timeout)[: stage + 1])


@attrs.frozen
class StopProposal:
    """The call of `should_stop` at which to stop: one node's proposal, or what all agreed on."""

    call: int | None  # None: the workers of the node cannot stop at a call
    reason: str = RESIZE  # one of STOP_REASONS
    grace_s: float = 0.0  # time that is left to save


# Published if workers are stopped without a notice, or if a node has stopped waiting for a common
# call, so that no other node waits for its proposal.
NO_COMMON_CALL = StopProposal(None)
# Published if all workers of the node have succeeded, and any call is acceptable.
STOP_AT_ANY_CALL = StopProposal(1, RESIZE, 1e6)


def agree_on_stop(proposals: Mapping[int, StopProposal], num_nodes: int) -> StopProposal | None:
    """Combine the proposals of all nodes.

    Args:
        proposals: the known proposals by node rank.
        num_nodes: the number of nodes of the generation.

    Returns:
        The largest call, the most urgent reason and the shortest time. NO_COMMON_CALL if a node
        cannot stop at a call. None while proposals are missing.
    """
    if any(proposal.call is None for proposal in proposals.values()):
        return NO_COMMON_CALL
    if len(proposals) < num_nodes:
        return None
    return StopProposal(
        max(proposal.call for proposal in proposals.values() if proposal.call is not None),
        most_urgent(*(proposal.reason for proposal in proposals.values())),
        min(proposal.grace_s for proposal in proposals.values()),
    )


def most_urgent(*reasons: str) -> str:
    """Return the most urgent of these stop reasons."""
    return min(reasons, key=_URGENCY.index)


def decode_proposal(data: bytes) -> StopProposal:
    """Decode a published proposal. Invalid data counts as NO_COMMON_CALL."""
    proposal = decode(StopProposal, data)
    if proposal is None or proposal.reason not in STOP_REASONS:
        return NO_COMMON_CALL
    return attrs.evolve(proposal, grace_s=max(0.0, proposal.grace_s))


def propose_stop(node_rank: int, proposal: StopProposal) -> Publish:
    """Return the command that publishes a proposal, unless the node has published one before."""
    return Publish(STOP_TOPIC, str(node_rank), encode(proposal), only_if_absent=True)


StopTransition = tuple["StopProcedure", tuple[AgentCommand, ...]]


@attrs.frozen
class StopProcedure:
    """The stop of one group. Each method takes an event, and returns the next state."""

    timeouts: StopTimeouts
    node_rank: int = 0
    num_nodes: int = 1
    is_peer_reachable: bool = False  # messages to the other nodes can be published
    is_coordinated: bool = False  # workers can stop at a call that `StopAtCall` gives them
    regroup_grace_s: float = 0.0  # time to leave the group; 0 if no worker can regroup
    is_leaving: bool = False  # the workers know that their group is over
    started_at: float = 0.0  # start of the stages
    stage: StopStage = StopStage.NOTICE
    is_killed_early: bool = False  # a SIGINT has ended the time after SIGTERM
    notice: StopNotice | None = None  # the current notice, None without one
    deadline: float = 0.0  # end of the time to agree on a call
    own_proposal: StopProposal | None = None  # what this node has published
    agreement: StopProposal | None = None  # None until there is one
    proposals: Mapping[int, StopProposal] = attrs.field(factory=dict)  # of all nodes, by rank

    @property
    def is_in_notice(self) -> bool:
        """True while the workers may save and exit by themselves."""
        return self.notice is not None and self.stage is StopStage.NOTICE

    @property
    def is_negotiating(self) -> bool:
        """True while the nodes have not agreed on a call."""
        return self.is_coordinated and self.notice is not None and self.agreement is None

    @property
    def needs_proposal(self) -> bool:
        """True while the first call at which the workers here can stop is unknown."""
        return self.is_negotiating and self.own_proposal is None

    def time_to_next_stage(self, now: float) -> float:
        """Return the seconds until the next stage."""
        return self.timeouts.time_to_next_stage(now - self.started_at)

    def start(self, now: float, notice: StopNotice | None) -> StopTransition:
        """Start the procedure. The workers have received `notice`, or are stopped without one."""
        if notice is None:
            procedure = attrs.evolve(self, own_proposal=NO_COMMON_CALL)
            published = self._publish_proposal(NO_COMMON_CALL)
            if self.regroup_grace_s:
                return procedure._start_leaving(now), (LeaveGroup(), *published)
            timeouts = self.timeouts.with_notice(0.0)
            stage = StopStage.TERM
            procedure = attrs.evolve(procedure, timeouts=timeouts, started_at=now, stage=stage)
            return procedure, (SignalWorkers(), *published)
        procedure = attrs.evolve(
            self,
            timeouts=self.timeouts.with_notice(notice.grace_s),
            started_at=now,
            notice=notice,
            deadline=now + notice.grace_s,
        )
        return procedure, self._subscribe_to_broken_group()

    def shorten_notice(self, now: float, notice: StopNotice | None) -> StopTransition:
        """Replace the workers' notice, or end their time to save if `notice` is None.

        The more urgent reason and the shorter time of the two notices apply. A proposal that this
        node has published stays valid. Nothing happens if the workers have no notice any more.
        """
        if self.notice is None or self.stage is not StopStage.NOTICE:
            return self, ()
        if notice is None and self.regroup_grace_s:
            broken = Publish(GROUP_BROKEN_TOPIC, str(self.node_rank), b"")
            commands = (LeaveGroup(), broken) if self._has_peers else (LeaveGroup(),)
            return self._start_leaving(now), commands
        if notice is None:
            return self.escalate(now), ()
        remaining_s = self.time_to_next_stage(now)
        grace_s = min(remaining_s, notice.grace_s)
        notice = StopNotice(most_urgent(self.notice.reason, notice.reason), grace_s)
        procedure = attrs.evolve(
            self,
            started_at=self.started_at - (remaining_s - grace_s),
            notice=notice,
            deadline=min(self.deadline, now + grace_s),
        )
        return procedure, (StopAtCall(None, notice),)

    def on_group_broken(self, now: float, nodes: Collection[str]) -> StopTransition:
        """React to nodes that have reported a failed collective in the group."""
        if nodes and self.regroup_grace_s and self.is_in_notice:
            return self._start_leaving(now), (LeaveGroup(),)
        return self, ()

    def allow_regroup(self, regroup_grace_s: float) -> StopTransition:
        """Set the time to leave the group, because workers may be able to regroup only now."""
        procedure = attrs.evolve(self, regroup_grace_s=regroup_grace_s)
        return procedure, procedure._subscribe_to_broken_group()

    def cancel_regroup(self, now: float) -> StopProcedure:
        """Stop all workers, also those that could regroup."""
        waits_for_leaving = self.is_leaving and self.stage is StopStage.NOTICE
        procedure = self.escalate(now) if waits_for_leaving else self
        return attrs.evolve(procedure, regroup_grace_s=0.0)

    def escalate(self, now: float) -> StopProcedure:
        """Enter the next stage now: SIGTERM after a notice, SIGKILL after SIGTERM.

        If the time of the current stage is over already, the next stage keeps its full time.
        """
        is_overdue = self.stage < self.timeouts.stage_at(now - self.started_at)
        if self.stage >= StopStage.KILL or is_overdue:
            return self
        started_at = self.started_at - self.time_to_next_stage(now)
        is_killed_early = self.stage is StopStage.TERM
        return attrs.evolve(self, is_killed_early=is_killed_early, started_at=started_at)

    def on_proposals(self, messages: Mapping[str, bytes] | None) -> StopProcedure:
        """Store the proposals of all nodes. None: the other nodes cannot be reached."""
        if messages is None:
            return attrs.evolve(self, is_peer_reachable=False)
        proposals = {int(rank): decode_proposal(data) for rank, data in messages.items()}
        return attrs.evolve(self, proposals=proposals)

    def poll(self, now: float, running: Collection[str], call: int | None) -> StopTransition:
        """React to the time.

        Args:
            now: the time on the clock of `start`.
            running: the names of the workers that have not stopped.
            call: the first call at which the workers here can stop, if it is known.
        """
        procedure, negotiation = self._negotiate(now, call)
        procedure, stages = procedure._advance_stage(now, ", ".join(running))
        procedure, withdrawal = procedure._withdraw()
        return procedure, (*negotiation, *stages, *withdrawal)

    def _negotiate(self, now: float, call: int | None) -> StopTransition:
        """Publish this node's proposal once it is known, and act on the nodes' agreement."""
        if self.notice is None or not self.is_negotiating:
            return self, ()
        has_failed = now >= self.deadline or (self.num_nodes > 1 and not self.is_peer_reachable)
        own = self.own_proposal
        commands: tuple[AgentCommand, ...] = ()
        if own is None and call is not None and not has_failed:
            own = StopProposal(call, self.notice.reason, self.deadline - now)
            commands = self._publish_proposal(own)
        agreement = own if self.num_nodes == 1 else agree_on_stop(self.proposals, self.num_nodes)
        if own is None or agreement is None:
            agreement = NO_COMMON_CALL if has_failed else None
        procedure = attrs.evolve(self, own_proposal=own, agreement=agreement)
        if agreement is None:
            return procedure, commands
        if agreement.call is not None:
            # The workers of a node that leaves save and exit. Workers that regroup continue,
            # whatever the reason of the other nodes is.
            reason = self.notice.reason if self.regroup_grace_s else agreement.reason
            notice = StopNotice(reason, agreement.grace_s)
            return procedure, (*commands, StopAtCall(agreement.call, notice))
        if self.is_in_notice and self.regroup_grace_s:
            return procedure._start_leaving(now), (*commands, LeaveGroup())
        return (procedure.escalate(now) if self.is_in_notice else procedure), commands

    def _advance_stage(self, now: float, running: str) -> StopTransition:
        """Send the signal of a stage that has begun, or report that the procedure has finished."""
        if not running:
            return self, (WorkersStopped(),)
        timeouts, started_at = self.timeouts, self.started_at
        stage = timeouts.stage_at(now - started_at)
        if stage is StopStage.GIVE_UP and self.stage < StopStage.KILL:
            # SIGKILL is late, because the loop was blocked or the timeouts became shorter. The
            # workers have the whole time to end after it.
            stage = StopStage.KILL
            started_at = now - timeouts.notice_timeout - timeouts.shutdown_timeout
        commands: list[AgentCommand] = []
        if self.stage < StopStage.TERM <= stage:
            commands.append(
                SignalWorkers(f"{self._explain_notice_end()}, sending SIGTERM: {running}")
            )
        if self.stage < StopStage.KILL <= stage:
            late = f"still running {timeouts.shutdown_timeout:g} s after SIGTERM"
            reason = "SIGINT arrived" if self.is_killed_early else late
            commands.append(SignalWorkers(f"{reason}, killing: {running}", force=True))
        if stage is StopStage.GIVE_UP:
            commands.append(WorkersStopped(unkillable=running))
        return attrs.evolve(self, stage=stage, started_at=started_at), tuple(commands)

    def _withdraw(self) -> StopTransition:
        """Publish that there is no common call, if this node has stopped waiting for one.

        Otherwise the workers of the other nodes would wait for this node in `should_stop` until
        their time to save is over. A call that this node has proposed is replaced, because its
        workers get a signal before they reach it.
        """
        has_given_up = self.is_leaving or self.stage > StopStage.NOTICE
        is_open = self.agreement is None or self.agreement.call is None
        if not (self.is_coordinated and has_given_up and is_open):
            return self, ()
        is_known = agree_on_stop(self.proposals, self.num_nodes) == NO_COMMON_CALL
        if is_known or self.own_proposal == NO_COMMON_CALL:
            return self, ()
        withdrawal = propose_stop(self.node_rank, NO_COMMON_CALL)
        withdrawal = attrs.evolve(withdrawal, only_if_absent=False)
        procedure = attrs.evolve(self, own_proposal=NO_COMMON_CALL)
        return procedure, (withdrawal,) if self._has_peers else ()

    def _explain_notice_end(self) -> str:
        """Return why the workers do not get more time before SIGTERM."""
        if self.is_leaving:
            return f"still in their group {self.regroup_grace_s:g} s after it was over"
        if self.agreement == NO_COMMON_CALL:
            return "the workers cannot all stop at one step to save"
        return "still running after the time to save"

    def _start_leaving(self, now: float) -> StopProcedure:
        timeouts = self.timeouts.with_notice(self.regroup_grace_s)
        return attrs.evolve(self, timeouts=timeouts, started_at=now, notice=None, is_leaving=True)

    @property
    def _has_peers(self) -> bool:
        return self.num_nodes > 1 and self.is_peer_reachable

    def _publish_proposal(self, proposal: StopProposal) -> tuple[AgentCommand, ...]:
        if not self._has_peers:
            return ()
        publish = propose_stop(self.node_rank, proposal)
        # Without a call of its own, this node does not need the proposals of the others.
        return (publish,) if proposal.call is None else (publish, Subscribe(STOP_TOPIC))

    def _subscribe_to_broken_group(self) -> tuple[AgentCommand, ...]:
        uses_topic = self.regroup_grace_s > 0 and self._has_peers
        return (Subscribe(GROUP_BROKEN_TOPIC),) if uses_topic else ()
