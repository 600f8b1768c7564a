"""Where in its store a job keeps what, as which bytes, and what one listing of it says.

All that every node watches is under `head/`, and small. The rest is for the node that leads: the
leased records of the living, the members of generations cut into shards, and who has finished.

Values are JSON objects with exactly the fields of their attrs class, by whose annotations they are
written and read; nothing that comes off a store is ever executed. All nodes of a job run the same
version: a node that reads a document of another format leaves with a `RendezvousConfigError`.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import quote

import attrs

from ..errors import ConfigError, RendezvousConfigError
from ..stores.key_space import Entry, Listing
from .membership import JobPhase, Leader, Membership, MembershipState, Node, with_members
from .rank_assignment import AssignedNode, RankAssignment, num_shards

FORMAT = 5
REMEDY = "start all nodes with the same version of elasticlib"
LARGEST = 2**63

SCALARS: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
}

Value = TypeVar("Value")


class StoreKeys:
    """The keys of one job; `run_id` may be any text.

    job: what all of them begin with. watched: what every node watches. leader: leased by the node
    that decides. memory: the state as those remember it whose store has forgotten it. Where a
    membership or a node may be left out, the answer begins the keys of all.
    """

    def __init__(self, run_id: str) -> None:
        self.job_prefix = f"{quote(run_id, safe='')}/"
        self.watched_prefix = f"{self.job_prefix}head/"
        self.state = f"{self.watched_prefix}membership"
        self.leader = f"{self.watched_prefix}leader"
        self.remembered_state = f"{self.watched_prefix}remembered"
        self.leader_status = f"{self.job_prefix}leader_status"

    def master_endpoint(self, membership: str = "") -> str:
        """Stands for as long as the generation does; its value is where torch's store is."""
        return f"{self.watched_prefix}store_endpoint/{membership}"

    def node(self, node_id: str = "") -> str:
        return f"{self.job_prefix}node/{node_id}"

    def shard(self, membership: str = "", number: int | str = "") -> str:
        return self._of_generation("members", membership, number)

    def finished(self, membership: str = "", node_id: str = "") -> str:
        """Written by a member whose workers have succeeded."""
        return self._of_generation("finished", membership, node_id)

    def left(self, membership: str = "", node_id: str = "") -> str:
        """Written by a node that leaves its generation and says so."""
        return self._of_generation("left", membership, node_id)

    def exchange_prefix(self, membership: str = "") -> str:
        """Begins the keys under which the nodes of a generation post things for one another."""
        return self._of_generation("exchange", membership)

    def _of_generation(self, kind: str, membership: str, rest: int | str = "") -> str:
        return (
            f"{self.job_prefix}{kind}/{membership}/{rest}"
            if membership
            else f"{self.job_prefix}{kind}/"
        )


