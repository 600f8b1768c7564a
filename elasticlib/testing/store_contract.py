"""Tests of the contract that `elasticlib.stores.interface` describes, for any `Store`.

A test file subclasses `StoreContract` and overrides the fixture `make_store`, and also
`client_spec` if other processes can reach the store.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ..errors import ConfigError, LeaseLostError, StoreConnectionError
from ..stores.interface import ABSENT, Listing, Store
from .store_model import EDGE_CASE_KEYS, StoreMachine
from .store_process import (
    ClientSpec,
    exercise_in_child,
    increment,
    race,
    read_line,
    read_number,
    refresh_lease,
    run_in_child,
)

Connect = Callable[[], Store]


class StoreContract:
    """Pytest suite with one test for each rule of the contract.

    The tests check the classes of errors, and not their messages.
    """

    lease_ttl_s = 0.5  #: seconds; long enough that a busy machine refreshes in time
    timeout_s = 20.0  #: seconds after which an expected event counts as missing
    num_processes = 3  #: processes that write at the same time
    num_increments = 15  #: writes of each of them
    max_examples = 25  #: random histories

    @pytest.fixture
    def make_store(self) -> Connect:
        """Override: return a function that creates clients of one store, which is empty."""
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def client_spec(self) -> ClientSpec | None:
        """Override, if other processes can reach the store: return how they create a client."""
        return None

    @pytest.fixture
    def connect(self, make_store: Connect) -> Iterator[Connect]:
        """Return `make_store`, whose clients are closed after the test."""
        with ExitStack() as clients:
            yield lambda: clients.enter_context(make_store())

    # Keys and values

    def test_a_missing_key_is_none(self, connect: Connect) -> None:
        store = connect()
        assert store.get("missing") is None
        assert store.delete("missing") is False
        assert store.list("missing").entries == ()

    def test_every_client_reads_what_was_written(self, connect: Connect) -> None:
        one, other = connect(), connect()
        for value in (b"", b"text", bytes(range(256)), b"\r\n" * 50_000):
            written = one.set("key", value)
            assert (written.key, written.value) == ("key", value)
            assert other.get("key") == written == one.get("key")

    def test_keys_that_differ_are_never_confused(self, connect: Connect) -> None:
        store = connect()
        entries = {key: store.set(key, key.encode()) for key in EDGE_CASE_KEYS}
        assert {key: store.get(key) for key in EDGE_CASE_KEYS} == entries
        assert store.list("").entries == tuple(entries[key] for key in sorted(EDGE_CASE_KEYS))
        for key in EDGE_CASE_KEYS:
            under = tuple(
                entries[other] for other in sorted(EDGE_CASE_KEYS) if other.startswith(key)
            )
            assert store.list(key).entries == under

    @pytest.mark.parametrize("key", ["", "a\0b", "x" * 1025, "ü" * 513, "\ud800"])
    def test_an_invalid_key_is_rejected(self, connect: Connect, key: str) -> None:
        store = connect()
        calls: list[Callable[[], object]] = [
            lambda: store.get(key),
            lambda: store.set(key, b""),
            lambda: store.compare_set(key, b"", expected=ABSENT),
            lambda: store.delete(key),
            lambda: store.refresh(key, 1),
        ]
        for call in calls:
            with pytest.raises(ConfigError):
                call()
        assert store.list("").entries == ()

    @pytest.mark.parametrize("ttl", [0.0, -1.0, float("inf"), float("nan")])
    def test_an_invalid_ttl_is_rejected(self, connect: Connect, ttl: float) -> None:
        store = connect()
        with pytest.raises(ConfigError):
            store.set("key", b"", ttl=ttl)
        with pytest.raises(ConfigError):
            store.compare_set("key", b"", expected=ABSENT, ttl=ttl)
        assert store.get("key") is None

    # Versions, conditions, snapshots

    def test_versions_increase_and_are_never_reused(self, connect: Connect) -> None:
        one, other = connect(), connect()
        versions = [one.set("a", b"").version, other.set("b", b"").version]
        assert one.delete("a") is True
        versions.append(other.list("").version)
        versions.append(one.set("a", b"").version)
        won = other.compare_set("a", b"", expected=versions[-1])
        assert won.entry is not None
        versions.append(won.entry.version)
        assert versions[0] > 0
        assert versions == sorted(set(versions))
        assert one.list("").version == versions[-1]

    def test_compare_set_writes_only_over_the_expected_version(self, connect: Connect) -> None:
        store, other = connect(), connect()
        lost = store.compare_set("key", b"new", expected=7)
        assert (lost.succeeded, lost.entry, store.get("key")) == (False, None, None)
        first = store.compare_set("key", b"first", expected=ABSENT)
        assert first.succeeded
        assert first.entry == other.get("key")
        again = other.compare_set("key", b"again", expected=ABSENT)
        assert (again.succeeded, again.entry) == (False, first.entry)
        assert first.entry is not None
        second = other.compare_set("key", b"second", expected=first.entry.version)
        assert (second.succeeded, second.entry) == (True, store.get("key"))
        late = store.compare_set("key", b"late", expected=first.entry.version)
        assert (late.succeeded, late.entry) == (False, second.entry)

    def test_delete_returns_whether_it_removed_the_key(self, connect: Connect) -> None:
        store, other = connect(), connect()
        old = store.set("key", b"old")
        new = store.set("key", b"new")
        assert store.delete("key", expected=old.version) is False
        assert other.get("key") == new
        assert other.delete("key", expected=new.version) is True
        assert store.get("key") is None
        assert store.delete("key") is False

    def test_a_list_shows_the_keys_at_one_moment(self, connect: Connect) -> None:
        writer, reader = connect(), connect()

        started, enough = threading.Event(), threading.Event()

        def write() -> None:
            for number in itertools.count():
                writer.set("pair/a", b"%d" % number)
                writer.set("pair/b", b"%d" % number)
                started.set()
                if enough.is_set():
                    return

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            try:
                assert started.wait(self.timeout_s)
                for _ in range(30):
                    self._check_pair(reader.list("pair/"))
            finally:
                enough.set()
            writing.result(self.timeout_s)

    def test_a_list_of_4_mib_is_complete_and_a_snapshot(self, connect: Connect) -> None:
        writer, reader = connect(), connect()
        filler = {f"long/1/{number:03}": b"x" * 16 * 1024 for number in range(250)}
        for key, value in filler.items():
            writer.set(key, value)
        done = threading.Event()

        def write() -> None:
            for number in itertools.count():
                if done.is_set():
                    return
                # The first and the last key of the listing are written one after the other.
                writer.set("long/0", str(number).encode())
                writer.set("long/2", str(number).encode())

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            try:
                for _ in range(4):
                    found = {entry.key: entry.value for entry in reader.list("long/").entries}
                    first, last = (int(found.pop(f"long/{end}", b"-1")) for end in (0, 2))
                    assert 0 <= first - last <= 1
                    assert found == filler
            finally:
                done.set()
            writing.result(self.timeout_s)

    def _check_pair(self, listing: Listing) -> None:
        values = {entry.key: int(entry.value) for entry in listing.entries}
        assert 0 <= values.get("pair/a", -1) - values.get("pair/b", -1) <= 1
        if listing.entries:
            assert max(entry.version for entry in listing.entries) == listing.version

    def test_random_operations_agree_with_a_dictionary(self, connect: Connect) -> None:
        clients = (connect(), connect())
        run_state_machine_as_test(
            lambda: StoreMachine(clients),  # type: ignore[arg-type]
            settings=settings(
                max_examples=self.max_examples,
                stateful_step_count=25,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )

    # Races

    def test_no_update_is_lost_between_threads(self, connect: Connect) -> None:
        stores = [connect(), connect()]
        with ThreadPoolExecutor(4) as pool:
            for done in [
                pool.submit(increment, stores[number % 2], "count", self.num_increments)
                for number in range(4)
            ]:
                done.result(self.timeout_s)
        assert read_number(stores[0], "count") == 4 * self.num_increments

    def test_no_update_is_lost_between_processes(
        self, connect: Connect, client_spec: ClientSpec | None
    ) -> None:
        spec = _require_client_spec(client_spec)
        race(spec, self.num_processes, "count", self.num_increments, self.timeout_s)
        assert read_number(connect(), "count") == self.num_processes * self.num_increments

    # Waiting

    def test_a_wait_without_a_change_returns_false_after_its_timeout(
        self, connect: Connect
    ) -> None:
        store = connect()
        version = store.set("other", b"").version
        assert store.wait("key", after=version, timeout=0.0) is False
        assert store.wait("", after=version, timeout=0.1) is False

    def test_a_wait_returns_true_for_an_earlier_change(self, connect: Connect) -> None:
        one, other = connect(), connect()
        before = one.set("key", b"").version
        other.set("other", b"")
        other.delete("key")
        assert one.wait("key", after=before, timeout=0.0) is True
        assert one.wait("k", after=before, timeout=0.0) is True
        assert one.wait("", after=before, timeout=0.0) is True
        assert one.wait("zzz", after=one.list("").version, timeout=0.0) is False

    @pytest.mark.parametrize("change", ["set", "overwrite", "compare_set", "delete"])
    def test_a_wait_ends_with_each_kind_of_change(self, connect: Connect, change: str) -> None:
        one, other = connect(), connect()
        entry = one.set("watched/there", b"")
        changes: dict[str, Callable[[], object]] = {
            "set": lambda: other.set("watched/new", b""),
            "overwrite": lambda: other.set("watched/there", b""),
            "compare_set": lambda: other.compare_set("watched/new", b"", expected=ABSENT),
            "delete": lambda: other.delete("watched/there"),
        }
        with ThreadPoolExecutor(1) as pool:
            waiting = self._start_waiting(pool, one, "watched/", entry.version)
            changes[change]()
            assert waiting.result(self.timeout_s) is True

    def test_a_wait_does_not_block_other_threads(self, connect: Connect) -> None:
        store = connect()
        version = store.set("key", b"").version
        with ThreadPoolExecutor(1) as pool:
            waiting = self._start_waiting(pool, store, "quiet", version)
            for number in range(5):
                store.set("key", b"%d" % number)
                assert store.get("key") == store.list("key").entries[0]
            store.set("quiet", b"")
            assert waiting.result(self.timeout_s) is True

    def test_list_and_wait_miss_no_change(self, connect: Connect) -> None:
        writer, watcher = connect(), connect()

        def watch() -> int:
            while True:
                listing = watcher.list("key")
                if listing.entries and listing.entries[0].value == b"last":
                    return listing.version
                # If a change were missed, this wait would time out.
                assert watcher.wait("key", after=listing.version, timeout=self.timeout_s)

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            for number in range(40):
                writer.set("key", b"%d" % number)
                writer.set("other", b"")
            last = writer.set("key", b"last")
            assert watching.result() >= last.version

    # Leases

    def test_a_refreshed_lease_does_not_expire_and_a_refresh_is_not_a_change(
        self, connect: Connect
    ) -> None:
        owner, other = connect(), connect()
        for _ in range(5):
            lease = refresh_lease(owner, other, "lease", self.lease_ttl_s)
            if lease is not None:
                break
        else:
            pytest.skip("this machine is too busy to refresh a lease in time")
        assert other.get("lease") == lease
        assert other.list("").version == lease.version

    def test_a_lease_that_is_not_refreshed_expires_for_every_client(self, connect: Connect) -> None:
        owner, one, other = connect(), connect(), connect()
        lease = owner.set("lease", b"mine", ttl=self.lease_ttl_s)
        assert one.get("lease") == lease
        assert one.wait("lease", after=lease.version, timeout=self.timeout_s) is True
        listing = one.list("lease")
        assert listing.entries == ()
        assert listing.version > lease.version
        assert owner.get("lease") is None
        assert other.get("lease") is None
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", lease.version)
        assert other.compare_set("lease", b"", expected=ABSENT).succeeded

    def test_one_lease_expires_while_another_is_refreshed(self, connect: Connect) -> None:
        one, other = connect(), connect()
        refreshed = one.set("lease/refreshed", b"", ttl=self.lease_ttl_s)
        version = one.set("lease/abandoned", b"", ttl=self.lease_ttl_s).version
        for _ in range(int(4 * self.timeout_s / self.lease_ttl_s)):
            if other.wait("lease/", after=version, timeout=self.lease_ttl_s / 4):
                break
            one.refresh("lease/refreshed", refreshed.version)
        assert other.list("lease/").entries == (refreshed,)

    def test_writing_a_leased_key_without_ttl_ends_the_lease(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.set("lease", b"mine", ttl=self.lease_ttl_s)
        plain = other.set("lease", b"plain")
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", lease.version)
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", plain.version)
        assert other.wait("lease", after=plain.version, timeout=self.lease_ttl_s * 2) is False
        assert owner.get("lease") == plain

    def test_a_new_lease_replaces_the_old_one(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        old = owner.set("lease", b"old", ttl=1000 * self.lease_ttl_s)
        outcome = other.compare_set("lease", b"new", expected=old.version, ttl=self.lease_ttl_s)
        assert outcome.succeeded
        assert outcome.entry is not None
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", old.version)
        other.refresh("lease", outcome.entry.version)
        assert owner.wait("lease", after=outcome.entry.version, timeout=self.timeout_s) is True
        assert owner.get("lease") is None

    def test_a_deleted_lease_is_lost(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.set("lease", b"", ttl=1000 * self.lease_ttl_s)
        assert other.delete("lease") is True
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", lease.version)

    def test_only_the_owner_can_refresh_a_lease(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.set("lease", b"", ttl=1000 * self.lease_ttl_s)
        with pytest.raises(LeaseLostError):
            other.refresh("lease", lease.version)
        owner.refresh("lease", lease.version)

    def test_the_lease_of_a_killed_owner_expires(
        self, connect: Connect, client_spec: ClientSpec | None
    ) -> None:
        spec = _require_client_spec(client_spec)
        watcher = connect()
        with spec.start("lease", "lease", str(self.lease_ttl_s * 4)) as owner:
            try:
                assert read_line(owner) == "done"
                lease = watcher.get("lease")
                assert lease is not None
            finally:
                owner.kill()
            assert watcher.wait("lease", after=lease.version, timeout=self.timeout_s) is True
        assert watcher.list("lease").entries == ()

    # Closing

    def test_close_ends_the_leases_of_this_client_only(self, connect: Connect) -> None:
        one, other = connect(), connect()
        kept = other.set("lease/other", b"", ttl=1000 * self.lease_ttl_s)
        one.set("lease/one", b"", ttl=1000 * self.lease_ttl_s)
        plain = one.set("lease/plain", b"")
        one.close()
        one.close()
        assert other.wait("lease/", after=plain.version, timeout=self.timeout_s) is True
        assert other.list("lease/").entries == (kept, plain)

    def test_close_ends_waits_with_an_error(self, connect: Connect) -> None:
        one = connect()
        version = one.set("key", b"").version
        with ThreadPoolExecutor(1) as pool:
            waiting = self._start_waiting(pool, one, "quiet", version)
            one.close()
            with pytest.raises(StoreConnectionError):
                waiting.result(self.timeout_s)
        with pytest.raises(StoreConnectionError):
            one.get("key")

    # Forks

    @pytest.mark.parametrize("is_busy", [False, True], ids=["idle parent", "busy parent"])
    def test_a_client_in_a_forked_child_works_or_raises_and_does_not_affect_its_parent(
        self, connect: Connect, is_busy: bool
    ) -> None:
        one, other = connect(), connect()
        lease = one.set("lease/parent", b"", ttl=1000 * self.lease_ttl_s)
        with _used_by_threads(one) if is_busy else nullcontext():
            results = [
                run_in_child(partial(exercise_in_child, one), self.timeout_s) for _ in range(5)
            ]
        assert set(results) <= {"worked", "raised"}
        assert len(set(results)) == 1
        one.refresh("lease/parent", lease.version)
        assert other.list("lease/").entries == (lease,)
        assert (other.get("child") is not None) is (results[0] == "worked")
        assert one.get("child") == other.get("child")

    def _start_waiting(
        self, pool: ThreadPoolExecutor, store: Store, prefix: str, version: int
    ) -> Future[bool]:
        # A wait that only returns when its timeout ends is too late for the test.
        waiting = pool.submit(store.wait, prefix, after=version, timeout=2 * self.timeout_s)
        # The other thread probably waits by then. If not, it must still see the change.
        store.wait("never-written", after=version, timeout=0.05)
        return waiting


@contextmanager
def _used_by_threads(store: Store) -> Iterator[None]:
    """Let two threads use the store, so that a fork happens while they do."""
    is_finished = threading.Event()

    def use(number: int) -> None:
        while not is_finished.is_set():
            store.set(f"busy/{number}", b"x" * 1000)
            store.list("busy/")

    with ThreadPoolExecutor(2) as pool:
        using = [pool.submit(use, number) for number in range(2)]
        try:
            yield
        finally:
            is_finished.set()
        for done in using:
            done.result()


def _require_client_spec(spec: ClientSpec | None) -> ClientSpec:
    """Return the spec. Skip the test if there is none."""
    if spec is None:
        pytest.skip("no client_spec: other processes cannot reach this store")
    return spec
