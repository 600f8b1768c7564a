"""The event loop of the agent with signals and with faulty handlers, workers and journals."""

from __future__ import annotations

import logging
import queue
import signal
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import pytest
from single_worker_agent import OneWorker, SingleNodeHandler, running

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
from elasticlib.agent.blocking_membership import BlockingMembership
from elasticlib.agent.messages import Action, Requested, Tick
from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError, ElasticError, RendezvousClosedError
from elasticlib.observe.event import Event
from elasticlib.observe.event_kinds import EventBody
from elasticlib.observe.journal import EventListener, Journal, NodeJournal
from elasticlib.options import AgentOptions, HangLimits
from elasticlib.rendezvous.interface import (
    Change,
    ChangeKind,
    Joined,
    Report,
    ReportKind,
    assign_ranks,
)
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import Heartbeat, StopHow, StopNotice, WorkerView
from elasticlib.workers.spec import WorkerGroup


class BlockedWorker(OneWorker):
    """A worker whose start does not return until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_released = threading.Event()

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        super().start(group, on_exit)
        self.is_released.wait(60)


def test_stalled_time_grows_while_the_event_loop_is_blocked_and_is_zero_after_the_run() -> None:
    workers, now = BlockedWorker(), [0.0]
    with running(workers, clock=lambda: now[0]) as run:
        now[0] = 1000.0
        assert run.agent.stalled_s() == 1000.0
        workers.is_released.set()
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
        now[0] = 9000.0
        assert run.agent.stalled_s() == 0.0


def test_an_agent_can_only_be_run_once() -> None:
    workers = OneWorker()
    with running(workers) as run:
        with pytest.raises(ElasticError, match="an agent runs once"):
            run.agent.run()
        assert workers.view(), "the running run continues"
        workers.end()
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
    job = None if given is None else RendezvousSettings(max_restarts=given)
    if given in (None, 3):
        ElasticAgent(spec, make_handler(), OneWorker(), job=job)
        return
    with pytest.raises(ConfigError, match=r"max_restarts=0, .* max_restarts=3: leave out"):
        ElasticAgent(spec, make_handler(), OneWorker(), job=job)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_number_of_workers_other_than_the_handlers_slots_is_rejected(workers: int) -> None:
    handler = DynamicRendezvousHandler(MemoryStore(), "j", NODE, RendezvousSettings(1, 1))
    spec = WorkerSpec(Command("none"), workers)
    with pytest.raises(ConfigError, match=rf"slots=2, .* local_world_size={workers}: give both"):
        ElasticAgent(spec, handler, OneWorker())


def test_a_restart_budget_other_than_that_of_the_generation_ends_the_run() -> None:
    workers = OneWorker()
    workers.up.set()
    with running(
        workers, SingleNodeHandler(max_restarts=0), job=RendezvousSettings(max_restarts=2)
    ) as run:
        result = run.result()
    assert (result.state, workers.starts) == (WorkerState.FAILED, 0)
    assert "max_restarts=2" in result.reason
    assert "max_restarts=0" in result.reason


class RaisingJournal(Journal):
    """A journal that raises an exception for the second event."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def record(self, body: EventBody, *, generation: int = 0, rank: int | None = None) -> None:
        del generation, rank
        self.kinds.append(body.kind)
        if len(self.kinds) == 2:
            raise ZeroDivisionError("error of the journal")


class RecordingJournal(RaisingJournal):
    """A journal that records all events."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[tuple[str, dict[str, Any]]] = []

    def record(self, body: EventBody, *, generation: int = 0, rank: int | None = None) -> None:
        del generation, rank
        self.kinds.append(body.kind)
        self.facts.append((body.kind, dict(body.data)))


class BlockingJournal(RecordingJournal):
    """A journal that blocks until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_released = threading.Event()

    def record(self, body: EventBody, *, generation: int = 0, rank: int | None = None) -> None:
        self.is_released.wait(60)
        super().record(body, generation=generation, rank=rank)


def test_a_journal_that_raises_is_logged_once_and_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, journal = OneWorker(), RaisingJournal()
    with caplog.at_level(logging.INFO, "elasticlib"), running(workers, journal=journal) as run:
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
    assert len(journal.kinds) == 2
    (message,) = [text for text in caplog.messages if "RaisingJournal" in text]
    assert "ZeroDivisionError: error of the journal" in message


