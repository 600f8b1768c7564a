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

from ..workers.interface import DRAIN, PREEMPTED, REASONS, RESIZE, Notice
from ..workers.spec import StopStage, StopTimeouts
from .policy import (
    Command,
    EndWorkers,
    Gather,
    GroupStopped,
    LeaveGroup,
    Post,
    StopAt,
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
class Need:
    """What one node says. call: the first at which it can stop; None if its workers do not ask.
    reason: as in a notice; seconds: that are left to it."""

    call: int | None
    reason: str = RESIZE
    seconds: float = 0.0


NO_CALL = Need(None)
"""Said where workers are stopped without a notice, so that the other nodes wait for nothing."""
ANY_CALL = Need(1, RESIZE, 1e6)
"""Said where all workers have succeeded, and can stop wherever the others do."""


def agreed(needs: Mapping[int, Need], nodes: int) -> Need | None:
    """What all stop at, once all nodes (by rank) have spoken; None while some have not.

    Its call is None where there can be no such call. The reason is the most urgent that a node
    has, and the time is the shortest.
    """
    if any(need.call is None for need in needs.values()):
        return NO_CALL
    if len(needs) < nodes:
        return None
    calls = [need.call for need in needs.values() if need.call is not None]
    return Need(
        max(calls),
        more_urgent(*(need.reason for need in needs.values())),
        min(need.seconds for need in needs.values()),
    )


def more_urgent(*reasons: str) -> str:
    """The most urgent of these."""
    return min(reasons, key=_URGENCY.index)


def decode_need(data: bytes) -> Need:
    """What cannot be read is no agreement."""
    need = decode(Need, data)
    if need is None or need.reason not in REASONS:
        return NO_CALL
    return attrs.evolve(need, seconds=max(0.0, need.seconds))


def post_need(node: int, need: Need) -> Post:
    """Tell the other nodes, unless this one has said something before."""
    return Post(STOP, str(node), encode(need), first=True)


Climb = tuple["Stopping", tuple[Command, ...]]


@attrs.frozen
class Stopping:
    """One group on its way out; each method takes an event, with the time at which it came.

    ladder: as it is climbed. node: the rank of this one of so many nodes; reachable: whether the
    others can be told. keep: where the workers go on in another group, seconds for them to leave
    this one when it is over; else 0. leaving: they have been told that it is. since: when the climb
    began. notice: what the workers were last given; None
    where they are stopped without. deadline: until when they may agree on a call. said: what this
    node told the others of it; needs: what all nodes have said; outcome: what came of it, None
    until then.
    """

    ladder: StopTimeouts
    node: int = 0
    nodes: int = 1
    reachable: bool = False
    agrees: bool = False
    keep: float = 0.0
    leaving: bool = False
    since: float = 0.0
    rung: StopStage = StopStage.NOTICE
    hurried: bool = False
    notice: Notice | None = None
    deadline: float = 0.0
    said: Need | None = None
    outcome: Need | None = None
    needs: Mapping[int, Need] = attrs.field(factory=dict)

    @property
    def noticing(self) -> bool:
        """Whether the workers have a notice, and may save and end by themselves."""
        return self.notice is not None and self.rung is StopStage.NOTICE

    @property
    def agreeing(self) -> bool:
        """Whether they have a notice and are to agree at which call to stop, and have not yet."""
        return self.agrees and self.notice is not None and self.outcome is None

    @property
    def asking(self) -> bool:
        """Whether it is still to be found out at which call the workers here can stop."""
        return self.agreeing and self.said is None

    def left(self, now: float) -> float:
        """Seconds until the next rung."""
        return self.ladder.time_to_next_stage(now - self.since)

    def begin(self, now: float, notice: Notice | None) -> Climb:
        """Start to climb; the workers have just heard the notice, or are stopped without."""
        if notice is None and self.keep:
            return self._leave(now), (LeaveGroup(), *self._tell(NO_CALL))
        if notice is None:
            plain = self.ladder.with_notice(0.0)
            stopping = attrs.evolve(self, ladder=plain, since=now, rung=StopStage.TERM)
            return stopping, (EndWorkers(), *self._tell(NO_CALL))
        stopping = attrs.evolve(
            self,
            ladder=self.ladder.with_notice(notice.seconds),
            since=now,
            notice=notice,
            deadline=now + notice.seconds,
        )
        return stopping, (Gather(OVER),) if self.keep and self._with_others else ()

    def sooner(self, now: float, notice: Notice | None) -> Climb:
        """Those with a notice get this one, if it leaves them less time; None: they get no more.

        The more urgent reason and the shorter time hold, unless the other nodes have been told
        already, who would go by another answer.
        """
        if self.notice is None or self.rung is not StopStage.NOTICE:
            return self, ()
        if notice is None:
            post = (Post(OVER, str(self.node), b""),) if self._with_others else ()
            return (self._leave(now), (LeaveGroup(), *post)) if self.keep else (self.hurry(now), ())
        left, reason = self.left(now), more_urgent(self.notice.reason, notice.reason)
        notice = attrs.evolve(notice, seconds=min(left, notice.seconds), reason=reason)
        stopping = attrs.evolve(
            self,
            since=self.since - (left - notice.seconds),
            notice=notice,
            deadline=min(self.deadline, now + notice.seconds),
        )
        return stopping, (StopAt(None, notice),)

    def over(self, now: float, nodes: Collection[str]) -> Climb:
        """These have said that the group has broken."""
        breaks = nodes and self.keep and self.noticing
        return (self._leave(now), (LeaveGroup(),)) if breaks else (self, ())

    def _leave(self, now: float) -> Stopping:
        """The workers are told that their group is over."""
        ladder = self.ladder.with_notice(self.keep)
        return attrs.evolve(self, ladder=ladder, since=now, notice=None, leaving=True)

    def keep_members(self, keep: float) -> Climb:
        """The workers have a notice, and some can go on in another group if `keep` is not 0."""
        stopping = attrs.evolve(self, keep=keep)
        return stopping, (Gather(OVER),) if keep and self._with_others else ()

    def keep_none(self, now: float) -> Stopping:
        """Nobody goes on in another group."""
        stopping = self.hurry(now) if self.leaving and self.rung is StopStage.NOTICE else self
        return attrs.evolve(stopping, keep=0.0)

    def hurry(self, now: float) -> Stopping:
        """Do without what is left of this rung: a notice becomes SIGTERM, that SIGKILL. Where the
        rung's time is up already, the next one has all of its own."""
        if self.rung >= StopStage.KILL or self.rung < self.ladder.stage_at(now - self.since):
            return self
        return attrs.evolve(self, hurried=True, since=self.since - self.left(now))

    def heard(self, posts: Mapping[str, bytes] | None) -> Stopping:
        """This is what the nodes have posted; None: they cannot be asked."""
        if posts is None:
            return attrs.evolve(self, reachable=False)
        needs = {int(rank): decode_need(value) for rank, value in posts.items()}
        return attrs.evolve(self, needs=needs)

    def look(self, now: float, running: Collection[str], call: int | None) -> Climb:
        """Time goes by; `running` names the workers, who can stop at `call`, if it is known."""
        stopping, agreeing = self._agree(now, call)
        stopping, climbing = stopping._climb(now, ", ".join(running))
        return stopping, (*agreeing, *climbing)

    def _agree(self, now: float, call: int | None) -> Climb:
        if self.notice is None or not self.agreeing:
            return self, ()
        lost = now >= self.deadline or (self.nodes > 1 and not self.reachable)
        said = self.said
        telling: tuple[Command, ...] = ()
        if said is None and call is not None and not lost:
            said = Need(call, self.notice.reason, self.deadline - now)
            telling = self._tell(said)
        found = said if self.nodes == 1 else agreed(self.needs, self.nodes)
        if said is None or found is None:
            found = NO_CALL if lost else None
        stopping = attrs.evolve(self, said=said, outcome=found)
        if found is None:
            return stopping, telling
        if found.call is not None:
            # Those of a node that leaves save and end; ours go on, whatever others stop for.
            reason = self.notice.reason if self.keep else found.reason
            return stopping, (*telling, StopAt(found.call, Notice(reason, found.seconds)))
        if self.noticing and self.keep:
            return stopping._leave(now), (*telling, LeaveGroup())
        return (stopping.hurry(now) if self.noticing else stopping), telling

    def _climb(self, now: float, running: str) -> Climb:
        if not running:
            return self, (GroupStopped(),)
        rung = self.ladder.stage_at(now - self.since)
        commands: list[Command] = []
        if self.rung < StopStage.TERM <= rung:
            why = "still there after they were asked to save"
            if self.leaving:
                why = f"still in their group {self.keep:g} s after it was over"
            elif self.outcome == NO_CALL:
                why = "the workers cannot all stop at one step to save"
            commands.append(EndWorkers(f"{why}, sending SIGTERM: {running}"))
        if self.rung < StopStage.KILL <= rung:
            late = f"still there after {self.ladder.shutdown_timeout:g} s"
            said = "did not end in time" if self.hurried else late
            commands.append(EndWorkers(f"{said}, killing: {running}", force=True))
        if rung is StopStage.GIVE_UP:
            commands.append(GroupStopped(left=running))
        return attrs.evolve(self, rung=rung), tuple(commands)

    @property
    def _with_others(self) -> bool:
        return self.nodes > 1 and self.reachable

    def _tell(self, need: Need) -> tuple[Command, ...]:
        return (post_need(self.node, need), Gather(STOP)) if self._with_others else ()
