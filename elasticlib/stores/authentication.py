"""How the two ends of a TCP store show each other that they know a secret, and never the secret.

Each side sends a nonce; the server proves itself first, and only a server that has is sent the
client's proof, so what merely listens where a store is expected gets nothing to guess the secret
from. A proof covers both nonces, the job and the role of the prover, so none is of use in another
connection, for another job, or sent back to its sender.

Whoever connects to a server does get its proof, and may try secrets against it for as long as they
like; that is why a short secret is refused.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct

import attrs

from ..errors import ConfigError

SECRET_ENV = "ELASTICLIB_SECRET"
"""The environment variable in which a launcher is given the secret."""

SECRET_MISMATCH_HINT = (
    f"give all nodes and the store the same one, in {SECRET_ENV} or a secret_file"
)
"""What to do about secrets that do not match, as the end of a sentence."""

MIN_SECRET_BYTES = 16
"""Bytes of a secret: a shorter one is soon guessed by who has seen a proof."""
MAX_SECRET_BYTES = 64 * 1024

NONCE_BYTES = 32
DIGITS = 64
"""Of a nonce, and of a proof: both are 32 bytes in hexadecimal."""

_PURPOSE = b"elasticlib store handshake 3"
_LENGTH = struct.Struct(">I")


class Role(enum.Enum):
    """Who proves."""

    CLIENT = b"client"
    SERVER = b"server"


@attrs.frozen
class HandshakeTranscript:
    """What the two ends of one connection have told each other, which their proofs cover."""

    server_nonce: str
    client_nonce: str
    job: str


def check_secret(secret: bytes | None, said: str = "secret") -> bytes | None:
    """The secret itself, or a ConfigError that does not show it; said: what gave it."""
    if secret is not None and not isinstance(secret, bytes):
        raise ConfigError(f"{said} is bytes, got {type(secret).__name__}")
    if secret is not None and not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{said} holds {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, got {len(secret)}: "
            "a shorter one can be guessed; take a random one, such as `openssl rand -hex 32` prints"
        )
    return secret


def is_hex_digest(value: object) -> bool:
    """Whether it has the form of a nonce or a proof."""
    return type(value) is str and len(value) == DIGITS and set(value) <= set("0123456789abcdef")


def compute_proof(secret: bytes, role: Role, exchange: HandshakeTranscript) -> str:
    """The proof of one side."""
    told = (exchange.server_nonce, exchange.client_nonce, exchange.job)
    # A job's name may be any text of JSON's, half of a surrogate pair included.
    parts = [_PURPOSE, role.value, *(text.encode("utf-8", "surrogatepass") for text in told)]
    # Each part with its length, so that no two exchanges run into the same bytes.
    message = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def verify_proof(proof: str, secret: bytes, role: Role, exchange: HandshakeTranscript) -> bool:
    """Whether it is that side's proof; how long that takes tells nothing about the secret."""
    return hmac.compare_digest(proof.encode(), compute_proof(secret, role, exchange).encode())
