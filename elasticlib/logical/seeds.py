"""Seeds that are a function of what they are for: the job's seed, step and logical worker.

No rank, world size or history enters, so whoever computes a logical worker draws the same numbers.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from ..errors import ConfigError

Use = Literal["model", "data", "update"]
"""What is drawn: in the forward pass, for the samples, or after the gradients are reduced."""


def seed_of(seed: int, step: int, worker: int, use: Use) -> int:
    """A 63-bit seed: the first bytes of a BLAKE2b digest of the four.

    torch's generator on a CPU uses the lower 32 bits alone, so of 77,000 such streams two are
    alike with a chance of one in two. That does no harm; it is no source of secrets either way.

    Raises:
        ConfigError: `step` is negative.
    """
    if step < 0:
        raise ConfigError(f"need step >= 0, got {step}")
    text = f"{seed}/{step}/{worker}/{use}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
