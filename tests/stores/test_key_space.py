"""The key space: limits, the log of changes, and leases that expire by bounded ticks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import LeaseLostError, StoreRejectedError
from elasticlib.stores.key_space import ABSENT, KeySpace, KeySpaceLimits, Lease, LeaseTimers

SMALL = KeySpaceLimits(value_bytes=10, total_bytes=40, keys=4, change_log=5)


def test_a_value_that_is_too_long_is_rejected_and_changes_nothing() -> None:
    space = KeySpace(SMALL)
    space.put("key", b"x" * 10, None, 0.0)
    with pytest.raises(StoreRejectedError, match="at most 10 bytes, got 11 for key 'key'"):
        space.put("key", b"x" * 11, None, 0.0)
    entry = space.get("key")
    assert entry is not None
    assert (entry.value, space.version) == (b"x" * 10, 1)


def test_too_many_keys_are_rejected_and_existing_ones_can_be_written() -> None:
    space = KeySpace(SMALL)
    for key in "abcd":
        space.put(key, b"", None, 0.0)
    with pytest.raises(StoreRejectedError, match="at most 4 keys, got 'e' too"):
        space.put("e", b"", None, 0.0)
    space.put("d", b"again", None, 0.0)
    space.delete("a", None)
    space.put("e", b"", None, 0.0)


def test_too_many_bytes_are_rejected_until_a_key_is_deleted() -> None:
    space = KeySpace(SMALL)
    for key in "abc":
        space.put(key, b"x" * 10, None, 0.0)
    with pytest.raises(StoreRejectedError, match="at most 40 bytes, key 'd' would make it 44"):
        space.put("d", b"x" * 10, None, 0.0)
    space.put("a", b"y" * 10, None, 0.0)
    space.delete("b", None)
    space.put("d", b"x" * 10, None, 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=20), st.data())
def test_a_change_is_never_missed_if_the_log_is_short(
    steps: list[tuple[str, bool]], data: st.DataObject
) -> None:
    space = KeySpace(SMALL)
    history: list[str] = []
    for key, write in steps:
        if write:
            space.put(key, b"", None, 0.0)
            history.append(key)
        elif space.delete(key, None):
            history.append(key)
    assert space.version == len(history)
    after = data.draw(st.integers(0, space.version))
    for prefix in "abc":
        if prefix in history[after:]:
            assert space.has_changed(prefix, after)
        elif space.version - after <= SMALL.change_log:
            assert not space.has_changed(prefix, after)


def test_a_version_of_another_store_counts_as_changed() -> None:
    assert KeySpace().has_changed("key", 1)


def test_removing_an_owner_ends_its_leases_only() -> None:
    space = KeySpace()
    space.put("mine", b"", Lease(1, 10.0), 0.0)
    space.put("was mine", b"", Lease(1, 10.0), 0.0)
    space.put("was mine", b"", None, 0.0)
    space.put("yours", b"", Lease(2, 10.0), 0.0)
    version = space.version
    space.remove_owner(1)
    assert [e.key for e in space.list("").entries] == ["was mine", "yours"]
    assert space.version == version + 1
    assert space.has_changed("mine", version)
    space.remove_owner(1)
    assert space.version == version + 1


def test_the_error_of_a_lost_lease_names_the_reason() -> None:
    space = KeySpace()
    with pytest.raises(LeaseLostError, match="at version 3 is lost: the key is gone"):
        space.refresh("key", 3, 1, 0.0)
    entry = space.put("key", b"", None, 0.0)
    with pytest.raises(LeaseLostError, match="the key is no lease"):
        space.refresh("key", entry.version, 1, 0.0)
    lease = space.put("key", b"", Lease(1, 1.0), 0.0)
    with pytest.raises(LeaseLostError, match="the key was written again at version 2"):
        space.refresh("key", entry.version, 1, 0.0)
    with pytest.raises(LeaseLostError, match="it belongs to another client"):
        space.refresh("key", lease.version, 2, 0.0)
    space.refresh("key", lease.version, 1, 0.0)


def test_an_expired_lease_is_an_absent_key() -> None:
    space = KeySpace()
    space.put("key", b"", Lease(1, 8.0), 0.0)
    for now in range(9):
        space.expire_leases(float(now))
    assert space.get("key") is None
    assert space.compare_set("key", b"", ABSENT, None, 9.0).succeeded


@given(st.floats(0.01, 1000.0), st.floats(0, 1e6))
def test_a_lease_expires_at_the_first_tick_after_its_ttl(ttl: float, start: float) -> None:
    timers = LeaseTimers()
    timers.restart("lease", ttl, start)
    now = start
    while not timers.tick(now):
        assert now - start < ttl * 1.01
        step = timers.until_due(now)
        assert step is not None
        now += step
    assert now - start >= ttl * 0.99


@given(st.lists(st.floats(0, 1000.0), max_size=30))
def test_a_lease_that_is_refreshed_at_every_second_tick_never_expires(gaps: list[float]) -> None:
    timers = LeaseTimers()
    timers.restart("lease", 1.0, 0.0)
    now = 0.0
    for number, gap in enumerate(gaps):
        now += gap
        assert timers.tick(now) == []
        if number % 2:
            timers.restart("lease", 1.0, now)


def test_a_store_that_was_paused_gives_owners_time_to_refresh() -> None:
    timers = LeaseTimers()
    for name in ("heard", "dead"):
        timers.restart(name, 1.0, 0.0)
    timers.tick(0.25)
    assert timers.tick(3600.0) == []
    timers.restart("heard", 1.0, 3600.0)
    timers.tick(3600.2)
    timers.tick(3600.4)
    assert timers.tick(3600.6) == ["dead"]


def test_a_clock_that_is_set_back_neither_expires_nor_extends_a_lease() -> None:
    timers = LeaseTimers()
    timers.restart("lease", 1.0, 100.0)
    for now in (50.0, 0.0, -100.0, -99.75, -99.5, -99.25):
        assert timers.tick(now) == []
    assert timers.tick(-99.0) == ["lease"]


def test_the_interval_of_ticks_follows_the_shortest_lease() -> None:
    timers = LeaseTimers()
    assert timers.until_due(0.0) is None
    timers.restart("long", 80.0, 0.0)
    assert timers.until_due(0.0) == 10.0
    timers.restart("short", 8.0, 0.0)
    assert timers.until_due(0.0) == 1.0
    timers.restart("long", 80.0, 0.25)
    assert timers.until_due(0.25) == 0.75
    assert not timers.is_due(0.5)
    assert timers.is_due(1.0)
    timers.remove("short")
    timers.tick(1.0)
    assert timers.until_due(1.0) == 10.0
