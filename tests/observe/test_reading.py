"""A job's history, from what its agents told."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from told_runs import WALL, Agent, files

from elasticlib.observe.event import decode, encode
from elasticlib.observe.history import GenerationTrigger, History, JobState
from elasticlib.observe.history_reader import history_of
from elasticlib.observe.report import Report
from elasticlib.observe.report.build import node_views


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-6)


def one_failure() -> Agent:
    """50 steps at 10 a second, of which the last 20 are done again."""
    one = Agent("n1").launch(0.0).begin(2.0, 1).train(5.0, 1).steps(9.9, 50, 10.0)
    one.tell(6.0, "checkpoint.saved", step=30)
    one.fail(10.0, "rank 0 raised").stop(10.0, 10.5)
    one.begin(11.0, 2, restarts=1, cause="n1: rank 0 raised")
    return one.restore(13.0, 30, 1.5).train(14.0, 31).steps(24.0, 131, 10.0).succeed(25.0)


def test_a_failure_costs_what_its_phases_took() -> None:
    history = history_of(files(one_failure()))
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
    # From the end of training to its going on there is no second that is in no phase.
    assert cost.seconds - cost.repeated == near(second.first_step_at - first.finished_at)


def test_goodput_is_the_time_of_steps_that_count() -> None:
    history = history_of(files(one_failure()))
    assert history.duration_seconds == near(25.1)
    assert history.goodput == near((5 + (25 - 14) - 1.9) / 25.1)


def hang(agent: Agent) -> Agent:
    """60 steps at 10 a second, 2 min without any, and 60 more."""
    agent.train(5.0, 1).steps(8.0, 31, 10.0).steps(10.9, 60, 10.0)
    return agent.steps(134.0, 91, 0.25).steps(137.0, 120, 10.0)


def test_time_in_which_no_step_came_is_not_training() -> None:
    one = hang(Agent("n1").launch(0.0).begin(2.0, 1)).succeed(140.0)
    (made,) = history_of(files(one)).generations
    assert made.cost.stalled == near(134.0 - 10.9 - 31 * 0.1)
    history = history_of(files(one))
    assert history.goodput == near((140.0 - 5.0 - 120.0) / 140.1)
    assert history.lost_seconds == near(sum(made.cost.phases.values()) + 0.1)
    assert "Without a step" not in Report(history).html()
    assert "stalled" in Report(history).html()


@pytest.mark.parametrize("ending", ["failed", "stands", "succeeded"])
def test_a_hang_that_goes_on_to_the_end_is_none_either(ending: str) -> None:
    one = Agent("n1").launch(0.0).begin(2.0, 1).train(5.0, 1).steps(15.0, 101, 10.0)
    if ending == "failed":
        one.fail(100.0, "it was killed").stop(100.0, 100.5).end(101.0, "failed", "no restarts left")
    elif ending == "stands":
        one.tell(100.0, "checkpoint.saved", step=90)
    else:
        one.succeed(100.0)
    (made,) = history_of(files(one)).generations
    # Who ends well had something else to do, such as to score the model.
    assert made.cost.stalled == (None if ending == "succeeded" else near(85.0))


@pytest.mark.parametrize("pace", [0.1, 20.0])
def test_steps_that_take_long_or_become_slower_are_no_stall(pace: float) -> None:
    one, at, step = Agent("n1").launch(0.0).begin(2.0, 1).train(5.0, 1), 5.0, 1
    for _ in range(60):
        steps = max(1, int(10 / pace))
        at, step = at + steps * pace, step + steps
        one.steps(at, step)
        pace *= 1.05
    (made,) = history_of(files(one)).generations
    assert made.cost.stalled is None


def crash_loop() -> Agent:
    """Two generations end before their first step, one of them after it has taken up a state."""
    one = Agent("n1").launch(0.0).begin(1.0, 1).fail(601.0, "OOM").stop(601.0, 602.0)
    one.begin(603.0, 2, restarts=1, cause="n1: OOM").restore(605.0, 0, 1.5)
    one.fail(703.0, "OOM").stop(703.0, 704.0)
    one.begin(705.0, 3, restarts=2, cause="n1: OOM").train(715.0, 1).steps(800.0, 86, 1.0)
    return one


def test_a_generation_that_ends_before_a_step_was_a_start_from_end_to_end() -> None:
    history = history_of(files(crash_loop()))
    assert [(g.cost.startup, g.cost.restore) for g in history.generations] == [
        (near(600), None),
        (near(98.5), near(1.5)),
        (near(10), None),
    ]
    phases = sum(generation.cost.seconds for generation in history.generations)
    assert (phases, history.lost_seconds) == (near(715), near(715))


def test_where_no_steps_are_told_nobody_knows_what_was_a_start() -> None:
    history = history_of({"cut": [e for e in crash_loop().events if "step" not in e.data]})
    assert [generation.cost.startup for generation in history.generations] == [None] * 3
    assert history.lost_seconds is None


def given_notice(saved: int) -> History:
    """100 steps in 10 s, notice, and 300 more until the workers are gone; then on from `saved`."""
    one = Agent("n1").launch(0.0).begin(1.0, 1).train(2.0, 1).steps(11.9, 100, 10.0)
    one.tell(12.0, "stopping", notice="resize", grace_seconds=60.0)
    one.tell(42.0, "stopped", duration_seconds=30.0, survivors="").steps(42.0, 400, 10.0)
    one.tell(42.0, "rendezvous.started", reason="n2 joined", is_planned=True)
    one.begin(43.0, 2, cause="n2 joined").train(44.0, saved + 1).steps(84.0, saved + 400, 10.0)
    return history_of(files(one))


def test_steps_that_are_done_after_a_notice_and_saved_are_not_lost() -> None:
    history = given_notice(400)
    first, second = history.generations
    assert (first.finished_at, second.cost.shutdown, second.cost.repeated_steps) == (
        near(42),
        near(0),
        0,
    )
    assert history.lost_seconds == near(2 + 2)


def test_steps_that_are_done_after_a_notice_and_not_saved_are_lost_where_they_are_redone() -> None:
    history = given_notice(100)
    assert history.generations[1].cost.repeated_steps == 300
    assert history.lost_seconds == pytest.approx(2 + 2 + 30, abs=0.2)


def test_what_is_told_once_stands_in_the_history() -> None:
    history = history_of(files(one_failure()))
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
        (stay.generation, stay.started_at, stay.finished_at) for stay in history.memberships
    ] == [
        (1, near(2), near(10.5)),
        (2, near(11), near(25)),
    ]
    assert [(mark.kind, mark.text) for mark in history.timeline] == [
        ("checkpoint.saved", "step 30"),
        ("worker.exited", "rank 0 raised"),
        ("failure", "rank 0 raised"),
        ("state.restored", "step 30 from disk"),
    ]
    assert [(pace.step, pace.steps_per_second) for pace in history.progress] == [
        (50, 10.0),
        (131, 10.0),
    ]


def pair(**clocks: float) -> History:
    one = Agent("n1", booted=-50.0).launch(0.0)
    two = Agent("n2", booted=-70_000.0, **clocks).launch(0.5)
    for rank, agent in enumerate((one, two)):
        agent.begin(2.0, 1, rank=rank, nodes=2).train(3.0, 1).steps(9.0, 61)
        agent.tell(10.0 + rank, "stopping", notice="", grace_seconds=0.0)
    one.stop(10.0, 12.0).begin(13.0, 2, nodes=2, restarts=1, cause="n1: it fell")
    two.stop(11.0, 11.5).begin(13.0, 2, rank=1, nodes=2, restarts=1, cause="n1: it fell")
    for agent in (one, two):
        agent.succeed(20.0)
    return history_of(files(two, one))


@pytest.mark.parametrize("ahead", [-60.0, 0.0, 60.0, 7 * 3600.0, -1e8])
def test_a_node_whose_wall_clock_is_off_lands_right(ahead: float) -> None:
    history = pair(ahead=ahead)
    assert {(stay.node, stay.generation): stay.started_at for stay in history.memberships} == {
        ("n1", 1): near(2.0),
        ("n2", 1): near(2.0),
        ("n1", 2): near(13.0),
        ("n2", 2): near(13.0),
    }
    assert [node.started_at for node in history.nodes] == [near(0.0), near(0.5)]
    assert [generation.node_count for generation in history.generations] == [2, 2]
    cost = history.generations[1].cost
    assert (cost.shutdown, cost.rendezvous) == (near(2.0), near(1.0)), "the slowest node's stop"


def test_incarnation_tells_whether_generations_with_one_number_are_the_same() -> None:
    one = Agent("n1").launch(0.0).begin(1.0, 1, nodes=2).train(2.0, 1).succeed(101.0)
    two = Agent("n2", ahead=7200.0).launch(0.0).begin(1.0, 1, rank=1, nodes=2).succeed(101.0)
    assert len(history_of(files(one, two)).generations) == 1
    other = [attrs.evolve(e, data={**e.data, "incarnation": "other"}) for e in two.events]
    assert len(history_of({"1": one.events, "2": other}).generations) == 2


def test_nodes_that_share_no_generation_are_laid_by_their_wall_clocks() -> None:
    one = Agent("n1", booted=-5.0).launch(0.0).begin(1.0, 1).stop(10.0, 11.0)
    two = Agent("n2", booted=-9.0).launch(9.0).begin(12.0, 2, cause="n1 left").succeed(20.0)
    history = history_of(files(two, one))
    assert [(g.number, g.started_at) for g in history.generations] == [(1, near(1)), (2, near(12))]


def test_a_lost_node_is_told_of_by_those_that_go_on_without_it() -> None:
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.begin(1.0, 1, rank=rank, nodes=2).train(2.0, 1).steps(9.0, 71)
    one.stop(15.0, 15.5).begin(16.0, 2, cause="n2 left").succeed(30.0)
    history = history_of(files(one, two))
    first, second = history.generations
    assert {node.node: node.is_lost for node in history.nodes} == {"n1": False, "n2": True}
    assert (second.trigger, second.cost.detection, second.cost.shutdown) == (
        GenerationTrigger.NODE_LOSS,
        near(6.0),
        near(0.5),
    )
    assert first.finished_at == near(9.0), "nothing went on after the last step"
    assert history.state is JobState.SUCCEEDED
    (gone,) = (stay for stay in history.memberships if stay.node == "n2")
    assert gone.finished_at == near(9.0)
    (_, row) = node_views(history)
    assert row.lost_at == near(9.0)
    quick = history_of(
        {"one": one.events, "two": two.tell(14.0, "checkpoint.saved", step=70).events}
    )
    assert quick.generations[1].cost.detection == near(6.0), "no step came of what it told"
    alone = history_of(files(one))
    assert alone.generations[1].cost.detection == near(6.0), "a survivor alone tells the same"


def test_a_spare_that_was_a_member_waits_in_silence_and_is_not_lost_while_the_job_runs() -> None:
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.begin(1.0, 1, rank=rank, nodes=2).train(2.0, 1).steps(9.0, 71).stop(15.0, 15.5)
    one.begin(16.0, 2, cause="n2 left").train(17.0, 72).steps(30.0, 200)
    running = history_of(files(one, two))
    assert [node.is_lost for node in running.nodes] == [False, False]
    over = history_of(files(one.succeed(40.0), two))
    assert [node.is_lost for node in over.nodes] == [False, True]


def lost(*, steps: bool) -> History:
    """The second node dies right after a step, 3 s after it last told of one, and it is noticed."""
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.begin(1.0, 1, rank=rank, nodes=2)
        if steps:
            agent.train(2.0, 1).steps(12.0, 101)
    one.tell(15.1, "stopping", notice="", grace_seconds=0.0)
    if steps:
        one.tell(15.3, "progress", step=131, steps_per_second=10.0, seconds_since_heartbeat=0.3)
    one.tell(15.4, "stopped", duration_seconds=0.3, survivors="").begin(
        16.0, 2, cause="n2 left", why="loss"
    ).succeed(20.0)
    return history_of(files(one, two))


def test_who_was_lost_worked_as_long_as_its_peers_did() -> None:
    first, second = lost(steps=True).generations
    assert (second.trigger, second.cost.detection, first.finished_at) == (
        GenerationTrigger.NODE_LOSS,
        near(0.1),
        near(15.0),
    )


def test_where_no_steps_are_told_no_silence_is_claimed() -> None:
    first, second = lost(steps=False).generations
    assert (second.trigger, second.cost.detection, first.finished_at) == (
        GenerationTrigger.NODE_LOSS,
        None,
        near(15.1),
    )


def test_the_silence_before_a_hang_is_lost_as_well() -> None:
    one = Agent("n1").launch(0.0).begin(1.0, 1).train(2.0, 1).steps(30.0, 71)
    one.tell(
        65.0, "failure", reason="hangs", failure_kind="hang", seconds_since_heartbeat=40.0
    ).stop(65.0, 66.0)
    one.begin(67.0, 2, restarts=1, cause="n1: hangs")
    first, second = history_of(files(one)).generations
    assert (first.finished_at, second.cost.detection) == (near(25.0), near(40.0))


@pytest.mark.parametrize("why", GenerationTrigger)
@pytest.mark.parametrize("cause", ["n3 joined", "n2 left", "no batches left", "n1 drains (all)"])
def test_a_generation_was_sought_for_what_the_rendezvous_told_whatever_its_words(
    why: GenerationTrigger, cause: str
) -> None:
    told = {"cause": cause, "why": why.value}
    one = Agent("n1").launch(0.0).begin(1.0, 1, why="start").stop(5.0, 6.0).begin(7.0, 2, **told)
    # Begun anew after it had begun, it has lost what the store held.
    wanted = GenerationTrigger.NODE_LOSS if why is GenerationTrigger.START else why
    assert [g.trigger for g in history_of(files(one)).generations] == [
        GenerationTrigger.START,
        wanted,
    ]
    newcomer = Agent("n3").launch(6.0).begin(7.0, 2, rank=1, **told)
    assert [g.trigger for g in history_of(files(newcomer)).generations] == [why]


@pytest.mark.parametrize(
    ("why", "failed", "wanted"),
    [
        ("resize", False, GenerationTrigger.RESIZE),
        ("", False, GenerationTrigger.NODE_LOSS),
        ("", True, GenerationTrigger.FAILURE),
    ],
)
def test_where_it_was_not_told_what_the_nodes_did_says_it_and_no_words_do(
    why: str, failed: bool, wanted: GenerationTrigger
) -> None:
    for cause in ("n3 joined", "n1: ValueError: no batches left", "n2 left"):
        one = Agent("n1").launch(0.0).begin(1.0, 1)
        if failed:
            one.fail(4.0, "ValueError: no batches left")
        one.stop(5.0, 6.0, why).begin(7.0, 2, cause=cause)
        assert [g.trigger for g in history_of(files(one)).generations] == [
            GenerationTrigger.START,
            wanted,
        ]


def test_a_failure_beside_a_loss_is_a_loss_as_nobody_is_charged_for_it() -> None:
    one = Agent("n1").launch(0.0).begin(1.0, 1).fail(5.0, "its peer had gone").stop(5.0, 6.0)
    one.begin(7.0, 2, cause="n2 left", why="loss")
    assert [g.trigger for g in history_of(files(one)).generations] == [
        GenerationTrigger.START,
        GenerationTrigger.NODE_LOSS,
    ]


def test_a_run_that_was_launched_again_is_counted_on() -> None:
    one, two = Agent("n1"), Agent("n2", ahead=60.0)
    for launched in (0.0, 30.0):
        for rank, agent in enumerate((one, two)):
            agent.launch(launched).begin(launched + 1, 1, rank=rank, nodes=2)
            agent.train(launched + 2, 1).steps(launched + 9, 8)
            agent.stop(launched + 9, launched + 9.5, "drain").end(launched + 10, "drained", "asked")
    one.launch(60.0).begin(61.0, 1).succeed(70.0)
    history = history_of(files(one, two))
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
    ("ends", "wanted"),
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
def test_the_jobs_state_is_that_of_all_nodes(
    ends: tuple[str | None, ...], wanted: JobState
) -> None:
    agents = [Agent("n1").launch(0.0), Agent("n2").launch(0.0)]
    for rank, agent in enumerate(agents):
        agent.begin(1.0, 1, rank=rank, nodes=2)
        end = ends[rank]
        if end is not None:
            agent.end(9.0, end, "so it was", root_cause={"host": "n2"} if end == "failed" else None)
    history = history_of(files(*agents))
    assert history.state is wanted
    if wanted is JobState.FAILED:
        assert (history.reason, history.root_cause) == ("so it was", {"host": "n2"})


@pytest.mark.parametrize(
    ("ends", "gone", "wanted"),
    [
        ((None, None), "01", None),
        (("drained", None), "1", None),
        (("succeeded", None), "1", JobState.SUCCEEDED),
        ((None, None), "1", JobState.RUNNING),
    ],
)
def test_where_no_agent_lives_that_did_not_end_nobody_knows_how_the_job_did(
    ends: tuple[str | None, ...], gone: str, wanted: JobState | None
) -> None:
    agents = [Agent("n1").launch(0.0), Agent("n2").launch(0.0)]
    for rank, (agent, end) in enumerate(zip(agents, ends, strict=True)):
        agent.begin(1.0, 1, rank=rank, nodes=2).train(2.0, 1).steps(8.0 + rank, 61)
        if end is not None:
            agent.end(9.0, end, "so it was")
    killed = {f"{number}.jsonl" for number in gone}
    history = history_of(files(*agents), lambda file, _: file in killed)
    assert history.state is wanted
    assert [node.is_lost for node in history.nodes] == [str(n) in gone for n in range(2)]
    said = "terminated unexpectedly (killed?)" in Report(history).html()
    assert said is (wanted is None)


def test_a_node_that_is_sent_away_does_not_end_the_job() -> None:
    one, two = Agent("n1").launch(0.0).begin(1.0, 1, nodes=2), Agent("n2").launch(0.0)
    two.begin(1.0, 1, rank=1, nodes=2).fail(2.0, "it fell").stop(2.0, 3.0)
    two.end(4.0, "failed", "this node's workers failed", expelled=True)
    one.stop(2.0, 3.0)
    assert history_of(files(one, two)).state is JobState.RESTARTING
    one.begin(5.0, 2, cause="n2: it fell")
    assert history_of(files(one, two)).state is JobState.RUNNING


def test_files_of_some_nodes_and_their_ends_may_be_missing() -> None:
    whole = one_failure().events
    for length in range(len(whole) + 1):
        history = history_of({"cut": whole[:length]})
        assert len(history.generations) == sum(
            e.kind == "generation.started" for e in whole[:length]
        )
    headless = history_of({"tail": whole[8:]})
    assert [g.number for g in headless.generations] == [2]
    assert history_of({}).state is JobState.WAITING


def test_a_week_is_thinned_and_says_so() -> None:
    one = Agent("n1").launch(0.0).begin(1.0, 1)
    for step in range(1, 20_001):
        one.steps(1.0 + step * 10, step)
        one.tell(1.0 + step * 10, "checkpoint.saved", step=step)
    history = history_of(files(one))
    assert len(history.progress) <= 2_001
    assert len(history.timeline) <= 501
    assert history.omitted_events == 40_000 - len(history.progress) - len(history.timeline)
    assert (history.progress[0].step, history.progress[-1].step, history.checkpoint_step) == (
        1,
        20_000,
        20_000,
    )
    gaps = {b.step - a.step for a, b in zip(history.progress, history.progress[1:-1], strict=False)}
    assert len(gaps) == 1, "evenly"


def test_many_marks_of_one_kind_leave_out_none_of_another_and_are_counted() -> None:
    """Two workers end again and again, always in the same order; both nodes tell of each step
    that is saved, of three at a time."""
    one, two = Agent("n1").launch(0.0), Agent("n2").launch(0.0)
    for rank, agent in enumerate((one, two)):
        agent.begin(1.0, 1, rank=rank, nodes=2)
        for at in range(2, 604):
            agent.tell(at, "checkpoint.saved", step=at, count=3)
    for at in range(2, 2004):
        for place in (0, 1) if at % 4 == 0 else ():
            one.tell(
                at,
                "worker.exited",
                place,
                local_rank=place,
                exit_code=1,
                succeeded=False,
                description="code 1",
            )
        one.tell(at, "failure", reason="rank 0 exited").tell(
            at, "state.restored", step=at, source="disk"
        )
    history = history_of(files(one, two))
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
    words = Report(history).html()
    assert "Checkpoints: 1,806" in words
    assert "counted together. 1,002 evenly spaced failures are counted." in words


@pytest.mark.parametrize("numbers", [0, 2])
@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_number_any_more_is_told_of(odd: str, numbers: int) -> None:
    one = Agent("n1").launch(0.0).begin(1.0, 1).train(2.0, 1)
    for step in (1, 2, 3, 4):
        loss = 1e30 if step <= numbers else float(odd)
        one.tell(
            10.0 * step,
            "progress",
            step=step,
            steps_per_second=1.0,
            seconds_since_heartbeat=0.0,
            loss=loss,
        )
    words = Report(history_of({"0": [decode(encode(event)) for event in one.events]})).html()
    assert (
        f"{4 - numbers} values are not finite and not shown; the first is {odd} at step " in words
    )


@pytest.mark.parametrize(
    "change", [{"monotonic": 1e308}, {"timestamp": -1e308}, {"generation": 10**400}]
)
def test_what_has_a_time_or_a_generation_that_cannot_be_is_passed_over(
    change: dict[str, Any],
) -> None:
    one = Agent("n1").launch(0.0).begin(1.0, 1).train(2.0, 1).succeed(20.0)
    known = history_of(files(one))
    odd = attrs.evolve(one.events[2], **change)
    assert history_of({"0.jsonl": [*one.events, odd]}) == known
