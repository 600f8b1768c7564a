"""The first cause over all nodes: told in bounds, taken in the store's order, had in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.agent.board import CauseBoard
from elasticlib.agent.causes import (
    Cause,
    cause_of,
    decode,
    decode_ranks,
    encode,
    encode_ranks,
    first_cause,
)
from elasticlib.rendezvous.document import Node
from elasticlib.rendezvous.interface import BootstrapStoreInfo, RendezvousInfo, deal_seats
from elasticlib.rendezvous.layout import Keys, StoredJob
from elasticlib.stores.interface import Listing
from elasticlib.stores.memory import MemoryStore
from elasticlib.workers.exits import WorkerExit

NODES = tuple(Node(f"n{i}", f"n{i}", "127.0.0.1", 1) for i in range(3))


def failure(rank: int, message: str = "") -> WorkerExit:
    return WorkerExit(0, rank, 70 + rank, 1, message=message, traceback=f"Traceback\n{message}")


def info(store: MemoryStore, node: int, roll: str = "1.a") -> RendezvousInfo:
    seat = deal_seats(NODES)[node]
    place = BootstrapStoreInfo("127.0.0.1", 1)
    return RendezvousInfo("run", 1, seat, place, store=store, board=f"run/board/{roll}/")


@given(st.text(max_size=50), st.lists(st.integers(0, 999), max_size=5))
def test_a_cause_is_read_as_it_was_told(text: str, ranks: list[int]) -> None:
    cause = attrs.evolve(cause_of(failure(1, text), "host", 3), followed=tuple(ranks))
    assert decode(encode(cause)) == cause


def test_whatever_a_worker_wrote_a_cause_stays_small_and_ends_as_it_did() -> None:
    huge = attrs.evolve(failure(1, "é" * 10**6 + " the end"), tail="y\n" * 10**6)
    told = encode(cause_of(huge, "h", 1))
    assert len(told) < 128 * 1024
    said = decode(told)
    assert said is not None
    assert said.traceback.endswith("the end")
    assert said.traceback.startswith("Traceback")


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"{}", b"\xff", b'{"host": "h"}', b'{"followed": 3}', b"null"),
        *(b"[" * 200_000, b"9" * 9_000),
        encode(cause_of(WorkerExit(0, 0, 1, 1), "h", 1)).replace(b'"tail": ""', b'"tail": 5'),
    ],
)
def test_what_another_version_wrote_is_no_cause(data: bytes) -> None:
    assert decode(data) is None
    assert first_cause({"first": data}) is None
    assert decode_ranks(data) == ()


def test_a_cause_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    cause = cause_of(failure(0, "no"), "h", 1)
    later = encode(cause).replace(b'{"host"', b'{"new": [], "host"')
    assert decode(later) == cause


def test_those_that_followed_are_named_and_not_the_first() -> None:
    said = {"first": encode(cause_of(failure(1, "no"), "h", 1))}
    said |= {"also/0": encode_ranks([4, 1]), "also/2": encode_ranks([2])}
    cause = first_cause(said)
    assert cause is not None
    assert (cause.rank, cause.followed) == (1, (2, 4))
    assert len(decode_ranks(encode_ranks(range(10**6)))) == 64


@pytest.fixture
def boards() -> Iterator[list[CauseBoard]]:
    boards = [CauseBoard(host=f"n{i}", answer_seconds=5.0) for i in range(3)]
    yield boards
    for board in boards:
        board.close()


def test_the_first_to_tell_is_the_first_cause_on_every_node(boards: list[CauseBoard]) -> None:
    store = MemoryStore()
    boards[1].tell(info(store, 1), failure(1, "the cause"))
    assert _first(boards[1], store, 1, failure(1, "the cause")).message == "the cause"
    boards[0].tell(info(store, 0), failure(0, "peer is gone"))
    told = [_first(boards[0], store, 0, failure(0, "peer is gone"))]
    told.append(_first(boards[2], store, 2))
    for cause in told:
        assert (cause.host, cause.rank, cause.message) == ("n1", 1, "the cause")
        assert cause.followed == (0,)


def _first(board: CauseBoard, store: MemoryStore, node: int, *failures: WorkerExit) -> Cause:
    cause = board.first(info(store, node), list(failures), elsewhere=True)
    assert cause is not None
    return cause


def test_a_node_waits_for_the_word_of_the_one_that_failed(boards: list[CauseBoard]) -> None:
    store = Watched()
    found: list[Cause | None] = []
    asking = threading.Thread(
        target=lambda: found.append(boards[0].first(info(store, 0), [], elsewhere=True))
    )
    asking.start()
    assert store.waited.wait(10)
    boards[1].tell(info(store, 1), failure(1, "late"))
    asking.join(10)
    assert [cause and cause.message for cause in found] == ["late"]


class Watched(MemoryStore):
    """Says when somebody has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        self.waited.set()
        return super().wait(prefix, after=after, timeout=timeout)


def test_another_generations_cause_is_not_this_ones(boards: list[CauseBoard]) -> None:
    store = MemoryStore()
    boards[1].tell(info(store, 1, "1.a"), failure(1, "old"))
    boards[1].tell(info(store, 1, "2.b"), failure(1, "new"))
    cause = boards[0].first(info(store, 0, "2.b"), [], elsewhere=True)
    assert cause is not None
    assert cause.message == "new"


def test_what_was_told_of_earlier_generations_is_cleared_away_with_them() -> None:
    store, keys = MemoryStore(), Keys("run")
    for roll in ("1.a", "2.b"):
        store.set(f"{keys.board(roll)}first", b"")
    left = StoredJob(keys, store.list(keys.job)).left_over("2.b")
    assert left == (f"{keys.board('1.a')}first",)


def test_without_a_failure_nobody_is_asked() -> None:
    board = CauseBoard(host="n")
    assert board.first(info(MemoryStore(), 0), [], elsewhere=False) is None
    board.close()


class Hanging(MemoryStore):
    """Does not answer before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = threading.Event()

    def list(self, prefix: str) -> Listing:
        self.answer.wait(10)
        return super().list(prefix)


def test_a_store_that_hangs_costs_bounded_time_and_the_own_cause_is_told() -> None:
    store, found = Hanging(), []
    board = CauseBoard(host="n0", answer_seconds=0.05)
    asking = threading.Thread(
        target=lambda: found.append(
            board.first(info(store, 0), [failure(0, "own")], elsewhere=True)
        )
    )
    asking.start()
    asking.join(5)
    assert [(cause.message, cause.host) for cause in found] == [("own", "n0")]
    store.answer.set()
    board.close()
