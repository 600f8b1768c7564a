"""What a node publishes of itself, and what it says when it is asked for its workers' stacks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

from elasticlib.launch.launch_config import LaunchConfig
from elasticlib.launch.observability import publish_status, stacks_of
from elasticlib.launch.rendezvous_setup import open_rendezvous
from elasticlib.observe.journal import NodeJournal
from elasticlib.observe.node_status import StatusReader
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.interface import Heartbeat


def test_only_those_are_asked_whose_stacks_are_wanted() -> None:
    asked: list[set[int]] = []

    def dump(local_ranks: Any) -> dict[int, str]:
        asked.append(set(local_ranks))
        return {local: f"of {local}" for local in local_ranks if local != 2}

    workers = [SimpleNamespace(local_rank=local, rank=4 + local) for local in range(4)]
    agent: Any = SimpleNamespace(
        get_worker_group=lambda: SimpleNamespace(workers=workers),
        workers=SimpleNamespace(
            running=lambda: {local: f"pid {local}" for local in range(4)},
            dump_stacks=dump,
            heartbeats=lambda: {local: Heartbeat(can_dump_stacks=True) for local in range(4)},
        ),
    )
    found = stacks_of(agent)(frozenset({5, 6, 9}))
    assert asked == [{1, 2}]
    assert (found.texts, found.unresponsive_ranks, found.unsupported) == ({5: "of 1"}, (6,), {})


def test_a_node_says_since_when_the_store_has_its_word() -> None:
    agent: Any = SimpleNamespace(workers=SimpleNamespace(heartbeats=dict), stalled_s=lambda: 0.0)
    with contextlib.ExitStack() as stack:
        meeting = open_rendezvous(LaunchConfig())
        stack.callback(meeting.close)
        journal = stack.enter_context(
            contextlib.closing(NodeJournal(meeting.run_id, meeting.node_id))
        )
        meeting.handler.next_rendezvous()
        stack.callback(meeting.handler.shutdown)
        stack.enter_context(publish_status(meeting, journal, agent))
        assert meeting.store is not None
        store, run_id = meeting.store, meeting.run_id
        wait_until("its status", lambda: StatusReader(store, run_id).read())
        (published,) = StatusReader(store, run_id).read().values()
    assert published.store_contact_age_seconds is not None
