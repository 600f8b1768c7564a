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
def prefix() -> str:
    """Return the prefix of this test in the etcd server that all tests share."""
    return next(ROOMS)


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """Start an etcd server that only this test uses, so that the test can kill it."""
    with EtcdServer(tmp_path / "own") as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[EndpointCluster]:
    """Create three endpoints. The test must leave no thread and no open descriptor."""
    before = count_resources()
    with ExitStack() as stack:
        yield EndpointCluster(stack)
    # The reader thread of a test ends shortly after its last connection is closed.
    wait_until(
        "the threads and descriptors of the test to be released",
        lambda: not has_more_resources(before),
        20.0,
    )


def count_resources() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def has_more_resources(before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(count_resources(), before, strict=True))