def test_a_journal_has_all_events_when_the_run_returns() -> None:
    workers, journal = OneWorker(), RecordingJournal()
    with running(workers, journal=journal) as run:
        workers.end()
        run.result()
        assert (journal.kinds[0], journal.kinds[-1]) == ("rendezvous.started", "run.finished")


def test_a_journal_that_blocks_does_not_delay_the_run() -> None:
    workers, journal = OneWorker(), BlockingJournal()
    with running(workers, journal=journal) as run:
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
        journal.is_released.set()


@pytest.mark.parametrize("field", ["stop_signals", "drain_signals", "notice_signals"])
@pytest.mark.parametrize("number", [0, 9, 4711])
def test_a_signal_that_cannot_be_caught_is_rejected_with_the_field(field: str, number: int) -> None:
    with pytest.raises(ConfigError, match=rf"{field} must be signals .* got {number}$"):
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


class ExitingHandler(SingleNodeHandler):
    """A third-party handler that raises SystemExit."""

    def next_rendezvous(self) -> Any:
        raise SystemExit("the handler leaves")


def test_system_exit_in_a_handler_ends_the_run_with_its_message() -> None:
    workers = OneWorker()
    workers.up.set()
    with running(workers, ExitingHandler()) as run:
        result = run.result()
    assert result.state is WorkerState.FAILED
    assert "SystemExit: the handler leaves" in result.reason


class ClosedHandler(SingleNodeHandler):
    """A third-party handler of a job that has ended."""

    def __init__(self, change: Change | None) -> None:
        super().__init__()
        self.change = change

    def next_rendezvous(self) -> Any:
        raise RendezvousClosedError("all nodes have finished", self.change)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (ChangeKind.SUCCEEDED, WorkerState.SUCCEEDED),
        (ChangeKind.STOPPED, WorkerState.STOPPED),
        (None, WorkerState.FAILED),
    ],
)
def test_a_node_that_joins_an_ended_job_gets_the_result_that_its_handler_names(
    kind: ChangeKind | None, state: WorkerState
) -> None:
    workers = OneWorker()
    workers.up.set()
    change = None if kind is None else Change(kind, "all nodes have finished")
    with running(workers, ClosedHandler(change)) as run:
        result = run.result()
    assert (result.state, workers.starts) == (state, 0)
    assert "all nodes have finished" in result.reason


def test_a_subclass_with_a_hook_of_torchs_agent_is_rejected() -> None:
    with pytest.raises(ConfigError, match="Ported defines _stop_workers, which only torch's agent"):
        type("Ported", (ElasticAgent,), {"_stop_workers": lambda _: None})


