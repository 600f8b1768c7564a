"""Fixtures of the tests of observability: two clients of one store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib import FileStore, TcpStore, TcpStoreServer
from elasticlib.stores.interface import Store


@pytest.fixture(params=["tcp", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """The client of a node, and the client of a process that reads its status or its stacks."""
    with contextlib.ExitStack() as stack:
        if request.param == "file":
            pair = [FileStore(tmp_path) for _ in range(2)]
        else:
            server = stack.enter_context(TcpStoreServer("127.0.0.1", 0, job="job"))
            pair = [TcpStore(server.host, server.port, job="job") for _ in range(2)]
        for store in pair:
            stack.callback(store.close)
        yield pair[0], pair[1]
