"""Queries for stacks through the store of a job, and the encoding of queries and answers."""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.clock import monotonic
from elasticlib.errors import StoreRejectedError
from elasticlib.observe.job_status import jobs_in
from elasticlib.observe.stack_query import (
    MAX_STACK_LENGTH,
    MAX_STACKS_BYTES,
    NodeStacks,
    StackClient,
    StackKeys,
    StackQuery,
    StackResponder,
    decode_query,
    decode_stacks,
    encode_query,
    encode_stacks,
)
from elasticlib.options import RendezvousSettings
from elasticlib.rendezvous.membership import Membership, NodeRecord, form_generation
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode, encode_shard, encode_state
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.waiting import wait_until

NODES = tuple(NodeRecord(f"id{n}", f"h{n}", "", 1) for n in range(3))
KEYS, STACK_KEYS = StoreKeys("job"), StackKeys("job")
ALL_STACKS = NodeStacks({0: "here"}, unresponsive_ranks=(1,))
SECRET = b"known to both sides"


def write_job(store: Store) -> None:
    """Write a job whose nodes are all alive."""
    document = form_generation(
        Membership(RendezvousSettings(1, 3)), NODES, charged=False, nonce="m"
    )
    for number, rows in shard_members(document).items():
        store.set(KEYS.shard(document.membership_id, number), encode_shard(rows))
    for node in NODES:
        store.set(KEYS.node(node.id), encode(node), ttl=60.0)
    store.set(KEYS.state, encode_state(document))


@contextlib.contextmanager
def start_responders(
    store: Store, *nodes: NodeRecord, poll_interval: float = 0.0
) -> Iterator[None]:
    """Answer queries for the stacks of these nodes inside the context."""

    def stacks_of(ranks: frozenset[int] | None) -> NodeStacks:
        if ranks is None:
            return ALL_STACKS
        return NodeStacks(dict.fromkeys(ranks, "here"))

    with contextlib.ExitStack() as stack:
        for node in nodes:
            responder = StackResponder(
                store, "job", node.id, stacks_of, poll_interval=poll_interval
            )
            stack.enter_context(responder)
        yield


def test_all_nodes_that_are_alive_answer_each_query_quickly(stores: tuple[Store, Store]) -> None:
    node_store, client_store = stores
    write_job(node_store)
    poll_interval = 0.05 if isinstance(client_store, FileStore) else 0.0
    with start_responders(node_store, *NODES, poll_interval=poll_interval):
        with StackClient(client_store, "job") as client:
            start = monotonic()
            for _ in range(3):
                result = client.query(20.0)
                assert result.stacks == {node.id: ALL_STACKS for node in NODES}
                assert [node.id for node in result.alive_nodes] == ["id0", "id1", "id2"]
            assert monotonic() - start < 10.0
        # The answers are deleted together with the query.
        wait_until("all answers to be deleted", lambda: not client_store.list("?").entries, 10.0)


def test_query_returns_after_its_timeout_if_a_node_does_not_answer(
    stores: tuple[Store, Store],
) -> None:
    node_store, client_store = stores
    write_job(node_store)
    with start_responders(node_store, *NODES[:2], poll_interval=0.05):
        client = StackClient(client_store, "job")

        def unresponsive_hosts() -> list[str]:
            result = client.query(0.5)
            return [node.host for node in result.alive_nodes if node.id not in result.stacks]

        # On a busy machine, the other nodes may not answer the first query in time.
        wait_until("all other nodes to answer", lambda: unresponsive_hosts() == ["h2"])


@pytest.fixture
def served() -> Iterator[tuple[TcpStoreServer, TcpStore]]:
    """A server that requires a secret, and a client that has it."""
    with (
        TcpStoreServer("127.0.0.1", 0, job="job", secret=SECRET) as server,
        TcpStore(server.host, server.port, job="job", secret=SECRET) as store,
    ):
        yield server, store


def test_query_does_not_wait_for_a_node_that_is_lost_during_the_query(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    _, store = served
    write_job(store)
    with start_responders(store, *NODES[:2]):
        loss = threading.Timer(0.2, store.delete, (KEYS.node("id2"),))
        loss.start()
        start = monotonic()
        assert len(StackClient(store, "job").query(30.0).stacks) == 2
        assert monotonic() - start < 15.0
        loss.join()


def test_query_for_some_ranks_passes_them_to_each_node(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    _, store = served
    write_job(store)
    with start_responders(store, *NODES):
        result = StackClient(store, "job").query(20.0, frozenset({5, 7}))
        assert result.stacks == {node.id: NodeStacks({5: "here", 7: "here"}) for node in NODES}


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b'{"version":3,"number":1,"ranks":null}', b"x" * 70_000]
)
def test_invalid_query_is_ignored(value: bytes, served: tuple[TcpStoreServer, TcpStore]) -> None:
    _, store = served
    write_job(store)
    with start_responders(store, *NODES):
        store.set(f"{STACK_KEYS.queries}wrong", value)
        store.set(f"{STACK_KEYS.queries}{'long' * 99}", b'{"version":2,"number":1,"ranks":null}')
        assert len(StackClient(store, "job").query(20.0).stacks) == 3
        assert not store.list(f"{STACK_KEYS.answers}wrong").entries
        assert not store.list(f"{STACK_KEYS.answers}long").entries


