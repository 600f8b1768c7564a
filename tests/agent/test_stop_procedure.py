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

STOP_TIMEOUTS = StopTimeouts(shutdown_timeout=30.0, kill_timeout=10.0)


class StoppingNode:
    """A node that stops. Both nodes share the published proposals, as they would in a store."""

    def __init__(self, proposals: dict[str, bytes], rank: int, nodes: int = 2) -> None:
        self.proposals, self.now = proposals, 0.0
        self.commands: list[AgentCommand] = []
        self.procedure = StopProcedure(
            STOP_TIMEOUTS,
            node_rank=rank,
            num_nodes=nodes,
            is_peer_reachable=nodes > 1,
            is_coordinated=True,
        )

    def start(self, notice: StopNotice | None) -> None:
        self._apply(self.procedure.start(self.now, notice))

    def shorten_notice(self, notice: StopNotice | None) -> None:
        self._apply(self.procedure.shorten_notice(self.now, notice))

    def poll(self, call: int | None = None, *, running: tuple[str, ...] = ("pid 1",)) -> None:
        self.procedure = self.procedure.on_proposals(self.proposals)
        self._apply(self.procedure.poll(self.now, running, call))

    def _apply(self, step: StopTransition) -> None:
        self.procedure, commands = step
        self.commands += commands
        for command in commands:
            if isinstance(command, Publish) and command.topic == STOP_TOPIC:
                if command.only_if_absent:
                    self.proposals.setdefault(command.key, command.value)
                else:
                    self.proposals[command.key] = command.value

    @property
    def stops_at(self) -> StopAtCall:
        (found,) = [c for c in self.commands if isinstance(c, StopAtCall) and c.call is not None]
        return found


@pytest.fixture
def nodes() -> tuple[StoppingNode, StoppingNode]:
    proposals: dict[str, bytes] = {}
    return StoppingNode(proposals, 0), StoppingNode(proposals, 1)


