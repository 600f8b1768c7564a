"""The keys and values of a job in its store.

All nodes watch the keys under `head/`, whose number and size do not depend on the number of nodes.
Only the leader reads the other keys: leased records of live nodes, the members of a generation in
shards, and which members have finished or left.

All nodes of a job run the same version: a node that reads a state of another format raises
RendezvousConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from urllib.parse import quote

from ..errors import RendezvousConfigError
from ..stores.key_space import Entry, Listing
from .membership import JobPhase, Leader, Membership, MembershipState, NodeRecord, with_members
from .rank_assignment import AssignedNode, RankAssignment, num_shards
from .record_codec import decode as decode
from .record_codec import encode as encode
from .record_codec import fields_of, from_json, parse

FORMAT = 7
FORMAT_REMEDY = "start all nodes with the same version of elasticlib"


class StoreKeys:
    """The keys of one job. `run_id` may be any text.

    If the membership id or node id is omitted, a method returns the common prefix of its keys.
    """

    def __init__(self, run_id: str) -> None:
        self.job_prefix = f"{quote(run_id, safe='')}/"  # prefix of all keys of the job
        self.watched_prefix = f"{self.job_prefix}head/"  # prefix of the keys that all nodes watch
        self.state = f"{self.watched_prefix}membership"
        self.leader = f"{self.watched_prefix}leader"  # leased by the leader
        # The last state of a job that the store has lost, as its nodes remember it.
        self.remembered_state = f"{self.watched_prefix}remembered"
        self.leader_status = f"{self.job_prefix}leader_status"

    def master_endpoint(self, membership_id: str = "") -> str:
        """The endpoint of torch's store, which rank 0 of the generation writes."""
        return f"{self.watched_prefix}store_endpoint/{membership_id}"

    def node(self, node_id: str = "") -> str:
        return f"{self.job_prefix}node/{node_id}"

    def shard(self, membership_id: str = "", number: int | str = "") -> str:
        return self._of_generation("members", membership_id, number)

    def finished(self, membership_id: str = "", node_id: str = "") -> str:
        """The key that a member writes when its workers have succeeded."""
        return self._of_generation("finished", membership_id, node_id)

    def left(self, membership_id: str = "", node_id: str = "") -> str:
        """The key that a node writes when it leaves its generation on purpose."""
        return self._of_generation("left", membership_id, node_id)

    def exchange_prefix(self, membership_id: str = "") -> str:
        """The prefix of the keys through which the nodes of a generation exchange messages."""
        return self._of_generation("exchange", membership_id)

    def _of_generation(self, kind: str, membership_id: str, rest: int | str = "") -> str:
        prefix = f"{self.job_prefix}{kind}/"
        return f"{prefix}{membership_id}/{rest}" if membership_id else prefix


