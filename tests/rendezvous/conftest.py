"""Fixture with the handlers of a job in this process. Their threads end before the test ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from handler_cluster import HandlerCluster


@pytest.fixture
def cluster() -> Iterator[HandlerCluster]:
    cluster = HandlerCluster()
    yield cluster
    cluster.close()
    for thread in threading.enumerate():
        if thread.name.startswith("rendezvous"):
            thread.join(5.0)
            assert not thread.is_alive(), thread.name
