"""The node that hosts the store keeps serving the other nodes after it has left the job."""

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

CLOSE_TIMEOUT_S = 0.2
TIMEOUTS = RendezvousTimeouts(
    lease_ttl=30.0, keep_alive_interval=0.1, close_timeout=CLOSE_TIMEOUT_S
)


class UnusedBootstrapStore:
    """A substitute for torch's store, which these tests do not use."""

    port = 1

    def __init__(self, address: str) -> None:
        del address

    def close(self) -> None:
        pass


class DepartedHost:
    """A job of two nodes whose store host has left the job and still serves the store."""

    def __init__(self, min_nodes: int) -> None:
        self.store = MemoryStore()
        self.pool = ThreadPoolExecutor()
        self.host, self.other = (
            DynamicRendezvousHandler(
                self.store,
                "job",
                Node(id=name, host=name, address="127.0.0.1", slots=1),
                RendezvousSettings(min_nodes=min_nodes, max_nodes=2),
                timeouts=TIMEOUTS,
                open_bootstrap_store=UnusedBootstrapStore,
            )
            for name in ("host", "other")
        )
        both = [self.pool.submit(handler.next_rendezvous) for handler in (self.host, self.other)]
        assert {info.result(60).world_size for info in both} == {2}
        self.host.shutdown()
        wait_until("the other node to detect the change", lambda: self.other.wait_for_change(0.1))
        self.next: Future[RendezvousInfo] | None = None

    def serve(self, *, stop_after: float | None, stop_timeout: float) -> float:
        """Serve the store, and return for how many seconds the host served it.

        Args:
            stop_after: the other node has stopped its workers after this many seconds, and joins
                the next rendezvous. None: it never does.
            stop_timeout: time that the host allows the other node for stopping its workers.
        """
        start = time.monotonic()

        def join_next_rendezvous() -> str:
            is_due = stop_after is not None and time.monotonic() - start >= stop_after
            if is_due and self.next is None:
                self.next = self.pool.submit(self.other.next_rendezvous)
            return ""

        with TcpStoreServer("127.0.0.1", 0) as server:
            setup = RendezvousSetup(self.host, self.store, server, "job", "host")
            setup.serve_until_handover(
                join_next_rendezvous, TIMEOUTS, min_remaining_nodes=1, stop_timeout=stop_timeout
            )
        assert (self.next is not None) == (stop_after is not None), "the host stopped too early"
        return time.monotonic() - start

    def close(self) -> None:
        self.other.shutdown()
        self.pool.shutdown()


@pytest.fixture(params=[1])
def departed_host(request: pytest.FixtureRequest) -> Iterator[DepartedHost]:
    departed_host = DepartedHost(request.param)
    yield departed_host
    departed_host.close()


def test_host_serves_until_the_other_node_has_joined_the_next_rendezvous(
    departed_host: DepartedHost,
) -> None:
    assert (
        3 * CLOSE_TIMEOUT_S
        <= departed_host.serve(stop_after=3 * CLOSE_TIMEOUT_S, stop_timeout=60.0)
        < 30.0
    )
    assert departed_host.next is not None
    assert departed_host.next.result(60).world_size == 1


@pytest.mark.parametrize("departed_host", [2], indirect=True)
def test_host_serves_for_the_close_timeout_if_the_rendezvous_cannot_complete(
    departed_host: DepartedHost,
) -> None:
    assert CLOSE_TIMEOUT_S < departed_host.serve(stop_after=0.1, stop_timeout=60.0) < 30.0


def test_host_serves_for_the_stop_timeout_if_the_other_node_never_stops_its_workers(
    departed_host: DepartedHost,
) -> None:
    assert (
        3 * CLOSE_TIMEOUT_S
        <= departed_host.serve(stop_after=None, stop_timeout=2 * CLOSE_TIMEOUT_S)
        < 30.0
    )
