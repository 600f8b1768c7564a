"""How long the host of a store stays for the others, once it has left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from elasticlib import (
    DynamicRendezvousHandler,
    MemoryStore,
    Node,
    RendezvousSettings,
    RendezvousTimeouts,
    TcpStoreServer,
)
from elasticlib.launch.rendezvous_setup import RendezvousSetup
from elasticlib.rendezvous.interface import RendezvousInfo
from elasticlib.testing.waiting import wait_until

CLOSE = 0.2
TIMING = RendezvousTimeouts(lease_ttl=30.0, keep_alive_interval=0.1, close_timeout=CLOSE)


class Unserved:
    """In place of torch's store, which nobody here asks for anything."""

    port = 1

    def __init__(self, address: str) -> None:
        del address

    def close(self) -> None:
        pass


class Departure:
    """Of a job of two nodes, the one that hosts the store has left, and serves on."""

    def __init__(self, least: int) -> None:
        self.store = MemoryStore()
        self.pool = ThreadPoolExecutor()
        self.host, self.other = (
            DynamicRendezvousHandler(
                self.store,
                "job",
                Node(id=name, host=name, address="127.0.0.1", slots=1),
                RendezvousSettings(min_nodes=least, max_nodes=2),
                timeouts=TIMING,
                open_bootstrap_store=Unserved,
            )
            for name in ("host", "other")
        )
        both = [self.pool.submit(handler.next_rendezvous) for handler in (self.host, self.other)]
        assert {info.result(60).world_size for info in both} == {2}
        self.host.shutdown()
        wait_until("the other hears of it", lambda: self.other.wait_for_change(0.1))
        self.next: Future[RendezvousInfo] | None = None

    def serve(self, *, stop_after: float | None, stop_timeout: float) -> float:
        """How long the host serves, where the other stops its workers after so many seconds."""
        began = time.monotonic()

        def go_on() -> bool:
            due = stop_after is not None and time.monotonic() - began >= stop_after
            if due and self.next is None:
                # It has stopped its workers, and waits for the next generation from now on.
                self.next = self.pool.submit(self.other.next_rendezvous)
            return False

        with TcpStoreServer("127.0.0.1", 0) as server:
            meeting = RendezvousSetup(self.host, self.store, server, "job", "host")
            meeting.serve_until_handover(
                go_on, TIMING, min_remaining_nodes=1, stop_timeout=stop_timeout
            )
        assert (self.next is not None) == (stop_after is not None), "the store was gone by then"
        return time.monotonic() - began

    def end(self) -> None:
        self.other.shutdown()
        self.pool.shutdown()


@pytest.fixture(params=[1])
def departure(request: pytest.FixtureRequest) -> Iterator[Departure]:
    made = Departure(request.param)
    yield made
    made.end()


def test_a_host_serves_for_as_long_as_the_others_may_take_to_stop_their_workers_and_meet(
    departure: Departure,
) -> None:
    assert 3 * CLOSE <= departure.serve(stop_after=3 * CLOSE, stop_timeout=60.0) < 30.0
    assert departure.next is not None
    assert departure.next.result(60).world_size == 1


@pytest.mark.parametrize("departure", [2], indirect=True)
def test_others_who_have_stopped_but_do_not_meet_are_served_for_the_close_timeout(
    departure: Departure,
) -> None:
    assert CLOSE < departure.serve(stop_after=0.1, stop_timeout=60.0) < 30.0


def test_others_who_never_stop_their_workers_are_served_for_as_long_as_a_stop_may_take(
    departure: Departure,
) -> None:
    assert 3 * CLOSE <= departure.serve(stop_after=None, stop_timeout=2 * CLOSE) < 30.0
