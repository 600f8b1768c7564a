"""What a reader that is no node of the job sees of it: its state, members and live nodes.

A reader gets the few keys that it needs, and never lists the whole job. Of 10,000 nodes it decodes
only the four fields that it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from urllib.parse import unquote

import attrs

from ..errors import RendezvousConfigError
from ..stores.interface import Entry, Store
from .membership import LeaderStatus, MembershipState
from .rank_assignment import num_shards
from .record_codec import decode, parse
from .store_layout import JOBS_PREFIX, StoreKeys, decode_state

MAX_READS = 3  # of a state whose members are replaced while they are read


@attrs.frozen
class SeenNode:
    """A node as a reader sees it. A `NodeRecord` has the same fields, and more."""

    id: str
    host: str
    slots: int
    drain_reason: str = ""  # why it is about to leave, empty if it is not


@attrs.frozen
class JobOverview:
    """A job as a reader sees it."""

    state: MembershipState | None  # None: no generation has been decided yet
    members: tuple[SeenNode, ...] = ()  # by group rank; empty if they are not known
    live_nodes: tuple[SeenNode, ...] = ()  # whose lease is valid, the last one to write at the end

    @property
    def member_ids(self) -> frozenset[str]:
        return frozenset(node.id for node in self.members)


def read_overview(store: Store, run_id: str) -> JobOverview:
    """Read a job: its state, the members of its generation, and its live nodes.

    Raises:
        StoreError: the store cannot be read.
        RendezvousConfigError: the job was written by another version.
    """
    keys = StoreKeys(run_id)
    state: MembershipState | None = None
    members: tuple[SeenNode, ...] = ()
    for _ in range(MAX_READS):
        entry = store.get(keys.state)
        state = None if entry is None else decode_state(entry.value)
        if state is None or not state.membership_id:
            break
        shards = store.list(keys.shard(state.membership_id)).entries
        if len(shards) == num_shards(state.num_nodes):
            members = _members(shards)
            break
        # The next generation has formed meanwhile, and its leader has deleted these shards.
    return JobOverview(state, members, live_nodes_of(store, run_id))


def live_nodes_of(store: Store, run_id: str) -> tuple[SeenNode, ...]:
    """Return the live nodes of a job.

    Raises:
        StoreError: the store cannot be read.
    """
    prefix = StoreKeys(run_id).node()
    entries = sorted(store.list(prefix).entries, key=lambda entry: entry.version)
    nodes = ((entry.key, _node(_parsed(entry))) for entry in entries)
    return tuple(node for key, node in nodes if node is not None and key == f"{prefix}{node.id}")


def live_ids_of(store: Store, run_id: str) -> set[str]:
    """Return the ids of the live nodes of a job.

    Raises:
        StoreError: the store cannot be read.
    """
    prefix = StoreKeys(run_id).node()
    return {entry.key.removeprefix(prefix) for entry in store.list(prefix).entries}


def read_leader_status(store: Store, run_id: str) -> LeaderStatus:
    """Return why the next generation has not formed yet, as far as it is known.

    Raises:
        StoreError: the store cannot be read.
    """
    entry = store.get(StoreKeys(run_id).leader_status)
    try:
        note = None if entry is None else decode(LeaderStatus, entry.value, "the note")
    except RendezvousConfigError:
        note = None  # Any client of the store can write it, and the leader writes it again.
    return note or LeaderStatus()


def jobs_in(store: Store) -> list[str]:
    """Return the ids of the jobs whose nodes have used this store.

    Raises:
        StoreError: the store cannot be read.
    """
    entries = store.list(JOBS_PREFIX).entries
    return [unquote(entry.key.removeprefix(JOBS_PREFIX)) for entry in entries]


def has_leader(store: Store, run_id: str) -> bool:
    """Return whether a node of the job leads it, as in any job with a live node.

    Raises:
        StoreError: the store cannot be read.
    """
    return store.get(StoreKeys(run_id).leader) is not None


def _parsed(entry: Entry) -> object:
    try:
        return parse(entry.value, "a record")
    except RendezvousConfigError:
        return None


def _node(raw: object) -> SeenNode | None:
    """Return a node by its JSON form; None if that is not valid."""
    if not isinstance(raw, dict):
        return None
    texts = raw.get("id"), raw.get("host"), raw.get("drain_reason")
    slots = raw.get("slots")
    if not all(type(text) is str for text in texts) or type(slots) is not int:
        return None
    return SeenNode(raw["id"], raw["host"], slots, raw["drain_reason"])


def _members(shards: Iterable[Entry]) -> tuple[SeenNode, ...]:
    """Return the members by rank; none if a record is not valid."""
    members: dict[int, SeenNode] = {}
    for rank, node in (row for shard in shards for row in _rows(_parsed(shard))):
        if node is None or rank in members:
            return ()
        members[rank] = node
    return tuple(members[rank] for rank in sorted(members))


def _rows(shard: object) -> Iterator[tuple[int, SeenNode | None]]:
    for row in shard if isinstance(shard, list) else ():
        has_form = isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict)
        rank = row[1].get("group_rank") if has_form else None
        yield (rank, _node(row[0])) if type(rank) is int else (-1, None)
