"""How a checkpoint file shows that it is whole: a record of its size and CRC-32 at its end.

The file is the zip archive that `torch.save` makes, and the record is the archive's comment, so
plain `torch.load` still reads it. Every byte of the file is either summed or fixed by the sums.
"""

from __future__ import annotations

import re
import zlib

import attrs

FORMAT = 1

NO_COMMENT = b"\0\0"
"""How an archive without a comment ends: the length of the comment, 0."""

_RECORD = re.compile(rb"elasticlib checkpoint ([0-9]+) size=([0-9]{20}) crc32=([0-9a-f]{8})\n")
_END_OF_ARCHIVE, _END_BYTES = b"PK\x05\x06", 22


@attrs.frozen
class Digest:
    """The size in bytes and the CRC-32 of an archive as torch wrote it, without a comment."""

    size: int = 0
    crc32: int = 0

    def over(self, data: bytes | memoryview) -> Digest:
        """The digest of what was summed so far with `data` behind it."""
        return Digest(self.size + len(data), zlib.crc32(data, self.crc32))


def seal(digest: Digest) -> bytes:
    """What takes the place of `NO_COMMENT` at the archive's end: a length, then the record."""
    sums = f"size={digest.size:020d} crc32={digest.crc32:08x}"
    record = f"elasticlib checkpoint {FORMAT} {sums}\n".encode("ascii")
    return len(record).to_bytes(2, "little") + record


SEAL_BYTES = len(seal(Digest()))


def can_be_sealed(end: bytes) -> bool:
    """Whether the last bytes of a file are those of a zip archive without a comment."""
    return end[-_END_BYTES:].startswith(_END_OF_ARCHIVE) and end.endswith(NO_COMMENT)


LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How `torch.save` begins a file that is no zip archive: a pickled number."""


def is_legacy(start: bytes) -> bool:
    """Whether a file with these first bytes is one of plain `torch.save`, of its older kind."""
    return start.startswith(LEGACY_MAGIC)


def flaw(digest: Digest, found: bytes) -> str | None:
    """What is wrong with a file, as a sentence; None if it is whole.

    Args:
        digest: of all bytes before the last `SEAL_BYTES`, and `NO_COMMENT`.
        found: the last `SEAL_BYTES` bytes.
    """
    if found == seal(digest):
        return None
    match = _RECORD.fullmatch(found[len(NO_COMMENT) :])
    if match is None:
        return "it does not end in an integrity record: cut short, changed, or not one of ours"
    version, size, crc32 = int(match[1]), int(match[2]), int(match[3], 16)
    if version != FORMAT:
        return f"its record says format {version}, this version reads {FORMAT}"
    if size != digest.size:
        return f"its record says {size} bytes of archive, there are {digest.size}"
    if crc32 != digest.crc32:
        return f"its record says CRC-32 {crc32:08x}, its bytes give {digest.crc32:08x}"
    return "the length before its integrity record is wrong"
