"""The status of a node, computed from its events and the heartbeats of its workers."""

from __future__ import annotations

from typing import Any

from made_events import make_event

from elasticlib.observe.aggregate import NodeStatus, apply_event, with_heartbeats
from elasticlib.observe.history import JobState
from elasticlib.workers.interface import Heartbeat


def apply_events(*events: tuple[str, dict[str, Any]]) -> list[NodeStatus]:
    """Return the status of a node after each event; the events are one second apart."""
    status, statuses = NodeStatus("job", "n1"), []
    for at, (kind, values) in enumerate(events):
        data = dict(values)
        rank = data.pop("rank", None)
        generation = data.pop("generation", status.generation)
        event = make_event(kind, "job", "n1", generation, 1e9 + at, float(at), rank, data)
        status = apply_event(status, event)
        statuses.append(status)
    return statuses


START: tuple[tuple[str, dict[str, Any]], ...] = (
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


def test_state_follows_the_events_of_a_node() -> None:
    states = [
        status.state
        for status in apply_events(
            *START,
            ("failure", {"reason": "rank 0 raised"}),
            ("stopping", {"notice": "", "grace_seconds": 0.0}),
            ("rendezvous.started", {"reason": "rank 0 raised"}),
            (
                "generation.started",
                {"generation": 2, "node_count": 2, "world_size": 2, "restarts": 1},
            ),
            ("stopping", {"notice": "resize", "grace_seconds": 30.0}),
            ("run.finished", {"state": "drained", "reason": "SIGUSR2", "exit_code": 75}),
        )
    ]
    expected = ["RENDEZVOUS"] * 2 + ["RUNNING"] * 2 + ["RESTARTING"] * 3
    assert [state.value for state in states] == [*expected, "RUNNING", "RESIZING", "DRAINED"]


def test_status_has_the_start_and_the_reason_of_its_state() -> None:
    *_, last = apply_events(*START, ("failure", {"reason": "rank 0 raised"}), ("stopped", {}))
    assert (last.state, last.state_since, last.reason) == (
        JobState.RESTARTING,
        4.0,
        "rank 0 raised",
    )
    assert (last.host, last.pid, last.node_count, last.max_restarts) == ("h", 7, 2, 3)


def test_workers_are_those_of_the_current_generation() -> None:
    *_, exited, restarted = apply_events(
        *START,
        ("worker.exited", {"rank": 0, "local_rank": 0}),
        ("generation.started", {"generation": 2}),
    )
    assert [worker.running for worker in exited.workers] == [False]
    assert restarted.workers == ()


def test_heartbeats_add_the_progress_of_workers() -> None:
    *_, last = apply_events(*START)
    heartbeat = Heartbeat(
        step=9,
        num_steps=3,
        last_step_at=10.0,
        last_activity_at=11.0,
        step_durations=(0.5, 0.5, 9.0),
        is_attached=True,
    )
    (worker,) = with_heartbeats(last, {0: heartbeat}, 13.0).workers
    assert (worker.step, worker.steps_per_second) == (9, 2.0)
    assert (worker.seconds_since_heartbeat, worker.checkpoint_step) == (2.0, None)


def test_rate_of_a_worker_without_recent_steps_is_zero() -> None:
    *_, last = apply_events(*START)
    heartbeat = Heartbeat(
        step=9,
        num_steps=3,
        last_step_at=10.0,
        last_activity_at=50.0,
        step_durations=(0.5,),
        is_attached=True,
    )
    rates = [
        with_heartbeats(last, {0: heartbeat}, at).workers[0].steps_per_second for at in (39.0, 41.0)
    ]
    assert rates == [2.0, 0.0]


def test_snapshot_step_is_the_newest_that_all_workers_have() -> None:
    other = ("worker.started", {"rank": 1, "local_rank": 1, "name": "pid 9"})
    *_, last = apply_events(*START, other, ("snapshot.taken", {"step": 60}))
    heartbeats = {
        0: Heartbeat(last_snapshot_step=97, is_attached=True),
        1: Heartbeat(last_snapshot_step=96, is_attached=True),
    }
    assert with_heartbeats(last, heartbeats, 13.0).snapshot_step == 96
    assert with_heartbeats(last, {0: Heartbeat(is_attached=True)}, 13.0).snapshot_step == 60


def test_data_of_a_wrong_type_are_ignored() -> None:
    invalid = {"node_rank": "zero", "node_count": None, "world_size": [2], "max_restarts": "3"}
    *_, last = apply_events(
        ("run.started", {"host": None, "pid": [1], "slots": None}),
        ("generation.started", {"generation": 1, "restarts": True, "reason": 7, **invalid}),
        ("worker.started", {"rank": 0, "local_rank": None, "name": {}}),
        ("checkpoint.saved", {"step": True}),
        ("progress", {"step": "9", "steps_per_second": []}),
    )
    (worker,) = last.workers
    assert (last.host, last.pid, last.slots, last.node_rank, last.node_count) == ("", 0, 0, None, 0)
    assert (last.world_size, last.restarts, last.max_restarts, last.reason) == (0, 0, None, "")
    assert (last.checkpoint_step, last.step) == (None, None)
    assert (worker.local_rank, worker.name) == (0, "")