def test_invalid_answer_is_ignored(served: tuple[TcpStoreServer, TcpStore]) -> None:
    _, store = served
    write_job(store)
    with start_responders(store, *NODES[:2]):
        client = StackClient(store, "job")
        client.query(0.3)
        (entry,) = store.list(STACK_KEYS.queries).entries
        query_id = entry.key.removeprefix(STACK_KEYS.queries)
        store.set(f"{STACK_KEYS.answers}{query_id}/id2", json.dumps({"version": 2}).encode())
        wait_until(
            "only the answers of the other nodes",
            lambda: {*client.query(0.3).stacks} == {"id0", "id1"},
        )


def test_query_does_not_wake_the_leader(served: tuple[TcpStoreServer, TcpStore]) -> None:
    _, store = served
    write_job(store)
    version = store.list(KEYS.job_prefix).version
    with start_responders(store, *NODES):
        StackClient(store, "job").query(20.0)
    assert not store.wait(KEYS.job_prefix, after=version, timeout=0.0)


def test_client_without_the_secret_is_rejected(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    server, _ = served
    for secret in (None, b"a wrong shared secret"):
        with (
            TcpStore(server.host, server.port, secret=secret) as store,
            pytest.raises(StoreRejectedError, match="secret"),
        ):
            StackClient(store, "job").query(1.0)


def test_all_jobs_of_a_store_are_found(served: tuple[TcpStoreServer, TcpStore]) -> None:
    server, store = served
    write_job(store)
    other = StoreKeys("an/other job")
    store.set(other.state, encode_state(Membership(RendezvousSettings(1, 1))))
    StackClient(store, "job").query(0.1)
    with TcpStore(server.host, server.port, secret=SECRET) as client:
        assert jobs_in(client) == (["an/other job", "job"], ["job"])


def test_responder_reconnects_after_a_restart_of_the_store() -> None:
    with TcpStoreServer("127.0.0.1", 0) as server:
        port = server.port
        with (
            TcpStore("127.0.0.1", port, connect_timeout=20.0) as store,
            start_responders(store, *NODES),
        ):
            write_job(store)
            assert len(StackClient(store, "job").query(20.0).stacks) == 3
            server.close()
            # The query uses another client, because a write that the responders had sent when the
            # server was closed fails: whether it took effect is unknown.
            with (
                TcpStoreServer("127.0.0.1", port) as restarted,
                TcpStore("127.0.0.1", restarted.port) as client_store,
            ):
                write_job(client_store)
                assert len(StackClient(client_store, "job").query(20.0).stacks) == 3
                store.close()


COUNTS = st.integers(0, 10**6)
QUERIES = st.builds(StackQuery, COUNTS, st.none() | st.frozensets(COUNTS))
TEXTS = st.dictionaries(COUNTS, st.text(max_size=50), max_size=4)
STACKS = st.builds(NodeStacks, TEXTS, st.lists(COUNTS, max_size=3).map(tuple), TEXTS)


@given(QUERIES, STACKS)
def test_decoding_returns_the_encoded_query_and_stacks(
    query: StackQuery, stacks: NodeStacks
) -> None:
    assert decode_query(encode_query(query)) == query
    assert decode_stacks(encode_stacks(stacks)) == stacks


INVALID = st.sampled_from(
    [None, True, -1, 3, 1e400, "", "x", [], ["x"], [{}], {}, {"1": 2}, {"x": ""}, [[[]]]]
)


def encode_field(data: bytes, name: str, value: object) -> bytes:
    """Return encoded JSON with another value of one field."""
    return json.dumps({**json.loads(data), name: value}).encode()


@given(QUERIES, INVALID, st.binary(max_size=40), st.sampled_from(["version", "number", "ranks"]))
def test_query_with_an_invalid_field_is_rejected_or_valid(
    query: StackQuery, value: object, noise: bytes, name: str
) -> None:
    data = encode_query(query)
    for truncated in (data[:-1], noise):
        with pytest.raises(ValueError, match="a query must"):
            decode_query(truncated)
    with contextlib.suppress(ValueError):
        decoded = decode_query(encode_field(data, name, value))
        assert decode_query(encode_query(decoded)) == decoded


@given(
    STACKS,
    INVALID,
    st.binary(max_size=40),
    st.sampled_from(["version", "texts", "unresponsive_ranks", "unsupported"]),
)
def test_stacks_with_an_invalid_field_are_rejected_or_valid(
    stacks: NodeStacks, value: object, noise: bytes, name: str
) -> None:
    data = zlib.decompress(encode_stacks(stacks))
    for truncated in (data[:-1], noise):
        with pytest.raises(ValueError, match="stacks must"):
            decode_stacks(zlib.compress(truncated))
    with contextlib.suppress(ValueError):
        decoded = decode_stacks(zlib.compress(encode_field(data, name, value)))
        assert decode_stacks(encode_stacks(decoded)) == decoded


def test_data_that_would_fill_the_memory_is_rejected() -> None:
    with pytest.raises(ValueError, match="more than 67108864 bytes"):
        decode_stacks(zlib.compress(b" " * (64 * 1024 * 1024 + 1)))
    with pytest.raises(ValueError, match="a query must have at most"):
        decode_query(b"[" * 70_000)


def test_long_stacks_are_truncated_to_the_limits() -> None:
    (text,) = decode_stacks(
        encode_stacks(NodeStacks({0: "x" * 2 * MAX_STACK_LENGTH}))
    ).texts.values()
    assert len(text) == MAX_STACK_LENGTH + len("...\n")
    # The text is nearly incompressible, and the stacks of all ranks exceed the limit.
    pieces = [f"{zlib.crc32(str(n).encode()):08x}" for n in range(8192)]
    noise = {
        rank: "".join(pieces[rank:] + pieces[:rank])[:: 1 + rank % 3] * 3 for rank in range(64)
    }
    assert len(encode_stacks(NodeStacks(noise))) <= MAX_STACKS_BYTES