class FaultyListener(EventListener):
    """Raises on the first event, or blocks until it is released."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises
        self.events: list[Event] = []
        self.released = threading.Event()

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if self.raises:
            raise ZeroDivisionError("error of the journal")
        self.released.wait(60)


@pytest.mark.parametrize("raises", [True, False])
def test_an_event_listener_that_raises_or_blocks_does_not_delay_the_run(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    workers, listener = OneWorker(), FaultyListener(raises)
    journal = NodeJournal("run", "n-1", listeners=[listener])
    with running(workers, journal=journal) as run:
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
        journal.close()
        listener.released.set()
    messages = [record for record in caplog.records if "FaultyListener" in record.getMessage()]
    assert len(messages) == 1
    assert len(listener.events) == 1 or not raises


class SteppingWorker(OneWorker):
    """A worker that makes ten steps in each generation, and reports them when it exits."""

    reports_progress = True

    def view(self) -> Mapping[int, WorkerView]:
        return {n: attrs.evolve(one, heartbeat=Heartbeat()) for n, one in super().view().items()}

    def make_exit(self, code: int, *, was_stopped: bool) -> WorkerExit:
        step, now = 10 * self.starts, monotonic()
        heartbeat = Heartbeat(
            is_attached=True,
            step=step,
            num_steps=10,
            first_step=step - 9,
            first_at=now,
            last_step_at=now,
            last_activity_at=now,
        )
        return attrs.evolve(super().make_exit(code, was_stopped=was_stopped), heartbeat=heartbeat)


def test_the_last_step_of_a_generation_is_recorded_before_the_next_generation() -> None:
    workers, journal = SteppingWorker(), RecordingJournal()
    with running(workers, journal=journal, job=RendezvousSettings(max_restarts=1)) as run:
        workers.end(1)
        wait_until("the second generation", lambda: workers.starts == 2)
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
    assert [(kind, facts["step"]) for kind, facts in journal.facts if "step" in facts] == [
        ("training.started", 1),
        ("progress", 10),
        ("training.started", 11),
        ("progress", 20),
    ]
    joins = [n for n, kind in enumerate(journal.kinds) if kind == "rendezvous.started"]
    assert journal.kinds.index("progress") < joins[1], (
        "the progress precedes the end of the first generation"
    )
    assert journal.kinds[-2:] == ["progress", "run.finished"]


@pytest.mark.parametrize("attached", [False, True])
def test_missing_step_reports_are_logged_once_with_the_remedy(
    caplog: pytest.LogCaptureFixture, attached: bool
) -> None:
    class SilentWorker(OneWorker):
        reports_progress = True
        polls = 0

        def view(self) -> Mapping[int, WorkerView]:
            self.polls += 1
            beat = Heartbeat(is_attached=attached, last_activity_at=monotonic())
            return {n: attrs.evolve(one, heartbeat=beat) for n, one in super().view().items()}

    workers, warning = SilentWorker(), "no worker of this node has reported a step"
    options = AgentOptions(hang=HangLimits(timeout=0.4, first_step_timeout=0.4))
    with running(workers, options=options, job=RendezvousSettings(max_restarts=1)) as run:
        wait_until("the warning", lambda: warning in caplog.text)
        workers.end(1)
        wait_until("the second generation", lambda: workers.starts == 2)
        polls = workers.polls
        wait_until("more polls than the limit needs", lambda: workers.polls > polls + 2)
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
    assert caplog.text.count(warning) == 1
    assert "context().step(step)" in caplog.text


class FaultyWorker(OneWorker):
    """Workers one of whose methods raises an exception."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.is_closed = method, False

    def prepare(self, *args: Any) -> None:
        self.fail_in("prepare")
        super().prepare(*args)

    def view(self) -> Mapping[int, WorkerView]:
        self.fail_in("view")
        return super().view()

    def notify(self, notice: StopNotice, call: int | None = None) -> None:
        del notice, call
        self.fail_in("notify")

    def close(self, grace_s: float = 0.0) -> None:
        super().close(grace_s)
        self.is_closed = True

    def fail_in(self, method: str) -> None:
        if method == self.method:
            self.up.set()
            raise ZeroDivisionError(f"an error of {method}")


@pytest.mark.parametrize("method", ["prepare", "view"])
def test_an_error_of_workers_ends_the_run_with_its_message(method: str) -> None:
    workers = FaultyWorker(method)
    with running(workers) as run:
        result = run.result()
    assert (result.state, workers.is_closed) == (WorkerState.FAILED, True)
    assert result.reason == f"ZeroDivisionError: an error of {method}"


class UnpreparedWorker(OneWorker):
    """Workers whose preparation ends when `on_ready` is called."""

    on_ready: Callable[[str], None]

    def prepare(
        self, spec: WorkerSpec, on_ready: Callable[[str], None], on_change: Callable[[], None]
    ) -> None:
        del spec, on_change
        self.on_ready = on_ready
        self.up.set()


def test_a_node_in_preparation_does_not_join_and_can_be_stopped() -> None:
    workers, handler = UnpreparedWorker(), SingleNodeHandler()
    with running(workers, handler) as run:
        run.agent.handle_signal(signal.SIGTERM)
        result = run.result()
        workers.on_ready("")
    assert (result.signal, workers.starts, handler.generation) == (signal.SIGTERM, 0, 0)


def test_a_node_that_cannot_run_its_workers_does_not_join() -> None:
    workers, handler = UnpreparedWorker(), SingleNodeHandler()
    with running(workers, handler) as run:
        workers.on_ready("no GPU has enough memory")
        result = run.result()
    assert (result.state, result.reason) == (WorkerState.FAILED, "no GPU has enough memory")
    assert (workers.starts, handler.generation) == (0, 0)


