"""The status of a job, computed from its store and the statuses of its nodes, and its display."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import attrs
import pytest
from made_events import make_event

from elasticlib.observe.aggregate import NodeStatus, WorkerStatus
from elasticlib.observe.event import Event
from elasticlib.observe.formatting import format_table
from elasticlib.observe.history import JobState
from elasticlib.observe.job_status import (
    EXIT_CODES,
    FIELDS,
    MAX_LOOP_BLOCKED_S,
    MAX_NODE_ROWS,
    NODE_FIELDS,
    JobReading,
    JobStatus,
    NodeEntry,
    as_document,
    check_health,
    document_of_node,
    exit_code,
    headline,
    node_table,
    rank_table,
    result_of,
    status_of,
)
from elasticlib.observe.summary import (
    AgedSummary,
    NodeDetail,
    NodeReport,
    NodeSummary,
    detail_of,
    summarize,
)
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.bad_nodes import ExcludedHost
from elasticlib.rendezvous.blame import Evidence, FailureKind, Verdict
from elasticlib.rendezvous.membership import (
    JobPhase,
    LeaderStatus,
    Membership,
    NodeRecord,
    begin_resize,
    end_generation,
    form_generation,
)
from elasticlib.rendezvous.overview import JobOverview, SeenNode

NODES = tuple(NodeRecord(f"id{n}", f"h{n}", "", 2) for n in range(3))
FORMED = form_generation(
    Membership(RendezvousSettings(2, 3, 4)), NODES[:2], charged=False, nonce="m"
)
S = JobState


def make_status(node: NodeRecord, state: JobState = S.RUNNING) -> NodeStatus:
    """Return the status of a node with two workers."""
    rank = NODES.index(node)
    workers = (
        WorkerStatus(
            2 * rank,
            0,
            "pid 1",
            step=10 + rank,
            steps_per_second=4.0,
            seconds_since_heartbeat=0.5,
            checkpoint_step=8,
        ),
        WorkerStatus(
            2 * rank + 1,
            1,
            "pid 2",
            step=11 + rank,
            steps_per_second=5.0,
            seconds_since_heartbeat=0.25,
        ),
    )
    return NodeStatus("job", node.id, state=state, workers=workers)


def seen(nodes: Sequence[NodeRecord]) -> tuple[SeenNode, ...]:
    return tuple(SeenNode(node.id, node.host, node.slots, node.drain_reason) for node in nodes)


def make_reading(document: Membership | None, *states: JobState, num_alive: int = 2) -> JobReading:
    """Return the content of a store in which the first nodes have reported these states."""
    statuses = [make_status(node, state) for node, state in zip(NODES, states, strict=False)]
    summaries = {
        status.node: AgedSummary(summarize(NodeReport(status, 1.0 + n, 9.0)), 0.5)
        for n, status in enumerate(statuses)
    }
    job = JobOverview(None, (), seen(NODES[:num_alive]))
    if document is not None:
        job = attrs.evolve(job, state=document.state, members=seen(document.members))
    return JobReading(
        "job",
        job,
        LeaderStatus("1 of 2 nodes are here"),
        summaries,
        {status.node: detail_of(status) for status in statuses},
    )


def with_live_nodes(reading: JobReading, nodes: Sequence[NodeRecord]) -> JobReading:
    return attrs.evolve(reading, job=attrs.evolve(reading.job, live_nodes=seen(nodes)))


def with_summaries(
    reading: JobReading, change: Callable[[NodeSummary], NodeSummary], age_s: float = 0.5
) -> JobReading:
    """Return the reading with changed summaries, which are this old."""
    summaries = {
        id: AgedSummary(change(found.summary), age_s) for id, found in reading.summaries.items()
    }
    return attrs.evolve(reading, summaries=summaries)


def compute_status(reading: JobReading) -> JobStatus:
    status = status_of(reading)
    assert status is not None
    return status


def state_of(document: Membership | None, *states: JobState, num_alive: int = 2) -> JobState | None:
    return compute_status(make_reading(document, *states, num_alive=num_alive)).state


def test_job_without_nodes_and_document_has_no_status() -> None:
    assert status_of(make_reading(None, num_alive=0)) is None


def test_state_follows_the_nodes_from_the_start_to_the_end_of_a_job() -> None:
    assert state_of(None, num_alive=1) is S.WAITING
    assert state_of(Membership(RendezvousSettings(2, 3)), num_alive=1) is S.WAITING
    assert state_of(Membership(RendezvousSettings(2, 3)), num_alive=2) is S.RENDEZVOUS
    assert state_of(FORMED, S.RENDEZVOUS, S.RUNNING) is S.RENDEZVOUS
    assert state_of(FORMED, S.RUNNING, S.RUNNING) is S.RUNNING
    assert state_of(FORMED, S.SUCCEEDED, S.RUNNING) is S.RUNNING
    assert state_of(FORMED, S.SUCCEEDED, S.SUCCEEDED) is S.SUCCEEDED
    states = {"SUCCEEDED": S.SUCCEEDED, "FAILED": S.FAILED, "ABORTED": S.STOPPED}
    for phase, state in states.items():
        assert state_of(attrs.evolve(FORMED, phase=JobPhase[phase]), num_alive=0) is state


def test_state_between_two_generations_depends_on_the_reason() -> None:
    assert state_of(FORMED, S.RUNNING, S.RESTARTING) is S.RESTARTING
    assert state_of(FORMED, S.RESTARTING, S.DRAINING) is S.DRAINING
    assert state_of(end_generation(FORMED, "gone")) is S.RENDEZVOUS
    assert state_of(end_generation(FORMED, "gone"), num_alive=1) is S.WAITING
    failed, lost = (Verdict(Evidence(kind)) for kind in (FailureKind.RAISED, FailureKind.LOST))
    assert state_of(end_generation(FORMED, "failed", failed)) is S.RESTARTING
    assert state_of(end_generation(FORMED, "gone", lost)) is S.RENDEZVOUS
    assert state_of(begin_resize(FORMED, "one more")) is S.RESIZING


def test_job_without_a_lease_has_no_state_and_terminated_unexpectedly() -> None:
    status = compute_status(make_reading(FORMED, num_alive=0))
    assert (status.state, exit_code(status)) == (None, 4)
    assert [node.state_text for node in status.nodes] == ["gone", "gone"]
    assert "no node is alive" in status.reason
    assert headline(status)[0] == "job: terminated unexpectedly (killed?)"


def test_without_published_statuses_the_store_is_the_source_and_the_exit_code_is_4() -> None:
    status = compute_status(make_reading(FORMED))
    assert (status.state, exit_code(status), as_document(status)["source"]) == (
        S.RUNNING,
        4,
        "store",
    )
    assert (
        "  no agent publishes a status (custom launcher without elasticlib.observe_node?); "
        "showing the store's data"
    ) in headline(status)
    status = compute_status(make_reading(FORMED, S.RUNNING))
    assert (exit_code(status), as_document(status)["source"]) == (0, "nodes")


def test_step_and_rate_of_a_job_are_those_of_the_slowest_worker() -> None:
    status = compute_status(make_reading(FORMED, S.RUNNING, S.RUNNING, num_alive=3))
    assert (status.step, status.steps_per_second) == (10, 4.0)
    assert (status.checkpoint_step, status.snapshot_step) == (8, None)
    assert (status.generation, status.world_size, status.max_restarts) == (1, 4, 4)
    assert status.state_seconds == 1.5
    assert [node.host for node in status.spares] == ["h2"]
    assert [node.host for node in status.not_reporting] == ["h2"]
    text = "\n".join(headline(status))
    assert "job: RUNNING for 1.5 s, started 9.5 s ago" in text
    assert "generation 1, 2 nodes (of 2 to 3), 4 workers, 0 of 4 restarts" in text
    assert "step 10, steps/s 4, checkpoint 8" in text
    assert "spares: h2" in text
    assert "not reporting: h2" in text


def test_node_without_a_rank_is_joining_before_a_generation_and_a_spare_during_one() -> None:
    def ranks_of(document: Membership) -> list[str]:
        status = compute_status(make_reading(document, num_alive=3))
        return [row[0] for row in node_table(status)[1]]

    assert ranks_of(Membership(RendezvousSettings(2, 3))) == ["joining"] * 3
    assert ranks_of(FORMED) == ["0", "1", "spare"]


def test_the_status_names_each_excluded_host_and_the_reason() -> None:
    excluded = ExcludedHost("h7", "its workers\nfailed")
    document = attrs.evolve(FORMED, excluded_hosts=(excluded,))
    status = compute_status(make_reading(document, S.RUNNING, S.RUNNING))
    assert as_document(status)["excluded"] == [{"host": "h7", "reason": "its workers\nfailed"}]
    assert "  excluded: h7, because its workers\\x0afailed" in headline(status)


def test_json_document_has_exactly_the_documented_keys() -> None:
    status = compute_status(make_reading(FORMED, S.RUNNING, S.RUNNING, num_alive=3))
    document = json.loads(json.dumps(as_document(status)))
    assert set(document) == set(FIELDS)
    assert all(set(node) == set(NODE_FIELDS) for node in document["nodes"])
    assert [node["reporting"] for node in document["nodes"]] == [True, True, False]
    assert document["nodes"][1]["workers"][0]["step"] == 11
    assert [node["age_seconds"] for node in document["nodes"]] == [0.5, 0.5, None]
    assert [node["state_seconds"] for node in document["nodes"]] == [1.5, 2.5, None]
    assert [node["healthy"] for node in document["nodes"]] == [True, True, None]


def test_status_names_each_excluded_host_and_the_reason() -> None:
    excluded = ExcludedHost("h7", "its workers\nfailed")
    document = attrs.evolve(FORMED, excluded_hosts=(excluded,))
    status = compute_status(make_reading(document, S.RUNNING, S.RUNNING))
    assert as_document(status)["excluded"] == [{"host": "h7", "reason": "its workers\nfailed"}]
    assert "  excluded: h7, because its workers\\x0afailed" in headline(status)


def test_document_of_one_node_has_the_same_keys() -> None:
    report = NodeReport(
        make_status(NODES[1]), 1.0, 9.0, loop_blocked_seconds=MAX_LOOP_BLOCKED_S + 1
    )
    document = json.loads(json.dumps(document_of_node(report)))
    assert set(document) == set(FIELDS)
    (node,) = document["nodes"]
    assert set(node) == set(NODE_FIELDS)
    assert (document["state"], document["source"], document["step"]) == ("RUNNING", "nodes", 11)
    assert document["state_seconds"] == node["state_seconds"] == 1.0
    assert (node["healthy"], node["alive"], node["reporting"]) == (False, True, True)
    assert node["health_message"] == "the agent's event loop has been blocked for 16.0 s"


def test_the_whole_reason_of_a_node_is_that_of_its_details() -> None:
    reading = make_reading(FORMED, S.DRAINING, S.RUNNING)
    cut = with_summaries(reading, lambda summary: attrs.evolve(summary, reason="too lo"))
    details = {"id0": NodeDetail(0, "too long for a summary")}
    assert compute_status(attrs.evolve(cut, details=details)).reason == "too long for a summary"
    assert compute_status(attrs.evolve(cut, details={})).reason == "too lo"


def test_old_statuses_that_are_not_renewed_do_not_count_as_reporting() -> None:
    reading = with_summaries(make_reading(FORMED, S.RUNNING, S.RUNNING), lambda s: s, 3600.0)
    status = compute_status(reading)
    assert (status.state, exit_code(status)) == (S.RUNNING, 0)
    assert as_document(status)["source"] == "nodes"
    assert [row[3] for row in node_table(status)[1]] == ["1 h", "1 h"]
    status = compute_status(attrs.evolve(reading, is_final=True))
    assert (status.state, exit_code(status)) == (S.RUNNING, 4)
    document = as_document(status)
    assert document["source"] == "store"
    assert [node["reporting"] for node in document["nodes"]] == [False, False]


def test_time_since_a_heartbeat_includes_the_age_of_the_status() -> None:
    reading = make_reading(FORMED, S.RUNNING, S.RUNNING, num_alive=1)
    reading = with_summaries(reading, lambda summary: summary, 7.0)
    status = compute_status(reading)
    assert [row[5:8] for row in node_table(status)[1]] == [
        ("10 to 11", "4 to 5", "7.5 s"),
        ("-", "-", "-"),
    ]
    assert [row[5] for row in rank_table(status)[1]] == ["7.5 s", "7.2 s"]
    status = compute_status(with_live_nodes(reading, ()))
    assert (status.step, status.steps_per_second) == (10, None)


def test_last_status_of_a_lost_member_does_not_affect_the_job() -> None:
    reading = make_reading(FORMED, S.RUNNING, S.RESTARTING, num_alive=1)
    status = compute_status(reading)
    assert (status.state, status.step, status.checkpoint_step) == (S.RUNNING, 10, 8)
    status = compute_status(with_live_nodes(reading, NODES[1:2]))
    assert (status.state, status.step) == (S.RESTARTING, 11)


def test_headline_marks_snapshots_of_killed_agents_as_lost() -> None:
    reading = make_reading(FORMED, S.RUNNING, S.RUNNING, num_alive=0)
    reading = with_summaries(reading, lambda summary: attrs.evolve(summary, snapshot_step=40))
    for alive_nodes, suffix in ((NODES[:2], ""), ((), " (lost with its agents)")):
        status = compute_status(with_live_nodes(reading, alive_nodes))
        (line,) = [line for line in headline(status) if "snapshot" in line]
        assert line.endswith(f"checkpoint 8, snapshot 40{suffix}")


def test_last_status_of_a_suspended_node_is_shown_with_its_age() -> None:
    for num_alive, state in ((2, "RUNNING"), (0, "gone")):
        reading = make_reading(FORMED, S.RUNNING, S.RUNNING, num_alive=num_alive)
        old = attrs.evolve(reading.summaries["id0"], age_s=40.0)
        status = compute_status(attrs.evolve(reading, summaries={**reading.summaries, "id0": old}))
        assert [node.state_text for node in status.nodes] == [state] * 2
        assert [row[3] for row in node_table(status)[1]] == ["40 s", "0.50 s"]
        assert (status.step, as_document(status)["nodes"][0]["age_seconds"]) == (10, 40.0)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (S.RUNNING, 0),
        (S.SUCCEEDED, 0),
        (S.FAILED, 1),
        *((state, 3) for state in JobState if not state.is_finished and state != S.RUNNING),
        (None, 4),
        (S.STOPPED, 5),
        (S.DRAINED, 5),
    ],
)
def test_exit_code_depends_on_the_state(state: JobState | None, code: int) -> None:
    assert exit_code(JobStatus("job", state)) == code
    assert code in EXIT_CODES


def make_large_job() -> JobStatus:
    """Return the status of 1,000 nodes: two publish none, and one has no recent heartbeat."""

    def make_entry(n: int) -> NodeEntry:
        summary = NodeSummary(
            S.RUNNING,
            num_workers=1,
            first_rank=n,
            step=100 + n % 2,
            last_step=100 + n % 2,
            silence_s=30.0 if n == 500 else 0.1,
        )
        found = None if n in (7, 8) else summary
        return NodeEntry(f"n{n}", f"h{n}", n, 1, alive=True, summary=found, age_s=0.5)

    return JobStatus("job", S.RUNNING, nodes=tuple(make_entry(n) for n in range(1000)))


def test_table_of_a_thousand_nodes_fits_on_a_screen_and_shows_unusual_nodes() -> None:
    lines = format_table(*node_table(make_large_job()))
    assert len(lines) <= MAX_NODE_ROWS + 2
    assert lines[1].split()[:4] == ["7", "h7", "no", "status"]
    assert any(line.split()[:2] == ["500", "h500"] and "30 s" in line for line in lines)
    assert lines[-1].startswith("4-6, 9-499, 501-999  993 others  RUNNING")
    assert "100 to 101" in lines[-1]
    assert rank_table(make_large_job())[1] == []


def test_only_members_contribute_to_the_step_and_the_rate_of_a_job() -> None:
    worker = WorkerStatus(
        1, 0, "pid 9", running=False, step=100, steps_per_second=0.5, checkpoint_step=90
    )
    spare = NodeStatus(
        "job",
        "id2",
        "h",
        state=S.RESTARTING,
        generation=1,
        node_rank=1,
        workers=(worker,),
        step=100,
        steps_per_second=0.5,
        snapshot_step=100,
    )
    reading = make_reading(FORMED, S.RUNNING, S.RUNNING, num_alive=3)
    found = AgedSummary(summarize(NodeReport(spare, 60.0, 90.0)), 0.5)
    reading = attrs.evolve(
        reading,
        summaries={**reading.summaries, "id2": found},
        details={**reading.details, "id2": detail_of(spare)},
    )
    status = compute_status(reading)
    assert (status.step, status.steps_per_second) == (10, 4.0)
    assert (status.snapshot_step, status.checkpoint_step) == (None, 90)
    assert status.nodes[2].rank is None
    assert [row[0] for row in rank_table(status)[1]] == ["0", "1", "2", "3"]


def last_event(
    state: str = "",
    reason: str = "",
    *,
    wall: float = 0.0,
    expelled: bool = False,
    generation: int = 2,
) -> Event:
    """Return the last event of an agent: its end, or a step if no state is given."""
    if not state:
        return make_event("progress", "job", "n", generation, wall, 1.0, None, {"step": 7})
    data = {"state": state, "reason": reason, "exit_code": 1, "expelled": expelled}
    return make_event("run.finished", "job", "n", generation, wall, 1.0, None, data)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["", "succeeded"], S.SUCCEEDED),
        (["drained", "failed"], S.FAILED),
        (["drained", "drained"], S.DRAINED),
        (["drained", "stopped"], S.DRAINED),
        (["drained", ""], None),
        ([""], None),
    ],
)
def test_result_of_a_run_is_taken_from_the_last_events(
    states: list[str], expected: JobState | None
) -> None:
    result = result_of("job", [last_event(state) for state in states], now=9.0)
    assert (result.state, result.is_recorded, result.nodes) == (expected, True, ())


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({"drained": 1, "stopped": 2}, S.STOPPED),
        ({"drained": 1, "": 2}, None),
        ({"": 1, "stopped": 2}, S.STOPPED),
        ({"drained": 2, "stopped": 2}, S.DRAINED),
        ({"failed": 0, "succeeded": 2}, S.SUCCEEDED),
    ],
)
def test_nodes_that_have_left_before_the_last_generation_do_not_affect_the_result(
    states: dict[str, int], expected: JobState | None
) -> None:
    events = [last_event(state, generation=number) for state, number in states.items()]
    assert result_of("job", events, now=9.0).state == expected
    assert result_of("job", events[::-1], now=9.0).state == expected


def test_failure_of_an_expelled_node_is_not_the_result_of_the_run() -> None:
    expelled = last_event("failed", "rank 0 raised", expelled=True)
    assert result_of("job", [expelled, last_event()], now=9.0).state is None
    result = result_of("job", [expelled, last_event("failed", "rank 1 raised")], now=9.0)
    assert (result.state, result.reason) == (S.FAILED, "rank 1 raised")
    assert result_of("job", [expelled], now=9.0).state is S.FAILED


def test_headline_has_the_result_of_a_run_and_its_age() -> None:
    failed = result_of("job", [last_event("failed", "rank 1 raised", wall=40.0)], now=50.0)
    assert headline(failed) == ["job: FAILED, 10 s ago", "  reason: rank 1 raised"]
    killed = result_of("job", [last_event(wall=40.0)], now=50.0)
    assert headline(killed)[0] == "job: terminated unexpectedly (killed?), 10 s ago"
    assert "the last event is progress" in headline(killed)[1]


@pytest.mark.parametrize("state", JobState)
def test_only_failed_nodes_and_blocked_agents_are_unhealthy(state: JobState) -> None:
    health = check_health(state, "rank 0 raised", 0.0)
    assert health.is_healthy is (state is not JobState.FAILED)
    assert health.is_healthy or "rank 0 raised" in health.message
    health = check_health(state, "", MAX_LOOP_BLOCKED_S + 1)
    assert health.is_healthy is (state.is_finished and state is not JobState.FAILED)


def test_health_message_has_the_time_for_which_the_event_loop_is_blocked() -> None:
    health = check_health(JobState.RUNNING, "", MAX_LOOP_BLOCKED_S + 1)
    assert health.message == "the agent's event loop has been blocked for 16.0 s"
