"""The first bytes of a pack (see `pack`): how large it is, as far as they are whole. Without torch.

Whoever is about to make room for a pack, or to read all of it, looks at these before.
"""

from __future__ import annotations

import struct
import zlib

from ..errors import CheckpointCorrupt

MAGIC = b"ELPACK1\n"
HEAD_BYTES = 64
PAGE = 4096
HEAD = struct.Struct("<8sQQI")
SUM = struct.Struct("<I")


def size_of(head: bytes | memoryview) -> tuple[int, int]:
    """The size of a pack and that of its head, in bytes, by its first `HEAD_BYTES` bytes.

    Raises:
        CheckpointCorrupt: these are not the first bytes of a pack.
    """
    if len(head) < HEAD_BYTES:
        raise CheckpointCorrupt(f"a pack begins with {HEAD_BYTES} bytes, here are {len(head)}")
    magic, size, outline, _ = HEAD.unpack_from(head)
    (summed,) = SUM.unpack_from(head, HEAD.size)
    if magic != MAGIC:
        raise CheckpointCorrupt(f"a pack begins with {MAGIC!r}, this with {bytes(magic)!r}")
    start = up(HEAD_BYTES + outline, PAGE)
    if summed != zlib.crc32(head[: HEAD.size]) or start > size:
        raise CheckpointCorrupt("the first bytes of the pack were changed")
    return size, start


def up(size: int, to: int) -> int:
    """The next multiple."""
    return -(-size // to) * to
