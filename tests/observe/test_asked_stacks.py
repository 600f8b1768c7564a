"""Stacks that are asked for through a job's store: who lives answers, who does not is named, and
nobody is disturbed; what others wrote is read back as it was, and nothing else is read."""

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
from elasticlib.rendezvous.membership import (
    Membership,
    NodeRecord,
    RendezvousSettings,
    form_generation,
)
from elasticlib.rendezvous.rank_assignment import shard_members
from elasticlib.rendezvous.store_layout import StoreKeys, encode, encode_shard, encode_state
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.waiting import wait_until

NODES = tuple(NodeRecord(f"id{n}", f"h{n}", "", 1) for n in range(3))
KEYS, ASKED = StoreKeys("job"), StackKeys("job")
TOLD = NodeStacks({0: "here"}, unresponsive_ranks=(1,))


def settled(store: Store) -> None:
    """A job of which all nodes live."""
    document = form_generation(
        Membership(RendezvousSettings(1, 3)), NODES, charged=False, nonce="m"
    )
    for number, rows in shard_members(document).items():
        store.set(KEYS.shard(document.membership_id, number), encode_shard(rows))
    for node in NODES:
        store.set(KEYS.node(node.id), encode(node), ttl=60.0)
    store.set(KEYS.state, encode_state(document))


@contextlib.contextmanager
def answering(
    store: Store, *nodes: NodeRecord, look_every: float = 0.0
) -> Iterator[list[StackResponder]]:
    def stacks(ranks: frozenset[int] | None) -> NodeStacks:
        return TOLD if ranks is None else NodeStacks({})

    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                StackResponder(store, "job", node.id, stacks, poll_interval=look_every)
            )
            for node in nodes
        ]


def test_all_who_live_answer_at_once_and_again(stores: tuple[Store, Store]) -> None:
    theirs, ours = stores
    settled(theirs)
    with answering(theirs, *NODES, look_every=0.05 if isinstance(ours, FileStore) else 0.0):
        with StackClient(ours, "job") as asker:
            began = monotonic()
            for _ in range(3):
                view = asker.query(20.0)
                assert view.stacks == {node.id: TOLD for node in NODES}
                assert [node.id for node in view.alive_nodes] == ["id0", "id1", "id2"]
            assert monotonic() - began < 10.0
        # The answers go with the question.
        wait_until("no answer", lambda: not ours.list("?").entries, 10.0)


def test_who_does_not_answer_is_named_and_not_waited_for_longer(
    stores: tuple[Store, Store],
) -> None:
    theirs, ours = stores
    settled(theirs)
    with answering(theirs, *NODES[:2], look_every=0.05):
        asker = StackClient(ours, "job")

        def silent() -> list[str]:
            view = asker.query(0.5)
            return [node.host for node in view.alive_nodes if node.id not in view.stacks]

        # A busy machine may need more than one question.
        wait_until("all others to answer", lambda: silent() == ["h2"])


@pytest.fixture
def served() -> Iterator[tuple[TcpStoreServer, TcpStore]]:
    with (
        TcpStoreServer("127.0.0.1", 0, job="job", secret=b"known to both sides") as server,
        TcpStore(server.host, server.port, job="job", secret=b"known to both sides") as store,
    ):
        yield server, store


def test_who_dies_while_it_is_asked_is_waited_for_no_more(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    _, store = served
    settled(store)
    with answering(store, *NODES[:2]):
        ending = threading.Timer(0.2, store.delete, (KEYS.node("id2"),))
        ending.start()
        began = monotonic()
        assert len(StackClient(store, "job").query(30.0).stacks) == 2
        assert monotonic() - began < 15.0
        ending.join()


def test_those_of_some_ranks_can_be_asked_for(served: tuple[TcpStoreServer, TcpStore]) -> None:
    _, store = served
    settled(store)
    with answering(store, *NODES):
        asker = StackClient(store, "job")
        some = asker.query(20.0, frozenset({5}))
        assert some.stacks == {node.id: NodeStacks({}) for node in NODES}


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b'{"version":3,"number":1,"ranks":null}', b"x" * 70_000]
)
def test_what_is_no_question_is_passed_over(
    value: bytes, served: tuple[TcpStoreServer, TcpStore]
) -> None:
    _, store = served
    settled(store)
    with answering(store, *NODES):
        store.set(f"{ASKED.queries}wrong", value)
        store.set(f"{ASKED.queries}{'long' * 99}", b'{"version":2,"number":1,"ranks":null}')
        assert len(StackClient(store, "job").query(20.0).stacks) == 3
        assert not store.list(f"{ASKED.answers}wrong").entries
        assert not store.list(f"{ASKED.answers}long").entries


