"""The stop procedure of a group, as a function of time and of the messages of the nodes."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib import StopTimeouts
from elasticlib.agent.policy import (
    AgentCommand,
    LeaveGroup,
    Publish,
    SignalWorkers,
    StopAtCall,
    Subscribe,
    WorkersStopped,
)
from elasticlib.agent.stop_procedure import (
    GROUP_BROKEN_TOPIC,
    STOP_AT_ANY_CALL,
    STOP_TOPIC,
    StopProcedure,
    StopProposal,
    StopStage,
    StopTransition,
    decode_proposal,
    propose_stop,
)
from elasticlib.workers.interface import DRAIN, RESIZE, StopNotice

LADDER = StopTimeouts(shutdown_timeout=30.0, kill_timeout=10.0)


class Side:
    """One of two nodes that stop, with the proposals that both have published."""

    def __init__(self, posts: dict[str, bytes], rank: int, nodes: int = 2) -> None:
        self.posts, self.now = posts, 0.0
        self.did: list[AgentCommand] = []
        self.stopping = StopProcedure(
            LADDER,
            node_rank=rank,
            num_nodes=nodes,
            is_peer_reachable=nodes > 1,
            is_coordinated=True,
        )

    def begin(self, notice: StopNotice | None) -> None:
        self._take(self.stopping.start(self.now, notice))

    def sooner(self, notice: StopNotice | None) -> None:
        self._take(self.stopping.shorten_notice(self.now, notice))

    def look(self, call: int | None = None, *, running: tuple[str, ...] = ("pid 1",)) -> None:
        self.stopping = self.stopping.on_proposals(self.posts)
        self._take(self.stopping.poll(self.now, running, call))

    def _take(self, step: StopTransition) -> None:
        self.stopping, commands = step
        self.did += commands
        for command in commands:
            if isinstance(command, Publish) and command.topic == STOP_TOPIC:
                assert command.only_if_absent
                self.posts.setdefault(command.key, command.value)

    @property
    def stops_at(self) -> StopAtCall:
        (found,) = [c for c in self.did if isinstance(c, StopAtCall) and c.call is not None]
        return found


@pytest.fixture
def sides() -> tuple[Side, Side]:
    posts: dict[str, bytes] = {}
    return Side(posts, 0), Side(posts, 1)


def test_both_nodes_stop_at_the_later_call_with_the_more_urgent_reason(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    one.begin(StopNotice(DRAIN, 30.0))
    other.begin(StopNotice(RESIZE, 60.0))
    one.look(call=5)
    assert one.stopping.is_negotiating, "the other has not spoken"
    other.look(call=9)
    for side in sides:
        side.look()
        assert side.stops_at == StopAtCall(9, StopNotice(DRAIN, 30.0))
        assert not side.stopping.is_negotiating


def test_a_node_that_regroups_stops_with_the_others_but_keeps_its_own_reason(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    one.stopping = attrs.evolve(one.stopping, regroup_grace_s=10.0)
    one.begin(StopNotice(RESIZE, 60.0))
    other.begin(StopNotice(DRAIN, 30.0))
    one.look(call=5)
    other.look(call=9)
    one.look()
    other.look()
    assert one.stops_at == StopAtCall(9, StopNotice(RESIZE, 30.0)), (
        "they go on, and need save nothing"
    )
    assert other.stops_at == StopAtCall(9, StopNotice(DRAIN, 30.0))


def test_workers_that_do_not_leave_their_group_are_stopped_after_a_delay() -> None:
    side = Side({}, 0, nodes=1)
    side.stopping = attrs.evolve(side.stopping, regroup_grace_s=10.0)
    side.begin(None)
    assert side.did == [LeaveGroup()]
    for second in range(60):
        side.now = float(second)
        side.look()
        if side.did[-1] == WorkersStopped(unkillable="pid 1"):
            break
    why = "still in their group 10 s after it was over, sending SIGTERM: pid 1"
    assert side.did[1:] == [
        SignalWorkers(why),
        SignalWorkers("still running 30 s after SIGTERM, killing: pid 1", force=True),
        WorkersStopped(unkillable="pid 1"),
    ]
    assert side.now == 50.0


@pytest.mark.parametrize("asked", [True, False], ids=["a resize", "a failure"])
def test_workers_are_stopped_at_once_if_the_regroup_is_cancelled(asked: bool) -> None:
    side = Side({}, 0, nodes=1)
    side.stopping = attrs.evolve(side.stopping, regroup_grace_s=10.0)
    side.begin(StopNotice(RESIZE, 60.0) if asked else None)
    side.stopping = side.stopping.cancel_regroup(side.now)
    side.sooner(None)
    side.look()
    assert isinstance(side.did[-1], SignalWorkers)


def test_workers_leave_their_group_if_the_nodes_cannot_agree_on_a_call(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    one.stopping = attrs.evolve(one.stopping, regroup_grace_s=10.0)
    one.begin(StopNotice(RESIZE, 60.0))
    other.begin(None)
    one.look(call=5)
    one.look()
    assert one.did[-1] == LeaveGroup()
    assert one.stopping.time_to_next_stage(one.now) == 10.0


def test_all_workers_leave_a_group_that_breaks_before_they_have_stopped(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    for side in sides:
        side.stopping = attrs.evolve(side.stopping, regroup_grace_s=10.0)
        side.begin(StopNotice(RESIZE, 60.0))
        assert side.did == [Subscribe(GROUP_BROKEN_TOPIC)]
        side.look(call=5)
    for side in sides:
        side.look()
        assert side.stops_at.call == 5
    other.sooner(None)
    assert other.did[-2:] == [LeaveGroup(), Publish(GROUP_BROKEN_TOPIC, "1", b"")]
    one._take(one.stopping.on_group_broken(one.now, {"1"}))
    assert LeaveGroup() in one.did
    assert one.stopping.time_to_next_stage(one.now) == 10.0
    assert one.stopping.on_group_broken(one.now, {"1"}) == (one.stopping, ()), "once is enough"


def test_a_single_node_stops_at_the_call_of_its_own_workers() -> None:
    side = Side({}, 0, nodes=1)
    side.begin(StopNotice(DRAIN, 30.0))
    side.look()
    assert side.stopping.needs_proposal, "its workers are in a step"
    side.now = 4.0
    side.look(call=5)
    assert side.did == [StopAtCall(5, StopNotice(DRAIN, 26.0))]


def test_a_finished_node_does_not_delay_the_agreement(sides: tuple[Side, Side]) -> None:
    one, other = sides
    other.posts["1"] = propose_stop(1, STOP_AT_ANY_CALL).value
    one.begin(StopNotice(DRAIN, 30.0))
    one.look(call=5)
    one.look()
    assert one.stops_at == StopAtCall(5, StopNotice(DRAIN, 30.0))


def test_a_node_that_stops_at_once_tells_the_others(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.begin(StopNotice(DRAIN, 600.0))
    other.begin(None)
    assert other.did[0] == SignalWorkers()
    assert other.posts["1"] == propose_stop(1, StopProposal(None)).value
    one.look(call=5)
    one.look()
    (asked,) = [command for command in one.did if isinstance(command, SignalWorkers)]
    assert asked.log_message.startswith("the workers cannot all stop at one step")


def test_workers_get_the_shutdown_timeout_after_the_agreement_has_timed_out(
    sides: tuple[Side, Side],
) -> None:
    one, _ = sides
    one.begin(StopNotice(DRAIN, 20.0))
    one.look(call=5)
    for now in (20.0, 20.1, 50.0):
        one.now = now
        one.look(call=5)
        ended = [command.force for command in one.did if isinstance(command, SignalWorkers)]
        assert ended == ([False, True] if now == 50.0 else [False])
    (asked, killed) = [
        command.log_message for command in one.did if isinstance(command, SignalWorkers)
    ]
    assert asked.startswith("the workers cannot all stop at one step to save")
    assert killed.startswith("still running 30 s after SIGTERM")


def test_workers_are_stopped_at_once_if_the_other_nodes_are_unreachable(
    sides: tuple[Side, Side],
) -> None:
    one, _ = sides
    one.begin(StopNotice(DRAIN, 600.0))
    one.look(call=5)
    one.stopping = one.stopping.on_proposals(None)
    one.look()
    assert isinstance(one.did[-1], SignalWorkers)


def test_a_node_whose_workers_have_exited_publishes_its_proposal(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.begin(StopNotice(DRAIN, 600.0))
    one.look(call=1, running=())
    assert decode_proposal(one.posts["0"]) == StopProposal(1, DRAIN, 600.0)
    assert one.did[-1] == WorkersStopped()


def test_an_expired_proposal_leaves_no_time_to_the_others() -> None:
    said = propose_stop(0, StopProposal(1, DRAIN, -3.0)).value
    assert decode_proposal(said) == StopProposal(1, DRAIN, 0.0)


def test_a_drain_during_the_agreement_on_a_resize_reaches_all_nodes(
    sides: tuple[Side, Side],
) -> None:
    one, other = sides
    for side in sides:
        side.begin(StopNotice(RESIZE, 60.0))
    other.look(call=9)
    one.now = 5.0
    one.look()
    one.sooner(StopNotice(DRAIN, 600.0))
    assert one.did[-1] == StopAtCall(None, StopNotice(DRAIN, 55.0))
    one.look(call=5)
    for side in sides:
        side.look()
        assert side.stops_at == StopAtCall(9, StopNotice(DRAIN, 55.0))


def test_a_later_notice_can_shorten_the_deadline_and_a_missing_one_ends_it() -> None:
    side = Side({}, 0, nodes=1)
    side.begin(StopNotice(RESIZE, 60.0))
    side.sooner(StopNotice(DRAIN, 10.0))
    assert side.stopping.time_to_next_stage(side.now) == pytest.approx(10.0)
    side.sooner(None)
    side.look()
    (asked,) = [command for command in side.did if isinstance(command, SignalWorkers)]
    assert "still running after the time to save" in asked.log_message
    side.sooner(StopNotice(DRAIN, 10.0))
    side.look()
    assert len(side.did) == 2, "who has been asked to stop gets no other notice"


def test_the_stop_stages_follow_their_timeouts() -> None:
    side = Side({}, 0, nodes=1)
    side.stopping = attrs.evolve(side.stopping, is_coordinated=False)
    side.begin(StopNotice(DRAIN, 5.0))
    climbed: list[tuple[float, type]] = []
    for second in range(60):
        side.now, before = float(second), len(side.did)
        side.look()
        climbed += [(side.now, type(command)) for command in side.did[before:]]
        if WorkersStopped in (kind for _, kind in climbed):
            break
    assert climbed == [(5.0, SignalWorkers), (35.0, SignalWorkers), (45.0, WorkersStopped)]
    forced = [command.force for command in side.did if isinstance(command, SignalWorkers)]
    assert forced == [False, True]
    assert side.did[-1] == WorkersStopped(unkillable="pid 1")


def test_each_escalation_goes_to_the_next_stop_stage() -> None:
    side = Side({}, 0, nodes=1)
    side.begin(None)
    side.stopping = side.stopping.escalate(1.0)
    side.now = 1.0
    side.look()
    assert side.did == [
        SignalWorkers(),
        SignalWorkers("did not exit in time, killing: pid 1", force=True),
    ]
    side.stopping = side.stopping.escalate(1.0)
    assert side.stopping.time_to_next_stage(1.0) == pytest.approx(10.0), (
        "there is no rung after that"
    )
    side.look(running=())
    assert side.did[-1] == WorkersStopped()


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 400))
def test_the_ladder_only_goes_up_and_says_when(
    notice: float, grace: float, reap: float, elapsed: float
) -> None:
    ladder = StopTimeouts(grace, reap).with_notice(notice)
    here, later = (
        ladder.stage_at(elapsed),
        ladder.stage_at(elapsed + ladder.time_to_next_stage(elapsed) + 1e-6),
    )
    assert here is StopStage.GIVE_UP or later > here


def test_the_ladder_gives_the_grace_that_was_asked_for() -> None:
    ladder = StopTimeouts(shutdown_timeout=70.0, kill_timeout=10.0)
    rungs = [ladder.stage_at(t) for t in (0, 69.9, 70, 79.9, 80)]
    assert rungs == [
        StopStage.TERM,
        StopStage.TERM,
        StopStage.KILL,
        StopStage.KILL,
        StopStage.GIVE_UP,
    ]


def test_a_notice_comes_before_the_grace_and_takes_nothing_from_it() -> None:
    ladder = StopTimeouts(shutdown_timeout=70.0, kill_timeout=10.0).with_notice(60.0)
    rungs = [ladder.stage_at(t) for t in (0, 59.9, 60, 129.9, 130, 140)]
    expected = [
        StopStage.NOTICE,
        StopStage.NOTICE,
        StopStage.TERM,
        StopStage.TERM,
        StopStage.KILL,
        StopStage.GIVE_UP,
    ]
    assert rungs == expected
    assert [ladder.time_to_next_stage(t) for t in (0, 60, 130, 150)] == [60, 70, 10, 0]
