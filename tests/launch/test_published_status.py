"""The status that a node publishes, and the stacks of its workers that it returns on request."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from single_worker_agent import OneWorker, SingleNodeHandler, running

from elasticlib import LaunchOptions, Node, WorkerState, observe_node, read_history
from elasticlib.errors import ConfigError
from elasticlib.launch.observability import publish_status, stacks_of
from elasticlib.launch.rendezvous_setup import open_rendezvous
from elasticlib.observe.history import JobState
from elasticlib.observe.journal import NodeJournal
from elasticlib.observe.node_status import StatusReader
from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until
from elasticlib.workers.interface import Heartbeat, WorkerView


def test_only_the_stacks_of_the_requested_ranks_are_dumped() -> None:
    dumped: list[set[int]] = []

    def collect(local_ranks: Any, timeout_s: float) -> dict[int, str]:
        assert timeout_s > 0
        dumped.append(set(local_ranks))
        return {local: f"of {local}" for local in local_ranks if local != 2}

    workers = [SimpleNamespace(local_rank=local, rank=4 + local) for local in range(4)]
    beat = Heartbeat(can_dump_stacks=True)
    agent: Any = SimpleNamespace(
        get_worker_group=lambda: SimpleNamespace(workers=workers),
        view=lambda: {local: WorkerView(f"pid {local}", heartbeat=beat) for local in range(4)},
        collect_stacks=collect,
    )
    stacks = stacks_of(agent)(frozenset({5, 6, 9}))
    assert dumped == [{1, 2}]
    assert (stacks.texts, stacks.unresponsive_ranks, stacks.unsupported) == ({5: "of 1"}, (6,), {})


def test_node_publishes_the_age_of_its_last_contact_with_the_store() -> None:
    agent: Any = SimpleNamespace(view=dict, stalled_s=lambda: 0.0)
    with contextlib.ExitStack() as stack:
        setup = open_rendezvous(LaunchOptions())
        stack.callback(setup.close)
        journal = stack.enter_context(contextlib.closing(NodeJournal(setup.run_id, setup.node_id)))
        setup.handler.next_rendezvous()
        stack.callback(setup.handler.shutdown)
        stack.enter_context(publish_status(setup, journal, agent))
        assert setup.store is not None
        store, run_id = setup.store, setup.run_id
        wait_until("its status", lambda: StatusReader(store, run_id).read())
        (published,) = StatusReader(store, run_id).read().values()
    assert published.store_contact_age_seconds is not None
    assert 0 <= published.store_contact_age_seconds < DEFAULT_TIMEOUT_S


def test_events_of_an_agent_with_a_custom_handler_are_recorded(tmp_path: Path) -> None:
    path, workers, handler = tmp_path / "events.jsonl", OneWorker(), SingleNodeHandler()
    with (
        pytest.raises(ConfigError, match=r"node=Node\(\.\.\.\), because SingleNodeHandler"),
        observe_node(handler, workers, path),
    ):
        raise AssertionError
    node = Node("n-1", "n", "127.0.0.1", slots=1)
    with observe_node(handler, workers, path, node=node) as journal:  # noqa: SIM117
        with running(workers, handler, journal=journal) as run:
            workers.end()
            assert run.result().state is WorkerState.SUCCEEDED
    assert read_history(path).state is JobState.SUCCEEDED
