"""The agent's event loop with faulty handlers, workers, journals and signals."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import attrs
import pytest
from single_worker_agent import OneWorker, Run, SingleNodeHandler, running

from elasticlib import (
    Command,
    DynamicRendezvousHandler,
    ElasticAgent,
    MemoryStore,
    Node,
    RendezvousHandler,
    RendezvousSettings,
    StaticRendezvousHandler,
    WorkerSpec,
    WorkerState,
)
from elasticlib.agent.hang_detector import HangLimits
from elasticlib.agent.options import AgentOptions
from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError, ElasticError
from elasticlib.observe.event import Event
from elasticlib.observe.journal import EventListener, Journal, NodeJournal
from elasticlib.rendezvous.interface import assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import Heartbeat, StopNotice


class Stands(OneWorker):
    """A worker whose exit status cannot be read until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.free = threading.Event(), threading.Event()

    def reap(self, local_rank: int) -> WorkerExit:
        self.asked.set()
        self.free.wait(60)
        return super().reap(local_rank)


def test_stalled_time_grows_while_the_event_loop_is_blocked_and_is_zero_after_the_run() -> None:
    workers, now = Stands(), [0.0]
    with running(workers, clock=lambda: now[0]) as run:
        workers.finish()
        assert workers.asked.wait(60)
        now[0] = 1000.0
        assert run.agent.stalled_s() == 1000.0
        workers.free.set()
        assert run.result().state is WorkerState.SUCCEEDED
        now[0] = 9000.0
        assert run.agent.stalled_s() == 0.0


def test_an_agent_can_only_be_run_once() -> None:
    workers = OneWorker()
    with running(workers) as run:
        with pytest.raises(ElasticError, match="an agent runs once"):
            run.agent.run()
        assert workers.running(), "the run that is under way goes on"
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
        with pytest.raises(ElasticError, match="create a new ElasticAgent, handler and workers"):
            run.agent.run()
    assert workers.starts == 1


NODE = Node("n-1", "n", "127.0.0.1", slots=2)


@pytest.mark.parametrize("given", [None, 0, 3])
@pytest.mark.parametrize(
    "make_handler",
    [
        lambda: DynamicRendezvousHandler(
            MemoryStore(), "j", NODE, RendezvousSettings(1, 1, max_restarts=3)
        ),
        lambda: StaticRendezvousHandler(
            MemoryStore(), "j", attrs.evolve(NODE, rank_hint=0), 1, max_restarts=3
        ),
    ],
)
def test_a_restart_budget_other_than_the_handlers_is_rejected(
    given: int | None, make_handler: Callable[[], RendezvousHandler]
) -> None:
    spec = WorkerSpec(Command("none"), 2)
    if given in (None, 3):
        ElasticAgent(spec, make_handler(), OneWorker(), max_restarts=given)
        return
    with pytest.raises(ConfigError, match=r"max_restarts=0, .* max_restarts=3: leave out"):
        ElasticAgent(spec, make_handler(), OneWorker(), max_restarts=given)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_number_of_workers_other_than_the_handlers_slots_is_rejected(workers: int) -> None:
    handler = DynamicRendezvousHandler(MemoryStore(), "j", NODE, RendezvousSettings(1, 1))
    spec = WorkerSpec(Command("none"), workers)
    with pytest.raises(ConfigError, match=rf"slots=2, .* local_world_size={workers}: give both"):
        ElasticAgent(spec, handler, OneWorker())


def test_a_restart_budget_other_than_that_of_the_generation_ends_the_run() -> None:
    workers = OneWorker()
    workers.up.set()
    with running(workers, SingleNodeHandler(max_restarts=0), max_restarts=2) as run:
        result = run.result()
    assert (result.state, workers.starts) == (WorkerState.FAILED, 0)
    assert "max_restarts=2" in result.reason
    assert "max_restarts=0" in result.reason


def test_a_negative_restart_budget_is_rejected() -> None:
    with pytest.raises(ConfigError, match="max_restarts must be at least 0, got -1"):
        ElasticAgent(WorkerSpec(Command("none")), SingleNodeHandler(), OneWorker(), max_restarts=-1)