def test_both_nodes_stop_at_the_later_call_with_the_more_urgent_reason(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, second = nodes
    first.start(StopNotice(DRAIN, 30.0))
    second.start(StopNotice(RESIZE, 60.0))
    first.poll(call=5)
    assert first.procedure.is_negotiating, "the other has not spoken"
    second.poll(call=9)
    for node in nodes:
        node.poll()
        assert node.stops_at == StopAtCall(9, StopNotice(DRAIN, 30.0))
        assert not node.procedure.is_negotiating


def test_a_node_that_regroups_stops_with_the_others_but_keeps_its_own_reason(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, second = nodes
    first.procedure = attrs.evolve(first.procedure, regroup_grace_s=10.0)
    first.start(StopNotice(RESIZE, 60.0))
    second.start(StopNotice(DRAIN, 30.0))
    first.poll(call=5)
    second.poll(call=9)
    first.poll()
    second.poll()
    assert first.stops_at == StopAtCall(9, StopNotice(RESIZE, 30.0)), (
        "they go on, and need save nothing"
    )
    assert second.stops_at == StopAtCall(9, StopNotice(DRAIN, 30.0))


def test_workers_that_do_not_leave_their_group_are_stopped_after_a_delay() -> None:
    node = StoppingNode({}, 0, nodes=1)
    node.procedure = attrs.evolve(node.procedure, regroup_grace_s=10.0)
    node.start(None)
    assert node.commands == [LeaveGroup()]
    for second in range(60):
        node.now = float(second)
        node.poll()
        if node.commands[-1] == WorkersStopped(unkillable="pid 1"):
            break
    message = "still in their group 10 s after it was over, sending SIGTERM: pid 1"
    assert node.commands[1:] == [
        SignalWorkers(message),
        SignalWorkers("still running 30 s after SIGTERM, killing: pid 1", force=True),
        WorkersStopped(unkillable="pid 1"),
    ]
    assert node.now == 50.0


@pytest.mark.parametrize("is_resize", [True, False], ids=["a resize", "a failure"])
def test_workers_are_stopped_at_once_if_the_regroup_is_cancelled(is_resize: bool) -> None:
    node = StoppingNode({}, 0, nodes=1)
    node.procedure = attrs.evolve(node.procedure, regroup_grace_s=10.0)
    node.start(StopNotice(RESIZE, 60.0) if is_resize else None)
    node.procedure = node.procedure.cancel_regroup(node.now)
    node.shorten_notice(None)
    node.poll()
    assert isinstance(node.commands[-1], SignalWorkers)


def test_workers_leave_their_group_if_the_nodes_cannot_agree_on_a_call(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, second = nodes
    first.procedure = attrs.evolve(first.procedure, regroup_grace_s=10.0)
    first.start(StopNotice(RESIZE, 60.0))
    second.start(None)
    first.poll(call=5)
    first.poll()
    assert first.commands[-1] == LeaveGroup()
    assert first.procedure.time_to_next_stage(first.now) == 10.0


def test_all_workers_leave_a_group_that_breaks_before_they_have_stopped(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, second = nodes
    for node in nodes:
        node.procedure = attrs.evolve(node.procedure, regroup_grace_s=10.0)
        node.start(StopNotice(RESIZE, 60.0))
        assert node.commands == [Subscribe(GROUP_BROKEN_TOPIC)]
        node.poll(call=5)
    for node in nodes:
        node.poll()
        assert node.stops_at.call == 5
    second.shorten_notice(None)
    assert second.commands[-2:] == [LeaveGroup(), Publish(GROUP_BROKEN_TOPIC, "1", b"")]
    first._apply(first.procedure.on_group_broken(first.now, {"1"}))
    assert LeaveGroup() in first.commands
    assert first.procedure.time_to_next_stage(first.now) == 10.0
    assert first.procedure.on_group_broken(first.now, {"1"}) == (first.procedure, ()), (
        "once is enough"
    )


def test_a_single_node_stops_at_the_call_of_its_own_workers() -> None:
    node = StoppingNode({}, 0, nodes=1)
    node.start(StopNotice(DRAIN, 30.0))
    node.poll()
    assert node.procedure.needs_proposal, "its workers are in a step"
    node.now = 4.0
    node.poll(call=5)
    assert node.commands == [StopAtCall(5, StopNotice(DRAIN, 26.0))]


@pytest.mark.parametrize("has_proposed", [True, False])
def test_a_node_that_gives_up_the_agreement_publishes_it_once(
    nodes: tuple[StoppingNode, StoppingNode], has_proposed: bool
) -> None:
    first, second = nodes
    for node in nodes:
        node.start(StopNotice(DRAIN, 600.0))
    first.poll(call=5)
    if has_proposed:
        # It has not seen the other node's proposal when SIGINT arrives.
        second._apply(second.procedure.poll(second.now, ("pid 1",), 7))
    second.procedure = second.procedure.escalate(second.now)
    for _ in range(3):
        second._apply(second.procedure.poll(second.now, ("pid 1",), None))
    withdrawn = propose_stop(1, StopProposal(None)).value
    assert second.proposals["1"] == withdrawn
    published = [c for c in second.commands if isinstance(c, Publish) and c.value == withdrawn]
    assert len(published) == 1
    first.poll()
    assert isinstance(first.commands[-1], SignalWorkers)


def test_a_finished_node_does_not_delay_the_agreement(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, second = nodes
    second.proposals["1"] = propose_stop(1, STOP_AT_ANY_CALL).value
    first.start(StopNotice(DRAIN, 30.0))
    first.poll(call=5)
    first.poll()
    assert first.stops_at == StopAtCall(5, StopNotice(DRAIN, 30.0))


def test_a_node_that_stops_at_once_publishes_it_to_the_others(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, second = nodes
    first.start(StopNotice(DRAIN, 600.0))
    second.start(None)
    assert second.commands[0] == SignalWorkers()
    assert second.proposals["1"] == propose_stop(1, StopProposal(None)).value
    first.poll(call=5)
    first.poll()
    (command,) = [command for command in first.commands if isinstance(command, SignalWorkers)]
    assert command.log_message.startswith("the workers cannot all stop at one step")


def test_workers_get_the_shutdown_timeout_after_the_agreement_has_timed_out(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, _ = nodes
    first.start(StopNotice(DRAIN, 20.0))
    first.poll(call=5)
    for now in (20.0, 20.1, 50.0):
        first.now = now
        first.poll(call=5)
        forced = [command.force for command in first.commands if isinstance(command, SignalWorkers)]
        assert forced == ([False, True] if now == 50.0 else [False])
    (first_message, second_message) = [
        command.log_message for command in first.commands if isinstance(command, SignalWorkers)
    ]
    assert first_message.startswith("the workers cannot all stop at one step to save")
    assert second_message.startswith("still running 30 s after SIGTERM")


def test_workers_are_stopped_at_once_if_the_other_nodes_are_unreachable(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, _ = nodes
    first.start(StopNotice(DRAIN, 600.0))
    first.poll(call=5)
    first.procedure = first.procedure.on_proposals(None)
    first.poll()
    assert isinstance(first.commands[-1], SignalWorkers)


def test_a_node_whose_workers_have_exited_publishes_its_proposal(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, _ = nodes
    first.start(StopNotice(DRAIN, 600.0))
    first.poll(call=1, running=())
    assert decode_proposal(first.proposals["0"]) == StopProposal(1, DRAIN, 600.0)
    assert first.commands[-1] == WorkersStopped()


def test_an_expired_proposal_leaves_no_time_to_the_others() -> None:
    proposal = propose_stop(0, StopProposal(1, DRAIN, -3.0)).value
    assert decode_proposal(proposal) == StopProposal(1, DRAIN, 0.0)


def test_a_drain_during_the_agreement_on_a_resize_reaches_all_nodes(
    nodes: tuple[StoppingNode, StoppingNode],
) -> None:
    first, second = nodes
    for node in nodes:
        node.start(StopNotice(RESIZE, 60.0))
    second.poll(call=9)
    first.now = 5.0
    first.poll()
    first.shorten_notice(StopNotice(DRAIN, 600.0))
    assert first.commands[-1] == StopAtCall(None, StopNotice(DRAIN, 55.0))
    first.poll(call=5)
    for node in nodes:
        node.poll()
        assert node.stops_at == StopAtCall(9, StopNotice(DRAIN, 55.0))


def test_a_later_notice_can_shorten_the_deadline_and_a_missing_one_ends_it() -> None:
    node = StoppingNode({}, 0, nodes=1)
    node.start(StopNotice(RESIZE, 60.0))
    node.shorten_notice(StopNotice(DRAIN, 10.0))
    assert node.procedure.time_to_next_stage(node.now) == pytest.approx(10.0)
    node.shorten_notice(None)
    node.poll()
    (command,) = [command for command in node.commands if isinstance(command, SignalWorkers)]
    assert "still running after the time to save" in command.log_message
    node.shorten_notice(StopNotice(DRAIN, 10.0))
    node.poll()
    assert len(node.commands) == 2, "workers that have been signalled get no other notice"


def test_the_stop_stages_follow_their_timeouts() -> None:
    node = StoppingNode({}, 0, nodes=1)
    node.procedure = attrs.evolve(node.procedure, is_coordinated=False)
    node.start(StopNotice(DRAIN, 5.0))
    history: list[tuple[float, type]] = []
    for second in range(60):
        node.now, before = float(second), len(node.commands)
        node.poll()
        history += [(node.now, type(command)) for command in node.commands[before:]]
        if WorkersStopped in (kind for _, kind in history):
            break
    assert history == [(5.0, SignalWorkers), (35.0, SignalWorkers), (45.0, WorkersStopped)]
    forced = [command.force for command in node.commands if isinstance(command, SignalWorkers)]
    assert forced == [False, True]
    assert node.commands[-1] == WorkersStopped(unkillable="pid 1")


def test_workers_have_their_time_after_sigkill_even_if_it_was_sent_late() -> None:
    node = StoppingNode({}, 0, nodes=1)
    node.start(None)
    node.now = 100.0  # the loop was blocked, or a deadline has shortened the stages
    node.poll()
    node.now = 109.0
    node.poll()
    killing = SignalWorkers("still running 30 s after SIGTERM, killing: pid 1", force=True)
    assert node.commands == [SignalWorkers(), killing]
    node.now = 111.0
    node.poll()
    assert node.commands[-1] == WorkersStopped(unkillable="pid 1")


def test_each_escalation_starts_the_next_stop_stage() -> None:
    node = StoppingNode({}, 0, nodes=1)
    node.start(None)
    node.procedure = node.procedure.escalate(1.0)
    node.now = 1.0
    node.poll()
    assert node.commands == [
        SignalWorkers(),
        SignalWorkers("SIGINT arrived, killing: pid 1", force=True),
    ]
    node.procedure = node.procedure.escalate(1.0)
    assert node.procedure.time_to_next_stage(1.0) == pytest.approx(10.0), (
        "there is no other stage after this one"
    )
    node.poll(running=())
    assert node.commands[-1] == WorkersStopped()


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 400))
def test_stop_stages_only_advance_and_the_time_of_the_next_stage_is_exact(
    notice: float, grace: float, reap: float, elapsed: float
) -> None:
    timeouts = StopTimeouts(grace, reap).with_notice(notice)
    stage, later_stage = (
        timeouts.stage_at(elapsed),
        timeouts.stage_at(elapsed + timeouts.time_to_next_stage(elapsed) + 1e-6),
    )
    assert stage is StopStage.GIVE_UP or later_stage > stage


def test_workers_get_the_whole_shutdown_timeout() -> None:
    timeouts = StopTimeouts(shutdown_timeout=70.0, kill_timeout=10.0)
    stages = [timeouts.stage_at(t) for t in (0, 69.9, 70, 79.9, 80)]
    assert stages == [
        StopStage.TERM,
        StopStage.TERM,
        StopStage.KILL,
        StopStage.KILL,
        StopStage.GIVE_UP,
    ]


def test_a_notice_precedes_the_shutdown_timeout_and_does_not_shorten_it() -> None:
    timeouts = StopTimeouts(shutdown_timeout=70.0, kill_timeout=10.0).with_notice(60.0)
    stages = [timeouts.stage_at(t) for t in (0, 59.9, 60, 129.9, 130, 140)]
    expected = [
        StopStage.NOTICE,
        StopStage.NOTICE,
        StopStage.TERM,
        StopStage.TERM,
        StopStage.KILL,
        StopStage.GIVE_UP,
    ]
    assert stages == expected
    assert [timeouts.time_to_next_stage(t) for t in (0, 60, 130, 150)] == [60, 70, 10, 0]
