"""How the two ends of a TCP store show each other that they know a secret, and never the secret.

The server sends a nonce; the client answers with one of its own and its proof; only whoever has
proven itself is sent the server's proof. A proof covers both nonces, the job and the role of the
prover, so none is of use in another connection, for another job, or sent back to its sender.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct

import attrs

from ..errors import ConfigError

VARIABLE = "ELASTICLIB_SECRET"
"""The environment variable in which a launcher is given the secret."""

HOW = f"give all nodes and the store the same one, in {VARIABLE} or a secret_file"
"""What to do about secrets that do not match, as the end of a sentence."""

NONCE_BYTES = 32
DIGITS = 64
"""Of a nonce, and of a proof: both are 32 bytes in hexadecimal."""

_PURPOSE = b"elasticlib store handshake 2"
_LENGTH = struct.Struct(">I")


class Role(enum.Enum):
    """Who proves."""

    CLIENT = b"client"
    SERVER = b"server"


@attrs.frozen
class Exchange:
    """What the two ends of one connection have told each other, which their proofs cover."""

    server_nonce: str
    client_nonce: str
    job: str


def check_secret(secret: bytes | None) -> bytes | None:
    """The secret itself, or a ConfigError that does not show it."""
    if secret is not None and not (isinstance(secret, bytes) and secret):
        raise ConfigError(f"a secret is one or more bytes, got {type(secret).__name__} without any")
    return secret


def is_digits(value: object) -> bool:
    """Whether it has the form of a nonce or a proof."""
    return type(value) is str and len(value) == DIGITS and set(value) <= set("0123456789abcdef")


def prove(secret: bytes, role: Role, exchange: Exchange) -> str:
    """The proof of one side."""
    told = (exchange.server_nonce, exchange.client_nonce, exchange.job)
    # A job's name may be any text of JSON's, half of a surrogate pair included.
    parts = [_PURPOSE, role.value, *(text.encode("utf-8", "surrogatepass") for text in told)]
    # Each part with its length, so that no two exchanges run into the same bytes.
    message = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def proves(proof: str, secret: bytes, role: Role, exchange: Exchange) -> bool:
    """Whether it is that side's proof; how long that takes tells nothing about the secret."""
    return hmac.compare_digest(proof.encode(), prove(secret, role, exchange).encode())
