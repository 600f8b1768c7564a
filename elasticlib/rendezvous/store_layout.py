"""The keys and values of a job in its store.

All nodes watch the keys under `head/`, whose number and size do not depend on the number of nodes.
Only the leader reads the other keys: leased records of live nodes, the members of a generation in
shards, and which members have finished or left.

Any client of the store can write anything under these keys. An entry that cannot be decoded is no
exception but a value: `JobListing.errors` has it, and the listing is read as if the entry did not
exist, or as if the state had not changed. A node replaces such an entry if it knows better.

All nodes of a job run the same version: a node that finds a state of another format when it starts
raises OtherFormatError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar
from urllib.parse import quote

import attrs

from ..endpoint import split_endpoint
from ..errors import ConfigError, RendezvousConfigError, require_not_none
from ..stores.key_space import Entry, Listing
from .blame import FailureDetails
from .membership import JobPhase, Leader, Membership, MembershipState, NodeRecord, with_members
from .rank_assignment import AssignedNode, RankAssignment, num_shards
from .record_codec import decode as decode
from .record_codec import encode as encode
from .record_codec import fields_of, from_json, parse

FORMAT = 8
FORMAT_REMEDY = "start all nodes with the same version of elasticlib"
# The names of the jobs of a store have one key each. Ids of jobs are quoted, so neither this prefix
# nor `StoreKeys.observers` is the beginning of a job's own keys.
JOBS_PREFIX = "??jobs/"

Value = TypeVar("Value")


class OtherFormatError(RendezvousConfigError):
    """The state of the job was written by another version of elasticlib."""


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
        # The keys of observers: the leader, which reads all keys of the job, never reads these.
        self.observers = f"?{self.job_prefix}"
        self.job_name = f"{JOBS_PREFIX}{self.job_prefix[:-1]}"  # written by each new leader

    def owns(self, key: str) -> bool:
        """Return whether a key belongs to the job, that of an observer included."""
        return key.startswith((self.job_prefix, self.observers)) or key == self.job_name

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

    def detail(self, membership_id: str = "", number: int | str = "") -> str:
        """The key of the details of a failure, by the rank of its node modulo a limit."""
        return self._of_generation("detail", membership_id, number)

    def exchange_prefix(self, membership_id: str = "") -> str:
        """The prefix of the keys through which the nodes of a generation exchange messages."""
        return self._of_generation("exchange", membership_id)

    def _of_generation(self, kind: str, membership_id: str, rest: int | str = "") -> str:
        prefix = f"{self.job_prefix}{kind}/"
        return f"{prefix}{membership_id}/{rest}" if membership_id else prefix


class JobListing:
    """The content of one listing of a job, or of its watched keys.

    Args:
        keys: The keys of the job.
        listing: The listing.
        last_state: The state that was read before. It is used if the entry cannot be decoded.
    """

    def __init__(
        self, keys: StoreKeys, listing: Listing, last_state: MembershipState | None = None
    ) -> None:
        self._keys = keys
        self._entries = {entry.key: entry for entry in listing.entries}
        self.version = listing.version
        self.errors: dict[str, RendezvousConfigError] = {}  # of entries that were read, by key
        self.state_entry = self._entries.get(keys.state)
        self.state = self._read(self.state_entry, decode_state)
        self.state_error = self.errors.get(keys.state)
        if self.state_error is not None:
            self.state = last_state
        self.membership_id = "" if self.state is None else self.state.membership_id
        self.phase = None if self.state is None else self.state.phase
        self.is_active = self.phase is JobPhase.ACTIVE
        self.leader_entry = self._entries.get(keys.leader)
        self.leader = self._read(self.leader_entry, decode_leader)
        self.remembered_entry = self._entries.get(keys.remembered_state)

    def _read(self, entry: Entry | None, decode_value: Callable[[bytes], Value]) -> Value | None:
        """Return the value of an entry; None if it does not exist or cannot be decoded."""
        try:
            return None if entry is None else decode_value(entry.value)
        except RendezvousConfigError as error:
            self.errors[require_not_none(entry, "the entry").key] = error
            return None

    @property
    def remembered_state(self) -> MembershipState | None:
        return self._read(self.remembered_entry, decode_state)

    @property
    def master_endpoint(self) -> str | None:
        """The endpoint of torch's store, or None until rank 0 serves that store."""
        return self._read(self.master_entry, decode_endpoint)

    @property
    def master_entry(self) -> Entry | None:
        """The entry of `master_endpoint`."""
        return self._entries.get(self._keys.master_endpoint(self.membership_id))

    def shard_entry(self, number: int) -> Entry | None:
        """The entry of a shard of the members of the current generation."""
        return self._entries.get(self._keys.shard(self.membership_id, number))

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
        entries = [self.shard_entry(number) for number in range(num_shards(state.num_nodes))]
        if None in entries:
            return with_members(state, ()), False
        if known is not None and known.membership_id == state.membership_id:
            return with_members(state, known.members), True
        shards = [self._read(entry, decode_shard) for entry in entries]
        rows = [row for shard in shards if shard is not None for row in shard]
        rows.sort(key=lambda row: row[1].group_rank)
        ranks = [row[1].group_rank for row in rows]
        # A generation that was restored after a loss of the store has ended, and has only those
        # members that were still there.
        all_ranks = range(state.num_nodes)
        is_restored = state.phase is JobPhase.FORMING and len(ranks) == len({*ranks} & {*all_ranks})
        if None in shards or (ranks != [*all_ranks] and not is_restored):
            return with_members(state, ()), False
        return with_members(state, (node for node, _ in rows)), True

    def live_nodes(self) -> tuple[NodeRecord, ...]:
        """Return the nodes whose lease is valid, most recently written record last."""
        entries = sorted(self._under(self._keys.node()), key=lambda entry: entry.version)
        nodes = ((entry.key, self._read(entry, decode_node)) for entry in entries)
        return tuple(n for key, n in nodes if n is not None and key == self._keys.node(n.id))

    def finished_ids(self) -> frozenset[str]:
        """Return the members of the current generation that have finished."""
        return self._ids(self._keys.finished)

    def left_ids(self) -> frozenset[str]:
        """Return the members of the current generation that have left on purpose."""
        return self._ids(self._keys.left)

    def details(self) -> dict[str, FailureDetails]:
        """Return the details of failures of the current generation, by node id."""
        entries = self._under(self._keys.detail(self.membership_id)) if self.membership_id else ()
        found = (self._read(entry, decode_details) for entry in entries)
        return {one.node: one.details.bounded() for one in found if one is not None}

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
        kinds = (keys.finished, keys.left, keys.detail, keys.exchange_prefix, keys.shard)
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
    """Decode a state.

    Raises:
        OtherFormatError: It is of another format.
        RendezvousConfigError: It is invalid.
    """
    raw = parse(data, "the membership")
    if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
        raise RendezvousConfigError(f"the membership in the store has no format: {data[:80]!r}")
    found = raw.pop("format")
    if found != FORMAT:
        raise OtherFormatError(
            f"the job's membership has format {found!r:.80}, this elasticlib reads only format "
            f"{FORMAT}: {FORMAT_REMEDY}"
        )
    return from_json(MembershipState, raw, "the membership")


@attrs.frozen
class DetailsRecord:
    """The details of a failed worker, with the id of its node."""

    node: str
    details: FailureDetails


def decode_details(data: bytes) -> DetailsRecord:
    """Decode what a node knows of its failed worker. Raises RendezvousConfigError if invalid."""
    return decode(DetailsRecord, data, "the details of a failure")


def decode_leader(data: bytes) -> Leader:
    """Decode the leader. Raises RendezvousConfigError if it is invalid."""
    return decode(Leader, data, "the leader")


def decode_endpoint(data: bytes) -> str:
    """Decode the endpoint of torch's store. Raises RendezvousConfigError if it is invalid."""
    try:
        endpoint = data.decode()
        split_endpoint(endpoint)
    except (UnicodeDecodeError, ConfigError) as error:
        raise RendezvousConfigError(f"the endpoint of torch's store is invalid: {error}") from error
    return endpoint


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
