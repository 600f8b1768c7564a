"""Heads, rolls and nodes as JSON, read strictly.

Whatever does not have exactly the fields and types of its format is refused with a sentence that
names the field; nothing that comes off a store is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import attrs

from ..errors import RendezvousMismatch
from .document import Ending, Failure, FailureKind, Head, Limits, Node, Phase, Why
from .intent import Leader
from .ranks import Row, Seat

FORMAT = 4
WITHOUT_WHY = 3
"""An earlier one, which is read as well: its heads do not say why for programs."""

_Fields = dict[str, tuple[type, ...]]
_OPTIONAL_STR = (str, type(None))
_LIMITS: _Fields = {
    "min_nodes": (int,),
    "max_nodes": (int,),
    "max_restarts": (int,),
    "last_call": (int, float),
    "fixed_ranks": (bool,),
    "spares": (int, type(None)),
    "quorum": (bool,),
    "launch": (str,),
    "restart_window": (int, float),
    "restart_backoff": (int, float),
    "resize_interval": (int, float),
}
_NODE: _Fields = {
    "id": (str,),
    "host": (str,),
    "address": (str,),
    "slots": (int,),
    "role": (str,),
    "hint": (int, type(None)),
    "topology": (str,),
    "roll": (str,),
    "rank": (int,),
    "runs": (bool,),
    "left": (str,),
    "beyond": (str,),
    "claim": _OPTIONAL_STR,
    "claim_roll": (str,),
    "claim_kind": (str,),
    "draining": (str,),
}
_FAILURE: _Fields = {"node": (str,), "reason": (str,), "kind": (str,)}
_ENDING: _Fields = {"by": (str,), "at": (str,)}
_LEADER: _Fields = {"id": (str,), "host": (str,), "beyond": (str,)}
_SEAT: _Fields = dict.fromkeys(attrs.fields_dict(Seat), (int,))
_HEAD: _Fields = {
    "format": (int,),
    "limits": (dict,),
    "incarnation": (str,),
    "phase": (str,),
    "generation": (int,),
    "roll": (str,),
    "nodes": (int,),
    "restarts": (int,),
    "cause": (str,),
    "failure": (dict, type(None)),
    "expelled": (list,),
    "refused": (list,),
    "ending": (dict, type(None)),
    "supersedes": (str,),
    "planned": (bool,),
    "quick": (int,),
    "why": _OPTIONAL_STR,
}
_NOTE: _Fields = {
    "reason": (str,),
    "here": (list,),
    "count": (int,),
    "waiting": (int,),
    "roll": (str,),
    "stuck": (bool,),
}


@attrs.frozen
class Note:
    """What the node that leads tells those who wait: why, who is here (the first names of
    `count`), how many wait for the generation with that roll to end, and whether there are too few
    to go on."""

    reason: str = ""
    here: tuple[str, ...] = ()
    count: int = 0
    waiting: int = 0
    roll: str = ""
    stuck: bool = False


def encode_node(node: Node) -> bytes:
    return _dump(_plain(node))


def decode_node(data: bytes) -> Node:
    return _node(_load(data, "a node"), "a node")


def _node(raw: object, what: str) -> Node:
    fields = _checked(raw, _NODE, what)
    return Node(**{**fields, "claim_kind": _kind(fields["claim_kind"], what)})


def _kind(text: str, what: str) -> FailureKind:
    if text not in {kind.value for kind in FailureKind}:
        raise RendezvousMismatch(f"{what} tells of the unknown kind of failure {text!r}")
    return FailureKind(text)


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a value, kinds of failures by their names."""
    fields = attrs.asdict(value)
    return {k: v.value if isinstance(v, FailureKind) else v for k, v in fields.items()}


def encode_leader(leader: Leader) -> bytes:
    return _dump(attrs.asdict(leader))


def decode_leader(data: bytes) -> Leader:
    return Leader(**_checked(_load(data, "the leader"), _LEADER, "the leader"))


def encode_note(note: Note) -> bytes:
    return _dump(attrs.asdict(note))


