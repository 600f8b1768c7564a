"""A handler that is garbage collected without `shutdown` leaves the job, and frees its store."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticlib.options import RendezvousSettings, RendezvousTimeouts
from elasticlib.rendezvous.handler import DynamicRendezvousHandler, StaticRendezvousHandler
from elasticlib.rendezvous.interface import ChangeKind, RendezvousInfo
from elasticlib.rendezvous.membership import Node
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.stores.failover_store import FailoverStore, StoreEndpoint
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore
from elasticlib.testing.waiting import wait_until

# No lease expires within a test.
TIMEOUTS = RendezvousTimeouts(
    join_timeout=60.0, lease_ttl=1000.0, keep_alive_interval=0.1, close_timeout=20.0
)


class Cluster:
    """Handlers over clients of one store. It holds no reference to a handler."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._memory = MemoryStore()
        self._pool = stack.enter_context(ThreadPoolExecutor(4))

    def client(self) -> Store:
        return self._stack.enter_context(self._memory.client())

    def handler(self, store: Store, name: str, min_nodes: int = 1) -> DynamicRendezvousHandler:
        return DynamicRendezvousHandler(
            store,
            "run",
            Node(id=f"{name}-1", host=name, address="127.0.0.1", slots=1),
            RendezvousSettings(min_nodes, 2, last_call_timeout=60.0),
            timeouts=TIMEOUTS,
            open_bootstrap_store=self.listen,
        )

    def listen(self, address: str) -> FakeBootstrapStore:
        listener = FakeBootstrapStore(address)
        self._stack.callback(listener.close)
        return listener

    def join_all(self, *handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
        joining = [self._pool.submit(handler.next_rendezvous) for handler in handlers]
        infos = [future.result(60.0) for future in joining]
        assert {(info.generation, info.world_size) for info in infos} == {
            (infos[0].generation, len(handlers))
        }
        assert sorted(info.rank for info in infos) == list(range(len(handlers)))
        return infos


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)
        gc.collect()
        wait_until("the threads of all nodes to end", lambda: not rendezvous_threads())


def rendezvous_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rendezvous"]


def test_a_handler_without_references_leaves_the_job(cluster: Cluster) -> None:
    remaining = cluster.handler(cluster.client(), "a")
    dropped_handler = cluster.handler(cluster.client(), "b")
    cluster.join_all(remaining, dropped_handler)
    del dropped_handler
    change = remaining.wait_for_change(60.0)
    assert change is not None
    assert (change.kind, change.reason) == (ChangeKind.GENERATION_ENDED, "b left")
    cluster.join_all(remaining)
    assert len(rendezvous_threads()) == 1
    remaining.shutdown()


def test_a_handler_in_a_reference_cycle_leaves_the_job(cluster: Cluster) -> None:
    remaining = cluster.handler(cluster.client(), "a")
    dropped_handler = cluster.handler(cluster.client(), "b")
    cluster.join_all(remaining, dropped_handler)
    dropped_handler.itself = dropped_handler  # type: ignore[attr-defined]
    del dropped_handler
    gc.collect()
    change = remaining.wait_for_change(60.0)
    assert change is not None
    assert change.kind is ChangeKind.GENERATION_ENDED
    remaining.shutdown()


@pytest.mark.parametrize("dropped", [True, False], ids=["deleted", "still referenced"])
@pytest.mark.parametrize("name", ["a", "b"], ids=["the first node", "the second node"])
def test_another_handler_with_the_same_id_replaces_it_at_once(
    cluster: Cluster, name: str, dropped: bool
) -> None:
    stores = {name: cluster.client() for name in "ab"}
    handlers = {name: cluster.handler(stores[name], name, 2) for name in "ab"}
    before = cluster.join_all(*handlers.values())
    referenced = None if dropped else handlers[name]
    handlers[name] = cluster.handler(stores[name], name, 2)
    other = handlers["ab".replace(name, "")]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(handlers[name].next_rendezvous)
        # The other node must stop its workers, because the workers of this node are lost.
        change = other.wait_for_change(60.0)
        assert change is not None
        assert change.kind is ChangeKind.GENERATION_ENDED
        infos = [other.next_rendezvous(), joining.result(60.0)]
    assert {info.generation for info in infos} == {before[0].generation + 1}
    assert sorted(info.rank for info in infos) == [0, 1]
    assert other.wait_for_change(1.0) is None
    for handler in (*handlers.values(), *filter(None, [referenced])):
        handler.shutdown()