class Raises(Journal):
    """A journal that raises an exception for the second event."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def record(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        del generation, rank, facts
        self.told.append(kind)
        if len(self.told) == 2:
            raise ZeroDivisionError("a view of mine")


class Keeps(Raises):
    """A journal that records all events."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[tuple[str, dict[str, Any]]] = []

    def record(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        del generation, rank
        self.told.append(kind)
        self.facts.append((kind, facts))


class StandsStill(Keeps):
    """A journal that blocks until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def record(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        self.free.wait(60)
        super().record(kind, generation=generation, rank=rank, **facts)


def test_a_journal_that_raises_is_logged_once_and_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, view = OneWorker(), Raises()
    with caplog.at_level(logging.INFO, "elasticlib"), running(workers, journal=view) as run:
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
    assert len(view.told) == 2
    (said,) = [record for record in caplog.records if "Raises" in record.getMessage()]
    assert "ZeroDivisionError: a view of mine" in said.getMessage()


def test_a_journal_has_all_events_when_the_run_returns() -> None:
    workers, view = OneWorker(), Keeps()
    with running(workers, journal=view) as run:
        workers.finish()
        run.result()
        assert (view.told[0], view.told[-1]) == ("rendezvous.started", "run.finished")


def test_a_journal_that_blocks_does_not_delay_the_run() -> None:
    workers, view = OneWorker(), StandsStill()
    with running(workers, journal=view) as run:
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
        view.free.set()


@pytest.mark.parametrize("field", ["stop_signals", "drain_signals", "notice_signals"])
@pytest.mark.parametrize("number", [0, 9, 4711])
def test_a_signal_that_cannot_be_caught_is_rejected_with_the_field(field: str, number: int) -> None:
    with pytest.raises(ConfigError, match=rf"{field}: .* \({number}\)"):
        AgentOptions(**{field: (number,)})


@pytest.mark.parametrize(
    ("number", "name"), [(37, "SIGRTMIN+3"), (64, "SIGRTMAX"), (10, "SIGUSR1")]
)
def test_a_signal_without_a_python_name_can_drain_the_node(number: int, name: str) -> None:
    workers = OneWorker()
    with running(workers, options=AgentOptions(drain_signals=(number,))) as run:
        run.agent.handle_signal(number)
        result = run.result()
    assert (result.state, result.signal) == (WorkerState.DRAINED, number)
    assert result.reason == f"received {name}"


class Leaves(SingleNodeHandler):
    """A third-party handler that raises SystemExit."""

    def next_rendezvous(self) -> Any:
        raise SystemExit("the handler leaves")


def test_system_exit_in_a_handler_ends_the_run_with_its_message() -> None:
    workers = OneWorker()
    workers.up.set()
    with running(workers, Leaves()) as run:
        result = run.result()
    assert result.state is WorkerState.FAILED
    assert "SystemExit: the handler leaves" in result.reason


class FaultyView(EventListener):
    """Raises on the first event, or blocks until it is released."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises
        self.events: list[Event] = []
        self.released = threading.Event()

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if self.raises:
            raise ZeroDivisionError("a view of mine")
        self.released.wait(60)


@pytest.mark.parametrize("raises", [True, False])
def test_an_event_listener_that_raises_or_blocks_does_not_delay_the_run(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    workers, view = OneWorker(), FaultyView(raises)
    journal = NodeJournal("run", "n-1", listeners=[view])
    with running(workers, journal=journal) as run:
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
        journal.close()
        view.released.set()
    messages = [record for record in caplog.records if "FaultyView" in record.getMessage()]
    assert len(messages) == 1
    assert len(view.events) == 1 or not raises


class Stepping(OneWorker):
    """A worker that makes ten steps in each generation, and reports them when it exits."""

    reports_heartbeats = True

    def heartbeats(self) -> Mapping[int, Heartbeat]:
        return {0: Heartbeat()}

    def final_heartbeats(self) -> Mapping[int, Heartbeat]:
        last = 10 * self.starts
        at = monotonic()
        told = Heartbeat(
            step=last,
            num_steps=10,
            first_step=last - 9,
            first_at=at,
            last_step_at=at,
            last_activity_at=at,
        )
        return {0: attrs.evolve(told, is_attached=True)}


def test_the_last_step_of_a_generation_is_recorded_before_the_next_generation() -> None:
    workers, view = Stepping(), Keeps()
    with running(workers, journal=view, max_restarts=1) as run:
        workers.finish(1)
        wait_until("the next", lambda: workers.starts == 2)
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
    told = [(kind, facts["step"]) for kind, facts in view.facts if "step" in facts]
    begun, steps = "training.started", "progress"
    assert told == [(begun, 1), (steps, 10), (begun, 11), (steps, 20)]
    joins = [n for n, kind in enumerate(view.told) if kind == "rendezvous.started"]
    assert view.told.index("progress") < joins[1], "of the first generation, before its end is told"
    assert view.told[-2:] == ["progress", "run.finished"]


@pytest.mark.parametrize("attached", [False, True])
def test_missing_step_reports_are_logged_once_with_the_remedy(
    caplog: pytest.LogCaptureFixture, attached: bool
) -> None:
    class Silent(Stepping):
        looks = 0

        def heartbeats(self) -> Mapping[int, Heartbeat]:
            self.looks += 1
            return {0: Heartbeat(is_attached=attached, last_activity_at=monotonic())}

    workers, sentence = Silent(), "no worker of this node has reported a step"
    options = AgentOptions(hang_limits=HangLimits(timeout=0.4, first_step_timeout=0.4))
    with running(workers, options=options, max_restarts=1) as run:
        wait_until("the warning", lambda: sentence in caplog.text)
        workers.finish(1)
        wait_until("the next", lambda: workers.starts == 2)
        looks = workers.looks
        wait_until("looks for longer than the limit", lambda: workers.looks > looks + 10)
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
    assert caplog.text.count(sentence) == 1
    assert "context().step(step)" in caplog.text


class Blind(OneWorker):
    """Workers whose steps cannot be looked at any more."""

    reports_heartbeats = True

    def heartbeats(self) -> Any:
        raise ZeroDivisionError("a beat of mine")


def test_an_error_while_reading_heartbeats_is_logged_and_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, view = Blind(), Keeps()
    with running(workers, journal=view) as run:
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
    assert view.told[-1] == "run.finished"
    assert "cannot read the workers" in caplog.text


def test_an_error_while_reading_heartbeats_ends_a_run_with_hang_detection() -> None:
    with running(Blind(), options=AgentOptions(hang_limits=HangLimits(timeout=1.0))) as run:
        result = run.result()
    assert result.state is WorkerState.FAILED
    assert result.reason == "ZeroDivisionError: a beat of mine"


class Unprepared(OneWorker):
    """Workers whose preparation raises an exception."""

    def wait_until_prepared(self) -> None:
        raise ZeroDivisionError("a preparation of mine")


def test_an_error_in_the_preparation_of_workers_ends_the_run_with_its_message() -> None:
    workers = Unprepared()
    workers.up.set()
    with running(workers) as run:
        result = run.result()
    assert (result.state, workers.starts) == (WorkerState.FAILED, 0)
    assert result.reason == "ZeroDivisionError: a preparation of mine"


class Prepares(SingleNodeHandler):
    """A rendezvous whose preparation takes until `ready` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ready = threading.Event(), threading.Event()

    def prepare(self) -> None:
        self.begun.set()
        self.ready.wait(60)


def test_a_node_in_preparation_does_not_join_and_can_be_stopped() -> None:
    workers, handler = OneWorker(), Prepares()
    workers.up.set()
    with running(workers, handler) as run:
        assert handler.begun.wait(60)
        run.agent.handle_signal(signal.SIGTERM)
        result = run.result()
        handler.ready.set()
    assert (result.signal, workers.starts, handler.generation) == (signal.SIGTERM, 0, 0)


class Waits(SingleNodeHandler):
    """A rendezvous that settles once `ready` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ready = threading.Event(), threading.Event()

    def next_rendezvous(self) -> Any:
        self.begun.set()
        self.ready.wait(60)
        return super().next_rendezvous()


def test_waiting_for_a_third_party_handler_is_logged_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, handler, now = OneWorker(), Waits(), [100.0]

    def waits() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line for line in lines if line.startswith("waiting for the other nodes")]

    def logged(count: int) -> bool:
        return len(waits()) >= count

    run = Run(ElasticAgent(WorkerSpec(Command("none")), handler, workers, clock=lambda: now[0]))
    with caplog.at_level(logging.INFO, "elasticlib.agent"):
        try:
            assert handler.begun.wait(60)
            for count in (1, 2, 3):
                now[0] = 100.0 + 10.0 * count
                wait_until("the wait to be logged", partial(logged, count), 20)
        finally:
            handler.ready.set()
            assert workers.up.wait(60)
            now[0] = 1000.0
            workers.finish()
            assert run.result().state is WorkerState.SUCCEEDED
    assert len(waits()) == 3
    assert waits()[1] == (
        "waiting for the other nodes for 20 s: next_rendezvous of Waits (backend single, run run) "
        "has not returned; reason for this rendezvous: the first generation of this node"
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_leaving_before_other_nodes_is_logged_if_the_handler_has_no_report_success(
    caplog: pytest.LogCaptureFixture, nodes: int
) -> None:
    members = [Node(f"n-{n}", "n", "127.0.0.1", slots=1) for n in range(nodes)]
    workers, handler = OneWorker(), SingleNodeHandler(assignment=assign_ranks(members)[0])
    with caplog.at_level(logging.INFO, "elasticlib.agent"), running(workers, handler) as run:
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
    assert ("SingleNodeHandler has no report_success: this node leaves" in caplog.text) is (
        nodes == 2
    )


class Listens(OneWorker):
    """A worker that supports stop notices, and exits after `finish`."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[str] = []
        self.told = threading.Event()
        self.terminated = 0

    def notify(self, notice: StopNotice) -> bool:
        self.notices.append(notice.reason)
        self.told.set()
        return True

    def stop(self, local_ranks: Collection[int], *, force: bool = False) -> None:
        self.terminated += 1
        super().stop(local_ranks, force=force)


class Grows(SingleNodeHandler):
    """A rendezvous at which another node waits if `more` is set."""

    more = 0

    def num_nodes_waiting(self) -> int:
        return self.more


def test_repeated_drain_signals_do_not_interrupt_the_save() -> None:
    workers = Listens()
    with running(workers, options=AgentOptions(checkpoint_grace=600.0)) as run:
        for _ in range(3):
            run.agent.handle_signal(signal.SIGTERM)
        workers.finish()
        result = run.result()
    assert (result.state, result.signal) == (WorkerState.DRAINED, signal.SIGTERM)
    assert (workers.notices, workers.terminated) == (["preempted"], 0)


def test_a_node_that_is_drained_during_a_resize_drains() -> None:
    workers, handler, view = Listens(), Grows(), Keeps()
    options = AgentOptions(checkpoint_grace=600.0)
    with running(workers, handler, options=options, journal=view) as run:
        handler.more = 1
        assert workers.told.wait(60)
        run.agent.handle_signal(signal.SIGTERM)
        workers.finish()
        result = run.result()
    assert result.state is WorkerState.DRAINED
    assert workers.notices == ["resize", "preempted"]
    assert [facts["duration_seconds"] < 300 for kind, facts in view.facts if kind == "stopped"] == [
        True
    ]


def test_events_distinguish_a_planned_resize_from_a_failure() -> None:
    workers, handler, view = Listens(), Grows(), Keeps()
    with running(workers, handler, max_restarts=1, journal=view) as run:
        handler.more = 1
        assert workers.told.wait(60)
        handler.more = 0
        workers.finish()
        wait_until("the second", lambda: workers.starts == 2)
        workers.finish(1)
        wait_until("the third", lambda: workers.starts == 3)
        workers.finish()
        assert run.result().state is WorkerState.SUCCEEDED
    planned = [facts["is_planned"] for kind, facts in view.facts if kind == "rendezvous.started"]
    assert planned == [False, True, False]


class CannotAgree(OneWorker):
    """Workers that support stop notices, but raise an exception when a call is proposed."""

    supports_coordinated_stop = True

    def notify(self, notice: StopNotice) -> bool:
        del notice
        return True

    def earliest_stop_call(self) -> int | None:
        raise ZeroDivisionError("a call of mine")


def test_an_error_in_the_stop_request_ends_the_run_with_its_message() -> None:
    workers, options = CannotAgree(), AgentOptions(checkpoint_grace=600.0)
    with running(workers, options=options) as run:
        run.agent.handle_signal(signal.SIGUSR2)
        result = run.result()
    assert result.state is WorkerState.FAILED
    assert result.reason == "ZeroDivisionError: a call of mine"
    assert not workers.running()
