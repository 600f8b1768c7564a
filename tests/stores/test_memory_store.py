"""The store in memory: an injected clock controls it, and it has no thread."""

from __future__ import annotations

import threading

import pytest

from elasticlib.errors import LeaseLostError, StoreConnectionError, StoreRejectedError
from elasticlib.stores.key_space import KeySpaceLimits
from elasticlib.stores.memory_store import MemoryStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_leases_expire_by_the_injected_clock() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    lease = store.set("lease", b"", ttl=8.0)
    for _ in range(7):
        clock.now += 1.0
        assert store.get("lease") == lease
        assert not store.wait("lease", after=lease.version, timeout=0.0)
    clock.now += 1.0
    assert store.wait("lease", after=lease.version, timeout=0.0)
    assert store.get("lease") is None
    with pytest.raises(LeaseLostError):
        store.refresh("lease", lease.version)


def test_a_jump_of_the_clock_does_not_expire_a_lease_at_once() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    lease = store.set("lease", b"", ttl=8.0)
    clock.now += 3600.0
    store.refresh("lease", lease.version)
    assert store.get("lease") == lease


def test_closing_a_simulated_client_ends_its_leases() -> None:
    store = MemoryStore(Clock())
    node = store.client()
    version = node.set("lease", b"", ttl=8.0).version
    node.close()
    assert store.wait("lease", after=version, timeout=0.0)
    assert store.list("").entries == ()
    with pytest.raises(StoreConnectionError, match="closed"):
        node.set("lease", b"")


def test_the_constructor_starts_no_thread() -> None:
    before = threading.active_count()
    MemoryStore().set("lease", b"", ttl=1.0)
    assert threading.active_count() <= before  # A thread of an earlier test may have exited.


def test_a_memory_store_enforces_its_limits() -> None:
    with pytest.raises(StoreRejectedError, match="at most 3 bytes, got 4"):
        MemoryStore(limits=KeySpaceLimits(value_bytes=3)).set("key", b"1234")
