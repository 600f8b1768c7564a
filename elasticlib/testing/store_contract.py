"""The contract of `elasticlib.stores.interface` as tests, for every store, also for yours.

Subclass `StoreContract` in a test file and override the fixture `make_store`; override
`client_recipe` too if other processes can reach the store.
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
from .store_model import ODD_KEYS, StoreMachine
from .store_process import (
    ClientRecipe,
    in_a_child,
    increment,
    kept_lease,
    number_at,
    race,
    said,
    use_as_child,
)

Connect = Callable[[], Store]


class StoreContract:
    """Every rule of the contract, as a test whose name is the claim. Of errors their kind is
    promised; the words are each store's own."""

    ttl = 0.5
    """Seconds; long enough that a busy machine refreshes in time."""

    patience = 20.0
    """Seconds after which something that should have happened has not."""

    processes = 3
    increments = 15
    examples = 25

    @pytest.fixture
    def make_store(self) -> Connect:
        """Override: a callable that gives a new client of one and the same, empty store."""
        raise NotImplementedError("override the fixture make_store")

    @pytest.fixture
    def client_recipe(self) -> ClientRecipe | None:
        """Override, if other processes can reach the store: how they build a client."""
        return None

    @pytest.fixture
    def connect(self, make_store: Connect) -> Iterator[Connect]:
        """`make_store`, whose clients are closed after the test."""
        with ExitStack() as clients:
            yield lambda: clients.enter_context(make_store())

    # Keys and values

    def test_a_missing_key_answers_at_once(self, connect: Connect) -> None:
        store = connect()
        assert store.get("missing") is None
        assert store.delete("missing") is False
        assert store.list("missing").entries == ()

    def test_what_was_written_is_read_by_every_client(self, connect: Connect) -> None:
        one, other = connect(), connect()
        for value in (b"", b"text", bytes(range(256)), b"\r\n" * 50_000):
            written = one.set("key", value)
            assert (written.key, written.value) == ("key", value)
            assert other.get("key") == written == one.get("key")

    def test_keys_are_any_text_and_never_confused(self, connect: Connect) -> None:
        store = connect()
        entries = {key: store.set(key, key.encode()) for key in ODD_KEYS}
        assert {key: store.get(key) for key in ODD_KEYS} == entries
        assert store.list("").entries == tuple(entries[key] for key in sorted(ODD_KEYS))
        for key in ODD_KEYS:
            under = tuple(entries[other] for other in sorted(ODD_KEYS) if other.startswith(key))
            assert store.list(key).entries == under

    @pytest.mark.parametrize("key", ["", "a\0b", "x" * 1025, "ü" * 513, "\ud800"])
    def test_what_can_be_no_key_is_refused(self, connect: Connect, key: str) -> None:
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
    def test_what_can_be_no_ttl_is_refused(self, connect: Connect, ttl: float) -> None:
        store = connect()
        with pytest.raises(ConfigError):
            store.set("key", b"", ttl=ttl)
        with pytest.raises(ConfigError):
            store.compare_set("key", b"", expected=ABSENT, ttl=ttl)
        assert store.get("key") is None

    # Versions, conditions, snapshots

    def test_versions_grow_and_are_never_used_again(self, connect: Connect) -> None:
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

    def test_compare_set_wins_only_over_the_expected_version(self, connect: Connect) -> None:
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

    def test_delete_says_whether_it_removed_anything(self, connect: Connect) -> None:
        store, other = connect(), connect()
        old = store.set("key", b"old")
        new = store.set("key", b"new")
        assert store.delete("key", expected=old.version) is False
        assert other.get("key") == new
        assert other.delete("key", expected=new.version) is True
        assert store.get("key") is None
        assert store.delete("key") is False

    def test_a_list_is_of_one_moment(self, connect: Connect) -> None:
        writer, reader = connect(), connect()

        begun, enough = threading.Event(), threading.Event()

        def write() -> None:
            for number in itertools.count():
                writer.set("pair/a", b"%d" % number)
                writer.set("pair/b", b"%d" % number)
                begun.set()
                if enough.is_set():
                    return

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            try:
                assert begun.wait(self.patience)
                for _ in range(30):
                    self._check_pair(reader.list("pair/"))
            finally:
                enough.set()
            writing.result(self.patience)

    def test_a_list_has_no_longest_and_is_of_one_moment(self, connect: Connect) -> None:
        """More entries and more bytes than stores pass on in one piece, of their own accord."""
        writer, reader = connect(), connect()
        filler = {f"long/1/{number:03}": b"x" * 16 * 1024 for number in range(600)}
        for key, value in filler.items():
            writer.set(key, value)
        done = threading.Event()

        def write() -> None:
            for number in itertools.count():
                if done.is_set():
                    return
                # The first and the last of what a listing holds, one after the other.
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
            writing.result(self.patience)

    def _check_pair(self, listing: Listing) -> None:
        values = {entry.key: int(entry.value) for entry in listing.entries}
        assert 0 <= values.get("pair/a", -1) - values.get("pair/b", -1) <= 1
        if listing.entries:
            assert max(entry.version for entry in listing.entries) == listing.version

    def test_any_history_agrees_with_a_dictionary(self, connect: Connect) -> None:
        clients = (connect(), connect())
        run_state_machine_as_test(
            lambda: StoreMachine(clients),  # type: ignore[arg-type]
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=25,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )

    # Races

    def test_threads_lose_no_update(self, connect: Connect) -> None:
        stores = [connect(), connect()]
        with ThreadPoolExecutor(4) as pool:
            for done in [
                pool.submit(increment, stores[number % 2], "count", self.increments)
                for number in range(4)
            ]:
                done.result(self.patience)
        assert number_at(stores[0], "count") == 4 * self.increments

    def test_processes_lose_no_update(
        self, connect: Connect, client_recipe: ClientRecipe | None
    ) -> None:
        recipe = _needed(client_recipe)
        race(recipe, self.processes, "count", self.increments, self.patience)
        assert number_at(connect(), "count") == self.processes * self.increments

    # Waiting

    def test_a_wait_without_a_change_ends_in_time(self, connect: Connect) -> None:
        store = connect()
        version = store.set("other", b"").version
        assert store.wait("key", after=version, timeout=0.0) is False
        assert store.wait("", after=version, timeout=0.1) is False

    def test_a_wait_sees_the_change_before_it(self, connect: Connect) -> None:
        one, other = connect(), connect()
        before = one.set("key", b"").version
        other.set("other", b"")
        other.delete("key")
        assert one.wait("key", after=before, timeout=0.0) is True
        assert one.wait("k", after=before, timeout=0.0) is True
        assert one.wait("", after=before, timeout=0.0) is True
        assert one.wait("zzz", after=one.list("").version, timeout=0.0) is False

    @pytest.mark.parametrize("change", ["set", "overwrite", "compare_set", "delete"])
    def test_a_wait_wakes_for_each_kind_of_change(self, connect: Connect, change: str) -> None:
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
            assert waiting.result(self.patience) is True

    def test_a_waiter_does_not_hold_up_other_threads(self, connect: Connect) -> None:
        store = connect()
        version = store.set("key", b"").version
        with ThreadPoolExecutor(1) as pool:
            waiting = self._start_waiting(pool, store, "quiet", version)
            for number in range(5):
                store.set("key", b"%d" % number)
                assert store.get("key") == store.list("key").entries[0]
            assert not waiting.done()
            store.set("quiet", b"")
            assert waiting.result(self.patience) is True

    def test_who_lists_and_waits_misses_nothing(self, connect: Connect) -> None:
        writer, watcher = connect(), connect()

        def watch() -> int:
            while True:
                listing = watcher.list("key")
                if listing.entries and listing.entries[0].value == b"last":
                    return listing.version
                # A missed change shows as a wait that nobody ends.
                assert watcher.wait("key", after=listing.version, timeout=self.patience)

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            for number in range(40):
                writer.set("key", b"%d" % number)
                writer.set("other", b"")
            last = writer.set("key", b"last")
            assert watching.result() >= last.version

    # Leases

    def test_a_refreshed_lease_lives_on_and_refreshing_is_no_change(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        for _ in range(5):
            lease = kept_lease(owner, other, "lease", self.ttl)
            if lease is not None:
                break
        else:
            pytest.skip("this machine is too busy to refresh a lease in time")
        assert other.get("lease") == lease
        assert other.list("").version == lease.version

    def test_an_unrefreshed_lease_ends_for_everyone(self, connect: Connect) -> None:
        owner, one, other = connect(), connect(), connect()
        lease = owner.set("lease", b"mine", ttl=self.ttl)
        assert one.get("lease") == lease
        assert one.wait("lease", after=lease.version, timeout=self.patience) is True
        listing = one.list("lease")
        assert listing.entries == ()
        assert listing.version > lease.version
        assert owner.get("lease") is None
        assert other.get("lease") is None
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", lease.version)
        assert other.compare_set("lease", b"", expected=ABSENT).succeeded

    def test_one_lease_ends_while_another_is_kept(self, connect: Connect) -> None:
        one, other = connect(), connect()
        kept = one.set("lease/kept", b"", ttl=self.ttl)
        version = one.set("lease/left", b"", ttl=self.ttl).version
        for _ in range(int(4 * self.patience / self.ttl)):
            if other.wait("lease/", after=version, timeout=self.ttl / 4):
                break
            one.refresh("lease/kept", kept.version)
        assert other.list("lease/").entries == (kept,)

    def test_writing_a_leased_key_makes_it_a_plain_one(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.set("lease", b"mine", ttl=self.ttl)
        plain = other.set("lease", b"plain")
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", lease.version)
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", plain.version)
        assert other.wait("lease", after=plain.version, timeout=self.ttl * 2) is False
        assert owner.get("lease") == plain

    def test_a_new_lease_takes_the_place_of_the_old(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        old = owner.set("lease", b"old", ttl=1000 * self.ttl)
        outcome = other.compare_set("lease", b"new", expected=old.version, ttl=self.ttl)
        assert outcome.succeeded
        assert outcome.entry is not None
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", old.version)
        other.refresh("lease", outcome.entry.version)
        assert owner.wait("lease", after=outcome.entry.version, timeout=self.patience) is True
        assert owner.get("lease") is None

    def test_a_deleted_lease_is_lost(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.set("lease", b"", ttl=1000 * self.ttl)
        assert other.delete("lease") is True
        with pytest.raises(LeaseLostError):
            owner.refresh("lease", lease.version)

    def test_only_its_owner_keeps_a_lease(self, connect: Connect) -> None:
        owner, other = connect(), connect()
        lease = owner.set("lease", b"", ttl=1000 * self.ttl)
        with pytest.raises(LeaseLostError):
            other.refresh("lease", lease.version)
        owner.refresh("lease", lease.version)

    def test_a_killed_owners_lease_ends(
        self, connect: Connect, client_recipe: ClientRecipe | None
    ) -> None:
        recipe = _needed(client_recipe)
        watcher = connect()
        with recipe.start("hold", "lease", str(self.ttl * 4)) as owner:
            try:
                assert said(owner) == "done"
                held = watcher.get("lease")
                assert held is not None
            finally:
                owner.kill()
            assert watcher.wait("lease", after=held.version, timeout=self.patience) is True
        assert watcher.list("lease").entries == ()

    # Closing

    def test_closing_ends_this_clients_leases_and_no_others(self, connect: Connect) -> None:
        one, other = connect(), connect()
        kept = other.set("lease/other", b"", ttl=1000 * self.ttl)
        one.set("lease/one", b"", ttl=1000 * self.ttl)
        plain = one.set("lease/plain", b"")
        one.close()
        one.close()
        assert other.wait("lease/", after=plain.version, timeout=self.patience) is True
        assert other.list("lease/").entries == (kept, plain)

    def test_closing_ends_the_waits_in_flight(self, connect: Connect) -> None:
        one = connect()
        version = one.set("key", b"").version
        with ThreadPoolExecutor(1) as pool:
            waiting = self._start_waiting(pool, one, "quiet", version)
            one.close()
            with pytest.raises(StoreConnectionError):
                waiting.result(self.patience)
        with pytest.raises(StoreConnectionError):
            one.get("key")

    # Forks

    @pytest.mark.parametrize("at_work", [False, True], ids=["at rest", "at work"])
    def test_a_forked_childs_copy_works_or_is_refused_and_leaves_its_parents_alone(
        self, connect: Connect, at_work: bool
    ) -> None:
        one, other = connect(), connect()
        lease = one.set("lease/parent", b"", ttl=1000 * self.ttl)
        with _used(one) if at_work else nullcontext():
            said = [in_a_child(partial(use_as_child, one), self.patience) for _ in range(5)]
        assert set(said) <= {"worked", "refused"}
        assert len(set(said)) == 1
        one.refresh("lease/parent", lease.version)
        assert other.list("lease/").entries == (lease,)
        assert (other.get("child") is not None) is (said[0] == "worked")
        assert one.get("child") == other.get("child")

    def _start_waiting(
        self, pool: ThreadPoolExecutor, store: Store, prefix: str, version: int
    ) -> Future[bool]:
        # Twice as long as the test waits for it: a wait that sees the change at its end is late.
        waiting = pool.submit(store.wait, prefix, after=version, timeout=2 * self.patience)
        # Most likely it is asleep by then. If not, it must see the change all the same.
        store.wait("nothing is ever written here", after=version, timeout=0.05)
        return waiting


@contextmanager
def _used(store: Store) -> Iterator[None]:
    """Two threads use it all the time, so that a fork finds them amid a call."""
    over = threading.Event()

    def use(number: int) -> None:
        while not over.is_set():
            store.set(f"busy/{number}", b"x" * 1000)
            store.list("busy/")

    with ThreadPoolExecutor(2) as pool:
        using = [pool.submit(use, number) for number in range(2)]
        try:
            yield
        finally:
            over.set()
        for done in using:
            done.result()


def _needed(recipe: ClientRecipe | None) -> ClientRecipe:
    if recipe is None:
        pytest.skip("no client_recipe: other processes cannot reach this store")
    return recipe
