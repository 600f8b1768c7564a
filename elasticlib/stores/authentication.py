"""Mutual authentication of the client and the server of a TCP store with a shared secret.

Each side sends a nonce, and proves with an HMAC that it knows the secret, which is never sent. The
server proves itself first, so a program that only listens at the store's address receives nothing
from which it could guess the secret. A proof covers both nonces, the job and the role of the
prover: it is not valid in another connection, for another job, or if it is sent back to its sender.

Any client receives the server's proof and can test guesses against it offline. Therefore a short
secret is rejected.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct

import attrs

from ..errors import ConfigError

SECRET_ENV = "ELASTICLIB_SECRET"  # the environment variable from which launchers read the secret
SECRET_MISMATCH_HINT = (
    f"give all nodes and the store the same one, in {SECRET_ENV} or a secret_file"
)
MIN_SECRET_BYTES = 16  # a shorter secret can be guessed from a proof
MAX_SECRET_BYTES = 64 * 1024
NONCE_BYTES = 32
HEX_DIGITS = 64  # length of a nonce and of a proof: both have 32 bytes

_PURPOSE = b"elasticlib store handshake 4"
_LENGTH = struct.Struct(">I")


class Role(enum.Enum):
    """The side of a connection that makes a proof."""

    CLIENT = b"client"
    SERVER = b"server"


@attrs.frozen
class HandshakeTranscript:
    """The values of one handshake that both proofs cover."""

    server_nonce: str
    client_nonce: str
    job: str


def check_secret(secret: bytes | None, source: str = "secret") -> bytes | None:
    """Return the secret, or raise a ConfigError that names its source and does not show it."""
    if secret is not None and not isinstance(secret, bytes):
        raise ConfigError(f"{source} is bytes, got {type(secret).__name__}")
    if secret is not None and not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{source} holds {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, got {len(secret)}: a "
            "shorter one can be guessed; take a random one, such as `openssl rand -hex 32` prints"
        )
    return secret


def is_hex_digest(value: object) -> bool:
    """Return True if the value has the form of a nonce or a proof."""
    return type(value) is str and len(value) == HEX_DIGITS and set(value) <= set("0123456789abcdef")


def compute_proof(secret: bytes, role: Role, transcript: HandshakeTranscript) -> str:
    """Return the proof of one side as hexadecimal digits."""
    texts = (transcript.server_nonce, transcript.client_nonce, transcript.job)
    # A JSON string can contain half of a surrogate pair.
    parts = [_PURPOSE, role.value, *(text.encode("utf-8", "surrogatepass") for text in texts)]
    # The length before each part ensures that different transcripts give different messages.
    message = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def verify_proof(proof: str, secret: bytes, role: Role, transcript: HandshakeTranscript) -> bool:
    """Return True if `role` makes this proof. The time of the call does not depend on the proof."""
    return hmac.compare_digest(proof.encode(), compute_proof(secret, role, transcript).encode())
