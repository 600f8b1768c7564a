"""The contract suite finds faults: each store here breaks one rule, and the named tests fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest

from elasticlib.errors import ElasticError
from elasticlib.stores.interface import ABSENT, CompareSetResult, Entry, Listing
from elasticlib.stores.memory_store import MemoryStore
from elasticlib.testing import StoreContract


class LosesUpdates(MemoryStore):
    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        current = self.get(key)
        if expected != (current.version if current else ABSENT):
            return CompareSetResult(False, current)
        self.wait("nothing", after=self.list("").version, timeout=0.001)
        return CompareSetResult(True, self.set(key, value, ttl=ttl))


class WinsOverAbsentKeys(MemoryStore):
    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        outcome = super().compare_set(key, value, expected=expected, ttl=ttl)
        return CompareSetResult(True, None) if outcome.entry is None else outcome


class ForgetsTtls(MemoryStore):
    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        return super().set(key, value, ttl=None if ttl is None else ttl * 1000)


class KeepsLeasesOfTheClosed(MemoryStore):
    def close(self) -> None:
        self._closed = True


class LetsAnybodyRefresh(MemoryStore):
    def refresh(self, key: str, version: int) -> None:
        self._owner = 1
        super().refresh(key, version)


class RefreshesByWriting(MemoryStore):
    def refresh(self, key: str, version: int) -> None:
        super().refresh(key, version)
        entry = self.get(key)
        assert entry is not None
        self.set(key, entry.value, ttl=0.5)


class MissesWakeUps(MemoryStore):
    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        found = super().wait(prefix, after=after, timeout=0.0)
        return found or (super().wait("nothing", after=after, timeout=timeout) and False)


class WakesAtTheEnd(MemoryStore):
    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        super().wait("nothing", after=self.list("").version, timeout=timeout)
        return super().wait(prefix, after=after, timeout=0.0)


class MissesDeletes(MemoryStore):
    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        return super().wait(prefix, after=after, timeout=timeout) and any(
            entry.version > after for entry in self.list(prefix).entries
        )


class WaitsFromNowOn(MemoryStore):
    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        return super().wait(prefix, after=max(after, self.list("").version), timeout=timeout)


class ListsInPieces(MemoryStore):
    def list(self, prefix: str) -> Listing:
        keys = [entry.key for entry in super().list(prefix).entries]
        found = []
        for key in keys:
            self.wait("nothing", after=super().list("").version, timeout=0.001)
            entry = self.get(key)
            if entry is not None:
                found.append(entry)
        return Listing(tuple(found), super().list("").version)


class ListsPageByPage(MemoryStore):
    def list(self, prefix: str) -> Listing:
        first = super().list(prefix).entries[:100]
        self.wait("nothing", after=super().list("").version, timeout=0.02)
        rest = super().list(prefix)
        return Listing((*first, *rest.entries[100:]), rest.version)


class ListsNoMoreThanAPage(MemoryStore):
    def list(self, prefix: str) -> Listing:
        return Listing(super().list(prefix).entries[:200], super().list("").version)


class ListsTheNewestFirst(MemoryStore):
    def list(self, prefix: str) -> Listing:
        found = super().list(prefix)
        entries = sorted(found.entries, key=lambda entry: -entry.version)
        return Listing(tuple(entries), found.version)


class DeletesEverything(MemoryStore):
    def delete(self, key: str, *, expected: int | None = None) -> bool:
        return super().delete(key, expected=None if expected else expected) or True


class UsesVersionsAgain(MemoryStore):
    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        there = self.get(key)
        entry = super().set(key, value, ttl=ttl)
        return entry if there else Entry(key, value, 1)


class OtherMessages(MemoryStore):
    """A correct store with other error messages."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("get", "set", "compare_set", "delete", "refresh", "list", "wait"):
            return found

        def translated(*args: Any, **kwargs: Any) -> Any:
            try:
                return found(*args, **kwargs)
            except ElasticError as error:
                raise type(error)("nein") from None

        return translated


FAULTS = [
    (LosesUpdates, "test_threads_lose_no_update"),
    (WinsOverAbsentKeys, "test_compare_set_writes_only_over_the_expected_version"),
    (WinsOverAbsentKeys, "test_any_history_agrees_with_a_dictionary"),
    (ForgetsTtls, "test_a_lease_without_refreshes_expires_for_every_client"),
    (ForgetsTtls, "test_one_lease_expires_while_another_is_refreshed"),
    (KeepsLeasesOfTheClosed, "test_close_ends_the_leases_of_this_client_only"),
    (LetsAnybodyRefresh, "test_only_the_owner_can_refresh_a_lease"),
    (
        RefreshesByWriting,
        "test_a_refreshed_lease_does_not_expire_and_a_refresh_is_not_a_change",
    ),
    (MissesWakeUps, "test_list_and_wait_miss_no_change"),
    (MissesWakeUps, "test_a_wait_does_not_block_other_threads"),
    (WakesAtTheEnd, "test_a_wait_does_not_block_other_threads"),
    (MissesDeletes, "test_a_wait_returns_true_for_an_earlier_change"),
    (MissesDeletes, "test_a_lease_without_refreshes_expires_for_every_client"),
    (MissesDeletes, "test_any_history_agrees_with_a_dictionary"),
    (LetsAnybodyRefresh, "test_any_history_agrees_with_a_dictionary"),
    (WaitsFromNowOn, "test_a_wait_returns_true_for_an_earlier_change"),
    (ListsInPieces, "test_a_list_is_a_snapshot"),
    (ListsPageByPage, "test_a_list_of_4_mib_is_complete_and_a_snapshot"),
    (ListsNoMoreThanAPage, "test_a_list_of_4_mib_is_complete_and_a_snapshot"),
    (ListsTheNewestFirst, "test_any_history_agrees_with_a_dictionary"),
    (DeletesEverything, "test_delete_returns_whether_it_removed_the_key"),
    (DeletesEverything, "test_any_history_agrees_with_a_dictionary"),
    (UsesVersionsAgain, "test_versions_increase_and_are_never_reused"),
]


class Contract(StoreContract):
    ttl = 0.1
    examples = 50


class Hasty(Contract):
    patience = 1.0


def play(contract: StoreContract, claim: str, make: Callable[[], MemoryStore], times: int) -> None:
    for _ in range(times):
        first = make()
        clients = itertools.chain([first], iter(first.client, None))
        getattr(contract, claim)(lambda clients=clients: next(clients))


@pytest.mark.parametrize(
    ("fault", "claim"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_contract_finds(fault: Callable[[], MemoryStore], claim: str) -> None:
    with pytest.raises((AssertionError, FutureTimeout, pytest.fail.Exception)):
        # On a busy machine, a change may not happen between the two steps of a faulty store.
        play(Hasty(), claim, fault, times=3)


@pytest.mark.parametrize(
    "claim",
    [
        "test_a_lease_without_refreshes_expires_for_every_client",
        "test_writing_a_leased_key_without_ttl_ends_the_lease",
        "test_only_the_owner_can_refresh_a_lease",
        "test_close_ends_waits_with_an_error",
    ],
)
def test_the_contract_accepts_other_error_messages(claim: str) -> None:
    play(Contract(), claim, OtherMessages, times=1)


def test_a_failed_assertion_shows_its_values() -> None:
    with pytest.raises(AssertionError, match="assert True is False"):
        Contract().test_a_missing_key_is_none(DeletesEverything)


@pytest.mark.parametrize("claim", sorted({claim for _, claim in FAULTS}))
def test_the_contract_finds_no_fault_in_a_correct_store(claim: str) -> None:
    play(Contract(), claim, MemoryStore, times=1)
