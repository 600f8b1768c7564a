"""Fixtures: etcd servers, and endpoints at which stores can be served."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from endpoint_cluster import EndpointCluster
from etcd_server import EtcdServer

from elasticlib.testing.waiting import wait_until

ROOMS = (f"/test/{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def room() -> str:
    """Return a prefix for this test in the etcd that all tests share."""
    return next(ROOMS)


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd server that the test may kill."""
    with EtcdServer(tmp_path / "own") as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[EndpointCluster]:
    """Three endpoints. The test must leave no thread and no descriptor."""
    before = _left()
    with ExitStack() as stack:
        yield EndpointCluster(stack)
    # The reader thread of a test ends shortly after its last connection.
    wait_until("threads and descriptors to be gone", lambda: not _beyond(before), 20.0)


def _left() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _beyond(before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(_left(), before, strict=True))
