"""Which nodes keep the replicas of which, and what they tell one another of it.

Node r's go to the next nodes by rank, wrapping at the end; so each node keeps as many as it gives,
and the loss of any one node leaves another with its snapshots.
"""

from __future__ import annotations

import json

import attrs

from ..foreign import read_fields, read_json
from ..stores.secret import is_digits


def takers(rank: int, nodes: int, replicas: int) -> tuple[int, ...]:
    """The ranks of the nodes that keep this one's replicas; itself is never among them."""
    return tuple((rank + by) % nodes for by in range(1, min(replicas, nodes - 1) + 1))


def givers(rank: int, nodes: int, replicas: int) -> tuple[int, ...]:
    """The ranks of the nodes whose replicas this one keeps."""
    return tuple((rank - by) % nodes for by in range(1, min(replicas, nodes - 1) + 1))


@attrs.frozen
class Place:
    """Where a node takes replicas in one generation. token: what it makes sure by that whoever
    comes has read this; 64 hexadecimal digits."""

    address: str
    port: int
    token: str


def encode_place(place: Place) -> bytes:
    return json.dumps(attrs.asdict(place)).encode()


def decode_place(data: bytes) -> Place | None:
    """None for what no node of this version has written."""
    try:
        place = read_fields(Place, read_json(data))
    except ValueError:
        return None
    return place if is_digits(place.token) and 0 < place.port < 65536 else None
