"""What every store promises: a small, strongly consistent key-value store for one job.

The contract, in prose. `elasticlib.testing.StoreContract` is the same contract as code; a store
of your own subclasses `Store`, and its test subclasses the suite.

* Keys are non-empty strings without NUL, at most 1,024 bytes in UTF-8. Values are bytes.
* Every change (a write, a delete, the end of a lease) gets the next **version** of the whole
  store, a positive integer. An entry carries the version of the write that made it. Versions
  grow and are never reused, also not after a delete.
* Reads and writes are linearizable: whoever reads after a write has returned sees it.
* A missing key answers at once. Nothing blocks for ever: `wait` has a timeout, and each other
  call ends within bounds that follow from the store's own, which its error names.
* `compare_set` says whether *this* call won, and what is there now; exactly one of several
  racing callers that expect the same version wins.
* A **lease** is a key written with a `ttl`. Its owner calls `refresh`, which is no change and
  wakes nobody. An unrefreshed lease ends after about its ttl, for everyone at once: nobody sees
  it afterwards, its owner's next `refresh` raises `LeaseLostError`, and waiters wake. It never ends
  early because some clock was wrong, or because the *store* stood still for a while. A store
  whose clients hold connections may end a lease when its owner's connection ends. Any write to
  the key replaces the lease: with a `ttl` by a new one, without by a plain key.
* `list` is a snapshot: the entries and the version at which they were read. Listings of up to 4 MiB
  succeed. A store may raise StoreRejectedError for a longer one.
* `wait(prefix, after=v)` returns True as soon as anything under the prefix has changed since
  version v, deletes and ended leases included, be it before the call or during it. It may return
  True without a cause; it never misses one. To watch: `list`, act, `wait` past the list's
  version, and again.
* A store may be used by several threads at once: one that waits does not hold up the others.
* In a child that was forked the copy of a client is another client: each of its calls works, with
  leases of its own, or raises `StoreConnectionError` (one of a store that is in its parent's
  memory, or of a library that does not bear forks). It never hangs, whatever the parent's threads
  were doing, and neither its calls, its `close` nor its end touch the parent's client or its
  leases.
* Failures: `StoreConnectionError` (not reached, or lost with the answer unknown: read again),
`StoreTimeoutError`, `StoreRejectedError` (the store said no), `LeaseLostError`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from .key_space import ABSENT as ABSENT
from .key_space import CompareSetResult as CompareSetResult
from .key_space import Entry as Entry
from .key_space import Listing as Listing
from .key_space import WatchResult as WatchResult
from .key_space import check_key as check_key
from .key_space import check_ttl as check_ttl

if TYPE_CHECKING:
    from typing_extensions import Self


class Store(abc.ABC):
    """A key-value store with versions, compare-and-set, leases and waiting."""

    @abc.abstractmethod
    def get(self, key: str) -> Entry | None:
        """What stands at `key`, or None at once."""

    @abc.abstractmethod
    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        """Write, whatever was there; with `ttl` (seconds) as a lease that `refresh` keeps."""

    @abc.abstractmethod
    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        """Write only if the key's version is `expected` (`ABSENT` for no such key)."""

    @abc.abstractmethod
    def delete(self, key: str, *, expected: int | None = None) -> bool:
        """Remove the key (only at version `expected`, if given); whether it was removed."""

    @abc.abstractmethod
    def refresh(self, key: str, version: int) -> None:
        """Keep the lease that was written at `version` alive for another ttl.

        Raises:
            LeaseLostError: the key is gone, was replaced, is no lease, or is another client's.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> Listing:
        """All entries whose key starts with `prefix` (`""` for all), as of one moment."""

    @abc.abstractmethod
    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        """Block until something under `prefix` has changed past version `after`.

        True when it has (or, rarely, may have); False when `timeout` seconds went by without.
        """

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> bool:
        """Like `wait`, without a thread that waits: `callback(True)` is called once, from whatever
        thread, when something has changed, or `callback(False)` when that can no longer be told.

        with_listing: `callback` may be given what `list(prefix)` would have answered then, in place
        of True. It must not block. False, and nothing is called: this store has only `wait` to
        offer.
        """
        del prefix, after, callback, with_listing
        return False

    def try_other_endpoints(self, accept: Callable[[Store, bool], bool]) -> bool:
        """Go to another place where this store is served, if it has several and one is accepted.

        `accept(store, earlier)` is asked of each; earlier: it comes before this one in the list.
        True if we went: what was read or leased here then counts for nothing. Called when a
        job's nodes do not find each other where they are.
        """
        del accept
        return False

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Let go of connections and end this client's leases; calls in flight end with an error.

        Closing twice is harmless.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