def test_a_wrong_answer_is_none(served: tuple[TcpStoreServer, TcpStore]) -> None:
    _, store = served
    settled(store)
    with answering(store, *NODES[:2]):
        asker = StackClient(store, "job")
        asker.query(0.3)
        (question,) = store.list(ASKED.queries).entries
        asked = question.key.removeprefix(ASKED.queries)
        store.set(f"{ASKED.answers}{asked}/id2", json.dumps({"version": 2}).encode())
        wait_until(
            "the others' answers alone", lambda: {*asker.query(0.3).stacks} == {"id0", "id1"}
        )


def test_the_node_that_leads_is_not_woken_by_what_people_ask(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    _, store = served
    settled(store)
    version = store.list(KEYS.job_prefix).version
    with answering(store, *NODES):
        StackClient(store, "job").query(20.0)
    assert not store.wait(KEYS.job_prefix, after=version, timeout=0.0)


def test_who_does_not_know_the_secret_is_told_nothing(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    server, _ = served
    for secret in (None, b"guessed by somebody"):
        with (
            TcpStore(server.host, server.port, secret=secret) as store,
            pytest.raises(StoreRejectedError, match="secret"),
        ):
            StackClient(store, "job").query(1.0)


def test_the_jobs_of_a_store_are_found_without_their_names(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    server, store = served
    settled(store)
    other = StoreKeys("an/other job")
    store.set(other.state, encode_state(Membership(RendezvousSettings(1, 1))))
    StackClient(store, "job").query(0.1)
    with TcpStore(server.host, server.port, secret=b"known to both sides") as nameless:
        assert jobs_in(nameless) == (["an/other job", "job"], ["job"])


def test_an_answerer_lives_through_a_store_that_goes_away() -> None:
    with TcpStoreServer("127.0.0.1", 0) as server:
        port = server.port
        with TcpStore("127.0.0.1", port, connect_timeout=20.0) as store, answering(store, *NODES):
            settled(store)
            assert len(StackClient(store, "job").query(20.0).stacks) == 3
            server.close()
            # Asked through a client of its own: a write of the answerers' client that is on its
            # way as the server goes is refused, for nobody knows whether it was done.
            with (
                TcpStoreServer("127.0.0.1", port) as again,
                TcpStore("127.0.0.1", again.port) as fresh,
            ):
                settled(fresh)
                assert len(StackClient(fresh, "job").query(20.0).stacks) == 3
                store.close()


COUNTS = st.integers(0, 10**6)
QUESTIONS = st.builds(StackQuery, COUNTS, st.none() | st.frozensets(COUNTS))
TEXTS = st.dictionaries(COUNTS, st.text(max_size=50), max_size=4)
STACKS = st.builds(NodeStacks, TEXTS, st.lists(COUNTS, max_size=3).map(tuple), TEXTS)


@given(QUESTIONS)
def test_a_question_is_read_as_it_was_asked(question: StackQuery) -> None:
    assert decode_query(encode_query(question)) == question


@given(STACKS)
def test_stacks_are_read_as_they_were_written(stacks: NodeStacks) -> None:
    assert decode_stacks(encode_stacks(stacks)) == stacks


WRONG = st.sampled_from(
    [None, True, -1, 3, 1e400, "", "x", [], ["x"], [{}], {}, {"1": 2}, {"x": ""}, [[[]]]]
)


@given(STACKS, QUESTIONS, st.data())
def test_what_is_not_whole_is_refused_and_nothing_else_happens(
    stacks: NodeStacks, question: StackQuery, data: st.DataObject
) -> None:
    kinds = (
        (decode_query, encode_query(question), False),
        (decode_stacks, zlib.decompress(encode_stacks(stacks)), True),
    )
    for decode, whole, pack in kinds:
        said = json.loads(whole)
        said[data.draw(st.sampled_from(sorted(said)))] = data.draw(WRONG)
        changed = json.dumps(said).encode()
        for wrong in (data.draw(st.binary(max_size=40)), changed, whole[:-1]):
            with contextlib.suppress(ValueError):
                decode(zlib.compress(wrong) if pack else wrong)


def test_what_would_fill_the_memory_is_refused_before_it_does() -> None:
    with pytest.raises(ValueError, match="truncated, or exceed"):
        decode_stacks(zlib.compress(b" " * (64 * 1024 * 1024 + 1)))
    with pytest.raises(ValueError, match="a query must have at most"):
        decode_query(b"[" * 70_000)


def test_long_stacks_are_cut_and_many_are_cut_more() -> None:
    (text,) = decode_stacks(
        encode_stacks(NodeStacks({0: "x" * 2 * MAX_STACK_LENGTH}))
    ).texts.values()
    assert len(text) == MAX_STACK_LENGTH + len("...\n")
    # Text that hardly packs, of more ranks than there is room for.
    pieces = [f"{zlib.crc32(str(n).encode()):08x}" for n in range(8192)]
    noise = {
        rank: "".join(pieces[rank:] + pieces[:rank])[:: 1 + rank % 3] * 3 for rank in range(64)
    }
    assert len(encode_stacks(NodeStacks(noise))) <= MAX_STACKS_BYTES
