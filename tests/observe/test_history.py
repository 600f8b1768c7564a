"""The history of a job, computed from the events of its agents."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from recorded_runs import WALL, Agent, event_files

from elasticlib.observe.event import decode, encode
from elasticlib.observe.event_kinds import body_of
from elasticlib.observe.history import GenerationTrigger, History, JobState
from elasticlib.observe.history_reader import history_of
from elasticlib.observe.report import Report
from elasticlib.observe.report.build import node_views


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-6)


def one_failure() -> Agent:
    """Return 50 steps at 10 per second, of which the last 20 are repeated after a failure."""
    one = Agent("n1").launch(0.0).join(2.0, 1).train(5.0, 1).advance(9.9, 50, 10.0)
    one.record(6.0, "checkpoint.saved", step=30)
    one.fail(10.0, "rank 0 raised").stop(10.0, 10.5)
    one.join(11.0, 2, restarts=1, reason="n1: rank 0 raised")
    return one.restore(13.0, 30, 1.5).train(14.0, 31).advance(24.0, 131, 10.0).succeed(25.0)


def test_cost_of_a_failure_has_the_durations_of_its_phases() -> None:
    history = history_of(event_files(one_failure()))
    first, second = history.generations
    assert (first.trigger, first.cost.rendezvous, first.cost.startup) == (
        GenerationTrigger.START,
        near(2),
        near(3),
    )
    assert (first.started_at, first.first_step_at, first.finished_at) == (
        near(2),
        near(5),
        near(10),
    )
    assert (second.trigger, second.reason, second.restarts) == (
        GenerationTrigger.FAILURE,
        "n1: rank 0 raised",
        1,
    )
    cost = second.cost
    assert (cost.detection, cost.shutdown, cost.rendezvous) == (None, near(0.5), near(0.5))
    assert (cost.startup, cost.restore) == (near(1.5), near(1.5))
    assert (cost.repeated_steps, cost.repeated) == (20, near(19 * 4.9 / 49))
    assert (second.first_step, second.last_step) == (31, 131)
    # The phases cover the whole time in which training was interrupted.
    assert cost.seconds - cost.repeated == near(second.first_step_at - first.finished_at)


def test_goodput_is_the_share_of_time_in_productive_steps() -> None:
    history = history_of(event_files(one_failure()))
    assert history.duration_seconds == near(25.1)
    assert history.goodput == near((5 + (25 - 14) - 1.9) / 25.1)


def hang(agent: Agent) -> Agent:
    """Record 60 steps at 10 per second, 2 minutes without a step, and 60 more steps."""
    agent.train(5.0, 1).advance(8.0, 31, 10.0).advance(10.9, 60, 10.0)
    return agent.advance(134.0, 91, 0.25).advance(137.0, 120, 10.0)


def test_time_without_steps_counts_as_stalled() -> None:
    one = hang(Agent("n1").launch(0.0).join(2.0, 1)).succeed(140.0)
    (generation,) = history_of(event_files(one)).generations
    assert generation.cost.stalled == near(134.0 - 10.9 - 31 * 0.1)
    history = history_of(event_files(one))
    assert history.goodput == near((140.0 - 5.0 - 120.0) / 140.1)
    assert history.lost_seconds == near(sum(generation.cost.phases.values()) + 0.1)
    assert "Without a step" not in Report(history).html()
    assert "stalled" in Report(history).html()


@pytest.mark.parametrize("ending", ["failed", "still running", "succeeded"])
def test_time_without_steps_at_the_end_counts_as_stalled_unless_the_run_succeeds(
    ending: str,
) -> None:
    one = Agent("n1").launch(0.0).join(2.0, 1).train(5.0, 1).advance(15.0, 101, 10.0)
    if ending == "failed":
        one.fail(100.0, "it was killed").stop(100.0, 100.5).finish(
            101.0, "failed", "no restarts left"
        )
    elif ending == "still running":
        one.record(100.0, "checkpoint.saved", step=90)
    else:
        one.succeed(100.0)
    (generation,) = history_of(event_files(one)).generations
    # Before a successful end, the workers may do something else, such as evaluate the model.
    assert generation.cost.stalled == (None if ending == "succeeded" else near(85.0))


@pytest.mark.parametrize("step_seconds", [0.1, 20.0])
def test_slow_steps_and_steps_that_become_slower_are_no_stall(step_seconds: float) -> None:
    one, at, step = Agent("n1").launch(0.0).join(2.0, 1).train(5.0, 1), 5.0, 1
    for _ in range(60):
        steps = max(1, int(10 / step_seconds))
        at, step = at + steps * step_seconds, step + steps
        one.advance(at, step)
        step_seconds *= 1.05
    (generation,) = history_of(event_files(one)).generations
    assert generation.cost.stalled is None


def crash_loop() -> Agent:
    """Return two generations that fail before their first step, one of them after a restore."""
    one = Agent("n1").launch(0.0).join(1.0, 1).fail(601.0, "OOM").stop(601.0, 602.0)
    one.join(603.0, 2, restarts=1, reason="n1: OOM").restore(605.0, 0, 1.5)
    one.fail(703.0, "OOM").stop(703.0, 704.0)
    one.join(705.0, 3, restarts=2, reason="n1: OOM").train(715.0, 1).advance(800.0, 86, 1.0)
    return one


def test_generation_that_fails_before_its_first_step_counts_as_startup() -> None:
    history = history_of(event_files(crash_loop()))
    assert [(g.cost.startup, g.cost.restore) for g in history.generations] == [
        (near(600), None),
        (near(98.5), near(1.5)),
        (near(10), None),
    ]
    phases = sum(generation.cost.seconds for generation in history.generations)
    assert (phases, history.lost_seconds) == (near(715), near(715))


def test_startup_time_is_unknown_without_reported_steps() -> None:
    history = history_of({"file": [e for e in crash_loop().events if "step" not in e.data]})
    assert [generation.cost.startup for generation in history.generations] == [None] * 3
    assert history.lost_seconds is None


def resized_after_notice(saved: int) -> History:
    """Return a resize after 100 steps and 300 more after the notice; `saved` is restored."""
    one = Agent("n1").launch(0.0).join(1.0, 1).train(2.0, 1).advance(11.9, 100, 10.0)
    one.record(12.0, "stopping", notice="resize", grace_seconds=60.0)
    one.record(42.0, "stopped", duration_seconds=30.0, survivors="").advance(42.0, 400, 10.0)
    one.record(42.0, "rendezvous.started", reason="n2 joined", is_planned=True)
    one.join(43.0, 2, reason="n2 joined").train(44.0, saved + 1).advance(84.0, saved + 400, 10.0)
    return history_of(event_files(one))


def test_saved_steps_after_a_notice_are_not_lost() -> None:
    history = resized_after_notice(400)
    first, second = history.generations
    assert (first.finished_at, second.cost.shutdown, second.cost.repeated_steps) == (
        near(42),
        near(0),
        0,
    )
    assert history.lost_seconds == near(2 + 2)


def test_steps_after_a_notice_that_are_not_saved_count_as_repeated() -> None:
    history = resized_after_notice(100)
    assert history.generations[1].cost.repeated_steps == 300
    assert history.lost_seconds == pytest.approx(2 + 2 + 30, abs=0.2)


def test_history_has_the_state_nodes_and_timeline_of_the_run() -> None:
    history = history_of(event_files(one_failure()))
    assert (history.run, history.start_timestamp, history.state) == (
        "job",
        near(WALL),
        JobState.SUCCEEDED,
    )
    assert (history.checkpoint_step, history.restarts, history.max_restarts) == (30, 1, 3)
    (node,) = history.nodes
    assert (node.host, node.pid, node.log_dir, node.is_lost) == ("n1", 7, "/logs", False)
    assert node.exit is not None
    assert (node.exit.state, node.exit.exit_code) == (JobState.SUCCEEDED, 0)
    assert [
        (membership.generation, membership.started_at, membership.finished_at)
        for membership in history.memberships
    ] == [
        (1, near(2), near(10.5)),
        (2, near(11), near(25)),
    ]
    assert [(event.kind, event.text) for event in history.timeline] == [
        ("checkpoint.saved", "step 30"),
        ("worker.exited", "rank 0 raised"),
        ("failure", "rank 0 raised"),
        ("state.restored", "step 30 from disk"),
    ]
    assert [(sample.step, sample.steps_per_second) for sample in history.progress] == [
        (50, 10.0),
        (131, 10.0),
    ]


def two_nodes(**clocks: float) -> History:
    """Return a failure and a restart of two nodes; the clocks are those of the second node."""
    one = Agent("n1", booted_at=-50.0).launch(0.0)
    two = Agent("n2", booted_at=-70_000.0, **clocks).launch(0.5)
    for rank, agent in enumerate((one, two)):
        agent.join(2.0, 1, rank=rank, nodes=2).train(3.0, 1).advance(9.0, 61)
        agent.record(10.0 + rank, "stopping", notice="", grace_seconds=0.0)
    one.stop(10.0, 12.0).join(13.0, 2, nodes=2, restarts=1, reason="n1: it fell")
    two.stop(11.0, 11.5).join(13.0, 2, rank=1, nodes=2, restarts=1, reason="n1: it fell")
    for agent in (one, two):
        agent.succeed(20.0)
    return history_of(event_files(two, one))


@pytest.mark.parametrize("clock_error", [-60.0, 0.0, 60.0, 7 * 3600.0, -1e8])
def test_wrong_wall_clock_of_a_node_does_not_change_the_history(clock_error: float) -> None:
    history = two_nodes(clock_error=clock_error)
    assert {
        (membership.node, membership.generation): membership.started_at
        for membership in history.memberships
    } == {
        ("n1", 1): near(2.0),
        ("n2", 1): near(2.0),
        ("n1", 2): near(13.0),
        ("n2", 2): near(13.0),
    }
    assert [node.started_at for node in history.nodes] == [near(0.0), near(0.5)]
    assert [generation.node_count for generation in history.generations] == [2, 2]
    cost = history.generations[1].cost
    assert (cost.shutdown, cost.rendezvous) == (near(2.0), near(1.0)), "the slowest node's stop"


def test_incarnation_distinguishes_generations_with_the_same_number() -> None:
    one = Agent("n1").launch(0.0).join(1.0, 1, nodes=2).train(2.0, 1).succeed(101.0)
    two = Agent("n2", clock_error=7200.0).launch(0.0).join(1.0, 1, rank=1, nodes=2).succeed(101.0)
    assert len(history_of(event_files(one, two)).generations) == 1
    other = [
        attrs.evolve(e, body=body_of(e.kind, {**e.data, "incarnation": "other"}))
        for e in two.events
    ]
    assert len(history_of({"1": one.events, "2": other}).generations) == 2


def test_nodes_without_a_common_generation_are_aligned_by_their_wall_clocks() -> None:
    one = Agent("n1", booted_at=-5.0).launch(0.0).join(1.0, 1).stop(10.0, 11.0)
    two = Agent("n2", booted_at=-9.0).launch(9.0).join(12.0, 2, reason="n1 left").succeed(20.0)
    history = history_of(event_files(two, one))
    assert [(g.number, g.started_at) for g in history.generations] == [(1, near(1)), (2, near(12))]


def test_loss_of_a_node_is_detected_from_the_events_of_the_survivors() -> None:
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.join(1.0, 1, rank=rank, nodes=2).train(2.0, 1).advance(9.0, 71)
    one.stop(15.0, 15.5).join(16.0, 2, reason="n2 left").succeed(30.0)
    history = history_of(event_files(one, two))
    first, second = history.generations
    assert {node.node: node.is_lost for node in history.nodes} == {"n1": False, "n2": True}
    assert (second.trigger, second.cost.detection, second.cost.shutdown) == (
        GenerationTrigger.NODE_LOSS,
        near(6.0),
        near(0.5),
    )
    assert first.finished_at == near(9.0)
    assert history.state is JobState.SUCCEEDED
    (membership,) = (m for m in history.memberships if m.node == "n2")
    assert membership.finished_at == near(9.0)
    (_, row) = node_views(history)
    assert row.lost_at == near(9.0)
    # Events without steps do not shorten the detection time.
    two.record(14.0, "checkpoint.saved", step=70)
    assert history_of(event_files(one, two)).generations[1].cost.detection == near(6.0)
    # The file of the survivor is sufficient.
    assert history_of(event_files(one)).generations[1].cost.detection == near(6.0)


def test_former_member_that_waits_as_a_spare_is_not_lost_while_the_job_runs() -> None:
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.join(1.0, 1, rank=rank, nodes=2).train(2.0, 1).advance(9.0, 71).stop(15.0, 15.5)
    one.join(16.0, 2, reason="n2 left").train(17.0, 72).advance(30.0, 200)
    running = history_of(event_files(one, two))
    assert [node.is_lost for node in running.nodes] == [False, False]
    finished = history_of(event_files(one.succeed(40.0), two))
    assert [node.is_lost for node in finished.nodes] == [False, True]


def lost_node(*, steps: bool) -> History:
    """Return the loss of a node right after a step, 3 s after it last recorded a step."""
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.join(1.0, 1, rank=rank, nodes=2)
        if steps:
            agent.train(2.0, 1).advance(12.0, 101)
    one.record(15.1, "stopping", notice="", grace_seconds=0.0)
    if steps:
        one.record(15.3, "progress", step=131, steps_per_second=10.0, seconds_since_heartbeat=0.3)
    one.record(15.4, "stopped", duration_seconds=0.3, survivors="").join(
        16.0, 2, reason="n2 left", trigger="loss"
    ).succeed(20.0)
    return history_of(event_files(one, two))


def test_lost_node_worked_as_long_as_the_other_nodes() -> None:
    first, second = lost_node(steps=True).generations
    assert (second.trigger, second.cost.detection, first.finished_at) == (
        GenerationTrigger.NODE_LOSS,
        near(0.1),
        near(15.0),
    )


def test_detection_time_of_a_loss_is_unknown_without_reported_steps() -> None:
    first, second = lost_node(steps=False).generations
    assert (second.trigger, second.cost.detection, first.finished_at) == (
        GenerationTrigger.NODE_LOSS,
        None,
        near(15.1),
    )


def test_time_without_heartbeats_before_a_hang_is_lost() -> None:
    one = Agent("n1").launch(0.0).join(1.0, 1).train(2.0, 1).advance(30.0, 71)
    one.record(
        65.0, "failure", reason="hangs", failure_kind="hang", seconds_since_heartbeat=40.0
    ).stop(65.0, 66.0)
    one.join(67.0, 2, restarts=1, reason="n1: hangs")
    first, second = history_of(event_files(one)).generations
    assert (first.finished_at, second.cost.detection) == (near(25.0), near(40.0))


@pytest.mark.parametrize("trigger", GenerationTrigger)
@pytest.mark.parametrize("reason", ["n3 joined", "n2 left", "no batches left", "n1 drains (all)"])
def test_reported_trigger_of_the_rendezvous_is_used_for_any_reason(
    trigger: GenerationTrigger, reason: str
) -> None:
    recorded = {"reason": reason, "trigger": trigger.value}
    one = Agent("n1").launch(0.0).join(1.0, 1, trigger="start")
    one.stop(5.0, 6.0).join(7.0, 2, **recorded)
    # A second start of a job means that the store has lost its content.
    expected = GenerationTrigger.NODE_LOSS if trigger is GenerationTrigger.START else trigger
    assert triggers_of(one) == [GenerationTrigger.START, expected]
    joining_node = Agent("n3").launch(6.0).join(7.0, 2, rank=1, **recorded)
    assert triggers_of(joining_node) == [trigger]


def triggers_of(agent: Agent) -> list[GenerationTrigger]:
    return [generation.trigger for generation in history_of(event_files(agent)).generations]


@pytest.mark.parametrize(
    ("notice", "failed", "expected"),
    [
        ("resize", False, GenerationTrigger.RESIZE),
        ("", False, GenerationTrigger.NODE_LOSS),
        ("", True, GenerationTrigger.FAILURE),
    ],
)
def test_trigger_that_is_not_reported_follows_from_the_events_and_not_from_the_reason(
    notice: str, failed: bool, expected: GenerationTrigger
) -> None:
    for reason in ("n3 joined", "n1: ValueError: no batches left", "n2 left"):
        one = Agent("n1").launch(0.0).join(1.0, 1)
        if failed:
            one.fail(4.0, "ValueError: no batches left")
        one.stop(5.0, 6.0, notice).join(7.0, 2, reason=reason)
        assert triggers_of(one) == [GenerationTrigger.START, expected]


def test_failure_together_with_a_loss_counts_as_a_loss() -> None:
    one = Agent("n1").launch(0.0).join(1.0, 1).fail(5.0, "connection lost").stop(5.0, 6.0)
    one.join(7.0, 2, reason="n2 left", trigger="loss")
    assert triggers_of(one) == [GenerationTrigger.START, GenerationTrigger.NODE_LOSS]


def test_generations_of_a_second_launch_are_numbered_after_the_first() -> None:
    one, two = Agent("n1"), Agent("n2", clock_error=60.0)
    for start in (0.0, 30.0):
        for rank, agent in enumerate((one, two)):
            agent.launch(start).join(start + 1, 1, rank=rank, nodes=2)
            agent.train(start + 2, 1).advance(start + 9, 8)
            agent.stop(start + 9, start + 9.5, "drain").finish(start + 10, "drained", "SIGUSR2")
    one.launch(60.0).join(61.0, 1).succeed(70.0)
    history = history_of(event_files(one, two))
    assert [(g.number, g.node_count, g.trigger) for g in history.generations] == [
        (1, 2, GenerationTrigger.START),
        (2, 2, GenerationTrigger.START),
        (3, 1, GenerationTrigger.START),
    ]
    assert [g.started_at for g in history.generations] == [near(1), near(31), near(61)]
    assert history.generations[1].cost.repeated_steps == 8
    assert [node.node for node in history.nodes][-1] == "n1 (3)"
    assert (history.state, history.duration_seconds) == (JobState.SUCCEEDED, near(70.1))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("succeeded", None), JobState.SUCCEEDED),
        (("failed", None), JobState.FAILED),
        (("failed", "failed"), JobState.FAILED),
        (("drained", "drained"), JobState.DRAINED),
        (("stopped", "drained"), JobState.DRAINED),
        (("drained", None), JobState.RUNNING),
        ((None, None), JobState.RUNNING),
    ],
)
def test_state_of_the_job_combines_the_states_of_its_nodes(
    states: tuple[str | None, ...], expected: JobState
) -> None:
    agents = [Agent("n1").launch(0.0), Agent("n2").launch(0.0)]
    for rank, agent in enumerate(agents):
        agent.join(1.0, 1, rank=rank, nodes=2)
        end = states[rank]
        if end is not None:
            agent.finish(
                9.0, end, "a reason", root_cause={"host": "n2"} if end == "failed" else None
            )
    history = history_of(event_files(*agents))
    assert history.state is expected
    if expected is JobState.FAILED:
        assert (history.reason, history.root_cause) == ("a reason", {"host": "n2"})


@pytest.mark.parametrize(
    ("states", "lost_files", "expected"),
    [
        ((None, None), "01", None),
        (("drained", None), "1", None),
        (("succeeded", None), "1", JobState.SUCCEEDED),
        ((None, None), "1", JobState.RUNNING),
    ],
)
def test_state_is_unknown_if_all_unfinished_agents_were_killed(
    states: tuple[str | None, ...], lost_files: str, expected: JobState | None
) -> None:
    agents = [Agent("n1").launch(0.0), Agent("n2").launch(0.0)]
    for rank, (agent, end) in enumerate(zip(agents, states, strict=True)):
        agent.join(1.0, 1, rank=rank, nodes=2).train(2.0, 1).advance(8.0 + rank, 61)
        if end is not None:
            agent.finish(9.0, end, "a reason")
    killed = {f"{number}.jsonl" for number in lost_files}
    history = history_of(event_files(*agents), lambda file, _: file in killed)
    assert history.state is expected
    assert [node.is_lost for node in history.nodes] == [str(n) in lost_files for n in range(2)]
    has_warning = "terminated unexpectedly (killed?)" in Report(history).html()
    assert has_warning is (expected is None)


def test_expelled_node_does_not_finish_the_job() -> None:
    one, two = Agent("n1").launch(0.0).join(1.0, 1, nodes=2), Agent("n2").launch(0.0)
    two.join(1.0, 1, rank=1, nodes=2).fail(2.0, "it fell").stop(2.0, 3.0)
    two.finish(4.0, "failed", "this node's workers failed", expelled=True)
    one.stop(2.0, 3.0)
    assert history_of(event_files(one, two)).state is JobState.RESTARTING
    one.join(5.0, 2, reason="n2: it fell")
    assert history_of(event_files(one, two)).state is JobState.RUNNING


def test_truncated_event_files_are_read() -> None:
    events = one_failure().events
    for length in range(len(events) + 1):
        history = history_of({"file": events[:length]})
        assert len(history.generations) == sum(
            e.kind == "generation.started" for e in events[:length]
        )
    without_start = history_of({"file": events[8:]})
    assert [g.number for g in without_start.generations] == [2]
    assert history_of({}).state is JobState.WAITING


def test_long_history_is_sampled_evenly_and_counts_omitted_events() -> None:
    one = Agent("n1").launch(0.0).join(1.0, 1)
    for step in range(1, 20_001):
        one.advance(1.0 + step * 10, step)
        one.record(1.0 + step * 10, "checkpoint.saved", step=step)
    history = history_of(event_files(one))
    assert len(history.progress) <= 2_001
    assert len(history.timeline) <= 501
    assert history.omitted_events == 40_000 - len(history.progress) - len(history.timeline)
    assert (history.progress[0].step, history.progress[-1].step, history.checkpoint_step) == (
        1,
        20_000,
        20_000,
    )
    gaps = {b.step - a.step for a, b in zip(history.progress, history.progress[1:-1], strict=False)}
    assert len(gaps) == 1


def test_frequent_events_of_one_kind_do_not_displace_other_kinds() -> None:
    # Two workers fail again and again in the same order. Each saved event counts 3 checkpoints.
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.join(1.0, 1, rank=rank, nodes=2)
        for at in range(2, 604):
            agent.record(at, "checkpoint.saved", step=at, count=3)
    for at in range(2, 2004):
        for rank in (0, 1) if at % 4 == 0 else ():
            one.record(
                at,
                "worker.exited",
                rank,
                local_rank=rank,
                exit_code=1,
                succeeded=False,
                description="code 1",
            )
        one.record(at, "failure", reason="rank 0 exited").record(
            at, "state.restored", step=at, source="disk"
        )
    history = history_of(event_files(one, two))
    assert (history.num_failures, history.save_counts) == (
        2002,
        {"checkpoint.saved": 1806, "snapshot.taken": 0},
    )
    kinds = {
        kind: [m for m in history.timeline if m.kind == kind]
        for kind in ("failure", "state.restored")
    }
    assert [len(marks) for marks in kinds.values()] == [1002, 1002]
    assert {m.rank for m in history.timeline if m.kind == "worker.exited"} == {0, 1}
    html = Report(history).html()
    assert "Checkpoints: 1,806" in html
    assert "counted together. 1,002 evenly spaced failures are counted." in html


@pytest.mark.parametrize("num_finite", [0, 2])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_loss_that_is_not_finite_is_mentioned_in_the_report(value: str, num_finite: int) -> None:
    one = Agent("n1").launch(0.0).join(1.0, 1).train(2.0, 1)
    for step in (1, 2, 3, 4):
        loss = 1e30 if step <= num_finite else float(value)
        one.record(
            10.0 * step,
            "progress",
            step=step,
            steps_per_second=1.0,
            seconds_since_heartbeat=0.0,
            loss=loss,
        )
    html = Report(history_of({"0": [decode(encode(event)) for event in one.events]})).html()
    message = f"{4 - num_finite} values are not finite and not shown; the first is {value} at step "
    assert message in html


@pytest.mark.parametrize(
    "change", [{"monotonic": 1e308}, {"timestamp": -1e308}, {"generation": 10**400}]
)
def test_event_with_an_impossible_time_or_generation_is_ignored(
    change: dict[str, Any],
) -> None:
    one = Agent("n1").launch(0.0).join(1.0, 1).train(2.0, 1).succeed(20.0)
    expected = history_of(event_files(one))
    invalid = attrs.evolve(one.events[2], **change)
    assert history_of({"0.jsonl": [*one.events, invalid]}) == expected
