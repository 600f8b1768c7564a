"""Requests of operators through the store of a job: messages, signatures, client and responder."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed_jobs import JOB, MEMBERS, RUN_ID, SPARE, write_job

from elasticlib.clock import monotonic
from elasticlib.errors import ConfigError, RunNotFoundError, StoreConnectionError
from elasticlib.observe.requests import (
    LEFT_TEXT,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    MAX_REQUESTS,
    NO_SECRET,
    REFUSAL,
    Answer,
    NotSignedError,
    Request,
    RequestClient,
    RequestKeys,
    RequestKind,
    Responder,
    Seal,
    TargetNode,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    find_node,
    new_request_id,
    read_target_job,
    result_document,
    result_lines,
)
from elasticlib.rendezvous.membership import JobEnd, JobPhase, NodeRecord, end_job
from elasticlib.rendezvous.store_layout import encode, encode_state
from elasticlib.stores.interface import Entry, Listing, Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.threads import daemon_thread, only_logged

KEYS = RequestKeys(RUN_ID)
SECRET = b"known to the nodes and the operator"
FIRST = "0123456789abcdef"
PLAIN = Seal(None, RUN_ID)


def make_request(
    kind: str = "stop", target: str = "", id: str = FIRST, **fields: object
) -> Request:
    request = Request(id, RequestKind(kind), target, RUN_ID, "run", 1, "ann@login", 20.0)
    return attrs.evolve(request, **fields)


def put(store: Store, request: Request, secret: bytes | None = None) -> None:
    """Write a request as its client does."""
    key = KEYS.request(request.id)
    store.set(key, Seal(secret, RUN_ID).sign(key, encode_request(request)))


# -- messages --------------------------------------------------------------------------------------

# The characters for which str.isprintable() is true.
PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
TEXTS = st.text(PRINTABLE, max_size=20)
IDS = st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")
LIMITS = st.floats(0.1, 3600.0)
REQUESTS = st.builds(
    Request,
    IDS,
    st.sampled_from(RequestKind),
    TEXTS,
    TEXTS,
    TEXTS,
    st.integers(0, 9),
    TEXTS,
    LIMITS,
    TEXTS,
)
SIZES = st.integers(0, 10**6)
ANSWERS = st.builds(Answer, TEXTS, st.booleans(), TEXTS, SIZES, st.booleans())


@given(REQUESTS, ANSWERS)
def test_a_message_is_decoded_as_it_was_encoded(request: Request, answer: Answer) -> None:
    assert decode_request(encode_request(request)) == request
    encoded = encode_answer(answer)
    decoded = decode_answer(encoded)
    assert attrs.evolve(decoded, host="", text="") == attrs.evolve(answer, host="", text="")
    assert answer.text.startswith(decoded.text)


@given(st.text(max_size=400), st.text(max_size=400))
def test_an_answer_fits_into_a_listing_of_ten_thousand(host: str, text: str) -> None:
    data = encode_answer(Answer(host, True, text, 10**6, True))
    assert len(PLAIN.sign(KEYS.answer(FIRST, "n"), data)) <= MAX_ANSWER_BYTES + 2
    json.dumps(attrs.asdict(decode_answer(data)))


INVALID_VALUES = st.sampled_from(
    [None, True, -1, 3, 1e400, 0.0, "x\n", "\x1b[2J", "x" * 600, [], {}, "start", [[[]]]]
)


@given(REQUESTS, ANSWERS, st.data())
def test_invalid_messages_raise_only_value_errors(
    request: Request, answer: Answer, data: st.DataObject
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
        ({"kind": "kill"}, "'kill' is not a valid RequestKind"),
        ({"by": "ann\x1b[2J"}, "by must be printable"),
        ({"by": "a" * 513}, "by must be printable, of at most 512 characters"),
        ({"target": "a" * 513}, "target must have up to 512 characters"),
        ({"id": "../x"}, "id must be 16 hexadecimal digits, got '../x'"),
        ({"limit_s": 0}, "limit_s must be above 0 and up to 3600, got 0"),
        ({"limit_s": 1e9}, "limit_s must be above 0 and up to 3600"),
        ({"generation": "1"}, "generation must be int, got '1'"),
        ({"generation": -1}, "generation must be a number from 0, got -1"),
        ({"incarnation": None}, "incarnation must be str, got None"),
        ({"more": 1}, "'more' is an unknown field"),
        ({"version": 2}, "must have version 1, got 2"),
    ],
)
def test_an_invalid_request_is_rejected_with_its_field(
    change: dict[str, object], message: str
) -> None:
    fields = {**json.loads(encode_request(make_request())), **change}
    with pytest.raises(ValueError, match=message):
        decode_request(json.dumps(fields).encode())


def test_long_messages_are_rejected_before_they_are_parsed() -> None:
    for decode in (decode_request, decode_answer):
        with pytest.raises(ValueError, match="must have at most"):
            decode(b"[" * (MAX_REQUEST_BYTES + 1))
    long = make_request("stacks", payload="é" * 7000)
    with pytest.raises(ConfigError, match="a request has at most 8192 bytes"):
        encode_request(long)


# -- signatures ------------------------------------------------------------------------------------


def test_a_value_is_valid_only_with_the_secret_of_its_job_and_at_its_key() -> None:
    seal = Seal(SECRET, RUN_ID)
    value = seal.sign("?job/request/1", b"content")
    assert seal.open("?job/request/1", value) == b"content"
    for other, key, changed in (
        (seal, "?job/request/2", value),
        (seal, "?job/request/1", value + b"."),
        (seal, "?job/request/1", b"- content"),
        (Seal(b"another secret of a job", RUN_ID), "?job/request/1", value),
        (Seal(SECRET, "another job"), "?job/request/1", value),
    ):
        with pytest.raises(NotSignedError):
            other.open(key, changed)
    assert PLAIN.open("?job/request/1", PLAIN.sign("?job/request/1", b"content")) == b"content"


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


def test_a_job_that_is_over_or_has_no_live_node_cannot_be_controlled() -> None:
    with MemoryStore() as store:
        with pytest.raises(RunNotFoundError, match="no node of run 'job' is alive"):
            read_target_job(store, RUN_ID)
        membership = write_job(store)
        job = read_target_job(store, RUN_ID)
        assert [(node.host, node.rank) for node in job.nodes] == [
            *(("host0", 0), ("host1", 1), ("host2", 2), ("host9", None))
        ]
        over = end_job(membership, JobPhase.FAILED, "rank 0", job_end=JobEnd("host0", "now"))
        store.set(JOB.state, encode_state(over))
        with pytest.raises(RunNotFoundError, match="run 'job' has failed: rank 0"):
            read_target_job(store, RUN_ID)
        store.set(JOB.state, encode_state(membership))
        for node in (*MEMBERS, SPARE):
            store.delete(JOB.node(node.id))
        with pytest.raises(RunNotFoundError, match="no node of run 'job' is alive"):
            read_target_job(store, RUN_ID)


# -- a node ----------------------------------------------------------------------------------------


class AnsweringNode:
    """A node that takes requests, and answers each one at once."""

    def __init__(self, store: Store, node: NodeRecord, secret: bytes | None = None) -> None:
        self.store, self.taken, self.now = store, list[Request](), 0.0
        self.incarnation = ""
        self.responder = Responder(
            store,
            RUN_ID,
            node.id,
            node.host,
            self.take,
            read_incarnation=lambda: self.incarnation,
            secret=secret,
            clock=lambda: self.now,
        )

    def take(self, request: Request) -> None:
        self.taken.append(request)
        self.responder.reply(request.id, f"takes a {request.kind.value}", done=True)

    def poll(self) -> float | None:
        """Read the requests once and answer them. Return when to poll again."""
        _, pause = self.responder.poll()
        self.responder.flush()
        return pause


@contextlib.contextmanager
def serving(store: Store, *nodes: NodeRecord, secret: bytes | None = None) -> Iterator[None]:
    """Let nodes answer requests in threads."""
    ended = threading.Event()

    def serve(node: AnsweringNode) -> None:
        while not ended.is_set():
            version, _ = node.responder.poll()
            node.responder.flush()
            store.wait(node.responder.prefix, after=version, timeout=0.05)

    threads = []
    for node in nodes:
        answering = AnsweringNode(store, node, secret)
        answering.incarnation = "run"
        threads.append(daemon_thread(lambda a=answering: serve(a), "serves", only_logged))  # type: ignore[misc]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as store:
        write_job(store)
        yield store


def test_a_node_takes_each_request_for_it_once(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    mine, others = make_request("drain", "id0"), make_request("drain", "id1", "1" * 16)
    for request in (mine, others):
        put(store, request)
    assert node.poll() is None
    assert node.poll() is None
    assert node.taken == [mine]
    assert store.get(KEYS.answer(others.id, "id0")) is None


def test_a_request_to_an_earlier_run_or_another_job_is_ignored(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    put(store, make_request(incarnation="earlier"))
    put(store, make_request(id="1" * 16, run="another"))
    node.poll()
    assert not node.taken
    assert not store.list(KEYS.answers).entries


def test_a_member_knows_its_run_by_itself_whatever_the_store_says(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    node.incarnation = "later"
    put(store, make_request())
    node.poll()
    assert not node.taken


def test_a_node_takes_an_earlier_request_once_it_is_part_of_the_run(store: MemoryStore) -> None:
    outside = attrs.evolve(SPARE, inactive_incarnation="run")
    store.set(JOB.node(SPARE.id), encode(outside))
    put(store, make_request())
    node = AnsweringNode(store, SPARE)
    # The node must look again soon, because the requests do not change any more.
    assert node.poll() is not None
    store.delete(JOB.node(SPARE.id))
    assert node.poll() is not None
    assert not node.taken
    store.set(JOB.node(SPARE.id), encode(SPARE))
    assert node.poll() is None
    assert len(node.taken) == 1


def test_a_node_takes_no_request_after_its_limit(store: MemoryStore) -> None:
    store.delete(JOB.node(MEMBERS[0].id))
    node = AnsweringNode(store, MEMBERS[0])
    put(store, make_request())
    node.poll()
    store.set(JOB.node(MEMBERS[0].id), encode(MEMBERS[0]))
    node.now = 20.5
    assert node.poll() is None
    assert not node.taken


def test_the_oldest_requests_are_taken_first_and_all_are_answered(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    ids = [new_request_id() for _ in range(MAX_REQUESTS + 1)]
    for id in ids:
        put(store, make_request(id=id))
    assert node.poll() is not None
    assert [request.id for request in node.taken] == ids[:-1]
    assert node.poll() is None
    assert all(store.get(KEYS.answer(id, "id0")) for id in ids)


@pytest.mark.parametrize("value", [b"", b"- {", b"x" * 9000, b"- []", b"{}"])
def test_an_invalid_request_is_ignored_and_others_are_answered(
    value: bytes, store: MemoryStore
) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    store.set(KEYS.request("invalid"), value)
    other = make_request(id="1" * 16)
    store.set(KEYS.request("2" * 16), PLAIN.sign("", encode_request(other)))  # not its own id
    put(store, make_request())
    node.poll()
    assert [request.id for request in node.taken] == [FIRST]


def test_answers_are_deleted_with_their_request(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    put(store, make_request("stacks"))
    node.responder.poll()
    node.responder.reply(FIRST, "sends 1 stack", done=True, body=b"stack")
    node.responder.flush()
    assert len(store.list("?job/body/").entries) == len(store.list(KEYS.answers).entries) == 1
    store.delete(KEYS.request(FIRST))
    node.poll()
    assert not store.list("?job/").entries


def test_answers_of_a_node_that_has_left_are_deleted_by_another_one(store: MemoryStore) -> None:
    left, stays = AnsweringNode(store, MEMBERS[0]), AnsweringNode(store, MEMBERS[1])
    put(store, make_request("drain", "id0"))
    left.poll()
    stays.responder.delete_stale_answers()
    assert store.list(KEYS.answers).entries, "its request is still there"
    store.delete(KEYS.request(FIRST))
    stays.responder.delete_stale_answers()
    assert not store.list(KEYS.answers).entries


class UnwritableStore(MemoryStore):
    """A store in which answers cannot be written for a while."""

    is_writable = False

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        if key.startswith(KEYS.answers) and not self.is_writable:
            raise StoreConnectionError("the store is unreachable")
        return super().set(key, value, ttl=ttl)


def test_an_answer_that_could_not_be_written_is_written_later() -> None:
    with UnwritableStore() as store:
        write_job(store)
        node = AnsweringNode(store, MEMBERS[0])
        put(store, make_request())
        with pytest.raises(StoreConnectionError):
            node.poll()
        store.is_writable = True
        node.poll()
        assert len(node.taken) == len(store.list(KEYS.answers).entries) == 1


def test_a_node_that_serves_the_store_waits_until_its_answers_are_read(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    node.responder.wait_until_read(60.0)  # there is no request
    put(store, make_request())
    node.poll()
    node.now = monotonic()
    deletion = threading.Timer(0.2, store.delete, (KEYS.request(FIRST),))
    deletion.start()
    node.responder.wait_until_read(node.now + 60.0)
    deletion.join()
    assert store.get(KEYS.request(FIRST)) is None


# -- a secret --------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, b"guessed by somebody else"])
def test_a_request_without_the_secret_is_refused_with_the_remedy(
    secret: bytes | None, store: MemoryStore
) -> None:
    node = AnsweringNode(store, MEMBERS[0], SECRET)
    put(store, make_request(), secret)
    assert node.poll() is None
    assert not node.taken
    entry = store.get(KEYS.answer(FIRST, "id0"))
    assert entry is not None
    answer = decode_answer(PLAIN.open(entry.key, entry.value))
    assert (answer.done, answer.refused, answer.text) == (False, True, REFUSAL)


def test_a_request_with_a_secret_to_a_job_without_one_is_refused(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0])
    put(store, make_request(), SECRET)
    node.poll()
    assert not node.taken
    entry = store.get(KEYS.answer(FIRST, "id0"))
    assert entry is not None
    assert decode_answer(PLAIN.open(entry.key, entry.value)).text == NO_SECRET


def test_a_signed_request_that_was_copied_to_another_id_is_refused(store: MemoryStore) -> None:
    node = AnsweringNode(store, MEMBERS[0], SECRET)
    request, other = make_request(), KEYS.request("1" * 16)
    signed = Seal(SECRET, RUN_ID).sign(KEYS.request(FIRST), encode_request(request))
    changed = signed.replace(FIRST.encode(), b"1" * 16)
    for value in (signed, changed):
        store.set(other, value)
        node.poll()
        store.delete(other)
        node.poll()
    assert not node.taken


def test_the_operator_reads_only_signed_answers_of_the_node_itself(store: MemoryStore) -> None:
    job, seal = read_target_job(store, RUN_ID), Seal(SECRET, RUN_ID)
    here, there = (KEYS.answer(FIRST, id) for id in ("id0", "id1"))
    content = encode_answer(Answer("host0", True, "ends"))
    store.set(here, seal.sign(here, content))
    store.set(there, seal.sign(here, content))  # moved to another node
    forged = KEYS.answer(FIRST, "id2")
    store.set(forged, PLAIN.sign(forged, content))
    with RequestClient(store, RUN_ID, SECRET) as client:
        result = client.send(make_request(), job.nodes[:3])
    assert {id: answer.done for id, answer in result.answers.items()} == {
        "id0": True,
        "id1": False,
        "id2": False,
    }
    assert [node.id for node in result.refused] == ["id1", "id2"]


def test_a_body_that_was_moved_to_another_node_is_not_read(store: MemoryStore) -> None:
    seal, request = Seal(SECRET, RUN_ID), make_request("stacks")
    body = KEYS.body(FIRST, "id0")
    store.set(body, seal.sign(body, b"stack"))
    store.set(KEYS.body(FIRST, "id1"), seal.sign(body, b"stack"))
    with RequestClient(store, RUN_ID, SECRET) as client:
        assert client.read_body(request, "id0") == b"stack"
        assert client.read_body(request, "id1") is None
        assert client.read_body(request, "id2") is None


def test_operator_and_nodes_with_one_secret_understand_each_other(store: MemoryStore) -> None:
    job = read_target_job(store, RUN_ID)
    with (
        serving(store, *MEMBERS, SPARE, secret=SECRET),
        RequestClient(store, RUN_ID, SECRET) as client,
    ):
        result = client.send(make_request(), job.nodes)
    assert not result.missing
    assert not result.refused
    assert {answer.text for answer in result.answers.values()} == {"takes a stop"}
    (entry,) = (e for e in store.list("?job/request/").entries or (None,))
    assert entry is None, "the request is deleted"


# -- the client ------------------------------------------------------------------------------------


def test_all_nodes_answer_through_any_store(stores: tuple[Store, Store]) -> None:
    node_store, store = stores
    write_job(node_store)
    job = read_target_job(store, RUN_ID)
    with serving(node_store, *MEMBERS, SPARE), RequestClient(store, RUN_ID) as client:
        result = client.send(make_request(), job.nodes)
        assert not result.missing
        assert result.answers["id9"] == Answer("host9", True, "takes a stop")
    assert result_lines(result)[0] == "host0 (rank 0): takes a stop"
    assert not store.list("?job/").entries, "requests and answers are deleted"


def test_nodes_that_do_not_answer_are_named(store: MemoryStore) -> None:
    job = read_target_job(store, RUN_ID)
    with serving(store, *MEMBERS[:2]), RequestClient(store, RUN_ID) as client:
        result = client.send(make_request(limit_s=0.3), job.nodes)
    assert [node.host for node in result.missing] == ["host2", "host9"]
    assert result_lines(result)[2:] == [
        "host2 (rank 2): no response",
        "host9 (waiting): no response",
    ]
    document = result_document(result)
    assert document["missing"][1] == {"id": "id9", "host": "host9", "rank": None}
    assert document["answers"][0]["done"] is True


@pytest.mark.parametrize(
    ("kind", "done"), [("drain", True), ("stop", True), ("restart", False), ("stacks", False)]
)
def test_a_node_that_leaves_is_not_waited_for(kind: str, done: bool, store: MemoryStore) -> None:
    job = read_target_job(store, RUN_ID)
    with serving(store, *MEMBERS), RequestClient(store, RUN_ID) as client:
        store.delete(JOB.node(SPARE.id))
        started_at = monotonic()
        result = client.send(make_request(kind, limit_s=60.0), job.nodes)
    assert result_lines(result)[-1] == f"host9 (waiting): {LEFT_TEXT}"
    assert result.answers["id9"].done is done
    assert not result.missing
    assert monotonic() - started_at < 30.0


def test_the_answer_of_a_node_that_leaves_at_once_counts(store: MemoryStore) -> None:
    leaving = store.client()
    leaving.set(JOB.node(SPARE.id), encode(SPARE), ttl=60.0)
    job = read_target_job(store, RUN_ID)
    node = AnsweringNode(leaving, SPARE)
    request = make_request("drain", SPARE.id)
    put(store, request)
    node.poll()
    leaving.close()  # Its leases end.
    with RequestClient(store, RUN_ID) as client:
        result = client.send(request, [find_node("host9", job.nodes)])
    assert result_lines(result) == ["host9 (waiting): takes a drain"]


def test_the_leader_is_not_woken_by_requests(store: MemoryStore) -> None:
    version = store.list(JOB.job_prefix).version
    with serving(store, *MEMBERS), RequestClient(store, RUN_ID) as client:
        client.send(make_request("restart"), read_target_job(store, RUN_ID).nodes[:3])
    assert not store.wait(JOB.job_prefix, after=version, timeout=0.0)


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
        key = KEYS.answer(FIRST, "id0")
        store.set(key, PLAIN.sign(key, encode_answer(Answer("host0", True, "ends"))))
        with RequestClient(store, RUN_ID) as client:
            result = client.send(make_request("restart"), NODES[:3])
        assert set(result.answers) == {"id0"}
