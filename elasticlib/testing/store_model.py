"""A store as a dictionary, in the dumbest way, and histories to compare a real one with.

A step is done on both; answers, contents and the growth of versions must agree.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ..stores.interface import ABSENT, Store

ODD_KEYS = (
    "a", "A", "/", "..", ".", "a/b", "a b", "a%2fb", "a\\b", "k.a", "lock", "~", "-", "ä", "日本",
    "\U0001f600", "\n", "*", "x" * 255, "y" * 1024, "ü" * 512, "x" * 254 + "z",
)  # fmt: skip

KEYS = st.sampled_from(["a", "b", "a/1", "a/2"])
VALUES = st.binary(max_size=20)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, VALUES),
        st.tuples(st.just("compare_set"), KEYS, VALUES, st.sampled_from(["now", "old", "absent"])),
        st.tuples(st.just("delete"), KEYS, st.sampled_from(["now", "old", "any"])),
        st.tuples(st.just("list"), st.sampled_from(["", "a", "a/", "b", "c"])),
    ),
    max_size=25,
)


class DictionaryModel:
    """What a store should answer, in the dumbest way."""

    def __init__(self, room: str) -> None:
        self._room = room
        self._there: dict[str, tuple[bytes, int]] = {}
        self._old: dict[str, int] = {}
        self._newest = 0

    def check(self, store: Store, verb: str, name: str, *rest: Any) -> None:
        """Do one step on the store and on the dictionary; they must agree."""
        key = self._room + name
        getattr(self, f"_{verb}")(store, key, *rest)
        entry = store.get(key)
        assert (entry and (entry.value, entry.version)) == self._there.get(key)

    def _set(self, store: Store, key: str, value: bytes) -> None:
        self._written(key, value, store.set(key, value).version)

    def _compare_set(self, store: Store, key: str, value: bytes, which: str) -> None:
        expected = ABSENT if which == "absent" else self._expected(key, which)
        outcome = store.compare_set(key, value, expected=expected)
        assert outcome.won == (expected == self._there.get(key, (b"", ABSENT))[1])
        if outcome.won:
            assert outcome.entry is not None
            self._written(key, value, outcome.entry.version)
        entry = outcome.entry
        assert (entry and (entry.value, entry.version)) == self._there.get(key)

    def _delete(self, store: Store, key: str, which: str) -> None:
        expected = None if which == "any" else self._expected(key, which)
        removes = key in self._there and expected in (None, self._there[key][1])
        assert store.delete(key, expected=expected) is removes
        if removes:
            self._old[key] = self._there.pop(key)[1]
            self._newest = store.list(key).version

    def _list(self, store: Store, prefix: str) -> None:
        found = [(e.key, (e.value, e.version)) for e in store.list(prefix).entries]
        assert found == sorted(i for i in self._there.items() if i[0].startswith(prefix))

    def _written(self, key: str, value: bytes, version: int) -> None:
        assert version > self._newest
        self._newest = version
        if key in self._there:
            self._old[key] = self._there[key][1]
        self._there[key] = (value, version)

    def _expected(self, key: str, which: str) -> int:
        if which == "old":
            return self._old.get(key, 10**9)
        return self._there.get(key, (b"", ABSENT))[1]