def decode_note(data: bytes) -> Note:
    fields = _checked(_load(data, "the note"), _NOTE, "the note")
    _check_strings(fields, "here", "the note")
    return Note(**{**fields, "here": tuple(fields["here"])})


def encode_shard(rows: Iterable[Row]) -> bytes:
    """Some of a roll's members, each with its seat."""
    return _dump([[_plain(node), attrs.asdict(seat)] for node, seat in rows])


def decode_shard(data: bytes) -> tuple[Row, ...]:
    return tuple(_row(row) for row in _rows(data))


def find_seat(data: bytes, node_id: str) -> Seat | None:
    """One node's seat on a shard, if it has one there; the rows of others are not looked at."""
    for row in _rows(data):
        if isinstance(row[0], dict) and row[0].get("id") == node_id:
            return _row(row)[1]
    return None


def _rows(data: bytes) -> list[list[object]]:
    rows = _parse(data, "a roll")
    if not isinstance(rows, list) or any(not isinstance(r, list) or len(r) != 2 for r in rows):
        raise RendezvousMismatch("a roll in the store is no list of nodes and seats")
    return rows


def _row(row: list[object]) -> Row:
    node, seat = row
    return _node(node, "a member"), Seat(**_checked(seat, _SEAT, "a seat"))


def encode_head(head: Head) -> bytes:
    fields = {name: getattr(head, name) for name in attrs.fields_dict(Head)}
    for name in ("limits", "failure", "ending"):
        fields[name] = None if fields[name] is None else _plain(fields[name])
    why = None if head.why is None else head.why.value
    return _dump({"format": FORMAT, **fields, "phase": head.phase.value, "why": why})


def decode_head(data: bytes) -> Head:
    """The head, or RendezvousMismatch if this is none of ours or of another format."""
    raw = _load(data, "the document")
    if raw.get("format") not in (WITHOUT_WHY, FORMAT):
        raise RendezvousMismatch(
            f"the document has format {raw.get('format')!r}, this elasticlib reads {FORMAT}: "
            "start all nodes with the same version"
        )
    if raw["format"] == WITHOUT_WHY:
        raw = {**raw, "why": None}
    fields = _checked(raw, _HEAD, "the document")
    for name in ("expelled", "refused"):
        _check_strings(fields, name, "the document")
    if fields["phase"] not in {phase.value for phase in Phase}:
        raise RendezvousMismatch(f"the document has the unknown phase {fields['phase']!r}")
    failure, ending = fields["failure"], fields["ending"]
    read: dict[str, Any] = {name: fields[name] for name in _HEAD if name != "format"}
    read["limits"] = Limits(**_checked(fields["limits"], _LIMITS, "limits"))
    read["phase"] = Phase(fields["phase"])
    read["why"] = next((why for why in Why if why.value == fields["why"]), None)
    read["expelled"], read["refused"] = tuple(fields["expelled"]), tuple(fields["refused"])
    if failure is not None:
        said = _checked(failure, _FAILURE, "failure")
        read["failure"] = Failure(**{**said, "kind": _kind(said["kind"], "failure")})
    if ending is not None:
        read["ending"] = Ending(**_checked(ending, _ENDING, "ending"))
    return Head(**read)


def _check_strings(fields: dict[str, Any], name: str, what: str) -> None:
    if not all(isinstance(text, str) for text in fields[name]):
        raise RendezvousMismatch(f"{what}: field {name!r} is not all strings")


def _dump(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def _parse(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RendezvousMismatch(f"{what} in the store is not JSON: {error}") from error


def _load(data: bytes, what: str) -> dict[str, Any]:
    raw = _parse(data, what)
    if not isinstance(raw, dict):
        raise RendezvousMismatch(f"{what} in the store is {type(raw).__name__}, not an object")
    return raw


def _checked(raw: object, fields: _Fields, what: str) -> dict[str, Any]:
    if not isinstance(raw, dict) or raw.keys() != fields.keys():
        found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise RendezvousMismatch(f"{what} needs the fields {sorted(fields)}, got {found}")
    for name, types in fields.items():
        value = raw[name]
        # bool is an int to Python, and not to us.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise RendezvousMismatch(f"{what}: field {name!r} is {value!r}")
    return raw
