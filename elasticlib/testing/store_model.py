"""A model of a store in a dictionary, and a state machine that compares a store with it.

Each step is done on the store and on the model. Results, contents, leases and versions must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from ..errors import LeaseLostError
from ..stores.interface import ABSENT, Entry, Store

EDGE_CASE_KEYS = (
    "a", "A", "/", "..", ".", "a/b", "a b", "a%2fb", "a\\b", "k.a", "lock", "~", "-", "ä", "日本",
    "\U0001f600", "\n", "*", "x" * 255, "y" * 1024, "ü" * 512, "x" * 254 + "z",
)  # fmt: skip

KEYS = st.sampled_from(["a", "b", "a/1", "a/2"])
PREFIXES = st.sampled_from(["", "a", "a/", "b", "c"])
VALUES = st.binary(max_size=20)
LONG_TTL_S = 1000.0  # ttl of a lease that does not expire during a test

_TEST_PREFIXES = (f"test{number}/" for number in itertools.count())


class DictionaryModel:
    """Expected contents of a store under the prefix of one test.

    Each public method with a store calls it, and checks the result against the model.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._entries: dict[str, tuple[bytes, int]] = {}
        self._owners: dict[str, int | None] = {}
        self._old_versions: dict[str, int] = {}
        self._changes: list[tuple[int, str]] = []

    def read(self, store: Store, key: str) -> None:
        entry = store.get(key)
        assert (entry and (entry.value, entry.version)) == self._entries.get(key)

    def set(self, store: Store, key: str, value: bytes, owner: int | None) -> None:
        ttl = None if owner is None else LONG_TTL_S
        entry = store.set(key, value, ttl=ttl)
        assert (entry.key, entry.value) == (key, value)
        self._record_write(store, entry, owner)

    def compare_set(self, store: Store, key: str, value: bytes, expected: int) -> None:
        outcome = store.compare_set(key, value, expected=expected)
        assert outcome.succeeded == (expected == self.version(key, "now"))
        if outcome.succeeded:
            assert outcome.entry is not None
            assert (outcome.entry.key, outcome.entry.value) == (key, value)
            self._record_write(store, outcome.entry, None)
        entry = outcome.entry
        assert (entry and (entry.value, entry.version)) == self._entries.get(key)

    def delete(self, store: Store, key: str, expected: int | None) -> None:
        is_removed = key in self._entries and expected in (None, self._entries[key][1])
        assert store.delete(key, expected=expected) is is_removed
        if is_removed:
            self._old_versions[key] = self._entries.pop(key)[1]
            self._record_change(store, key, store.list(key).version)

    def refresh(self, store: Store, key: str, version: int, owner: int) -> None:
        is_owned = version == self.version(key, "now") != ABSENT and self._owners[key] == owner
        try:
            store.refresh(key, version)
            succeeded = True
        except LeaseLostError:
            succeeded = False
        assert succeeded is is_owned

    def list(self, store: Store, prefix: str) -> None:
        found = [(e.key, (e.value, e.version)) for e in store.list(prefix).entries]
        assert found == sorted(i for i in self._entries.items() if i[0].startswith(prefix))

    def wait(self, store: Store, prefix: str, back: int) -> None:
        """Check that a wait notices each of the last `back` changes."""
        changes = self._changes[-back:]
        if changes:
            after = changes[0][0] - 1
            is_changed = any(key.startswith(prefix) for _, key in changes)
            assert store.wait(prefix, after=after, timeout=0.0) or not is_changed

    def version(self, key: str, which: str) -> int:
        """Return a version of the key.

        Args:
            key: the key.
            which: "now" for the current version, "old" for the one before the last change, and
                "absent" for ABSENT.
        """
        if which == "old":
            return self._old_versions.get(key, 10**9)
        return self._entries.get(key, (b"", ABSENT))[1] if which == "now" else ABSENT

    def _record_write(self, store: Store, entry: Entry, owner: int | None) -> None:
        key = entry.key
        self._record_change(store, key, entry.version)
        if key in self._entries:
            self._old_versions[key] = self._entries[key][1]
        self._entries[key] = (entry.value, entry.version)
        self._owners[key] = owner

    def _record_change(self, store: Store, key: str, version: int) -> None:
        assert version > (self._changes[-1][0] if self._changes else 0)
        self._changes.append((version, key))
        self.wait(store, key, back=1)


class StoreMachine(RuleBasedStateMachine):
    """Random operations of several clients of a store, which take turns."""

    def __init__(self, clients: Sequence[Store]) -> None:
        super().__init__()
        self._turns: Iterator[tuple[int, Store]] = itertools.cycle(enumerate(clients))
        self._clients = clients
        self._model = DictionaryModel(next(_TEST_PREFIXES))

    def _key(self, name: str) -> str:
        return self._model.prefix + name

    def _check_entry(self, key: str) -> None:
        """Check that every client reads the entry, and only the owner can refresh a lease."""
        for number, store in enumerate(self._clients):
            self._model.read(store, key)
            self._model.refresh(store, key, self._model.version(key, "now"), number)

    @rule(name=KEYS, value=VALUES, leased=st.booleans())
    def set(self, name: str, value: bytes, leased: bool) -> None:
        key = self._key(name)
        number, store = next(self._turns)
        self._model.set(store, key, value, number if leased else None)
        self._check_entry(key)

    @rule(name=KEYS, value=VALUES, which=st.sampled_from(["now", "old", "absent"]))
    def compare_set(self, name: str, value: bytes, which: str) -> None:
        key = self._key(name)
        _, store = next(self._turns)
        self._model.compare_set(store, key, value, self._model.version(key, which))
        self._check_entry(key)

    @rule(name=KEYS, which=st.sampled_from(["now", "old", "any"]))
    def delete(self, name: str, which: str) -> None:
        key = self._key(name)
        expected = None if which == "any" else self._model.version(key, which)
        self._model.delete(next(self._turns)[1], key, expected)
        self._check_entry(key)

    @rule(name=KEYS)
    def refresh(self, name: str) -> None:
        key = self._key(name)
        for number, store in enumerate(self._clients):
            self._model.refresh(store, key, self._model.version(key, "old"), number)

    @rule(prefix=PREFIXES)
    def list(self, prefix: str) -> None:
        self._model.list(next(self._turns)[1], self._key(prefix))

    @rule(prefix=PREFIXES, back=st.integers(1, 4))
    def wait(self, prefix: str, back: int) -> None:
        self._model.wait(next(self._turns)[1], self._key(prefix), back)
