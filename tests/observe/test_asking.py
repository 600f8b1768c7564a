"""Questions through a job's store: who lives answers, who does not is named, and nobody is
disturbed."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import until

from elasticlib.clock import monotonic
from elasticlib.errors import StoreRefused
from elasticlib.observe.asking import Answerer, Asker, QuestionKeys, jobs_in
from elasticlib.observe.history import JobState
from elasticlib.observe.question import Stacks, What
from elasticlib.observe.status import status_of
from elasticlib.observe.story import NodeStatus, WorkerStatus
from elasticlib.rendezvous.document import Document, Limits, Node, settle
from elasticlib.rendezvous.layout import Keys, encode, encode_shard, encode_state
from elasticlib.rendezvous.ranks import deal_shards
from elasticlib.stores.file import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer

NODES = tuple(Node(f"id{n}", f"h{n}", "", 1) for n in range(3))
KEYS, ASKED = Keys("job"), QuestionKeys("job")
TOLD = Stacks({0: "here"}, silent=(1,))


def settled(store: Store) -> None:
    """A job of which all nodes live."""
    document = settle(Document(Limits(1, 3)), NODES, charged=False, nonce="m")
    for number, rows in deal_shards(document).items():
        store.set(KEYS.shard(document.membership, number), encode_shard(rows))
    for node in NODES:
        store.set(KEYS.node(node.id), encode(node), ttl=60.0)
    store.set(KEYS.state, encode_state(document))


@contextlib.contextmanager
def answering(store: Store, *nodes: Node, look_every: float = 0.0) -> Iterator[list[Answerer]]:
    with contextlib.ExitStack() as stack:
        began = monotonic()

        def one(node: Node) -> Answerer:
            worker = WorkerStatus(0, 0, "pid 1", step=7)
            status = NodeStatus(
                "job", node.id, node.host, state=JobState.RUNNING, began=began, workers=(worker,)
            )
            answerer = Answerer(
                store,
                "job",
                node.id,
                status=lambda: status,
                stacks=lambda ranks: TOLD if ranks is None else Stacks({}),
                heard=lambda: 0.25,
                look_every=look_every,
            )
            return stack.enter_context(answerer)

        yield [one(node) for node in nodes]


@pytest.fixture(params=["tcp", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """The nodes' client and the asker's."""
    with contextlib.ExitStack() as stack:
        if request.param == "file":
            pair = [FileStore(tmp_path) for _ in range(2)]
        else:
            server = stack.enter_context(TcpStoreServer("127.0.0.1", 0, job="job"))
            pair = [TcpStore(server.host, server.port, job="job") for _ in range(2)]
        for store in pair:
            stack.callback(store.close)
        yield pair[0], pair[1]


def test_all_who_live_answer_at_once_and_again(stores: tuple[Store, Store]) -> None:
    theirs, ours = stores
    settled(theirs)
    with answering(theirs, *NODES, look_every=0.05 if isinstance(ours, FileStore) else 0.0):
        asker, began = Asker(ours, "job"), monotonic()
        for _ in range(3):
            view = asker.ask(What.STANDING, 20.0)
            assert {*view.answers} == {"id0", "id1", "id2"}
            assert [one.heard for one in view.answers.values()] == [0.25] * 3
        assert monotonic() - began < 10.0
        status = status_of(view)
        assert status is not None
        assert (status.state, status.step, status.world) == (JobState.RUNNING, 7, 3)
        asker.close()
        # The answers go with the question.
        until("no answer", lambda: not ours.list("?").entries, 10.0)


def test_who_does_not_answer_is_named_and_not_waited_for_longer(
    stores: tuple[Store, Store],
) -> None:
    theirs, ours = stores
    settled(theirs)
    with answering(theirs, *NODES[:2], look_every=0.05):
        asker = Asker(ours, "job")

        def silent() -> list[str]:
            status = status_of(asker.ask(What.STANDING, 0.5))
            assert status is not None
            return [node.host for node in status.silent]

        # A busy machine may need more than one question.
        until("all others to answer", lambda: silent() == ["h2"])


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
        assert len(Asker(store, "job").ask(What.STANDING, 30.0).answers) == 2
        assert monotonic() - began < 15.0
        ending.join()


def test_stacks_come_with_the_answer(served: tuple[TcpStoreServer, TcpStore]) -> None:
    _, store = served
    settled(store)
    with answering(store, *NODES):
        asker = Asker(store, "job")
        assert asker.ask(What.STACKS, 20.0).stacks == {node.id: TOLD for node in NODES}
        some = asker.ask(What.STACKS, 20.0, frozenset({5}))
        assert some.stacks == {node.id: Stacks({}) for node in NODES}


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b'{"v":1,"what":"exit","number":1}', b"x" * 70_000]
)
def test_what_is_no_question_is_passed_over(
    value: bytes, served: tuple[TcpStoreServer, TcpStore]
) -> None:
    _, store = served
    settled(store)
    with answering(store, *NODES):
        store.set(f"{ASKED.questions}wrong", value)
        store.set(f"{ASKED.questions}{'long' * 99}", b'{"v":1,"what":"standing","number":1}')
        assert len(Asker(store, "job").ask(What.STANDING, 20.0).answers) == 3
        assert not store.list(f"{ASKED.answers}wrong").entries
        assert not store.list(f"{ASKED.answers}long").entries


def test_a_wrong_answer_is_none(served: tuple[TcpStoreServer, TcpStore]) -> None:
    _, store = served
    settled(store)
    with answering(store, *NODES[:2]):
        asker = Asker(store, "job")
        asker.ask(What.STANDING, 0.3)
        (question,) = store.list(ASKED.questions).entries
        asked = question.key.removeprefix(ASKED.questions)
        store.set(f"{ASKED.answers}{asked}/id2", json.dumps({"v": 1}).encode())
        until(
            "the others' answers alone",
            lambda: {*asker.ask(What.STANDING, 0.3).answers} == {"id0", "id1"},
        )


def test_the_node_that_leads_is_not_woken_by_what_people_ask(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    _, store = served
    settled(store)
    version = store.list(KEYS.job).version
    with answering(store, *NODES):
        Asker(store, "job").ask(What.STACKS, 20.0)
    assert not store.wait(KEYS.job, after=version, timeout=0.0)


def test_who_does_not_know_the_secret_is_told_nothing(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    server, _ = served
    for secret in (None, b"guessed by somebody"):
        with (
            TcpStore(server.host, server.port, secret=secret) as store,
            pytest.raises(StoreRefused, match="secret"),
        ):
            Asker(store, "job").ask(What.STANDING, 1.0)


def test_the_jobs_of_a_store_are_found_without_their_names(
    served: tuple[TcpStoreServer, TcpStore],
) -> None:
    server, store = served
    settled(store)
    other = Keys("an/other job")
    store.set(other.state, encode_state(Document(Limits(1, 1))))
    Asker(store, "job").ask(What.STANDING, 0.1)
    with TcpStore(server.host, server.port, secret=b"known to both sides") as nameless:
        assert jobs_in(nameless) == (["an/other job", "job"], ["job"])


def test_an_answerer_lives_through_a_store_that_goes_away() -> None:
    with TcpStoreServer("127.0.0.1", 0) as server:
        port = server.port
        with TcpStore("127.0.0.1", port, connect_timeout=20.0) as store, answering(store, *NODES):
            settled(store)
            assert len(Asker(store, "job").ask(What.STANDING, 20.0).answers) == 3
            server.close()
            # Asked through a client of its own: a write of the answerers' client that is on its
            # way as the server goes is refused, for nobody knows whether it was done.
            with (
                TcpStoreServer("127.0.0.1", port) as again,
                TcpStore("127.0.0.1", again.port) as fresh,
            ):
                settled(fresh)
                assert len(Asker(fresh, "job").ask(What.STANDING, 20.0).answers) == 3
                store.close()
