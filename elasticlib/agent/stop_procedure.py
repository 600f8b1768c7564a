"""How one group of workers is stopped: the ladder, and the call at which all ranks stop. Pure.

Each node says the first call of `should_stop` at which its own workers all can stop; the last of
these is one that no worker has passed, whatever collectives tie them together, for each of them has
been held before it or will ask again. Ranks count their calls alike, as they take their steps
together. Whoever does not stop there climbs the ladder, by the time alone.

Workers that can go on in another group have stopped once they are out of theirs: either at that
call, or when they are told that the group is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from ..workers.interface import DRAIN, PREEMPTED, RESIZE, STOP_REASONS, StopNotice
from ..workers.spec import StopStage, StopTimeouts
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

STOP = "stop/"
"""What is posted under it: the needs of the nodes, each under its rank."""
OVER = "over/"
"""What is posted under it: by each node whose workers were to stop where all do, and leave their
group at once instead, as it has broken."""
_URGENCY = (PREEMPTED, DRAIN, RESIZE)


@attrs.frozen
class StopProposal:
    """What one node says. call: the first at which it can stop; None if its workers do not ask.
    reason: as in a notice; seconds: that are left to it."""

    call: int | None
    reason: str = RESIZE
    grace_s: float = 0.0


NO_COMMON_CALL = StopProposal(None)
"""Said where workers are stopped without a notice, so that the other nodes wait for nothing."""
STOP_AT_ANY_CALL = StopProposal(1, RESIZE, 1e6)
"""Said where all workers have succeeded, and can stop wherever the others do."""


def agree_on_stop(needs: Mapping[int, StopProposal], nodes: int) -> StopProposal | None:
    """What all stop at, once all nodes (by rank) have spoken; None while some have not.

    Its call is None where there can be no such call. The reason is the most urgent that a node
    has, and the time is the shortest.
    """
    if any(need.call is None for need in needs.values()):
        return NO_COMMON_CALL
    if len(needs) < nodes:
        return None
    calls = [need.call for need in needs.values() if need.call is not None]
    return StopProposal(
        max(calls),
        most_urgent(*(need.reason for need in needs.values())),
        min(need.grace_s for need in needs.values()),
    )


def most_urgent(*reasons: str) -> str:
    """The most urgent of these."""
    return min(reasons, key=_URGENCY.index)


def decode_proposal(data: bytes) -> StopProposal:
    """What cannot be read is no agreement."""
    need = decode(StopProposal, data)
    if need is None or need.reason not in STOP_REASONS:
        return NO_COMMON_CALL
    return attrs.evolve(need, grace_s=max(0.0, need.grace_s))


def propose_stop(node: int, need: StopProposal) -> Publish:
    """Tell the other nodes, unless this one has said something before."""
    return Publish(STOP, str(node), encode(need), only_if_absent=True)


StopTransition = tuple["StopProcedure", tuple[AgentCommand, ...]]


@attrs.frozen
class StopProcedure:
    """One group on its way out; each method takes an event, with the time at which it came.

    ladder: as it is climbed. node: the rank of this one of so many nodes; reachable: whether the
    others can be told. keep: where the workers go on in another group, seconds for them to leave
    this one when it is over; else 0. leaving: they have been told that it is. since: when the climb
    began. notice: what the workers were last given; None
    where they are stopped without. deadline: until when they may agree on a call. said: what this
    node told the others of it; needs: what all nodes have said; outcome: what came of it, None
    until then.
    """

    timeouts: StopTimeouts
    node_rank: int = 0
    num_nodes: int = 1
    is_peer_reachable: bool = False
    is_coordinated: bool = False
    regroup_grace_s: float = 0.0
    is_leaving: bool = False
    started_at: float = 0.0
    stage: StopStage = StopStage.NOTICE
    was_escalated: bool = False
    notice: StopNotice | None = None
    deadline: float = 0.0
    own_proposal: StopProposal | None = None
    agreement: StopProposal | None = None
    proposals: Mapping[int, StopProposal] = attrs.field(factory=dict)

    @property
    def is_in_notice(self) -> bool:
        """Whether the workers have a notice, and may save and end by themselves."""
        return self.notice is not None and self.stage is StopStage.NOTICE

    @property
    def is_negotiating(self) -> bool:
        """Whether they have a notice and are to agree at which call to stop, and have not yet."""
        return self.is_coordinated and self.notice is not None and self.agreement is None

    @property
    def needs_proposal(self) -> bool:
        """Whether it is still to be found out at which call the workers here can stop."""
        return self.is_negotiating and self.own_proposal is None

    def time_to_next_stage(self, now: float) -> float:
        """Seconds until the next rung."""
        return self.timeouts.time_to_next_stage(now - self.started_at)

    def start(self, now: float, notice: StopNotice | None) -> StopTransition:
        """Start to climb; the workers have just heard the notice, or are stopped without."""
        if notice is None and self.regroup_grace_s:
            return self._start_leaving(now), (LeaveGroup(), *self._propose(NO_COMMON_CALL))
        if notice is None:
            plain = self.timeouts.with_notice(0.0)
            stopping = attrs.evolve(self, timeouts=plain, started_at=now, stage=StopStage.TERM)
            return stopping, (SignalWorkers(), *self._propose(NO_COMMON_CALL))
        stopping = attrs.evolve(
            self,
            timeouts=self.timeouts.with_notice(notice.grace_s),
            started_at=now,
            notice=notice,
            deadline=now + notice.grace_s,
        )
        return stopping, (Subscribe(OVER),) if self.regroup_grace_s and self._has_peers else ()

    def shorten_notice(self, now: float, notice: StopNotice | None) -> StopTransition:
        """Those with a notice get this one, if it leaves them less time; None: they get no more.

        The more urgent reason and the shorter time hold, unless the other nodes have been told
        already, who would go by another answer.
        """
        if self.notice is None or self.stage is not StopStage.NOTICE:
            return self, ()
        if notice is None:
            post = (Publish(OVER, str(self.node_rank), b""),) if self._has_peers else ()
            return (
                (self._start_leaving(now), (LeaveGroup(), *post))
                if self.regroup_grace_s
                else (self.escalate(now), ())
            )
        left, reason = self.time_to_next_stage(now), most_urgent(self.notice.reason, notice.reason)
        notice = attrs.evolve(notice, grace_s=min(left, notice.grace_s), reason=reason)
        stopping = attrs.evolve(
            self,
            started_at=self.started_at - (left - notice.grace_s),
            notice=notice,
            deadline=min(self.deadline, now + notice.grace_s),
        )
        return stopping, (StopAtCall(None, notice),)

    def on_group_broken(self, now: float, nodes: Collection[str]) -> StopTransition:
        """These have said that the group has broken."""
        breaks = nodes and self.regroup_grace_s and self.is_in_notice
        return (self._start_leaving(now), (LeaveGroup(),)) if breaks else (self, ())

    def _start_leaving(self, now: float) -> StopProcedure:
        """The workers are told that their group is over."""
        ladder = self.timeouts.with_notice(self.regroup_grace_s)
        return attrs.evolve(self, timeouts=ladder, started_at=now, notice=None, is_leaving=True)

    def allow_regroup(self, regroup_grace_s: float) -> StopTransition:
        """The workers have a notice, and some of them can regroup if the time is not 0."""
        procedure = attrs.evolve(self, regroup_grace_s=regroup_grace_s)
        return procedure, (Subscribe(OVER),) if regroup_grace_s and self._has_peers else ()

    def cancel_regroup(self, now: float) -> StopProcedure:
        """Nobody goes on in another group."""
        stopping = (
            self.escalate(now) if self.is_leaving and self.stage is StopStage.NOTICE else self
        )
        return attrs.evolve(stopping, regroup_grace_s=0.0)

    def escalate(self, now: float) -> StopProcedure:
        """Do without what is left of this rung: a notice becomes SIGTERM, that SIGKILL. Where the
        rung's time is up already, the next one has all of its own."""
        if self.stage >= StopStage.KILL or self.stage < self.timeouts.stage_at(
            now - self.started_at
        ):
            return self
        return attrs.evolve(
            self, was_escalated=True, started_at=self.started_at - self.time_to_next_stage(now)
        )

    def on_proposals(self, posts: Mapping[str, bytes] | None) -> StopProcedure:
        """This is what the nodes have posted; None: they cannot be asked."""
        if posts is None:
            return attrs.evolve(self, is_peer_reachable=False)
        needs = {int(rank): decode_proposal(value) for rank, value in posts.items()}
        return attrs.evolve(self, proposals=needs)

    def poll(self, now: float, running: Collection[str], call: int | None) -> StopTransition:
        """Time goes by; `running` names the workers, who can stop at `call`, if it is known."""
        stopping, agreeing = self._negotiate(now, call)
        stopping, climbing = stopping._advance_stage(now, ", ".join(running))
        return stopping, (*agreeing, *climbing)

    def _negotiate(self, now: float, call: int | None) -> StopTransition:
        if self.notice is None or not self.is_negotiating:
            return self, ()
        lost = now >= self.deadline or (self.num_nodes > 1 and not self.is_peer_reachable)
        said = self.own_proposal
        telling: tuple[AgentCommand, ...] = ()
        if said is None and call is not None and not lost:
            said = StopProposal(call, self.notice.reason, self.deadline - now)
            telling = self._propose(said)
        found = said if self.num_nodes == 1 else agree_on_stop(self.proposals, self.num_nodes)
        if said is None or found is None:
            found = NO_COMMON_CALL if lost else None
        stopping = attrs.evolve(self, own_proposal=said, agreement=found)
        if found is None:
            return stopping, telling
        if found.call is not None:
            # Those of a node that leaves save and end; ours go on, whatever others stop for.
            reason = self.notice.reason if self.regroup_grace_s else found.reason
            return stopping, (*telling, StopAtCall(found.call, StopNotice(reason, found.grace_s)))
        if self.is_in_notice and self.regroup_grace_s:
            return stopping._start_leaving(now), (*telling, LeaveGroup())
        return (stopping.escalate(now) if self.is_in_notice else stopping), telling

    def _advance_stage(self, now: float, running: str) -> StopTransition:
        if not running:
            return self, (WorkersStopped(),)
        rung = self.timeouts.stage_at(now - self.started_at)
        commands: list[AgentCommand] = []
        if self.stage < StopStage.TERM <= rung:
            why = "still there after they were asked to save"
            if self.is_leaving:
                why = f"still in their group {self.regroup_grace_s:g} s after it was over"
            elif self.agreement == NO_COMMON_CALL:
                why = "the workers cannot all stop at one step to save"
            commands.append(SignalWorkers(f"{why}, sending SIGTERM: {running}"))
        if self.stage < StopStage.KILL <= rung:
            late = f"still there after {self.timeouts.shutdown_timeout:g} s"
            said = "did not end in time" if self.was_escalated else late
            commands.append(SignalWorkers(f"{said}, killing: {running}", force=True))
        if rung is StopStage.GIVE_UP:
            commands.append(WorkersStopped(unkillable=running))
        return attrs.evolve(self, stage=rung), tuple(commands)

    @property
    def _has_peers(self) -> bool:
        return self.num_nodes > 1 and self.is_peer_reachable

    def _propose(self, need: StopProposal) -> tuple[AgentCommand, ...]:
        return (propose_stop(self.node_rank, need), Subscribe(STOP)) if self._has_peers else ()
