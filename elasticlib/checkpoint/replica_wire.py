"""What goes over the connection by which one agent gives another the replicas of its snapshots.

A frame is a kind, a length, the CRC-32 of both and the payload, and that; each kind has a longest
payload, and all but DATA are JSON of a fixed schema. In turn: the taker's CHALLENGE, the giver's
HELLO, the taker's PROOF, then the giver's, the taker's WELCOME; then for each snapshot OFFER, TAKE,
DATA as often as it takes, SEAL, KEPT.
"""

from __future__ import annotations

import enum
import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ..errors import StoreRefused
from ..stores.secret import DIGITS, Exchange, Role, is_digits, prove, proves

PROTOCOL = 2
CHUNK_BYTES = 4 << 20
CONTROL_BYTES = 8 << 10

HEAD = struct.Struct(">BII")
_SUMMED = struct.Struct(">BI")


class Kind(enum.IntEnum):
    """Of a frame."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    OFFER = 4
    TAKE = 5
    DATA = 6
    KEPT = 7
    REFUSED = 8
    PROOF = 9
    SEAL = 10


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_sum(value: Any) -> bool:
    return type(value) is str and re.fullmatch("(?:[0-9a-f]{16})?", value) is not None


SCHEMA: Mapping[Kind, Mapping[str, Callable[[Any], bool]]] = {
    Kind.CHALLENGE: {"protocol": _is_whole, "nonce": is_digits},
    Kind.HELLO: {"rank": _is_whole, "nonce": is_digits},
    Kind.PROOF: {"proof": is_digits},
    Kind.WELCOME: {},
    Kind.OFFER: {"record": lambda value: type(value) is dict},
    Kind.TAKE: {},
    Kind.SEAL: {"sum": _is_sum},
    Kind.KEPT: {},
    Kind.REFUSED: {"message": _is_text, "final": lambda value: type(value) is bool},
}


@attrs.frozen
class Header:
    """Of one frame: what is to be read next."""

    kind: Kind
    size: int
    crc32: int


def read_header(data: bytes) -> Header:
    """Raises StoreRefused for what is no frame of ours, or too long."""
    number, size, crc32 = HEAD.unpack(data)
    try:
        kind = Kind(number)
    except ValueError:
        raise StoreRefused(f"a frame of replicas has no kind {number}") from None
    longest = CHUNK_BYTES if kind is Kind.DATA else CONTROL_BYTES
    if size > longest:
        raise StoreRefused(f"a frame {kind.name} has at most {longest} bytes, got {size}")
    return Header(kind, size, crc32)


def header(kind: Kind, payload: bytes | memoryview) -> bytes:
    return HEAD.pack(kind, len(payload), _sum(kind, len(payload), payload))


def _sum(kind: Kind, size: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(_SUMMED.pack(kind, size)))


def check_sum(head: Header, payload: bytes | memoryview) -> None:
    """Raises StoreRefused for a payload that was changed on its way."""
    found = _sum(head.kind, head.size, payload)
    if found != head.crc32:
        raise StoreRefused(
            f"a frame {head.kind.name} was changed on its way: its CRC-32 is {found:08x}, and it "
            f"says {head.crc32:08x}"
        )


def control(kind: Kind, **fields: Any) -> bytes:
    """A whole frame that carries fields; the caller keeps to the schema."""
    payload = json.dumps(fields, separators=(",", ":")).encode()
    return header(kind, payload) + payload


def read_fields(head: Header, payload: bytes) -> dict[str, Any]:
    """The fields of a frame other than DATA. Raises StoreRefused unless they are the schema's."""
    check_sum(head, payload)
    schema = SCHEMA.get(head.kind)
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        fields = None
    if schema is None or type(fields) is not dict or fields.keys() != schema.keys():
        raise StoreRefused(f"a frame {head.kind.name} of replicas has other fields")
    for name, accepts in schema.items():
        if not accepts(fields[name]):
            raise StoreRefused(f"{head.kind.name}: {name} cannot be {fields[name]!r:.80}")
    return fields


@attrs.frozen
class Proofs:
    """How the two ends of one connection show that both have read the taker's place on the board,
    and know the job's secret where there is one.

    board: of the generation, whose proofs are of no use in another.
    """

    token: str
    secret: bytes | None
    board: str

    def of_giver(self, taker_nonce: str, giver_nonce: str, rank: int) -> str:
        return prove(self._key, Role.CLIENT, self._told(taker_nonce, giver_nonce, rank))

    def is_giver(self, proof: str, taker_nonce: str, giver_nonce: str, rank: int) -> bool:
        return proves(proof, self._key, Role.CLIENT, self._told(taker_nonce, giver_nonce, rank))

    def of_taker(self, taker_nonce: str, giver_nonce: str, rank: int) -> str:
        return prove(self._key, Role.SERVER, self._told(taker_nonce, giver_nonce, rank))

    def is_taker(self, proof: str, taker_nonce: str, giver_nonce: str, rank: int) -> bool:
        return proves(proof, self._key, Role.SERVER, self._told(taker_nonce, giver_nonce, rank))

    @property
    def _key(self) -> bytes:
        if len(self.token) != DIGITS:
            raise ValueError(f"a token has {DIGITS} digits, got {len(self.token)}")
        return self.token.encode() + (self.secret or b"")

    def _told(self, taker_nonce: str, giver_nonce: str, rank: int) -> Exchange:
        # No job's name has a NUL: these proofs are of no use to a store.
        return Exchange(taker_nonce, giver_nonce, f"replicas\0{self.board}\0{rank}")
