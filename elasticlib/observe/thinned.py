"""A bounded choice of many things that come in order: all of them while they are few, and evenly
spread ones when they are many."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Keeps every one up to `limit`; then each second one, then each fourth, and so on. The first
    and the last are always there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._every = 1
        self._kept: list[Item] = []
        self._last: list[Item] = []
        self.seen = 0

    def add(self, item: Item) -> None:
        if self._limit <= 0:
            return
        if self.seen % self._every == 0:
            self._kept.append(item)
            self._last = []
        else:
            self._last = [item]
        self.seen += 1
        if len(self._kept) > self._limit:
            if not len(self._kept) % 2:
                self._last = self._kept[-1:]
            self._kept = self._kept[::2]
            self._every *= 2

    @property
    def items(self) -> tuple[Item, ...]:
        return (*self._kept, *self._last)

    @property
    def left_out(self) -> int:
        """How many came that are not kept."""
        return self.seen - len(self.items)
