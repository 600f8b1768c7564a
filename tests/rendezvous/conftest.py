"""Handlers of a job in this process. Their threads end before the test does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from test_handlers import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()
    for thread in threading.enumerate():
        if thread.name.startswith("rendezvous"):
            thread.join(5.0)
            assert not thread.is_alive(), thread.name