class JobListing:
    """The content of one listing of a job, or of its watched keys."""

    def __init__(self, keys: StoreKeys, listing: Listing) -> None:
        self._keys = keys
        self._entries = {entry.key: entry for entry in listing.entries}
        self.version = listing.version
        self.state_entry = self._entries.get(keys.state)
        self.state = None if self.state_entry is None else decode_state(self.state_entry.value)
        self.leader_entry = self._entries.get(keys.leader)
        self.leader = None
        if self.leader_entry is not None:
            self.leader = decode(Leader, self.leader_entry.value, "the leader")
        self.remembered_entry = self._entries.get(keys.remembered_state)

    @property
    def remembered_state(self) -> MembershipState | None:
        entry = self.remembered_entry
        return None if entry is None else decode_state(entry.value)

    @property
    def membership_id(self) -> str:
        return "" if self.state is None else self.state.membership_id

    @property
    def phase(self) -> JobPhase | None:
        return None if self.state is None else self.state.phase

    @property
    def master_endpoint(self) -> str | None:
        """The endpoint of torch's store, or None until rank 0 serves that store."""
        entry = self._entries.get(self._keys.master_endpoint(self.membership_id))
        return None if entry is None else entry.value.decode()

    def membership(self, known: Membership | None) -> tuple[Membership | None, bool]:
        """Return the state with its members.

        Args:
            known: a membership that was read before. If it has the same id, its members are used
                and no shard is decoded.

        Returns:
            The membership, or None if the job has none; and whether all of its members are known.
        """
        state = self.state
        if state is None:
            return None, False
        if not state.membership_id:
            return with_members(state, ()), True
        shards = [
            entry
            for number in range(num_shards(state.num_nodes))
            if (entry := self._entries.get(self._keys.shard(state.membership_id, number)))
        ]
        if len(shards) < num_shards(state.num_nodes):
            return with_members(state, ()), False
        if known is not None and known.membership_id == state.membership_id:
            return with_members(state, known.members), True
        rows = [row for entry in shards for row in decode_shard(entry.value)]
        rows.sort(key=lambda row: row[1].group_rank)
        return with_members(state, (node for node, _ in rows)), True

    def live_nodes(self) -> tuple[NodeRecord, ...]:
        """Return the nodes whose lease is valid, most recently written record last."""
        return self.node_records()[0]

    def node_records(self) -> tuple[tuple[NodeRecord, ...], dict[str, str]]:
        """Return the live nodes, and the error of each record that cannot be decoded, by key.

        An invalid record, such as one of another version, must not end the job of other nodes.
        """
        nodes, errors = [], {}
        for entry in sorted(self._under(self._keys.node()), key=lambda entry: entry.version):
            try:
                nodes.append(decode_node(entry.value))
            except RendezvousConfigError as error:
                errors[entry.key] = str(error)
        return tuple(nodes), errors

    def finished_ids(self) -> frozenset[str]:
        """Return the members of the current generation that have finished."""
        return self._ids(self._keys.finished)

    def left_ids(self) -> frozenset[str]:
        """Return the members of the current generation that have left on purpose."""
        return self._ids(self._keys.left)

    def _ids(self, key: Callable[[str], str]) -> frozenset[str]:
        if not self.membership_id:
            return frozenset()
        prefix = key(self.membership_id)
        return frozenset(entry.key.removeprefix(prefix) for entry in self._under(prefix))

    def master_keys(self) -> tuple[str, ...]:
        """Return the keys of the endpoints of torch's store, of all generations."""
        return tuple(entry.key for entry in self._under(self._keys.master_endpoint()))

    def stale_keys(self, membership_id: str) -> tuple[str, ...]:
        """Return the keys of all generations except this one, and that of the remembered state."""
        keys = self._keys
        kinds = (keys.finished, keys.left, keys.exchange_prefix, keys.shard)
        current = tuple(kind(membership_id) for kind in kinds)
        stale = [
            entry.key
            for kind in kinds
            for entry in self._under(kind(""))
            if not entry.key.startswith(current)
        ]
        master_key = keys.master_endpoint(membership_id)
        stale.extend(key for key in self.master_keys() if key != master_key)
        if self.remembered_entry is not None:
            stale.append(keys.remembered_state)
        return tuple(stale)

    def _under(self, prefix: str) -> Iterable[Entry]:
        return (entry for key, entry in self._entries.items() if key.startswith(prefix))


def encode_state(state: MembershipState) -> bytes:
    """Encode a state, or the state of a membership, without its members."""
    return encode({"format": FORMAT, **fields_of(state, MembershipState)})


@lru_cache(maxsize=16)
def decode_state(data: bytes) -> MembershipState:
    """Decode a state. Raises RendezvousConfigError if it is invalid or of another format."""
    raw = parse(data, "the membership")
    found = raw.pop("format", None) if isinstance(raw, dict) else None
    if found != FORMAT:
        raise RendezvousConfigError(
            f"the job's membership has format {found!r:.80}, this elasticlib reads only format "
            f"{FORMAT}: {FORMAT_REMEDY}"
        )
    return from_json(MembershipState, raw, "the membership")


@lru_cache(maxsize=4096)  # the leader decodes all records at each poll, and few have changed
def decode_node(data: bytes) -> NodeRecord:
    """Decode the record of a node. Raises RendezvousConfigError if it is invalid."""
    return decode(NodeRecord, data, "a node")


def encode_shard(rows: Iterable[AssignedNode]) -> bytes:
    """Encode members of a generation with their rank assignments."""
    return encode(list(rows))


def decode_shard(data: bytes) -> tuple[AssignedNode, ...]:
    """Decode a shard. Raises RendezvousConfigError if it is invalid."""
    return tuple(_decode_row(row) for row in _raw_rows(data))


def find_assignment(data: bytes, node_id: str) -> RankAssignment | None:
    """Return the assignment of one node in a shard, without decoding the other rows."""
    for row in _raw_rows(data):
        if isinstance(row[0], dict) and row[0].get("id") == node_id:
            return _decode_row(row)[1]
    return None


def _raw_rows(data: bytes) -> list[list[object]]:
    rows = parse(data, "a shard")
    if not isinstance(rows, list) or any(not isinstance(r, list) or len(r) != 2 for r in rows):
        raise RendezvousConfigError("a shard in the store is not a list of nodes and assignments")
    return rows


def _decode_row(row: list[object]) -> AssignedNode:
    return from_json(NodeRecord, row[0], "a member"), from_json(
        RankAssignment, row[1], "an assignment"
    )
