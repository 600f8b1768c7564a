"""What an agent shows to operators through the store: its status, answers, and no second effect."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest
from single_worker_agent import OneWorker, SingleNodeHandler, running

from elasticlib import (
    Command,
    ElasticAgent,
    Node,
    RunResult,
    WorkerSpec,
    WorkerState,
    observe_node,
    read_history,
)
from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError
from elasticlib.launch.observability import make_node_observer
from elasticlib.launch.observer import STACKS_INTERVAL_S, StackDumps
from elasticlib.launch.rendezvous_setup import RendezvousSetup
from elasticlib.launch.request_command import make_request
from elasticlib.observe.event_kinds import GenerationStarted, RunFinished
from elasticlib.observe.history import JobState
from elasticlib.observe.journal import NodeJournal
from elasticlib.observe.requests import (
    Answer,
    Request,
    RequestClient,
    RequestKeys,
    RequestKind,
    Seal,
    decode_answer,
    encode_request,
    read_target_job,
)
from elasticlib.observe.stacks import NodeStacks, decode_stacks
from elasticlib.observe.summary import StatusReader
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.membership import RendezvousSettings
from elasticlib.stores.interface import CancelWatch, Store, WatchResult
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S, wait_until
from elasticlib.workers.interface import Heartbeat, WorkerView

SECRET = b"known to the nodes and the operator"
KEYS = RequestKeys("job")
SEAL = Seal(SECRET, "job")


class DumpingWorker(OneWorker):
    """A worker that writes its stack on request, and counts how often."""

    num_dumps = 0

    def view(self) -> Mapping[int, WorkerView]:
        beat = Heartbeat(can_dump_stacks=True)
        return {local: WorkerView("the worker", heartbeat=beat) for local in super().view()}

    def dump_stacks(
        self,
        local_ranks: Collection[int],
        on_done: Callable[[Mapping[int, str]], None],
        *,
        save: bool = False,
    ) -> None:
        del save
        self.num_dumps += 1
        on_done(dict.fromkeys(local_ranks, "here"))


class ObservedAgent:
    """An agent of a job in a store, with its observer, in threads."""

    def __init__(self, store: Store, number: int) -> None:
        self.workers = DumpingWorker()
        node = Node(f"id{number}", "host", "127.0.0.1", slots=1)
        handler = self.handler = DynamicRendezvousHandler(
            store, "job", node, RendezvousSettings(1, 1), open_bootstrap_store=FakeBootstrapStore
        )
        self.agent = ElasticAgent(WorkerSpec(Command("none")), handler, self.workers)
        self.journal = NodeJournal("job", node.id)
        setup = RendezvousSetup(handler, store, None, "job", node.id)
        observer = make_node_observer(setup, self.journal, self.agent, SECRET)
        assert observer is not None
        self.observer = observer
        self._results: list[RunResult] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.closing(self.journal), self.observer:
            self._results.append(self.agent.run())

    def start(self) -> None:
        self._thread.start()
        wait_until("the worker to be up", self.workers.up.is_set)

    def wait_for_view(self) -> None:
        wait_until("the view of the worker", self.agent.view)

    def result(self) -> RunResult:
        self._thread.join(60)
        assert self._results, "the run has not returned"
        return self._results[0]


@contextlib.contextmanager
def agent_of(store: Store, number: int = 1) -> Iterator[ObservedAgent]:
    """Run an agent until its worker has started; at the end, stop it."""
    observed = ObservedAgent(store, number)
    observed.start()
    try:
        yield observed
    finally:
        observed.workers.end()
        observed.result()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as store:
        yield store


def send(store: Store, kind: RequestKind, node: str = "", payload: str = "") -> Sent:
    """Send a request to the job, as an operator does, and return the answer of the only node."""
    client_store = store.client() if isinstance(store, MemoryStore) else store
    with RequestClient(client_store, "job", SECRET) as client:
        job = wait_until("the job", lambda: read_target_job(store, "job"))
        request = make_request(kind, job, node, 30.0, payload)
        key = KEYS.request(request.id)
        result = client.send(request, job.nodes)
        entry = store.get(key)
        assert entry is not None
        (answer,) = result.answers.values()
        (node_id,) = result.answers
        body = client.read_body(request, node_id)
    return Sent(request, key, entry.value, answer, body)


class Sent:
    """A request that was answered; its signed bytes are what an attacker may have read."""

    def __init__(
        self, request: Request, key: str, value: bytes, answer: Answer, body: bytes | None
    ) -> None:
        self.request, self.key, self.value = request, key, value
        self.answer, self.body = answer, body

    def replay(self, store: Store, node: str) -> Answer:
        """Write the same bytes again, and return what this node answers."""
        answer_key = KEYS.answer(self.request.id, node)
        wait_until("the first answer to be deleted", lambda: store.get(answer_key) is None)
        store.set(self.key, self.value)
        entry = wait_until("the answer to the replay", lambda: store.get(answer_key))
        store.delete(self.key)
        return decode_answer(SEAL.open(answer_key, entry.value))

    def is_ignored(self, store: Store, node: str) -> bool:
        """Write the same bytes again before a request that the node answers."""
        store.set(self.key, self.value)
        assert send(store, RequestKind.STACKS).answer.done
        return store.get(KEYS.answer(self.request.id, node)) is None


# -- each kind, and its replay ---------------------------------------------------------------------


def test_a_drain_is_answered_and_its_replay_reaches_no_other_node(store: MemoryStore) -> None:
    with agent_of(store) as first:
        drain = send(store, RequestKind.DRAIN, "id1")
        assert drain.answer == Answer("host", True, "leaves the job once its 1 worker has stopped")
        assert first.result().state is WorkerState.DRAINED
    with agent_of(store, 2) as second:
        assert drain.is_ignored(store, "id2")
        assert not second.agent.is_leaving


def test_a_stop_is_answered_and_its_replay_ends_no_later_run(store: MemoryStore) -> None:
    with agent_of(store) as first:
        stop = send(store, RequestKind.STOP)
        assert stop.answer == Answer("host", True, "ends once its 1 worker has stopped")
        assert first.result().exit_code == 76
    with agent_of(store, 2) as second:
        assert stop.is_ignored(store, "id2")
        assert not second.agent.is_leaving


def test_a_restart_is_answered_and_its_replay_restarts_no_later_workers(
    store: MemoryStore,
) -> None:
    with agent_of(store) as observed:
        restart = send(store, RequestKind.RESTART)
        assert restart.answer == Answer("host", True, "restarts its 1 worker")
        wait_until("the new worker", lambda: observed.workers.starts == 2)
        answer = restart.replay(store, "id1")
        assert answer == Answer("host", False, "has started generation 2 since the request")
        assert observed.workers.starts == 2
        assert observed.agent.state.value == "active"


def test_replayed_requests_for_stacks_signal_the_workers_at_most_once_a_second(
    store: MemoryStore,
) -> None:
    with agent_of(store) as observed:
        observed.wait_for_view()
        started_at = monotonic()
        stacks = send(store, RequestKind.STACKS)
        assert stacks.answer.text == "sends 1 stack"
        assert stacks.body is not None
        assert decode_stacks(stacks.body) == NodeStacks({0: "here"})
        for _ in range(3):
            assert stacks.replay(store, "id1").done
        most = 1 + (monotonic() - started_at) / STACKS_INTERVAL_S
        assert 1 <= observed.workers.num_dumps <= most


# -- refused and unanswered requests ---------------------------------------------------------------


def test_an_operator_without_the_secret_is_told_the_remedy(store: MemoryStore) -> None:
    with agent_of(store) as observed:
        for secret in (None, b"guessed by somebody else"):
            with RequestClient(store.client(), "job", secret) as client:
                job = read_target_job(store, "job")
                request = make_request(RequestKind.STOP, job, "", 30.0)
                (answer,) = client.send(request, job.nodes).answers.values()
            assert (answer.done, answer.refused) == (False, True)
            assert "this job has a secret: set ELASTICLIB_SECRET" in answer.text
        assert not observed.agent.is_leaving


def test_a_request_that_the_agent_does_not_handle_any_more_is_answered_at_the_end(
    store: MemoryStore,
) -> None:
    observed = ObservedAgent(store, 1)
    observed.handler.next_rendezvous()
    job = read_target_job(store, "job")
    request = make_request(RequestKind.STOP, job, "", 30.0)
    key, answer_key = KEYS.request(request.id), KEYS.answer(request.id, "id1")
    store.set(key, SEAL.sign(key, encode_request(request)))
    with observed.observer:
        pass
    entry = store.get(answer_key)
    assert entry is not None
    answer = decode_answer(SEAL.open(answer_key, entry.value))
    assert answer == Answer("host", True, "was leaving the job already")
    observed.handler.shutdown()
    observed.journal.close()


def test_stacks_of_some_ranks_are_taken_from_a_dump_of_all() -> None:
    workers = DumpingWorker()
    with running(workers) as run:
        wait_until("the view", run.agent.view)
        dumps = StackDumps(run.agent, lambda: None)
        dumps.add("all", None, 10.0)
        dumps.add("one", frozenset({0, 7}), 10.0)
        assert dumps.poll(10.0) == []
        stacks = NodeStacks({0: "here"})
        assert dumps.poll(10.1) == [("all", stacks), ("one", stacks)]
        dumps.add("soon", frozenset({9}), 10.5)  # shares the dump of all
        assert dumps.poll(10.5) == [("soon", NodeStacks({}))]
        dumps.add("later", None, 11.5)
        assert dumps.poll(11.5) == []
        assert dumps.poll(11.6) == [("later", stacks)]
        assert workers.num_dumps == 2


def test_requests_with_other_ranks_wait_for_the_next_dump() -> None:
    workers = DumpingWorker()
    with running(workers) as run:
        wait_until("the view", run.agent.view)
        dumps = StackDumps(run.agent, lambda: None)
        dumps.add("one", frozenset({0}), 10.0)
        dumps.poll(10.0)
        dumps.add("all", None, 10.2)
        assert dumps.poll(10.2) == [("one", NodeStacks({0: "here"}))]
        assert dumps.due_at == 11.0
        assert dumps.poll(10.9) == []
        assert workers.num_dumps == 1
        dumps.poll(11.0)
        assert dumps.poll(11.0) == [("all", NodeStacks({0: "here"}))]


# -- stores ----------------------------------------------------------------------------------------


class WithoutWatch(MemoryStore):
    """A store that cannot report changes."""

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch | None:
        del prefix, after, callback, with_listing
        return None


def test_a_store_without_watches_is_listed_from_time_to_time() -> None:
    with WithoutWatch() as store, agent_of(store):
        assert send(store, RequestKind.STACKS).answer.done


# -- status ----------------------------------------------------------------------------------------


def test_a_node_publishes_its_status_and_its_last_one_at_the_end(store: MemoryStore) -> None:
    with agent_of(store) as observed:
        reader = StatusReader(store, "job")
        wait_until("its status", lambda: reader.read().get("id1"))
        observed.journal.record(GenerationStarted(), generation=7)
        wait_until("the new state", lambda: reader.read()["id1"].summary.generation == 7)
        published = reader.read()["id1"].summary
        assert published.contact_s is not None
        assert 0 <= published.contact_s < DEFAULT_TIMEOUT_S
        assert reader.read_details(["id1"])["id1"].generation == 7
        observed.journal.record(RunFinished(state="succeeded"), generation=7)
    assert reader.read()["id1"].summary.state is JobState.SUCCEEDED


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
