"""How long the host of a store stays for the others, once it has left."""

from __future__ import annotations

import time

import attrs

from elasticlib.launch.meeting import Meeting
from elasticlib.rendezvous.document import Document, Limits, Node, Timing, resize, settle
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.layout import Keys, encode, encode_shard, encode_state
from elasticlib.rendezvous.ranks import deal_seats
from elasticlib.stores.memory import MemoryStore
from elasticlib.stores.server import TcpStoreServer

CLOSE = 0.2
TIMING = Timing(lease=0.2, refresh=0.1, close=CLOSE)
KEYS = Keys("job")
HOST, OTHER = (Node(id=name, host=name, address="127.0.0.1", slots=1) for name in ("host", "other"))
LIMITS = Limits(min_nodes=1, max_nodes=2)


class Departure:
    """Of a job of two nodes, the one that hosts the store has left, and serves on."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.document = settle(Document(LIMITS), (HOST, OTHER), charged=False, nonce="a")
        self.document = resize(self.document, "host leaves")
        self.other = attrs.evolve(OTHER, membership=self.document.membership, rank=1, runs=True)
        self.write()
        self.began = time.monotonic()

    def write(self) -> None:
        document, members = self.document, self.document.members
        rows = zip(members, deal_seats(members), strict=True)
        self.store.set(KEYS.shard(document.membership, 0), encode_shard(rows))
        self.store.set(KEYS.state, encode_state(document.state))
        self.store.set(KEYS.node(OTHER.id), encode(self.other))

    def stop_workers(self) -> None:
        self.other = attrs.evolve(self.other, stopped=self.document.membership, runs=False)
        self.write()

    def meet(self) -> None:
        self.document = settle(self.document, (self.other,), charged=False, nonce="b")
        self.store.set(KEYS.master_endpoint(self.document.membership), b"127.0.0.1:1")
        self.write()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def serve(self, *story: tuple[float, str], stopping: float) -> float:
        """How long it serves while this happens, each at its second."""
        ahead = list(story)

        def go_on() -> bool:
            if ahead and self.seconds >= ahead[0][0]:
                getattr(self, ahead.pop(0)[1])()
            return False

        handler = DynamicRendezvousHandler(self.store, "job", HOST, LIMITS)
        server = TcpStoreServer("127.0.0.1", 0)
        meeting = Meeting(handler, self.store, server, "job", HOST.id)
        meeting.hand_over(go_on, TIMING, needed=1, stopping=stopping)
        assert not ahead, f"the store was gone after {self.seconds:.2f} s, before {ahead}"
        return self.seconds


def test_a_host_serves_for_as_long_as_the_others_may_take_to_stop_their_workers_and_meet() -> None:
    story = [(3 * CLOSE, "stop_workers"), (3.5 * CLOSE, "meet")]
    assert Departure().serve(*story, stopping=60.0) < 30.0


def test_others_who_have_stopped_but_do_not_meet_are_served_for_the_close_timeout() -> None:
    assert CLOSE < Departure().serve((0.1, "stop_workers"), stopping=60.0) < 30.0


def test_others_who_never_stop_their_workers_are_served_for_as_long_as_a_stop_may_take() -> None:
    assert 3 * CLOSE <= Departure().serve(stopping=2 * CLOSE) < 30.0
