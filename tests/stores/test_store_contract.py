"""Every store of elasticlib fulfills the contract, and so does one with the fewest methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from own_store_contract import OwnStoreContract

from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import CompareSetResult, Entry, Listing, Store
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.stores.tcp_server import TcpStoreServer
from elasticlib.testing import ClientSpec


class TestMemoryStore(OwnStoreContract):
    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        return MemoryStore().client


class FewestMethods(Store):
    """A store that has only the abstract methods, and `close`."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner

    def get(self, key: str) -> Entry | None:
        return self._inner.get(key)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        return self._inner.compare_set(key, value, expected=expected, ttl=ttl)

    def delete(self, key: str, *, expected: int | None = None) -> bool:
        return self._inner.delete(key, expected=expected)

    def refresh(self, key: str, version: int) -> None:
        self._inner.refresh(key, version)

    def list(self, prefix: str) -> Listing:
        return self._inner.list(prefix)

    def close(self) -> None:
        self._inner.close()


class TestFewestMethods(OwnStoreContract):
    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        first = MemoryStore()
        return lambda: FewestMethods(first.client())


class TestFileStore(OwnStoreContract):
    max_examples = 8

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: FileStore(tmp_path / "deep" / "store", timeout=self.timeout_s)

    @pytest.fixture
    def client_spec(self, tmp_path: Path) -> ClientSpec:
        folder = str(tmp_path / "deep" / "store")
        return ClientSpec(
            "elasticlib.stores.file_store:FileStore", (folder,), {"timeout": self.timeout_s}
        )


class TestTcpStore(OwnStoreContract):
    host = "127.0.0.1"

    @pytest.fixture
    def server(self) -> Iterator[TcpStoreServer]:
        with TcpStoreServer(self.host, 0, job="contract") as server:
            yield server

    @pytest.fixture
    def make_store(self, server: TcpStoreServer) -> Callable[[], Store]:
        return lambda: TcpStore(server.host, server.port, job="contract", timeout=self.timeout_s)

    @pytest.fixture
    def client_spec(self, server: TcpStoreServer) -> ClientSpec:
        return ClientSpec(
            "elasticlib.stores.tcp_client:TcpStore",
            (server.host, server.port),
            {"job": "contract", "timeout": self.timeout_s},
        )
