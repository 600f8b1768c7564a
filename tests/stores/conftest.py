"""Etcds for tests that change nothing of theirs, and for those that do; and places of stores."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from places import World

from elasticlib.testing.waiting import wait_until

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


@pytest.fixture
def world() -> Iterator[World]:
    """Of which no thread and no descriptor is left."""
    before = _left()
    with ExitStack() as stack:
        yield World(stack)
    # A receiver ends a moment after its last connection: this test's, and maybe the one before's.
    wait_until("threads and descriptors to be gone", lambda: not _beyond(before), 20.0)


def _left() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _beyond(before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(_left(), before, strict=True))