class WaitingHandler(SingleNodeHandler):
    """A handler whose rendezvous returns once `ready` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting, self.ready = threading.Event(), threading.Event()

    def next_rendezvous(self) -> Any:
        self.is_waiting.set()
        self.ready.wait(60)
        return super().next_rendezvous()


def test_waiting_for_a_third_party_handler_is_logged_from_time_to_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler, events = WaitingHandler(), queue.SimpleQueue[object]()
    membership = BlockingMembership(handler, None, 0.1, wait_log_interval=0.05)

    def waits() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line for line in lines if line.startswith("waiting for the other nodes")]

    with caplog.at_level(logging.INFO, "elasticlib.agent"):
        membership.open(events.put, lambda: 0.0)
        membership.join(1)
        try:
            wait_until("two log messages of the wait", lambda: len(waits()) > 1, 20)
        finally:
            handler.ready.set()
            assert isinstance(events.get(timeout=60), Joined)
            membership.close(60)
    assert waits()[0] == (
        "waiting for the other nodes for 0 s: next_rendezvous of WaitingHandler (backend single, "
        "run run) has not returned"
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_leaving_before_other_nodes_is_logged_if_the_handler_takes_no_report_of_it(
    caplog: pytest.LogCaptureFixture, nodes: int
) -> None:
    members = [Node(f"n-{n}", "n", "127.0.0.1", slots=1) for n in range(nodes)]
    workers, handler = OneWorker(), SingleNodeHandler(assignment=assign_ranks(members)[0])
    with caplog.at_level(logging.INFO, "elasticlib.agent"), running(workers, handler) as run:
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
    assert ("SingleNodeHandler takes no report of success: this node leaves" in caplog.text) is (
        nodes == 2
    )


class NotifiedWorker(OneWorker):
    """A worker that supports stop notices. It exits after `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[str] = []
        self.is_notified = threading.Event()
        self.num_stops = 0

    def view(self) -> Mapping[int, WorkerView]:
        return {n: attrs.evolve(one, takes_notices=True) for n, one in super().view().items()}

    def notify(self, notice: StopNotice, call: int | None = None) -> None:
        del call
        self.notices.append(notice.reason)
        self.is_notified.set()

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        self.num_stops += 1
        super().stop(local_ranks, how)


class GrowingHandler(SingleNodeHandler):
    """A handler that reports `more` waiting nodes."""

    more = 0

    def num_nodes_waiting(self) -> int:
        return self.more


def test_repeated_drain_signals_do_not_interrupt_the_save() -> None:
    workers = NotifiedWorker()
    with running(workers, options=AgentOptions(checkpoint_grace=600.0)) as run:
        for _ in range(3):
            run.agent.handle_signal(signal.SIGTERM)
        assert workers.is_notified.wait(60)
        workers.end()
        result = run.result()
    assert (result.state, result.signal) == (WorkerState.DRAINED, signal.SIGTERM)
    assert (workers.notices, workers.num_stops) == (["preempted"], 0)


def test_a_node_that_is_drained_during_a_resize_drains() -> None:
    workers, handler, journal = NotifiedWorker(), GrowingHandler(), RecordingJournal()
    options = AgentOptions(checkpoint_grace=600.0)
    with running(workers, handler, options=options, journal=journal) as run:
        handler.more = 1
        assert workers.is_notified.wait(60)
        run.agent.handle_signal(signal.SIGTERM)
        wait_until("the second notice", lambda: len(workers.notices) > 1)
        workers.end()
        result = run.result()
    assert result.state is WorkerState.DRAINED
    assert workers.notices == ["resize", "preempted"]
    assert [
        facts["duration_seconds"] < 300 for kind, facts in journal.facts if kind == "stopped"
    ] == [True]


def test_events_distinguish_a_planned_resize_from_a_failure() -> None:
    workers, handler, journal = NotifiedWorker(), GrowingHandler(), RecordingJournal()
    with running(workers, handler, job=RendezvousSettings(max_restarts=1), journal=journal) as run:
        handler.more = 1
        assert workers.is_notified.wait(60)
        handler.more = 0
        workers.end()
        wait_until("the second generation", lambda: workers.starts == 2)
        workers.end(1)
        wait_until("the third generation", lambda: workers.starts == 3)
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
    planned = [facts["is_planned"] for kind, facts in journal.facts if kind == "rendezvous.started"]
    assert planned == [False, True, False]


class FaultyNotifiedWorker(FaultyWorker):
    """Workers that take notices, and raise an exception when they get one."""

    def view(self) -> Mapping[int, WorkerView]:
        return {n: attrs.evolve(one, takes_notices=True) for n, one in super().view().items()}


def test_an_error_in_a_notice_ends_the_run_and_leaves_no_worker() -> None:
    workers, options = FaultyNotifiedWorker("notify"), AgentOptions(checkpoint_grace=600.0)
    with running(workers, options=options) as run:
        run.agent.handle_signal(signal.SIGUSR2)
        result = run.result()
    assert result.state is WorkerState.DRAINED, "the first cause decides"
    assert not workers.view()


class RestartsOnRequest(SingleNodeHandler):
    """A handler that starts a new generation for a restart request."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def report(self, report: Report) -> bool:
        if report.kind is ReportKind.RESTART:
            self.reasons.append(report.reason)
        return report.kind is ReportKind.RESTART

    def wait_for_change(self, timeout: float) -> Change | None:
        del timeout
        if len(self.reasons) < self.generation:
            return None
        return Change(ChangeKind.RESTART, self.reasons[-1])


def test_workers_save_and_are_started_again_after_a_restart_request() -> None:
    workers, handler, journal = NotifiedWorker(), RestartsOnRequest(), RecordingJournal()
    with running(workers, handler, job=RendezvousSettings(max_restarts=0), journal=journal) as run:
        run.agent.request_restart("an earlier request", 0)  # no generation has this number
        source = "a restart request"
        run.agent.post(Requested(Action.RESTART, source, generation=1, id="1", by="ann@login"))
        assert workers.is_notified.wait(60)
        workers.end()
        wait_until("the second start", lambda: workers.starts == 2)
        workers.end()
        result = run.result()
    assert (result.state, result.restarts) == (WorkerState.SUCCEEDED, 0)
    assert (handler.reasons, workers.notices) == (["a restart request"], ["restart"])
    events = [facts for kind, facts in journal.facts if kind == "control.requested"]
    assert events == [{"action": "restart", "by": "ann@login"}]


def test_a_restart_request_is_logged_if_the_handler_does_not_support_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = OneWorker()
    with running(workers) as run:
        run.agent.request_restart("a restart request", 1)
        wait_until("the warning", lambda: "does not support a restart on request" in caplog.text)
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
    assert workers.starts == 1


def test_a_stop_request_lets_workers_save_and_has_an_exit_code_of_its_own() -> None:
    workers = NotifiedWorker()
    with running(workers, options=AgentOptions(checkpoint_grace=600.0)) as run:
        run.agent.request_stop("a stop request from ann")
        # A scheduler may send its signals to the nodes, too.
        run.agent.handle_signal(signal.SIGTERM)
        assert workers.is_notified.wait(60)
        workers.end()
        result = run.result()
    assert (result.state, result.exit_code) == (WorkerState.STOPPED, 76)
    assert result.reason == "received a stop request from ann"
    assert (workers.notices, workers.num_stops) == (["drain"], 0)


class StubbornWorker(OneWorker):
    """A worker that ignores SIGTERM, and needs a moment to end after SIGKILL."""

    def __init__(self) -> None:
        super().__init__()
        self.has_sigterm = threading.Event()
        self.was_killed = False

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        del local_ranks
        self.has_sigterm.set()
        if how is StopHow.KILL:
            self.was_killed = True
            threading.Timer(0.2, self.end, (-9,)).start()


def test_a_drain_without_any_time_kills_the_workers_and_is_still_a_drain() -> None:
    workers = StubbornWorker()
    with running(workers) as run:
        run.agent.request_drain("a preemption notice", time_left_s=0.0)
        result = run.result()
    assert (result.state, result.exit_code) == (WorkerState.DRAINED, 75), result.reason


def test_a_deadline_during_a_stop_leaves_workers_a_moment_to_end_after_sigkill() -> None:
    workers, waited_s = StubbornWorker(), [0.0]
    with running(workers, clock=lambda: monotonic() + waited_s[0]) as run:
        run.agent.request_drain("an operator")
        assert workers.has_sigterm.wait(60)
        waited_s[0] = 20.0
        run.agent.request_drain("a preemption notice", time_left_s=4.0)
        result = run.result()
    assert (result.state, result.exit_code) == (WorkerState.DRAINED, 75), result.reason


def test_workers_that_get_no_notice_have_most_of_a_short_time_to_save_at_sigterm() -> None:
    workers, waited_s, turns = StubbornWorker(), [0.0], list[object]()
    options = AgentOptions(shutdown_timeout=1e6)

    def clock() -> float:
        return monotonic() + waited_s[0]

    with running(workers, options=options, clock=clock) as run:
        run.agent.observe_turns(lambda event, *_: turns.append(event))
        run.agent.request_drain("a preemption notice", time_left_s=4000.0)
        assert workers.has_sigterm.wait(60)
        waited_s[0] = 2000.0
        turns.clear()
        for number in (1, 2):  # between the two, the loop polls the stop
            run.agent.post(Tick())
            wait_until("the event", lambda n=number: turns.count(Tick()) >= n)
        workers.end()
        result = run.result()
    assert (result.state, workers.was_killed) == (WorkerState.DRAINED, False), result.reason


def test_a_drain_for_an_unknown_reason_is_rejected() -> None:
    workers = OneWorker()
    with running(workers) as run:
        with pytest.raises(ConfigError, match="reason must be 'preempted' or 'drain', got 'tired'"):
            run.agent.request_drain("an operator", reason="tired")
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED


class SavingWorker(OneWorker):
    """A worker that exits at a notice."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def view(self) -> Mapping[int, WorkerView]:
        return {n: attrs.evolve(one, takes_notices=True) for n, one in super().view().items()}

    def notify(self, notice: StopNotice, call: int | None = None) -> None:
        del call
        self.reasons.append(notice.reason)
        self.end()


class ResizingHandler(SingleNodeHandler):
    """A rendezvous whose leader begins a resize before it reads a request to restart."""

    def __init__(self) -> None:
        super().__init__()
        self.is_resizing = threading.Event()

    def report(self, report: Report) -> bool:
        if report.kind is ReportKind.RESTART:
            self.is_resizing.set()
        return report.kind is ReportKind.RESTART

    def wait_for_change(self, timeout: float) -> Change | None:
        if self.is_resizing.wait(min(timeout, 0.02)):
            self.is_resizing.clear()
            return Change(ChangeKind.RESIZE, "b joined")
        return None


def test_a_restart_that_is_requested_during_a_resize_is_not_lost() -> None:
    workers = SavingWorker()
    with running(workers, ResizingHandler()) as run:
        run.agent.request_restart("an operator", 1)
        wait_until("the second generation", lambda: workers.starts == 2)
        assert workers.reasons == ["restart"]


class RegroupableWorker(OneWorker):
    """A worker that can continue in the next generation. It exits when it is stopped."""

    has_left_group = False

    def view(self) -> Mapping[int, WorkerView]:
        return {n: attrs.evolve(one, can_regroup=True) for n, one in super().view().items()}

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        if how is StopHow.LEAVE:
            self.has_left_group = True
        else:
            super().stop(local_ranks, how)


class HandlerOfFailedGeneration(ResizingHandler):
    """A rendezvous whose generation fails before its leader reads a request to restart."""

    def wait_for_change(self, timeout: float) -> Change | None:
        change = super().wait_for_change(timeout)
        return change and Change(ChangeKind.GENERATION_ENDED, "a worker of another node failed")


def test_a_restart_that_is_requested_just_before_a_failure_is_not_lost() -> None:
    workers = RegroupableWorker()
    with running(workers, HandlerOfFailedGeneration()) as run:
        run.agent.request_restart("an operator", 1)
        wait_until("the second start", lambda: workers.starts == 2)
        assert not workers.has_left_group
        workers.end()
        assert run.result().state is WorkerState.SUCCEEDED
