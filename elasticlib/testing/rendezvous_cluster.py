"""Nodes of one job in the rendezvous contract suite: each node is a handler, used from a thread.

Every wait is bounded. Each node records the generations that it received, and `Cluster` checks the
records of all nodes together: unique ranks, one master per generation, increasing numbers.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from ..clock import monotonic
from ..errors import RendezvousClosedError
from ..rendezvous.blame import Evidence, FailureKind
from ..rendezvous.interface import (
    Change,
    RendezvousHandler,
    RendezvousInfo,
    Report,
    ReportKind,
)
from .waiting import wait_until

POLL_INTERVAL_S = 0.01  # between two calls of a handler method that does not block

Result = TypeVar("Result")


@attrs.frozen
class HandlerRequest:
    """The arguments of the handler that a test needs."""

    run_id: str
    name: str  #: unique among the nodes of a job that are alive at the same time: "a", "b", ...
    min_nodes: int
    max_nodes: int
    slots: int = 1
    max_restarts: int = 3
    join_timeout: float = 20.0  #: seconds after which next_rendezvous raises RendezvousTimeoutError


MakeHandler = Callable[[HandlerRequest], RendezvousHandler]


def run_in_thread(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a daemon thread, and return the future of its result."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="contract", daemon=True).start()
    return future


def report_failure(
    handler: RendezvousHandler, reason: str, kind: FailureKind = FailureKind.RAISED
) -> bool:
    """Report that workers of this node failed. Return whether the handler supports that."""
    return handler.report(Report(ReportKind.FAILURE, evidence=Evidence(kind, reason)))


class FakeBootstrapStore:
    """A minimal bootstrap store: a socket that listens until it is closed. Needs no torch."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class HandlerNode:
    """A node of a test: its handler, and the generations that the handler has returned."""

    def __init__(self, name: str, handler: RendezvousHandler, timeout_s: float) -> None:
        self.name = name
        self.handler = handler
        self.history: list[RendezvousInfo] = []
        self._timeout_s = timeout_s

    def next_rendezvous(self) -> RendezvousInfo:
        """Call next_rendezvous, and record the result."""
        info = self.handler.next_rendezvous()
        self.history.append(info)
        return info

    def start_joining(self) -> Future[RendezvousInfo]:
        """Call next_rendezvous in a thread, as an agent without workers does."""
        return run_in_thread(self.next_rendezvous)

    def join(self) -> RendezvousInfo:
        """Call next_rendezvous in a thread, and wait for its result."""
        return self.start_joining().result(self._timeout_s)

    def start_joining_when_nodes_wait(self) -> Future[RendezvousInfo]:
        """Call next_rendezvous in a thread as soon as num_nodes_waiting is positive."""

        def poll_and_join() -> RendezvousInfo:
            num_nodes_waiting = self.handler.num_nodes_waiting
            wait_until("num_nodes_waiting above 0", num_nodes_waiting, self._timeout_s)
            return self.next_rendezvous()

        return run_in_thread(poll_and_join)

    def reports_no_waiting_nodes(self, seconds: float) -> bool:
        """Return True if num_nodes_waiting becomes 0, and remains 0 for this time."""
        num_nodes_waiting = self.handler.num_nodes_waiting
        wait_until("num_nodes_waiting to be 0", lambda: num_nodes_waiting() == 0, self._timeout_s)
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if num_nodes_waiting() != 0:
                return False
            threading.Event().wait(POLL_INTERVAL_S)
        return True

    def shutdown(self) -> bool:
        return run_in_thread(self.handler.shutdown).result(self._timeout_s)

    def wait_for_change(self) -> Change:
        """Wait until the handler reports a change of the current generation, and return it."""
        description = f"wait_for_change to return a change on node {self.name}"
        return wait_until(description, lambda: self.handler.wait_for_change(0.1), self._timeout_s)

    def sees_no_change(self, seconds: float) -> bool:
        """Return True if the handler reports no change for this time."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if self.handler.wait_for_change(0.1) is not None:
                return False
            threading.Event().wait(POLL_INTERVAL_S)
        return True


class Cluster:
    """The nodes of one job. `close` shuts all of them down, and checks their records."""

    def __init__(self, make: MakeHandler, run_id: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.nodes: list[HandlerNode] = []
        self._make = make
        self._run_id = run_id

    def node(self, name: str, min_nodes: int, max_nodes: int, **settings: Any) -> HandlerNode:
        """Create a node, which does not join yet."""
        request = HandlerRequest(self._run_id, name, min_nodes, max_nodes, **settings)
        node = HandlerNode(name, self._make(request), self.timeout_s)
        self.nodes.append(node)
        return node

    def join(self, *nodes: HandlerNode) -> list[RendezvousInfo]:
        """Let these nodes join at the same time, and return their results in the same order."""
        joining = [node.start_joining() for node in nodes]
        infos = [future.result(self.timeout_s) for future in joining]
        self.check_single_generation(nodes, infos)
        return infos

    def check_single_generation(
        self, nodes: Sequence[HandlerNode], infos: Sequence[RendezvousInfo]
    ) -> None:
        """Check that exactly these nodes form one generation, and that its master listens."""
        assert len(nodes) == len(infos)
        assert sorted(info.rank for info in infos) == list(range(len(infos)))
        assert {info.world_size for info in infos} == {len(infos)}
        assert len({info.generation for info in infos}) == 1
        assert {info.run_id for info in infos} == {self._run_id}
        masters = {info.bootstrap_store_info for info in infos}
        assert len(masters) == 1, f"one generation has several masters: {masters}"
        (master,) = masters
        if all(info.use_agent_store for info in infos):
            address = (master.master_addr, master.master_port)
            socket.create_connection(address, self.timeout_s).close()

    def check_histories(self) -> None:
        """Check the generations that all nodes have received since the start of the test."""
        generations: dict[int, list[RendezvousInfo]] = defaultdict(list)
        for node in self.nodes:
            numbers = [info.generation for info in node.history]
            assert numbers == sorted(set(numbers)), f"{node.name} had generations {numbers}"
            assert all(number > 0 for number in numbers)
            for info in node.history:
                generations[info.generation].append(info)
        for number, infos in generations.items():
            ranks = [info.rank for info in infos]
            assert len(set(ranks)) == len(ranks), f"generation {number} has ranks {sorted(ranks)}"
            (size,) = {info.world_size for info in infos}
            assert set(ranks) <= set(range(size))
            assert len({info.bootstrap_store_info for info in infos}) == 1

    def close(self) -> None:
        """Shut all nodes down, and check that each shutdown returns True."""
        results = [(node.name, node.shutdown()) for node in self.nodes]
        assert results == [(node.name, True) for node in self.nodes]
        self.check_histories()


def raises_closed(joining: Future[RendezvousInfo], timeout_s: float) -> bool:
    """Return True if a call of next_rendezvous raises RendezvousClosedError."""
    try:
        joining.result(timeout_s)
    except RendezvousClosedError:
        return True
    return False
