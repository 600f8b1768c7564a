"""Documents and nodes as JSON, read strictly.

Whatever does not have exactly the fields and types of its format is refused with a sentence that
names the field; nothing that comes off a store is ever executed.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from ..errors import RendezvousMismatch
from .document import Document, Failure, Limits, Node, Phase

FORMAT = 1

_Fields = dict[str, tuple[type, ...]]
_OPTIONAL_STR = (str, type(None))
_LIMITS: _Fields = {
    "min_nodes": (int,),
    "max_nodes": (int,),
    "max_restarts": (int,),
    "last_call": (int, float),
    "fixed_ranks": (bool,),
}
_NODE: _Fields = {
    "id": (str,),
    "host": (str,),
    "address": (str,),
    "slots": (int,),
    "role": (str,),
    "hint": (int, type(None)),
    "after": (int,),
    "holds": (int,),
    "claim": _OPTIONAL_STR,
    "claim_generation": (int,),
}
_FAILURE: _Fields = {"node": (str,), "reason": (str,)}
_DOCUMENT: _Fields = {
    "format": (int,),
    "limits": (dict,),
    "incarnation": (str,),
    "phase": (str,),
    "generation": (int,),
    "members": (list,),
    "restarts": (int,),
    "cause": (str,),
    "failure": (dict, type(None)),
    "expelled": (list,),
}


def encode_node(node: Node) -> bytes:
    return _dump(attrs.asdict(node))


def decode_node(data: bytes) -> Node:
    return Node(**_checked(_load(data, "a node"), _NODE, "a node"))


def encode_document(document: Document) -> bytes:
    fields = attrs.asdict(document)
    fields["phase"] = document.phase.value
    return _dump({"format": FORMAT, **fields})


def decode_document(data: bytes) -> Document:
    """The document, or RendezvousMismatch if this is none of ours or of another format."""
    raw = _load(data, "the document")
    if raw.get("format") != FORMAT:
        raise RendezvousMismatch(
            f"the document has format {raw.get('format')!r}, this elasticlib reads {FORMAT}: "
            "start all nodes with the same version"
        )
    fields = _checked(raw, _DOCUMENT, "the document")
    if not all(isinstance(name, str) for name in fields["expelled"]):
        raise RendezvousMismatch("the document's expelled nodes are not all strings")
    if fields["phase"] not in {phase.value for phase in Phase}:
        raise RendezvousMismatch(f"the document has the unknown phase {fields['phase']!r}")
    failure = fields["failure"]
    return Document(
        limits=Limits(**_checked(fields["limits"], _LIMITS, "limits")),
        incarnation=fields["incarnation"],
        phase=Phase(fields["phase"]),
        generation=fields["generation"],
        members=tuple(Node(**_checked(m, _NODE, "a member")) for m in fields["members"]),
        restarts=fields["restarts"],
        cause=fields["cause"],
        failure=None if failure is None else Failure(**_checked(failure, _FAILURE, "failure")),
        expelled=tuple(fields["expelled"]),
    )


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()


def _load(data: bytes, what: str) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RendezvousMismatch(f"{what} in the store is not JSON: {error}") from error
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