def dynamic_handler(store: Store) -> DynamicRendezvousHandler:
    return DynamicRendezvousHandler(
        store,
        "run",
        Node(id="a-1", host="a", address="127.0.0.1", slots=1),
        RendezvousSettings(1, 1, last_call_timeout=0.0),
        timeouts=TIMEOUTS,
        open_bootstrap_store=FakeBootstrapStore,
    )


def static_handler(store: Store) -> StaticRendezvousHandler:
    return StaticRendezvousHandler(
        store,
        "run",
        Node(id="a-1", host="a", address="127.0.0.1", slots=1, rank_hint=0),
        1,
        timeouts=TIMEOUTS,
        open_bootstrap_store=FakeBootstrapStore,
    )


def tcp_store(server: TcpStoreServer) -> Store:
    return TcpStore(server.host, server.port)


def failover_store(server: TcpStoreServer) -> Store:
    endpoint = StoreEndpoint("here", lambda: TcpStore(server.host, server.port), lambda: None)
    return FailoverStore([endpoint], failover_timeout=60.0)


def join(handler: DynamicRendezvousHandler) -> None:
    assert handler.next_rendezvous().generation == 1


def join_and_shut_down(handler: DynamicRendezvousHandler) -> None:
    join(handler)
    assert handler.shutdown()


def threads_and_sockets() -> tuple[list[str], list[str]]:
    """Return the names of the threads of this process, and its open sockets."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # The descriptor of this listing itself is closed by now.
            continue
        if link.startswith(("socket:", "anon_inode:[eventpoll]")):
            sockets.append(link)
    return sorted(thread.name for thread in threading.enumerate()), sorted(sockets)


@pytest.mark.parametrize(
    "use",
    [lambda handler: handler.store.connect(), join, join_and_shut_down],
    ids=["never started", "member", "shut down"],
)
@pytest.mark.parametrize("new_handler", [dynamic_handler, static_handler])
@pytest.mark.parametrize("new_store", [tcp_store, failover_store])
def test_a_handler_and_store_without_references_leave_no_thread_and_no_connection(
    new_store: Callable[[TcpStoreServer], Store],
    new_handler: Callable[[Store], DynamicRendezvousHandler],
    use: Callable[[DynamicRendezvousHandler], None],
) -> None:
    with TcpStoreServer("127.0.0.1", 0).start() as server:
        tcp_store(server).connect()  # starts what the process and the server keep
        gc.collect()
        wait_until("the first client to be gone", lambda: not server.labels)
        before = threads_and_sockets()
        handler = new_handler(new_store(server))
        use(handler)
        del handler
        gc.collect()
        wait_until(
            "the threads and sockets to be as before",
            lambda: threads_and_sockets() == before,
            details=lambda: f"before: {before}, now: {threads_and_sockets()}",
        )


EXIT_WITHOUT_SHUTDOWN = """
import sys
from elasticlib import DynamicRendezvousHandler, FileStore, Node
from elasticlib import RendezvousSettings, RendezvousTimeouts
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore

handler = DynamicRendezvousHandler(
    FileStore(sys.argv[1]),
    "run",
    Node(id="a-1", host="a", address="127.0.0.1", slots=1),
    RendezvousSettings(1, 2, last_call_timeout=0.0),
    timeouts=RendezvousTimeouts(lease_ttl=1000.0, keep_alive_interval=0.1),
    open_bootstrap_store=FakeBootstrapStore,
)
print(handler.next_rendezvous().generation)
"""


def test_the_exit_of_a_process_is_noticed_without_a_connection(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXIT_WITHOUT_SHUTDOWN, str(tmp_path / "store")]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100.0, check=True)
    assert process.stdout == "1\n"
    with FileStore(tmp_path / "store") as store:
        assert store.list(StoreKeys("run").node()).entries == ()
