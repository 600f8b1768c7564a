"""A long listing goes out page by page, and all its pages are of one moment.

What is left of a listing waits here for the client that asked for it: references to entries, which
cost the store only what has been written over since. All together they are bounded; beyond, the
oldest is forgotten, and its client begins anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from ..errors import StoreRefused
from .state import Entry, Listing
from .wire import Frame

PAGE_BYTES = 1024 * 1024
"""Of one page, unless a single entry has more: others are answered between two pages."""


@attrs.frozen
class _Rest:
    client: int
    version: int
    entries: Sequence[Entry]
    bytes: int


class Pages:
    """What is left of each client's listings.

    frame_bytes: what one frame may carry of a listing. held_bytes: of all that waits here.
    """

    def __init__(self, frame_bytes: int, held_bytes: int) -> None:
        self._frame_bytes = frame_bytes
        self._page_bytes = min(PAGE_BYTES, frame_bytes)
        self._held_bytes = held_bytes
        self._numbers = itertools.count(1)
        self._rests: dict[int, _Rest] = {}
        self._held = 0

    def is_one_page(self, listing: Listing) -> bool:
        """Whether nothing would be left of it to ask for."""
        return sum(map(_size, listing.entries)) <= self._page_bytes

    def first(self, client: int, listing: Listing) -> Frame:
        """The first page. Raises StoreRefused for an entry that fits no frame."""
        return self._page(client, listing.version, listing.entries)

    def next(self, client: int, number: int) -> Frame:
        """The next page of what was left under that number; `absent` if it was forgotten."""
        rest = self._rests.get(number)
        if rest is None or rest.client != client:
            return Frame("absent", 0)
        self._forget(number)
        return self._page(client, rest.version, rest.entries)

    def depart(self, client: int) -> None:
        """The client is gone: nobody will ask for what is left of its listings."""
        for number in [n for n, rest in self._rests.items() if rest.client == client]:
            self._forget(number)

    def _page(self, client: int, version: int, entries: Sequence[Entry]) -> Frame:
        end = self._page_end(entries)
        page, left = entries[:end], entries[end:]
        number = self._hold(_Rest(client, version, left, sum(map(_size, left)))) if left else None
        rows: list[Any] = [[e.key, e.version, len(e.value)] for e in page]
        value = b"".join(entry.value for entry in page)
        return Frame("listing", 0, {"version": version, "rows": rows, "rest": number}, value)

    def _page_end(self, entries: Sequence[Entry]) -> int:
        size = 0
        for count, entry in enumerate(entries):
            size += _size(entry)
            if count and size > self._page_bytes:
                return count
            if size > self._frame_bytes:
                raise StoreRefused(
                    f"an answer is at most {self._frame_bytes} bytes, and what stands at "
                    f"{entry.key!r} takes up to {size}"
                )
        return len(entries)

    def _hold(self, rest: _Rest) -> int:
        number = next(self._numbers)
        self._rests[number] = rest
        self._held += rest.bytes
        while self._held > self._held_bytes and len(self._rests) > 1:
            self._forget(next(iter(self._rests)))
        return number

    def _forget(self, number: int) -> None:
        self._held -= self._rests.pop(number).bytes


def _size(entry: Entry) -> int:
    # Twelve bytes are the longest escape of one character in JSON.
    return 12 * len(entry.key) + 50 + len(entry.value)
