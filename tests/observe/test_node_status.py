"""Where a node stands, as a history of what it tells."""

from __future__ import annotations

from typing import Any

from elasticlib.observe.aggregate import NodeStatus, apply_event, with_heartbeats
from elasticlib.observe.event import Event
from elasticlib.observe.history import JobState
from elasticlib.workers.interface import Heartbeat


def told(*events: tuple[str, dict[str, Any]]) -> list[NodeStatus]:
    status, found = NodeStatus("job", "n1"), []
    for at, (kind, facts) in enumerate(events):
        rank = facts.pop("rank", None)
        generation = facts.pop("generation", status.generation)
        event = Event(kind, "job", "n1", generation, 1e9 + at, float(at), rank, facts)
        status = apply_event(status, event)
        found.append(status)
    return found


BEGINS = (
    ("run.started", {"host": "h", "pid": 7, "slots": 1}),
    ("rendezvous.started", {"reason": "this node is new"}),
    (
        "generation.started",
        {
            "generation": 1,
            "node_count": 2,
            "world_size": 2,
            "node_rank": 0,
            "restarts": 0,
            "max_restarts": 3,
        },
    ),
    ("worker.started", {"rank": 0, "local_rank": 0, "name": "pid 8"}),
)


def begins() -> list[tuple[str, dict[str, Any]]]:
    return [(kind, dict(facts)) for kind, facts in BEGINS]


def test_a_node_waits_runs_restarts_and_ends() -> None:
    states = [
        status.state
        for status in told(
            *begins(),
            ("failure", {"reason": "rank 0 raised"}),
            ("stopping", {"notice": "", "grace_seconds": 0.0}),
            ("rendezvous.started", {"reason": "rank 0 raised"}),
            (
                "generation.started",
                {"generation": 2, "node_count": 2, "world_size": 2, "restarts": 1},
            ),
            ("stopping", {"notice": "resize", "grace_seconds": 30.0}),
            ("run.finished", {"state": "drained", "reason": "asked", "exit_code": 75}),
        )
    ]
    want = ["RENDEZVOUS"] * 2 + ["RUNNING"] * 2 + ["RESTARTING"] * 3
    assert [state.value for state in states] == [*want, "RUNNING", "RESIZING", "DRAINED"]


def test_it_says_since_when_and_why() -> None:
    *_, last = told(*begins(), ("failure", {"reason": "rank 0 raised"}), ("stopped", {}))
    assert (last.state, last.state_since, last.reason) == (
        JobState.RESTARTING,
        4.0,
        "rank 0 raised",
    )
    assert (last.host, last.pid, last.node_count, last.max_restarts) == ("h", 7, 2, 3)


def test_workers_are_those_of_the_generation() -> None:
    *_, ended, again = told(
        *begins(),
        ("worker.exited", {"rank": 0, "local_rank": 0}),
        ("generation.started", {"generation": 2}),
    )
    assert [worker.running for worker in ended.workers] == [False]
    assert again.workers == ()


def test_a_look_adds_what_workers_tell() -> None:
    *_, last = told(*begins())
    beat = Heartbeat(
        step=9,
        num_steps=3,
        last_step_at=10.0,
        last_activity_at=11.0,
        step_durations=(0.5, 0.5, 9.0),
        is_attached=True,
    )
    (worker,) = with_heartbeats(last, {0: beat}, 13.0).workers
    assert (
        worker.step,
        worker.steps_per_second,
        worker.seconds_since_heartbeat,
        worker.checkpoint_step,
    ) == (
        9,
        2.0,
        2.0,
        None,
    )


def test_a_worker_that_makes_no_steps_for_long_is_not_shown_as_if_it_did() -> None:
    *_, last = told(*begins())
    beat = Heartbeat(
        step=9,
        num_steps=3,
        last_step_at=10.0,
        last_activity_at=50.0,
        step_durations=(0.5,),
        is_attached=True,
    )
    rates = [
        with_heartbeats(last, {0: beat}, at).workers[0].steps_per_second for at in (39.0, 41.0)
    ]
    assert rates == [2.0, 0.0]


def test_a_look_adds_the_snapshot_that_all_workers_have_kept() -> None:
    other = ("worker.started", {"rank": 1, "local_rank": 1, "name": "pid 9"})
    *_, last = told(*begins(), other, ("snapshot.taken", {"step": 60}))
    beats = {
        0: Heartbeat(last_snapshot_step=97, is_attached=True),
        1: Heartbeat(last_snapshot_step=96, is_attached=True),
    }
    assert with_heartbeats(last, beats, 13.0).snapshot_step == 96
    assert with_heartbeats(last, {0: Heartbeat(is_attached=True)}, 13.0).snapshot_step == 60


def test_facts_of_another_type_than_theirs_were_not_told() -> None:
    odd: dict[str, Any] = {
        "generation": 1,
        **{"node_rank": "zero", "nodes": None, "world": [2], "restarts": True, "cause": 7},
    }
    *_, last = told(
        ("run.started", {"host": None, "pid": [1], "slots": None}),
        ("generation.started", odd),
        ("worker.started", {"rank": 0, "local_rank": None, "name": {}}),
        ("checkpoint.saved", {"step": True}),
        ("progress", {"step": "9", "steps_per_second": []}),
    )
    (worker,) = last.workers
    assert (last.host, last.pid, last.slots, last.node_rank, last.node_count) == ("", 0, 0, None, 0)
    assert (last.world_size, last.restarts, last.reason, last.checkpoint_step, last.step) == (
        0,
        0,
        "",
        None,
        None,
    )
    assert (worker.local_rank, worker.name) == (0, "")
