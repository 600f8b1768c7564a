"""What a job is doing, of what its store holds and its nodes say; and how that is shown."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

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
from elasticlib.observe.node_status import NodeReport
from elasticlib.observe.stack_query import JobStacks, NodeStacks, group_stacks, stack_lines
from elasticlib.rendezvous.bad_nodes import ExcludedHost
from elasticlib.rendezvous.membership import (
    JobPhase,
    LeaderStatus,
    Membership,
    NodeFailure,
    NodeRecord,
    RendezvousSettings,
    begin_resize,
    end_generation,
    form_generation,
)

NODES = tuple(NodeRecord(f"id{n}", f"h{n}", "", 2) for n in range(3))
SETTLED = form_generation(
    Membership(RendezvousSettings(2, 3, 4)), NODES[:2], charged=False, nonce="m"
)
S = JobState


def published(node: NodeRecord, state: JobState = S.RUNNING, seconds: float = 1.0) -> NodeReport:
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
    status = NodeStatus("job", node.id, state=state, workers=workers)
    return NodeReport(status, seconds, 9.0, age_seconds=0.5)


def view(document: Membership | None, *states: JobState, live: int = 2) -> JobReading:
    found = {
        node.id: published(node, state, 1.0 + n)
        for n, (node, state) in enumerate(zip(NODES, states, strict=False))
    }
    return JobReading("job", document, NODES[:live], LeaderStatus("1 of 2 nodes are here"), found)


def state(document: Membership | None, *states: JobState, live: int = 2) -> JobState | None:
    found = status_of(view(document, *states, live=live))
    assert found is not None
    return found.state


def test_a_job_that_nobody_knows_is_none() -> None:
    assert status_of(view(None, live=0)) is None


def test_it_waits_meets_runs_and_ends() -> None:
    assert state(None, live=1) is S.WAITING
    assert state(Membership(RendezvousSettings(2, 3)), live=1) is S.WAITING
    assert state(Membership(RendezvousSettings(2, 3)), live=2) is S.RENDEZVOUS
    assert state(SETTLED, S.RENDEZVOUS, S.RUNNING) is S.RENDEZVOUS
    assert state(SETTLED, S.RUNNING, S.RUNNING) is S.RUNNING
    assert state(SETTLED, S.SUCCEEDED, S.RUNNING) is S.RUNNING
    assert state(SETTLED, S.SUCCEEDED, S.SUCCEEDED) is S.SUCCEEDED
    ended = {"SUCCEEDED": S.SUCCEEDED, "FAILED": S.FAILED, "ABORTED": S.STOPPED}
    for phase, want in ended.items():
        assert state(attrs.evolve(SETTLED, phase=JobPhase[phase]), live=0) is want


def test_why_it_is_between_two_generations_is_told_apart() -> None:
    assert state(SETTLED, S.RUNNING, S.RESTARTING) is S.RESTARTING
    assert state(SETTLED, S.RESTARTING, S.DRAINING) is S.DRAINING
    assert state(end_generation(SETTLED, "gone")) is S.RENDEZVOUS
    assert state(end_generation(SETTLED, "gone"), live=1) is S.WAITING
    assert state(end_generation(SETTLED, "failed", NodeFailure("id0", "rank 0"))) is S.RESTARTING
    assert state(begin_resize(SETTLED, "one more")) is S.RESIZING


def test_nobody_is_left_to_tell_where_no_lease_stands() -> None:
    found = status_of(view(SETTLED, live=0))
    assert found is not None
    assert (found.state, exit_code(found)) == (None, 4)
    assert [node.state_text for node in found.nodes] == ["gone", "gone"]
    assert "no node is alive" in found.reason
    assert headline(found)[0] == "job: terminated unexpectedly (killed?)"


def test_where_no_node_has_a_status_it_is_the_store_that_tells_and_the_code_is_4() -> None:
    found = status_of(view(SETTLED))
    assert found is not None
    assert (found.state, exit_code(found), as_document(found)["source"]) == (S.RUNNING, 4, "store")
    assert (
        "  no agent publishes a status (custom launcher without elasticlib.observe_node?); "
        "showing the store's data" in (headline(found))
    )
    one = status_of(view(SETTLED, S.RUNNING))
    assert one is not None
    assert (exit_code(one), as_document(one)["source"]) == (0, "nodes")


def test_the_slowest_counts_and_the_last_that_is_safe() -> None:
    found = status_of(view(SETTLED, S.RUNNING, S.RUNNING, live=3))
    assert found is not None
    assert (found.step, found.steps_per_second, found.checkpoint_step, found.snapshot_step) == (
        10,
        4.0,
        8,
        None,
    )
    assert (found.generation, found.world_size, found.max_restarts, found.state_seconds) == (
        1,
        4,
        4,
        1.5,
    )
    assert [node.host for node in found.spares] == ["h2"]
    assert [node.host for node in found.not_reporting] == ["h2"]
    text = "\n".join(headline(found))
    assert "job: RUNNING for 1.5 s, started 9.5 s ago" in text
    assert "generation 1, 2 nodes (of 2 to 3), 4 workers, 0 of 4 restarts" in text
    assert "step 10, steps/s 4, checkpoint 8" in text
    assert "spares: h2" in text
    assert "not reporting: h2" in text


def test_who_has_no_rank_yet_joins_and_is_a_spare_once_a_generation_stands() -> None:
    def places(document: Membership) -> list[str]:
        found = status_of(view(document, live=3))
        assert found is not None
        return [row[0] for row in node_table(found)[1]]

    assert places(Membership(RendezvousSettings(2, 3))) == ["joining"] * 3
    assert places(SETTLED) == ["0", "1", "spare"]


def test_the_document_has_the_keys_that_are_described_and_no_others() -> None:
    found = status_of(view(SETTLED, S.RUNNING, S.RUNNING, live=3))
    assert found is not None
    document = json.loads(json.dumps(as_document(found)))
    assert set(document) == set(FIELDS)
    assert all(set(node) == set(NODE_FIELDS) for node in document["nodes"])
    assert [node["reporting"] for node in document["nodes"]] == [True, True, False]
    assert document["nodes"][1]["workers"][0]["step"] == 11
    assert [node["age_seconds"] for node in document["nodes"]] == [0.5, 0.5, None]
    assert [node["state_seconds"] for node in document["nodes"]] == [1.5, 2.5, None]
    assert [node["healthy"] for node in document["nodes"]] == [True, True, None]


def test_the_status_names_each_excluded_host_and_the_reason() -> None:
    excluded = ExcludedHost("h7", "its workers\nfailed")
    found = status_of(view(attrs.evolve(SETTLED, excluded_hosts=(excluded,)), S.RUNNING, S.RUNNING))
    assert found is not None
    assert as_document(found)["excluded"] == [{"host": "h7", "reason": "its workers\nfailed"}]
    assert "  excluded: h7, because its workers\\x0afailed" in headline(found)


def test_one_node_shows_the_same_document_of_itself() -> None:
    one = attrs.evolve(
        published(NODES[1]), loop_blocked_seconds=MAX_LOOP_BLOCKED_S + 1, age_seconds=None
    )
    document = json.loads(json.dumps(document_of_node(one)))
    assert set(document) == set(FIELDS)
    (node,) = document["nodes"]
    assert set(node) == set(NODE_FIELDS)
    assert (document["state"], document["source"], document["step"]) == ("RUNNING", "nodes", 11)
    assert document["state_seconds"] == node["state_seconds"] == 1.0
    assert (node["healthy"], node["alive"], node["reporting"]) == (False, True, True)
    assert node["health_message"] == "the agent's event loop has been blocked for 16.0 s"


def test_old_statuses_that_nobody_renews_say_what_was_and_not_that_anybody_is_there() -> None:
    there = view(SETTLED, S.RUNNING, S.RUNNING)
    old = {id: attrs.evolve(one, age_seconds=3600.0) for id, one in there.reports.items()}
    found = status_of(attrs.evolve(there, reports=old))
    assert found is not None
    assert (found.state, exit_code(found), as_document(found)["source"]) == (S.RUNNING, 0, "nodes")
    assert [row[3] for row in node_table(found)[1]] == ["1 h", "1 h"]
    still = status_of(attrs.evolve(there, reports=old, is_final=True))
    assert still is not None
    assert (still.state, exit_code(still), as_document(still)["source"]) == (S.RUNNING, 4, "store")
    assert [node["reporting"] for node in as_document(still)["nodes"]] == [False, False]


def test_how_long_a_worker_is_silent_is_by_now_and_one_that_is_gone_makes_no_steps() -> None:
    there = view(SETTLED, S.RUNNING, S.RUNNING, live=1)
    old = {id: attrs.evolve(one, age_seconds=7.0) for id, one in there.reports.items()}
    found = status_of(attrs.evolve(there, reports=old))
    assert found is not None
    assert [row[5:8] for row in node_table(found)[1]] == [
        ("10 to 11", "4 to 5", "7.5 s"),
        ("-", "-", "-"),
    ]
    assert [row[5] for row in rank_table(found)[1]] == ["7.5 s", "7.2 s"]
    gone = status_of(attrs.evolve(there, alive_nodes=(), reports=old))
    assert gone is not None
    assert (gone.step, gone.steps_per_second) == (10, None)


def test_a_member_that_is_gone_holds_nobody_up_with_its_last_status() -> None:
    there = view(SETTLED, S.RUNNING, S.RESTARTING, live=1)
    found = status_of(there)
    assert found is not None
    assert (found.state, found.step, found.checkpoint_step) == (S.RUNNING, 10, 8)
    gone = status_of(attrs.evolve(there, alive_nodes=NODES[1:2]))
    assert gone is not None
    assert (gone.state, gone.step) == (S.RESTARTING, 11)


def test_snapshots_of_agents_that_were_killed_are_said_to_be_lost() -> None:
    there = view(SETTLED, S.RUNNING, S.RUNNING, live=0)
    kept = {
        id: attrs.evolve(it, status=attrs.evolve(it.status, snapshot_step=40))
        for id, it in there.reports.items()
    }
    for live, lost in ((NODES[:2], ""), ((), " (lost with its agents)")):
        found = status_of(attrs.evolve(there, alive_nodes=live, reports=kept))
        assert found is not None
        (line,) = [line for line in headline(found) if "snapshot" in line]
        assert line.endswith(f"checkpoint 8, snapshot 40{lost}")


def test_the_last_status_of_a_node_that_stands_still_is_shown_with_its_age() -> None:
    still = attrs.evolve(published(NODES[0]), age_seconds=40.0)
    for live, state in ((2, "RUNNING"), (0, "gone")):
        there = view(SETTLED, S.RUNNING, S.RUNNING, live=live)
        found = status_of(attrs.evolve(there, reports={**there.reports, "id0": still}))
        assert found is not None
        assert [node.state_text for node in found.nodes] == [state] * 2
        assert [row[3] for row in node_table(found)[1]] == ["40 s", "0.50 s"]
        assert (found.step, as_document(found)["nodes"][0]["age_seconds"]) == (10, 40.0)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (S.RUNNING, 0),
        (S.SUCCEEDED, 0),
        (S.FAILED, 1),
        *((between, 3) for between in JobState if not between.is_finished and between != S.RUNNING),
        (None, 4),
        (S.STOPPED, 5),
        (S.DRAINED, 5),
    ],
)
def test_scripts_can_go_by_the_exit_code(state: JobState | None, code: int) -> None:
    assert exit_code(JobStatus("job", state)) == code
    assert code in EXIT_CODES


def thousand() -> JobStatus:
    def node(n: int) -> NodeEntry:
        silent = 30.0 if n == 500 else 0.1
        worker = WorkerStatus(n, 0, "pid 1", step=100 + n % 2, seconds_since_heartbeat=silent)
        status = NodeStatus("job", f"n{n}", state=S.RUNNING, workers=(worker,))
        found = None if n in (7, 8) else NodeReport(status, 1.0, 1.0, age_seconds=0.5)
        return NodeEntry(f"n{n}", f"h{n}", n, 1, alive=True, report=found)

    return JobStatus("job", S.RUNNING, nodes=tuple(node(n) for n in range(1000)))


def test_a_thousand_nodes_fit_on_a_screen_and_the_odd_ones_are_seen() -> None:
    shown = format_table(*node_table(thousand()))
    assert len(shown) <= MAX_NODE_ROWS + 2
    assert shown[1].split()[:4] == ["7", "h7", "no", "status"]
    assert any(line.split()[:2] == ["500", "h500"] and "30 s" in line for line in shown)
    assert shown[-1].startswith("4-6, 9-499, 501-999  993 others  RUNNING")
    assert "100 to 101" in shown[-1]
    assert rank_table(thousand())[1] == []


STACK = 'Stack (most recent call first):\n  File "train.py", line 9 in step\n'


def test_equal_stacks_are_shown_once_and_rare_ones_first() -> None:
    ours = '  File "/here/elasticlib/workers/run_program.py", line 60 in run\n'
    texts = {0: STACK, 1: STACK + ours, 2: STACK.replace("line 9", "line 7"), 3: STACK}
    assert [group.ranks for group in group_stacks(texts)] == [(2,), (0, 1, 3)]
    assert "elasticlib" not in group_stacks(texts)[1].text


def test_who_does_not_show_its_stacks_is_named() -> None:
    one = NodeStacks({0: STACK}, unresponsive_ranks=(1,), unsupported={4: "pid 9"})
    said = "\n".join(stack_lines(JobStacks(NODES[:2], {"id0": one}), frozenset({0, 1, 6})))
    assert "h0: rank 1 returned no stack within 1 s" in said
    assert "h0: rank 4 (pid 9) is not a Python process started by elasticlib" in said
    assert "h1: no response" in said
    assert "no node that answered has a worker of rank 6" in said


def status(
    node: str, generation: int, rank: int | None, state: JobState, **more: Any
) -> NodeReport:
    known = NodeStatus("job", node, "h", state=state, generation=generation, node_rank=rank)
    return NodeReport(attrs.evolve(known, **more), 60.0, 90.0)


def test_of_a_job_only_its_members_steps_count() -> None:
    worker = WorkerStatus(
        1, 0, "pid 9", running=False, step=100, steps_per_second=0.5, checkpoint_step=90
    )
    more = {"workers": (worker,), "step": 100, "steps_per_second": 0.5, "snapshot_step": 100}
    spare = status("id2", 1, 1, S.RESTARTING, **more)
    there = view(SETTLED, S.RUNNING, S.RUNNING, live=3)
    found = status_of(attrs.evolve(there, reports={**there.reports, "id2": spare}))
    assert found is not None
    assert (found.step, found.steps_per_second, found.snapshot_step, found.checkpoint_step) == (
        10,
        4.0,
        None,
        90,
    )
    assert found.nodes[2].rank is None
    assert [row[0] for row in rank_table(found)[1]] == ["0", "1", "2", "3"]


def last(state: str = "", reason: str = "", *, wall: float = 0.0, expelled: bool = False) -> Event:
    """Return the last event of an agent: its end, or a step if no state is given."""
    if not state:
        return Event("progress", "job", "n", 2, wall, 1.0, None, {"step": 7})
    told = {"state": state, "reason": reason, "exit_code": 1, "expelled": expelled}
    return Event("run.finished", "job", "n", 2, wall, 1.0, None, told)


@pytest.mark.parametrize(
    ("states", "want"),
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
    states: list[str], want: JobState | None
) -> None:
    found = result_of("job", [last(state) for state in states], now=9.0)
    assert (found.state, found.is_recorded, found.nodes) == (want, True, ())


def test_failure_of_an_expelled_node_is_not_the_result_of_the_run() -> None:
    away = last("failed", "rank 0 raised", expelled=True)
    assert result_of("job", [away, last()], now=9.0).state is None
    ended = result_of("job", [away, last("failed", "rank 1 raised")], now=9.0)
    assert (ended.state, ended.reason) == (S.FAILED, "rank 1 raised")
    assert result_of("job", [away], now=9.0).state is S.FAILED


def test_headline_tells_the_result_of_a_run_and_how_long_ago_it_was() -> None:
    ended = result_of("job", [last("failed", "rank 1 raised", wall=40.0)], now=50.0)
    assert headline(ended) == ["job: FAILED, 10 s ago", "  reason: rank 1 raised"]
    killed = result_of("job", [last(wall=40.0)], now=50.0)
    assert headline(killed)[0] == "job: terminated unexpectedly (killed?), 10 s ago"
    assert "the last event is progress" in headline(killed)[1]


@pytest.mark.parametrize("state", JobState)
def test_only_a_failed_node_and_a_stuck_one_are_not_well(state: JobState) -> None:
    good = check_health(state, "rank 0 raised", 0.0)
    assert good.is_healthy is (state is not JobState.FAILED)
    assert good.is_healthy or "rank 0 raised" in good.message
    stuck = check_health(state, "", MAX_LOOP_BLOCKED_S + 1)
    assert stuck.is_healthy is (state.is_finished and state is not JobState.FAILED)


def test_how_long_the_loop_has_stood_still_is_told() -> None:
    found = check_health(JobState.RUNNING, "", MAX_LOOP_BLOCKED_S + 1)
    assert found.message == "the agent's event loop has been blocked for 16.0 s"
