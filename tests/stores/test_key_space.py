"""The keyspace: limits, the journal, and leases by bounded looks, all told the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.errors import LeaseLostError, StoreRejectedError
from elasticlib.stores.key_space import ABSENT, KeySpace, Lease, LeaseTimers, Limits

SMALL = Limits(value_bytes=10, total_bytes=40, keys=4, journal=5)


def test_a_value_too_long_is_refused_and_changes_nothing() -> None:
    space = KeySpace(SMALL)
    space.put("key", b"x" * 10, None, 0.0)
    with pytest.raises(StoreRejectedError, match="at most 10 bytes, got 11 for key 'key'"):
        space.put("key", b"x" * 11, None, 0.0)
    entry = space.get("key")
    assert entry is not None
    assert (entry.value, space.version) == (b"x" * 10, 1)


def test_too_many_keys_are_refused_but_known_ones_are_written() -> None:
    space = KeySpace(SMALL)
    for key in "abcd":
        space.put(key, b"", None, 0.0)
    with pytest.raises(StoreRejectedError, match="at most 4 keys, got 'e' too"):
        space.put("e", b"", None, 0.0)
    space.put("d", b"again", None, 0.0)
    space.delete("a", None)
    space.put("e", b"", None, 0.0)


def test_too_many_bytes_are_refused_and_deleting_makes_room() -> None:
    space = KeySpace(SMALL)
    for key in "abc":
        space.put(key, b"x" * 10, None, 0.0)
    with pytest.raises(StoreRejectedError, match="at most 40 bytes, key 'd' would make it 44"):
        space.put("d", b"x" * 10, None, 0.0)
    space.put("a", b"y" * 10, None, 0.0)
    space.delete("b", None)
    space.put("d", b"x" * 10, None, 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=20), st.data())
def test_a_change_is_never_missed_however_short_the_journal(
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
            assert space.changed(prefix, after)
        elif space.version - after <= SMALL.journal:
            assert not space.changed(prefix, after)


def test_a_version_of_another_store_counts_as_changed() -> None:
    assert KeySpace().changed("key", 1)


def test_a_departed_owners_leases_end_and_nobody_elses() -> None:
    space = KeySpace()
    space.put("mine", b"", Lease(1, 10.0), 0.0)
    space.put("was mine", b"", Lease(1, 10.0), 0.0)
    space.put("was mine", b"", None, 0.0)
    space.put("yours", b"", Lease(2, 10.0), 0.0)
    version = space.version
    space.depart(1)
    assert [e.key for e in space.list("").entries] == ["was mine", "yours"]
    assert space.version == version + 1
    assert space.changed("mine", version)
    space.depart(1)
    assert space.version == version + 1


def test_a_lost_lease_says_why() -> None:
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


def test_an_ended_lease_leaves_an_absent_key() -> None:
    space = KeySpace()
    space.put("key", b"", Lease(1, 8.0), 0.0)
    for now in range(9):
        space.expire_leases(float(now))
    assert space.get("key") is None
    assert space.compare_set("key", b"", ABSENT, None, 9.0).succeeded


@given(st.floats(0.01, 1000.0), st.floats(0, 1e6))
def test_a_silent_lease_ends_after_its_ttl_and_no_later_than_a_look(
    ttl: float, start: float
) -> None:
    clock = LeaseTimers()
    clock.hear("lease", ttl, start)
    now = start
    while not clock.look(now):
        assert now - start < ttl * 1.01
        step = clock.until_due(now)
        assert step is not None
        now += step
    assert now - start >= ttl * 0.99


@given(st.lists(st.floats(0, 1000.0), max_size=30))
def test_no_lease_ends_whose_owner_is_heard_at_each_second_look(gaps: list[float]) -> None:
    clock = LeaseTimers()
    clock.hear("lease", 1.0, 0.0)
    now = 0.0
    for number, gap in enumerate(gaps):
        now += gap
        assert clock.look(now) == []
        if number % 2:
            clock.hear("lease", 1.0, now)


def test_a_store_that_stood_still_gives_the_owners_their_chance() -> None:
    clock = LeaseTimers()
    for name in ("heard", "dead"):
        clock.hear(name, 1.0, 0.0)
    clock.look(0.25)
    assert clock.look(3600.0) == []
    clock.hear("heard", 1.0, 3600.0)
    clock.look(3600.2)
    clock.look(3600.4)
    assert clock.look(3600.6) == ["dead"]


def test_a_clock_that_goes_back_neither_ends_a_lease_nor_prolongs_it() -> None:
    clock = LeaseTimers()
    clock.hear("lease", 1.0, 100.0)
    for now in (50.0, 0.0, -100.0, -99.75, -99.5, -99.25):
        assert clock.look(now) == []
    assert clock.look(-99.0) == ["lease"]


def test_looks_follow_the_shortest_lease() -> None:
    clock = LeaseTimers()
    assert clock.until_due(0.0) is None
    clock.hear("long", 80.0, 0.0)
    assert clock.until_due(0.0) == 10.0
    clock.hear("short", 8.0, 0.0)
    assert clock.until_due(0.0) == 1.0
    clock.hear("long", 80.0, 0.25)
    assert clock.until_due(0.25) == 0.75
    assert not clock.due(0.5)
    assert clock.due(1.0)
    clock.forget("short")
    clock.look(1.0)
    assert clock.until_due(1.0) == 10.0
