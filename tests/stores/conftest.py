"""An etcd for all tests that change nothing of it, and one of its own for a test that does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer

ROOMS = (f"/test/{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def room() -> str:
    """A prefix of the test's own in the etcd that all share."""
    return next(ROOMS)


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """One that the test may kill."""
    with EtcdServer(tmp_path / "own") as server:
        yield server