class JobListing:
    """One listing of a job, or of its watched part, as what it means."""

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
        return None if self.remembered_entry is None else decode_state(self.remembered_entry.value)

    @property
    def stage(self) -> tuple[str, JobPhase | None]:
        """The state's membership, empty for none, and how it stands."""
        return ("", None) if self.state is None else (self.state.membership_id, self.state.phase)

    @property
    def master_entry(self) -> Entry | None:
        """What stands for as long as the state's generation does."""
        return self._entries.get(self._keys.master_endpoint(self.stage[0]))

    @property
    def master_endpoint(self) -> str | None:
        """Where the generation's torch store is, once its first node has said so."""
        entry = self.master_entry
        return entry.value.decode() if entry is not None and entry.value else None

    def membership(self, known: Membership | None) -> tuple[Membership | None, bool]:
        """The whole document, and whether all shards of its members were there.

        `known` is one that was read before: of the same membership, the members are the same.
        """
        state = self.state
        if state is None:
            return None, False
        shards = [
            self._keys.shard(state.membership_id, n) for n in range(num_shards(state.num_nodes))
        ]
        found = [self._entries[key] for key in shards if key in self._entries]
        if not state.membership_id or len(found) < len(shards):
            return with_members(state, ()), not state.membership_id
        if known is not None and known.membership_id == state.membership_id:
            return with_members(state, known.members), True
        rows = [row for entry in found for row in decode_shard(entry.value)]
        members = (node for node, _ in sorted(rows, key=lambda row: row[1].group_rank))
        return with_members(state, members), True

    def live_nodes(self) -> tuple[Node, ...]:
        """Return the nodes whose lease is valid, the one that last wrote its record at the end."""
        return self.records()[0]

    def records(self) -> tuple[tuple[Node, ...], dict[str, str]]:
        """Return the nodes as `live` does, and the error of each record that cannot be read.

        Such a record, as that of a node of another version, does not end the job of the others.
        """
        nodes, errors = [], {}
        for entry in sorted(self._under(self._keys.node()), key=lambda entry: entry.version):
            try:
                nodes.append(decode_node(entry.value))
            except RendezvousConfigError as error:
                errors[entry.key] = str(error)
        return tuple(nodes), errors

    def finished_ids(self) -> frozenset[str]:
        """The members that have finished the state's generation."""
        return self._ids(self._keys.finished)

    def left_ids(self) -> frozenset[str]:
        """The members that have said that they leave the state's generation."""
        return self._ids(self._keys.left)

    def _ids(self, key: Callable[[str], str]) -> frozenset[str]:
        membership, _ = self.stage
        if not membership:
            return frozenset()
        prefix = key(membership)
        return frozenset(entry.key.removeprefix(prefix) for entry in self._under(prefix))

    def master_keys(self) -> tuple[str, ...]:
        """Those of all generations that stand; of more than one, the newest is being written."""
        return tuple(entry.key for entry in self._under(self._keys.master_endpoint()))

    def stale_keys(self, membership: str) -> tuple[str, ...]:
        """What stands of other generations than that with this membership, and their memory."""
        keys = self._keys
        kinds = (keys.master_endpoint, keys.finished, keys.left, keys.exchange_prefix, keys.shard)
        old = [entry.key for kind in kinds for entry in self._under(kind(""))]
        ours = tuple(kind(membership) for kind in kinds[1:])
        kept = keys.master_endpoint(membership)
        memory = () if self.remembered_entry is None else (keys.remembered_state,)
        return (*(k for k in old if k != kept and not k.startswith(ours)), *memory)

    def _under(self, prefix: str) -> Iterable[Entry]:
        return (entry for key, entry in self._entries.items() if key.startswith(prefix))


# -- values as bytes ----------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """A node, a leader or a note."""
    return _ENCODER.encode(value).encode()


def encode_state(state: MembershipState) -> bytes:
    """Of a document, its state alone."""
    return encode({"format": FORMAT, **_fields(state, MembershipState)})


def encode_shard(rows: Iterable[AssignedNode]) -> bytes:
    """Some of a generation's members, each with its seat."""
    return encode(list(rows))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else _fields(value, type(value))


def _fields(value: Any, kind: type) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _names(kind)}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(attrs.fields_dict(kind))


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_plain)


def decode(kind: type[Value], data: bytes, what: str) -> Value:
    """The value, or RendezvousConfigError with the path of the field that is invalid."""
    return typing.cast(Value, _read(kind, _parse(data, what), what))


def _read(kind: Any, raw: Any, what: str) -> Any:
    try:
        return _reader(kind)(raw)
    except _Misfit as error:
        raise RendezvousConfigError(f"{what}{error}") from error


@lru_cache(maxsize=4096)
def decode_node(data: bytes) -> Node:
    # The node that leads reads those of all the others again at each look.
    return decode(Node, data, "a node")


@lru_cache(maxsize=16)
def decode_state(data: bytes) -> MembershipState:
    raw = _parse(data, "the document")
    found = raw.pop("format", None) if isinstance(raw, dict) else None
    if found != FORMAT:
        raise RendezvousConfigError(
            f"the job's document has format {found!r:.80}, this elasticlib reads only format "
            f"{FORMAT}: {REMEDY}"
        )
    return typing.cast(MembershipState, _read(MembershipState, raw, "the document"))


