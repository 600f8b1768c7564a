"""Rendezvous handlers with their threads, in this process over one memory store."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.handler import DynamicRendezvousHandler
from elasticlib.rendezvous.interface import Change, RendezvousHandler, RendezvousInfo
from elasticlib.rendezvous.membership import MembershipState, Node
from elasticlib.rendezvous.store_layout import StoreKeys, decode_state
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore

TIMEOUTS = RendezvousTimeouts(
    join_timeout=20.0, lease_ttl=1.0, keep_alive_interval=0.1, close_timeout=5.0
)


class HandlerCluster:
    """Handlers over one memory store. `close` shuts all of them down."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clients: list[MemoryStore] = []
        self.pool = ThreadPoolExecutor(8)
        self.handlers: list[RendezvousHandler] = []

    def client(self) -> MemoryStore:
        self.clients.append(self.store.client())
        return self.clients[-1]

    def handler(
        self,
        name: str,
        settings: RendezvousSettings,
        timeouts: RendezvousTimeouts = TIMEOUTS,
        *,
        slots: int = 1,
    ) -> DynamicRendezvousHandler:
        handler = DynamicRendezvousHandler(
            self.client(),
            "run",
            Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=slots),
            settings,
            timeouts=timeouts,
            open_bootstrap_store=FakeBootstrapStore,
        )
        self.handlers.append(handler)
        return handler

    def join(self, handler: RendezvousHandler) -> Future[RendezvousInfo]:
        return self.pool.submit(handler.next_rendezvous)

    def join_all(self, handlers: Iterable[RendezvousHandler]) -> list[RendezvousInfo]:
        """Join with all handlers at the same time; return what each of them gets."""
        return [future.result(20) for future in [self.join(handler) for handler in handlers]]

    def close(self) -> None:
        assert all(handler.shutdown() for handler in self.handlers)
        for client in self.clients:
            client.close()
        self.pool.shutdown()


def next_change(handler: RendezvousHandler) -> Change:
    """Wait for the next change of the handler's generation, and return it."""
    change = handler.wait_for_change(20.0)
    assert change is not None
    return change


def read_state(cluster: HandlerCluster) -> MembershipState:
    """Return the current state of the job."""
    entry = cluster.store.get(StoreKeys("run").state)
    assert entry is not None
    return decode_state(entry.value)
