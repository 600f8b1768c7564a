"""Requests of operators through the store of a job: how a node decides on them, and who answers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError, RunNotFoundError, StoreConnectionError
from elasticlib.observe.control import (
    MAX_MESSAGE_BYTES,
    MAX_REQUESTS,
    MAX_TEXT_LENGTH,
    ControlAction,
    ControlAnswer,
    ControlClient,
    ControlKeys,
    ControlRequest,
    ControlResponder,
    NodeActivity,
    Reaction,
    TargetNode,
    decide,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    find_node,
    read_target_job,
    result_document,
    result_lines,
)
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import (
    JobEnd,
    JobPhase,
    Membership,
    NodeRecord,
    end_job,
    form_generation,
)
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode, encode_shard, encode_state
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Entry, Listing, Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.waiting import wait_until

MEMBERS = tuple(NodeRecord(f"id{n}", f"host{n}", "", 1) for n in range(3))
SPARE = NodeRecord("id9", "host9", "", 1)
JOB, KEYS = StoreKeys("job"), ControlKeys("job")
TRAINING = NodeActivity(generation=1, num_workers=2, is_training=True)
REQUEST = ControlRequest("1", ControlAction.DRAIN, "ann@login", "run", 1, 30.0, "id0")


# -- messages --------------------------------------------------------------------------------------

# The characters for which str.isprintable() is true.
PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
TEXTS = st.text(PRINTABLE, max_size=20)
LIMITS = st.floats(0.1, 3600.0)
REQUESTS = st.builds(
    ControlRequest,
    TEXTS,
    st.sampled_from(ControlAction),
    TEXTS,
    TEXTS,
    st.integers(0, 9),
    LIMITS,
    TEXTS,
)
ANSWERS = st.builds(ControlAnswer, TEXTS, TEXTS, st.booleans(), TEXTS)


@given(REQUESTS)
def test_a_request_is_decoded_as_it_was_encoded(request: ControlRequest) -> None:
    assert decode_request(encode_request(request)) == request


@given(ANSWERS)
def test_an_answer_is_decoded_as_it_was_encoded(answer: ControlAnswer) -> None:
    assert decode_answer(encode_answer(answer)) == answer


INVALID_VALUES = st.sampled_from(
    [None, True, -1, 3, 1e400, 0.0, "x\n", "\x1b[2J", "x" * 600, [], {}, "start", [[[]]]]
)


@given(REQUESTS, ANSWERS, st.data())
def test_invalid_messages_raise_only_value_errors(
    request: ControlRequest, answer: ControlAnswer, data: st.DataObject
) -> None:
    kinds: tuple[tuple[Callable[[bytes], object], bytes], ...] = (
        (decode_request, encode_request(request)),
        (decode_answer, encode_answer(answer)),
    )
    for decode, valid in kinds:
        fields = json.loads(valid)
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(INVALID_VALUES)
        for invalid in (data.draw(st.binary(max_size=40)), json.dumps(fields).encode(), valid[:-1]):
            with contextlib.suppress(ValueError):
                decode(invalid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": "kill"}, "action must be one of drain, stop, restart, got 'kill'"),
        ({"by": "ann\x1b[2J"}, "by must be printable"),
        ({"by": "a" * (MAX_TEXT_LENGTH + 1)}, "by must be printable, of at most 512 characters"),
        ({"time_limit_s": 0}, "time_limit_s must be up to 3600, got 0"),
        ({"time_limit_s": 1e9}, "time_limit_s must be up to 3600"),
        ({"generation": "1"}, "invalid value of the field generation"),
        ({"incarnation": None}, "invalid value of the field incarnation"),
        ({"version": 2}, "a request must have version 1, got 2"),
    ],
)
def test_an_invalid_request_is_rejected_with_its_field(
    change: dict[str, object], message: str
) -> None:
    fields = {**json.loads(encode_request(REQUEST)), **change}
    with pytest.raises(ValueError, match=message):
        decode_request(json.dumps(fields).encode())


def test_long_messages_are_rejected_before_they_are_parsed() -> None:
    for decode in (decode_request, decode_answer):
        with pytest.raises(ValueError, match="must have at most"):
            decode(b"[" * (MAX_MESSAGE_BYTES + 1))


# -- the decision of a node ------------------------------------------------------------------------

ACTIVITIES = st.builds(
    NodeActivity, st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans()
)


TARGETS = st.sampled_from([("", "run"), ("id0", "run"), ("id1", "run"), ("id0", "earlier")])


@given(REQUESTS, TARGETS, st.sampled_from(["id0", "id1"]), ACTIVITIES, st.floats(0, 7200))
def test_a_node_reacts_only_to_requests_for_it_and_its_run_within_the_time_limit(
    request: ControlRequest,
    target: tuple[str, str],
    node_id: str,
    activity: NodeActivity,
    age_s: float,
) -> None:
    incarnation = "run"
    request = attrs.evolve(request, node_id=target[0], incarnation=target[1])
    is_for_node = request.node_id in ("", node_id)
    is_for_run = request.incarnation == incarnation
    reaction = decide(request, node_id, incarnation, activity, age_s=age_s)
    if not is_for_node or not is_for_run or age_s > request.time_limit_s:
        assert reaction is None
    else:
        assert reaction is not None
        assert reaction.text


@given(REQUESTS, ACTIVITIES)
def test_a_drain_of_a_node_that_leaves_already_has_no_effect_and_a_stop_has(
    request: ControlRequest, activity: NodeActivity
) -> None:
    request = attrs.evolve(request, incarnation="run", node_id="")
    leaving = attrs.evolve(activity, is_leaving=True)
    reaction = decide(request, "id0", "run", leaving, age_s=0.0)
    assert reaction is not None
    assert reaction.has_effect == (request.action is ControlAction.STOP)


@given(st.integers(0, 9), ACTIVITIES)
def test_workers_that_were_started_after_the_request_or_are_being_stopped_are_not_restarted(
    generation: int, activity: NodeActivity
) -> None:
    request = attrs.evolve(REQUEST, action=ControlAction.RESTART, generation=generation)
    reaction = decide(request, "id0", "run", activity, age_s=0.0)
    assert reaction is not None
    is_current = activity.is_training and activity.generation <= generation
    assert reaction.has_effect == (is_current and not activity.is_leaving)


STOPPING = NodeActivity(generation=1, num_workers=2)
WAITING = NodeActivity()
LEAVING = NodeActivity(generation=1, num_workers=2, is_leaving=True)


@pytest.mark.parametrize(
    ("action", "activity", "reaction"),
    [
        ("drain", TRAINING, Reaction(True, "leaves the job once its 2 workers have stopped")),
        ("drain", STOPPING, Reaction(True, "leaves the job once its 2 workers have stopped")),
        ("drain", WAITING, Reaction(True, "leaves the job")),
        ("drain", LEAVING, Reaction(False, "was leaving the job already")),
        ("stop", TRAINING, Reaction(True, "ends once its 2 workers have stopped")),
        ("stop", WAITING, Reaction(True, "ends")),
        ("stop", LEAVING, Reaction(True, "was leaving the job already")),
        ("restart", TRAINING, Reaction(True, "restarts its 2 workers")),
        ("restart", STOPPING, Reaction(False, "is stopping its workers already")),
        ("restart", WAITING, Reaction(False, "has no workers to restart")),
        ("restart", LEAVING, Reaction(False, "is leaving the job")),
        (
            "restart",
            attrs.evolve(TRAINING, generation=2),
            Reaction(False, "has started generation 2 since the request"),
        ),
    ],
)
def test_the_answer_describes_the_reaction_of_the_node(
    action: str, activity: NodeActivity, reaction: Reaction
) -> None:
    request = attrs.evolve(REQUEST, action=ControlAction(action))
    assert decide(request, "id0", "run", activity, age_s=0.0) == reaction


# -- the node that an operator names ---------------------------------------------------------------

NODES = (
    TargetNode("id0", "host0", 0),
    TargetNode("id1", "host1", 1),
    TargetNode("id2", "shared", 2),
    TargetNode("id3", "shared", None),
)


@pytest.mark.parametrize(
    ("selector", "node_id"), [("id1", "id1"), ("host1", "id1"), ("1", "id1"), ("id3", "id3")]
)
def test_a_node_is_found_by_id_host_or_rank(selector: str, node_id: str) -> None:
    assert find_node(selector, NODES).id == node_id


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (
            "shared",
            "'shared' is ambiguous; choose one of id2 (shared (rank 2)), id3 (shared (waiting))",
        ),
        ("host", "'host' is not the id, host or rank of a live node; choose one of id0 (host0"),
        ("None", "'None' is not the id"),
        ("", "'' is not the id"),
        ("7", "'7' is not the id"),
    ],
)
def test_an_unknown_or_ambiguous_name_is_rejected_with_the_candidates(
    selector: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        find_node(selector, NODES)
    assert message in str(error.value)


def test_a_host_that_is_named_like_the_rank_of_another_node_is_ambiguous() -> None:
    nodes = (TargetNode("id0", "1", 0), TargetNode("id1", "0", 1))
    with pytest.raises(ConfigError, match="'1' is ambiguous"):
        find_node("1", nodes)


# -- requests through a store ----------------------------------------------------------------------


def write_job(store: Store, *, incarnation: str = "run") -> Membership:
    """Write a job with three members and a spare, which are all alive."""
    waiting = Membership(RendezvousSettings(1, 3), incarnation)
    membership = form_generation(waiting, MEMBERS, charged=False, nonce="m")
    for number, rows in shard_members(membership).items():
        store.set(JOB.shard(membership.membership_id, number), encode_shard(rows))
    for node in (*MEMBERS, SPARE):
        store.set(JOB.node(node.id), encode(node), ttl=60.0)
    store.set(JOB.state, encode_state(membership))
    return membership


class FakeNode:
    """A node with a responder, and the requests that were passed to its agent."""

    def __init__(self, store: Store, node: NodeRecord, poll_interval: float = 0.0) -> None:
        self.activity = TRAINING if node in MEMBERS else NodeActivity()
        self.requests: list[ControlRequest] = []
        self.now = 0.0
        self.responder = ControlResponder(
            store,
            "job",
            node.id,
            lambda: self.activity,
            self.requests.append,
            host=node.host,
            poll_interval=poll_interval,
            clock=lambda: self.now,
        )

    def poll(self, store: Store) -> bool:
        """React once to what is in the store."""
        return self.responder.answer_all(store.list(KEYS.requests).entries)

    @property
    def actions(self) -> list[ControlAction]:
        return [request.action for request in self.requests]


@contextlib.contextmanager
def run_nodes(store: Store, *nodes: NodeRecord) -> Iterator[list[FakeNode]]:
    interval = 0.05 if isinstance(store, FileStore) else 0.0
    fakes = [FakeNode(store, node, interval) for node in nodes]
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake.responder)
        yield fakes


def make_request(action: str, node_id: str = "", id: str = "1", **fields: object) -> ControlRequest:
    request = ControlRequest(id, ControlAction(action), "ann@login", "run", 1, 20.0, node_id)
    return attrs.evolve(request, **fields)


def test_all_nodes_answer_a_stop_and_each_agent_gets_it_once(stores: tuple[Store, Store]) -> None:
    node_store, store = stores
    write_job(node_store)
    job = read_target_job(store, "job")
    assert [node.rank for node in job.nodes] == [0, 1, 2, None]
    with run_nodes(node_store, *MEMBERS, SPARE) as nodes, ControlClient(store, "job") as client:
        result = client.send(make_request("stop"), job.nodes)
        assert not result.missing
        assert result.answers["id9"] == ControlAnswer("id9", "host9", True, "ends")
        wait_until("the nodes to act", lambda: all(node.actions for node in nodes))
        assert [node.actions for node in nodes] == [[ControlAction.STOP]] * 4
        # The request is still in the store, where the nodes may read it again.
        assert not any(node.poll(node_store) for node in nodes)
        assert [node.actions for node in nodes] == [[ControlAction.STOP]] * 4
    assert not store.list("?").entries, "requests and answers are deleted"


def test_only_the_node_that_is_named_reacts(stores: tuple[Store, Store]) -> None:
    node_store, store = stores
    write_job(node_store)
    job = read_target_job(store, "job")
    with run_nodes(node_store, *MEMBERS, SPARE) as nodes, ControlClient(store, "job") as client:
        node = find_node("host1", job.nodes)
        result = client.send(make_request("drain", node.id), [node])
        assert result_lines(result) == [
            "host1 (rank 1): leaves the job once its 2 workers have stopped"
        ]
        wait_until("the node to act", lambda: nodes[1].actions)
        assert [node.actions for node in nodes] == [[], [ControlAction.DRAIN], [], []]


def test_requests_of_two_operators_are_both_answered(stores: tuple[Store, Store]) -> None:
    node_store, store = stores
    write_job(node_store)
    job = read_target_job(store, "job")
    with run_nodes(node_store, *MEMBERS) as nodes, ControlClient(store, "job") as client:
        first = make_request("drain", "id1")
        store.set(f"{KEYS.requests}{first.id}", encode_request(first), ttl=60.0)
        second = client.send(make_request("restart", id="2", by="bob@login"), job.nodes[:3])
        assert not second.missing
        wait_until("both", lambda: len(nodes[1].requests) == 2)
        assert {request.by for request in nodes[1].requests} == {"ann@login", "bob@login"}


def test_nodes_that_do_not_answer_are_named() -> None:
    with MemoryStore() as store:
        write_job(store)
        job = read_target_job(store, "job")
        with run_nodes(store, *MEMBERS[:2]), ControlClient(store, "job") as client:
            result = client.send(make_request("stop", time_limit_s=0.3), job.nodes)
        assert [node.host for node in result.missing] == ["host2", "host9"]
        assert result_lines(result)[2:] == [
            "host2 (rank 2): no response",
            "host9 (waiting): no response",
        ]
        document = result_document("job", result)
        assert document["missing"][1] == {"node": "id9", "host": "host9", "rank": None}
        assert document["answers"][0]["has_effect"] is True


@pytest.mark.parametrize(
    ("action", "text"), [("restart", "no response"), ("stop", "has left the job")]
)
def test_a_node_that_is_lost_is_not_waited_for(action: str, text: str) -> None:
    with MemoryStore() as store:
        write_job(store)
        job = read_target_job(store, "job")
        with run_nodes(store, *MEMBERS), ControlClient(store, "job") as client:
            store.delete(JOB.node(SPARE.id))
            started_at = monotonic()
            result = client.send(make_request(action, time_limit_s=60.0), job.nodes)
        assert result_lines(result)[-1] == f"host9 (waiting): {text}"
        assert len(result.missing) == (action == "restart")
        assert monotonic() - started_at < 30.0


def test_the_answer_of_a_node_that_leaves_at_once_counts() -> None:
    class LeavingNode(FakeNode):
        """Loses its connection, and so its leases, as soon as its agent has the request."""

        def __init__(self, client: MemoryStore, node: NodeRecord) -> None:
            super().__init__(client, node)
            self.responder._act = lambda _: client.close()

    with MemoryStore() as store:
        write_job(store)
        leaving = store.client()
        leaving.set(JOB.node(SPARE.id), encode(SPARE), ttl=60.0)
        job = read_target_job(store, "job")
        node = find_node("host9", job.nodes)
        with LeavingNode(leaving, SPARE).responder, ControlClient(store, "job") as client:
            result = client.send(make_request("drain", node.id), [node])
        assert result_lines(result) == ["host9 (waiting): leaves the job"]


def test_a_node_keeps_its_answer_to_each_request_that_is_in_the_store() -> None:
    with MemoryStore() as store:
        write_job(store)
        node = FakeNode(store, MEMBERS[0])
        answers = []
        for number in range(MAX_REQUESTS + 1):
            request = make_request("stop", id=str(number))
            store.set(f"{KEYS.requests}{request.id}", encode_request(request))
            assert node.poll(store)
            answers.append(f"{KEYS.answers}{request.id}/{MEMBERS[0].id}")
        assert all(store.get(key) for key in answers)


def test_a_request_to_an_earlier_run_of_the_job_is_ignored() -> None:
    with MemoryStore() as store:
        write_job(store, incarnation="later")
        node = FakeNode(store, MEMBERS[0])
        stale = make_request("stop")
        store.set(f"{KEYS.requests}{stale.id}", encode_request(stale))
        assert not node.poll(store)
        current = make_request("stop", id="2", incarnation="later")
        store.set(f"{KEYS.requests}{current.id}", encode_request(current))
        assert node.poll(store)
        assert node.requests == [current]


def test_a_node_reacts_to_an_earlier_request_once_it_is_part_of_the_run() -> None:
    with MemoryStore() as store:
        write_job(store)
        request = make_request("stop")
        store.set(f"{KEYS.requests}{request.id}", encode_request(request))
        outside = attrs.evolve(SPARE, inactive_incarnation="run")
        store.set(JOB.node(SPARE.id), encode(outside))
        node = FakeNode(store, SPARE)
        # The responder must look again soon, because the requests do not change any more.
        assert node.poll(store)
        store.delete(JOB.node(SPARE.id))
        assert node.poll(store)
        assert not node.requests
        with node.responder:
            store.set(JOB.node(SPARE.id), encode(SPARE))
            wait_until("the reaction", lambda: node.requests == [request])


class UnwritableStore(MemoryStore):
    """A store in which answers cannot be written for a while."""

    is_writable = False

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        if key.startswith(KEYS.answers) and not self.is_writable:
            raise StoreConnectionError("the store is unreachable")
        return super().set(key, value, ttl=ttl)


@pytest.mark.parametrize("delay_s", [5.0, 25.0])
def test_a_node_that_could_not_answer_acts_later_only_within_the_time_limit(delay_s: float) -> None:
    with UnwritableStore() as store:
        write_job(store)
        node = FakeNode(store, MEMBERS[0])
        request = make_request("stop")
        store.set(f"{KEYS.requests}{request.id}", encode_request(request))
        with pytest.raises(StoreConnectionError):
            node.poll(store)
        assert not node.requests, "a node does nothing that it has not answered"
        store.is_writable, node.now = True, delay_s
        is_in_time = delay_s <= request.time_limit_s
        assert node.poll(store) == is_in_time
        assert node.requests == [request] * is_in_time


@pytest.mark.parametrize(
    "value", [b"", b"{", b"x" * 9000, encode_request(attrs.evolve(REQUEST, id="other"))]
)
def test_an_invalid_request_is_ignored_and_others_are_answered(value: bytes) -> None:
    with MemoryStore() as store:
        write_job(store)
        node = FakeNode(store, MEMBERS[0])
        store.set(f"{KEYS.requests}invalid", value)
        request = make_request("stop")
        store.set(f"{KEYS.requests}{request.id}", encode_request(request))
        assert node.poll(store)
        assert node.requests == [request]


def test_answers_are_deleted_with_their_request() -> None:
    with MemoryStore() as store:
        write_job(store)
        node = FakeNode(store, MEMBERS[0])
        request = make_request("stop")
        store.set(f"{KEYS.requests}{request.id}", encode_request(request))
        node.poll(store)
        assert len(store.list(KEYS.answers).entries) == 1
        store.delete(f"{KEYS.requests}{request.id}")
        node.poll(store)
        assert not store.list(KEYS.answers).entries


def test_the_leader_is_not_woken_by_requests() -> None:
    with MemoryStore() as store:
        write_job(store)
        version = store.list(JOB.job_prefix).version
        with run_nodes(store, *MEMBERS), ControlClient(store, "job") as client:
            client.send(make_request("restart"), read_target_job(store, "job").nodes[:3])
        assert not store.wait(JOB.job_prefix, after=version, timeout=0.0)


def test_a_job_that_is_over_or_has_no_live_node_cannot_be_controlled() -> None:
    with MemoryStore() as store:
        with pytest.raises(RunNotFoundError, match="no node of run 'job' is alive"):
            read_target_job(store, "job")
        membership = write_job(store)
        over = end_job(membership, JobPhase.FAILED, "rank 0", job_end=JobEnd("host0", "now"))
        store.set(JOB.state, encode_state(over))
        with pytest.raises(RunNotFoundError, match="run 'job' has failed: rank 0"):
            read_target_job(store, "job")
        store.set(JOB.state, encode_state(membership))
        for node in (*MEMBERS, SPARE):
            store.delete(JOB.node(node.id))
        with pytest.raises(RunNotFoundError, match="no node of run 'job' is alive"):
            read_target_job(store, "job")


def test_a_node_that_serves_the_store_waits_until_its_answers_are_read() -> None:
    with MemoryStore() as store:
        write_job(store)
        node = FakeNode(store, MEMBERS[0])
        node.responder._clock = monotonic
        node.responder.wait_until_read(60.0)  # there is no request
        request = make_request("stop")
        store.set(f"{KEYS.requests}{request.id}", encode_request(request))
        node.poll(store)
        started_at = monotonic()
        node.responder.wait_until_read(0.3)
        assert monotonic() - started_at >= 0.3
        deletion = threading.Timer(0.2, store.delete, (f"{KEYS.requests}{request.id}",))
        deletion.start()
        node.responder.wait_until_read(60.0)
        deletion.join()
        assert monotonic() - started_at < 30.0


def test_answers_that_were_read_count_if_the_store_is_lost_then() -> None:
    class LostStore(MemoryStore):
        """A store that is lost after its second listing of answers."""

        listings = 0

        def list(self, prefix: str) -> Listing:
            if prefix.startswith(KEYS.answers):
                self.listings += 1
                if self.listings > 2:
                    raise StoreConnectionError("the store is gone")
            return super().list(prefix)

    with LostStore() as store:
        write_job(store)
        answer = ControlAnswer("id0", "host0", True, "ends")
        store.set(f"{KEYS.answers}1/id0", encode_answer(answer))
        with ControlClient(store, "job") as client:
            result = client.send(make_request("restart"), NODES)
        assert set(result.answers) == {"id0"}
