"""Every handler of elasticlib fulfills the contract over every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from elasticlib.options import RendezvousTimeouts
from elasticlib.rendezvous.handler import StaticRendezvousHandler
from elasticlib.rendezvous.interface import RendezvousHandler
from elasticlib.rendezvous.membership import Node
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing import HandlerRequest, StoreRendezvousContract
from elasticlib.testing.rendezvous_cluster import FakeBootstrapStore


class TestOverMemory(StoreRendezvousContract):
    max_examples = 20

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        return MemoryStore().client


class TestOverTcp(StoreRendezvousContract):
    @pytest.fixture
    def make_store(self) -> Iterator[Callable[[], Store]]:
        with TcpStoreServer("127.0.0.1", 0) as server:
            yield lambda: TcpStore(server.host, server.port, timeout=self.timeout_s)


class TestOverFiles(StoreRendezvousContract):
    max_examples = 3

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: FileStore(tmp_path / "store", timeout=self.timeout_s)


class TestStatic(StoreRendezvousContract):
    """Tests with a fixed number of nodes. The rank of a node is the position of its letter."""

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        return MemoryStore().client

    def handler(self, store: Store, node: Node, request: HandlerRequest) -> RendezvousHandler:
        rank = "abcde".index(request.name)
        if request.min_nodes != request.max_nodes or rank >= request.max_nodes:
            pytest.skip("a fixed number of nodes")
        return StaticRendezvousHandler(
            store,
            request.run_id,
            attrs.evolve(node, rank_hint=rank),
            request.max_nodes,
            max_restarts=request.max_restarts,
            timeouts=RendezvousTimeouts(
                join_timeout=request.join_timeout,
                lease_ttl=2.0,
                keep_alive_interval=0.2,
                close_timeout=5.0,
            ),
            open_bootstrap_store=FakeBootstrapStore,
        )
