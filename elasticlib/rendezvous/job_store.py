"""The store of a job as one node uses it: its leases, and a copy of what it knows to be there.

Each change gets the next version of the whole store. So if a write of this node has the version
that follows that of its copy, no other client has written in between, and the copy with this write
is what a listing would show at that moment. The node then reads its copy instead of the store. A
single write of another client makes a gap in the versions, and the next read lists the store again.
"""

from __future__ import annotations

import bisect

from ..errors import LeaseLostError
from ..stores.interface import ABSENT, Entry, Listing, Store


class JobStore:
    """The requests of one node to the store. Not thread-safe. Each may raise a StoreError.

    Args:
        store: The store of the job.
        ttl: Seconds after which the leases of this node expire.
    """

    def __init__(self, store: Store, ttl: float) -> None:
        self._store = store
        self._ttl = ttl
        self._leases: dict[str, int] = {}  # the version of each leased key
        self._prefix = ""  # of the copy
        self._copy: Listing | None = None  # the last listing, with the writes that followed on it

    # -- reading -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the copy.

        A node does so at the beginning of each turn. Over a longer time, the store may have been
        replaced by an empty one, whose versions could continue those of the copy by chance.
        """
        self._copy = None

    def copy(self, prefix: str) -> Listing | None:
        """Return what a listing would have shown at the last write, if that is known."""
        return self._copy if self._prefix == prefix else None

    def list(self, prefix: str) -> Listing:
        """List a prefix, and keep a copy of it."""
        listing = self._store.list(prefix)
        self.keep(prefix, listing)
        return listing

    def keep(self, prefix: str, listing: Listing) -> None:
        """Keep a copy of a listing."""
        self._prefix, self._copy = prefix, listing

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key, or None."""
        return self._store.get(key)

    # -- writing -----------------------------------------------------------------------------------

    def set(self, key: str, value: bytes, *, is_leased: bool = False) -> None:
        """Write a key, as a lease of this node if `is_leased`."""
        entry = self._store.set(key, value, ttl=self._ttl if is_leased else None)
        self._note(entry, is_leased)

    def compare_set(
        self, key: str, value: bytes, *, expected: int, is_leased: bool = False
    ) -> Entry | None:
        """Write a key if it has the expected version. Return the new entry, or None."""
        ttl = self._ttl if is_leased else None
        written = self._store.compare_set(key, value, expected=expected, ttl=ttl)
        if not written.succeeded or written.entry is None:
            self.forget()
            return None
        self._note(written.entry, is_leased)
        return written.entry

    def delete(self, key: str, expected: int | None = None) -> None:
        """Delete a key, if it has the expected version."""
        self.forget()  # The version of a deletion is not known.
        self._store.delete(key, expected=expected)

    def _note(self, entry: Entry, is_leased: bool) -> None:
        if is_leased:
            self._leases[entry.key] = entry.version
        else:
            self._leases.pop(entry.key, None)
        copy = self._copy
        if copy is None or entry.version != copy.version + 1:
            self.forget()
            return
        entries = copy.entries
        if entry.key.startswith(self._prefix):
            at = bisect.bisect_left(entries, entry.key, key=lambda one: one.key)
            is_new = at == len(entries) or entries[at].key != entry.key
            entries = (*entries[:at], entry, *entries[at + (not is_new) :])
        self._copy = Listing(entries, entry.version)

    # -- leases ------------------------------------------------------------------------------------

    def lease_of(self, key: str) -> int:
        """Return the version at which this node wrote a lease; `ABSENT` without one."""
        return self._leases.get(key, ABSENT)

    def refresh(self, key: str) -> bool:
        """Refresh a lease of this node. Return False if it has none, or has lost it."""
        if key not in self._leases:
            return False
        try:
            self._store.refresh(key, self._leases[key])
        except LeaseLostError:
            del self._leases[key]
            return False
        return True

    def delete_leases(self) -> None:
        """End all leases of this node now."""
        leases, self._leases = self._leases, {}
        for key, version in leases.items():
            self.delete(key, version)
