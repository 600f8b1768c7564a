"""Contract of a store: a small, strongly consistent key-value store for one job.

A store is a subclass of `Store`. `elasticlib.testing.StoreContract` tests these rules:

* Keys are non-empty strings without NUL, at most 1,024 bytes in UTF-8. Values are bytes.
* Each change (a write, a delete, the expiry of a lease) gets the next **version** of the whole
  store, a positive integer. An entry has the version of its last write. Versions increase and are
  never reused.
* Reads and writes are linearizable: a read after a write has returned sees that write.
* A missing key is None at once. Each call ends within a time that follows from the timeouts of the
  store; the error names them.
* If several callers race with the same expected version, exactly one `compare_set` succeeds.
* A **lease** is a key that was written with a `ttl` in seconds. It expires about `ttl` after its
  last refresh, for all clients at the same moment. An expiry is a change: it wakes waits. A refresh
  is not a change. A lease never expires early because a clock was set or the store was paused. A
  store may end a lease when the connection of its owner ends. A write to the key replaces the
  lease, with `ttl` by a new lease and without by a plain key.
* `list` is a snapshot: the entries and the version at which they were read. Listings of up to 4 MiB
  succeed. A store may raise StoreRejectedError for a longer one.
* `wait(prefix, after=v)` returns True as soon as a key under the prefix has changed since version
  v, before the call or during it. It can return True without a change, and it never misses one. To
  follow a prefix: list it, act, wait for a change after the version of the listing, and repeat.
* Several threads can use a client at the same time. A wait does not block other threads.
* In a forked child, the copy of a client is another client, which works or raises
  StoreConnectionError. It never blocks for ever, and it does not affect the client of the parent or
  its leases.
* Errors are `StoreConnectionError`, `StoreTimeoutError`, `StoreRejectedError` and `LeaseLostError`.
  After the first two, the caller does not know whether a write took place.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ..clock import monotonic, sleep
from .key_space import ABSENT as ABSENT
from .key_space import CompareSetResult as CompareSetResult
from .key_space import Entry as Entry
from .key_space import Listing as Listing
from .key_space import WatchResult as WatchResult
from .key_space import check_key as check_key
from .key_space import check_ttl as check_ttl

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..event_loop import EventLoop

POLL_INTERVAL_S = 0.02  # of the default `wait`

CancelWatch = Callable[[], None]  #: what `Store.watch` returns


class Store(abc.ABC):
    """A client of a key-value store with versions, compare-and-set, leases and waits.

    A subclass implements `get`, `compare_set`, `delete`, `refresh` and `list`. It can override the
    other methods, which work with these, to save round trips.
    """

    event_loop: EventLoop | None = None
    """The loop that reads this client's connections and calls its callbacks, or None. A thread that
    waits for changes can run the loop itself, as the rendezvous thread does. With None, callbacks
    come from other threads."""

    @abc.abstractmethod
    def get(self, key: str) -> Entry | None:
        """Return the entry at `key`, or None if the key does not exist."""

    @abc.abstractmethod
    def compare_set(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> CompareSetResult:
        """Write the key only if its version is `expected`.

        Args:
            key: The key to write.
            value: Its new value.
            expected: The version that the key must have; `ABSENT` if it must not exist.
            ttl: Seconds after which the key expires as a lease of this client, or None.

        Returns:
            Whether this call has written, and the entry at the key now.
        """

    @abc.abstractmethod
    def delete(self, key: str, *, expected: int | None = None) -> bool:
        """Remove the key, if its version is `expected` or if `expected` is None.

        Returns:
            True if this call has removed the key.
        """

    @abc.abstractmethod
    def refresh(self, key: str, version: int) -> None:
        """Start the ttl of a lease again.

        Args:
            key: The key of the lease.
            version: The version at which this client wrote the lease.

        Raises:
            LeaseLostError: The lease has expired, was deleted or replaced, or belongs to another
                client.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> Listing:
        """Return all entries whose key starts with `prefix`, sorted by key, as a snapshot.

        Raises:
            StoreRejectedError: The listing is longer than the store supports.
        """

    def set(self, key: str, value: bytes, *, ttl: float | None = None) -> Entry:
        """Write the key without a condition.

        Args:
            key: The key to write.
            value: Its new value.
            ttl: Seconds after which the key expires as a lease of this client, or None.

        Returns:
            The new entry.
        """
        result = self.compare_set(key, value, expected=ABSENT, ttl=ttl)
        while not result.succeeded or result.entry is None:
            version = ABSENT if result.entry is None else result.entry.version
            result = self.compare_set(key, value, expected=version, ttl=ttl)
        return result.entry

    def wait(self, prefix: str, *, after: int, timeout: float) -> bool:
        """Block until a key under `prefix` has changed since version `after`.

        The default compares the version of the whole store every 20 ms, because a listing does not
        show which keys were deleted. So it may also return True after a change of other keys.

        Args:
            prefix: The prefix of the keys; "" for all keys.
            after: The version since which changes count, usually that of a listing.
            timeout: Seconds to wait.

        Returns:
            True if there may be a change, False if there was none within the timeout.
        """
        deadline = monotonic() + timeout
        while self.list(prefix).version == after:
            left_s = deadline - monotonic()
            if left_s <= 0:
                return False
            sleep(min(left_s, POLL_INTERVAL_S))
        return True

    def watch(
        self,
        prefix: str,
        *,
        after: int,
        callback: Callable[[WatchResult], None],
        with_listing: bool = False,
    ) -> CancelWatch | None:
        """Call `callback` once when a key under `prefix` has changed since version `after`.

        The callback runs in any thread, and must not block. Its argument is True after a change,
        and False if the client lost the watch, for example with its connection. A watch that is not
        needed any more must be cancelled: until then, it occupies memory of the store, and keeps
        the objects of the callback alive.

        Args:
            prefix: The prefix of the keys.
            after: The version since which changes count.
            callback: The function to call.
            with_listing: The argument of the callback can also be the new listing, if it is short.

        Returns:
            A function that cancels the watch, for any thread and any number of calls. It raises no
            StoreError. A call of the callback that is in progress meanwhile may still end
            afterwards. None if this store only offers `wait`, which is the default: the callback is
            not called then.
        """
        del prefix, after, callback, with_listing
        return None

    def try_other_endpoints(self, accept: Callable[[Store, bool], bool]) -> bool:
        """Move to another endpoint at which this store is served, if one is accepted.

        The rendezvous calls this if the nodes of a job do not meet at the current endpoint. What
        was read or leased there does not count after a move.

        Args:
            accept: Is called with a client of each endpoint, and with True if that endpoint is
                before the current one in the list. Returns True to move there.

        Returns:
            True if this client has moved; by default False.
        """
        del accept
        return False

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Close connections and end the leases of this client. Calls in flight raise an error.

        Closing a closed store does nothing.
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
