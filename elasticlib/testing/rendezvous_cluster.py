"""Handlers as the agents of one job use them, a thread each, with a bound on every wait.

What a node is told is kept in its history, and what holds of all of them together (one set of
ranks, one master a generation, generations that grow) is checked on the histories.
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
from ..rendezvous.interface import Change, RendezvousHandler, RendezvousInfo
from .waiting import wait_until

PAUSE = 0.01
"""Seconds between looks at a handler that cannot tell of changes itself."""

Found = TypeVar("Found")


@attrs.frozen
class HandlerRequest:
    """The handler that a test needs: of which job, for which node, and how patient.

    name: differs among the nodes of a job that live at one time; `a`, `b`, `c` and so on.
    join_timeout: seconds in which a generation must settle, or RendezvousTimeoutError is raised.
    """

    run_id: str
    name: str
    min_nodes: int
    max_nodes: int
    slots: int = 1
    max_restarts: int = 3
    join_timeout: float = 20.0


MakeHandler = Callable[[HandlerRequest], RendezvousHandler]


def in_thread(call: Callable[[], Found]) -> Future[Found]:
    """What the call comes to; one that never ends keeps nobody from ending."""
    future: Future[Found] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="contract", daemon=True).start()
    return future


class Node:
    """One handler, and what it has answered."""

    def __init__(self, name: str, handler: RendezvousHandler, patience: float) -> None:
        self.name = name
        self.handler = handler
        self.history: list[RendezvousInfo] = []
        self._patience = patience

    def meet(self) -> RendezvousInfo:
        """Call next_rendezvous, and remember the answer."""
        info = self.handler.next_rendezvous()
        self.history.append(info)
        return info

    def join(self) -> Future[RendezvousInfo]:
        """The same in a thread, as an agent without workers does."""
        return in_thread(self.meet)

    def joined(self) -> RendezvousInfo:
        """The generation that this node comes into."""
        return self.join().result(self._patience)

    def join_when_counted(self) -> Future[RendezvousInfo]:
        """The same once some node is said to wait, as an agent does that goes by that alone."""

        def joins() -> RendezvousInfo:
            wait_until("num_nodes_waiting above 0", self.handler.num_nodes_waiting, self._patience)
            return self.meet()

        return in_thread(joins)

    def counts_nobody(self, seconds: float) -> bool:
        """Whether no node is said to wait for so long; at first, an older answer may stand."""
        look = self.handler.num_nodes_waiting
        wait_until("num_nodes_waiting to be 0", lambda: look() == 0, self._patience)
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if look() != 0:
                return False
            threading.Event().wait(PAUSE)
        return True

    def leaves(self) -> bool:
        """Call shutdown."""
        return in_thread(self.handler.shutdown).result(self._patience)

    def change(self) -> Change:
        """What becomes of the generation that this node holds."""
        what = f"wait_for_change to tell {self.name} of a change"
        return wait_until(what, lambda: self.handler.wait_for_change(0.1), self._patience)

    def keeps(self, seconds: float) -> bool:
        """Whether no change is told of for so long."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if self.handler.wait_for_change(0.1) is not None:
                return False
            threading.Event().wait(PAUSE)
        return True


class Cluster:
    """The nodes of one job; `close` shuts all of them down and checks what they were told."""

    def __init__(self, make: MakeHandler, run_id: str, patience: float) -> None:
        self.patience = patience
        self.nodes: list[Node] = []
        self._make = make
        self._run_id = run_id

    def node(self, name: str, min_nodes: int, max_nodes: int, **settings: Any) -> Node:
        """A node that has not joined yet."""
        request = HandlerRequest(self._run_id, name, min_nodes, max_nodes, **settings)
        node = Node(name, self._make(request), self.patience)
        self.nodes.append(node)
        return node

    def settled(self, *nodes: Node) -> list[RendezvousInfo]:
        """All of these join now; what each is told, in the order given."""
        joining = [node.join() for node in nodes]
        infos = [future.result(self.patience) for future in joining]
        self.check_one_world(nodes, infos)
        return infos

    def check_one_world(self, nodes: Sequence[Node], infos: Sequence[RendezvousInfo]) -> None:
        """These nodes, and no others, make up one generation, whose master serves."""
        assert sorted(info.rank for info in infos) == list(range(len(infos)))
        assert {info.world_size for info in infos} == {len(infos)}
        assert len({info.generation for info in infos}) == 1
        assert {info.run_id for info in infos} == {self._run_id}
        places = {info.bootstrap_store_info for info in infos}
        assert len(places) == 1, f"one generation has several masters: {places}"
        (place,) = places
        if all(node.handler.use_agent_store for node in nodes):
            address = (place.master_addr, place.master_port)
            socket.create_connection(address, self.patience).close()

    def check_histories(self) -> None:
        """What holds of all that was ever told, whoever left or joined meanwhile."""
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
        """Shut all down; each must say that it could free what it held."""
        freed = [(node.name, node.leaves()) for node in self.nodes]
        assert freed == [(node.name, True) for node in self.nodes]
        self.check_histories()


def closed(joining: Future[RendezvousInfo], patience: float) -> bool:
    """Whether a call of next_rendezvous ends by RendezvousClosedError."""
    try:
        joining.result(patience)
    except RendezvousClosedError:
        return True
    return False