def decode_shard(data: bytes) -> tuple[AssignedNode, ...]:
    return tuple(_row(row) for row in _rows(data))


def find_assignment(data: bytes, node_id: str) -> RankAssignment | None:
    """One node's seat on a shard, if it has one there; the rows of others are not looked at."""
    for row in _rows(data):
        if isinstance(row[0], dict) and row[0].get("id") == node_id:
            return _row(row)[1]
    return None


def _rows(data: bytes) -> list[list[object]]:
    rows = _parse(data, "a shard")
    if not isinstance(rows, list) or any(not isinstance(r, list) or len(r) != 2 for r in rows):
        raise RendezvousConfigError("a shard in the store is not a list of nodes and seats")
    return rows


def _row(row: list[object]) -> AssignedNode:
    return _read(Node, row[0], "a member"), _read(RankAssignment, row[1], "a seat")


def _parse(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RendezvousConfigError(f"{what} in the store is not JSON: {error}") from error


# -- what reads the value of an annotation ------------------------------------------------------


class _Misfit(Exception):
    """What JSON says is not as it should be; the text begins with the path of the field."""


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What makes a value of this annotation of what JSON says, or raises _Misfit."""
    if kind in SCALARS:
        return partial(_read_scalar, kind)
    if attrs.has(kind):
        hints = typing.get_type_hints(kind)
        return partial(_read_fields, kind, {name: _reader(hints[name]) for name in _names(kind)})
    if isinstance(kind, types.UnionType):
        (wanted,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
        return partial(_read_optional, _reader(wanted))
    if typing.get_origin(kind) is tuple:  # of any number of one kind
        return partial(_read_tuple, _reader(typing.get_args(kind)[0]))
    if words := _words(kind):
        return partial(_read_word, words)
    raise TypeError(f"no record has fields of {kind}: this is a bug in elasticlib")


def _words(kind: Any) -> dict[str, Any]:
    """The members of an enum by what JSON says for each; none of any other annotation."""
    is_enum = isinstance(kind, type) and issubclass(kind, enum.Enum)
    return {member.value: member for member in kind} if is_enum else {}


def _read_scalar(kind: type, raw: Any) -> Any:
    # JSON has no subclasses; so a bool, which is an int to Python, is none here.
    is_number = kind in (int, float)
    if type(raw) not in SCALARS[kind] or (is_number and not -LARGEST < raw < LARGEST):
        raise _Misfit(f" is {raw!r}")
    return raw


def _read_word(words: dict[str, Any], raw: Any) -> Any:
    if not isinstance(raw, str) or raw not in words:
        raise _Misfit(f" is {raw!r}, none of {sorted(words)}")
    return words[raw]


def _read_optional(read_wanted: Callable[[Any], Any], raw: Any) -> Any:
    return None if raw is None else read_wanted(raw)


def _read_tuple(read_one: Callable[[Any], Any], raw: Any) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise _Misfit(f" is {raw!r}, not a list")
    values: list[Any] = []
    try:
        for one in raw:
            values.append(read_one(one))
    except _Misfit as error:
        raise _Misfit(f"[{len(values)}]{error}") from error
    return tuple(values)


def _read_fields(kind: Any, readers: dict[str, Callable[[Any], Any]], raw: Any) -> Any:
    if not isinstance(raw, dict) or raw.keys() != readers.keys():
        found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise _Misfit(f" needs the fields {sorted(readers)}, got {found}")
    fields, name = {}, ""
    try:
        for name, read_field in readers.items():
            fields[name] = read_field(raw[name])
    except _Misfit as error:
        raise _Misfit(f": field {name!r}{error}") from error
    try:
        return kind(**fields)
    except ConfigError as error:
        raise _Misfit(f": {error}") from error
