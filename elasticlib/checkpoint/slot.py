"""A slot of memory: which snapshot it holds, which slot is written next, and which count.

A slot's first page holds a record of what follows, with its own sum; it is cleared before the
bytes behind it are touched and written when they are all there, so whoever reads it at any moment
sees a whole snapshot or none.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ..errors import CheckpointError
from ..foreign import read_fields, read_json

RECORD_BYTES = 4096
"""Of a slot, before the snapshot's own bytes; a page, as the tensors want to be aligned."""

ROOMY = 2
"""A slot is not used for what fills less than one part in so many of it."""

SEAL_BYTES = 64
SEAL_AT = RECORD_BYTES - SEAL_BYTES
"""Where the sum of the snapshot's bytes stands, which is made after it has come to count."""

MAGIC = b"ELSLOT1\n"
_SEAL_MAGIC = b"ELSEAL1\n"
_SEAL = struct.Struct("<8sQI")
SUMS = 1 << 64
_HEAD = struct.Struct("<8sII")


@attrs.frozen
class Record:
    """What a slot holds.

    name: of the snapshots, where a program has several kinds. sequence: the how manieth of its
    writer, from 1. size: of the pack behind the record, in bytes. part, parts: as `Held` has them.
    folder: where it is written when the job ends without it; empty for nowhere. shared: whether
    that folder is one for all nodes. run, launch, generation: see `fence.Writer`. sharded: whether
    it is a rank's part of a sharded state (see `sharded.lay_out_part`), be it the only one.
    """

    name: str
    step: int
    sequence: int
    size: int
    run: str
    generation: int
    part: int = 0
    parts: int = 1
    folder: str = ""
    shared: bool = True
    launch: str = ""
    sharded: bool = False

    @property
    def keep(self) -> int:
        """How many whole snapshots stay while another is written.

        One that is the same on all ranks: any rank's will do. Of a state in parts, two: a rank
        begins to write step n + 1 when it has entered that step's collective; if its GPU has not
        come out of it yet, another rank may be writing step n still, and hold n - 1 only. Nobody
        is further: who has n + 1 whole has come out of its collective, which needs all ranks to
        have n whole.
        """
        return 2 if self.parts > 1 else 1


def encode(record: Record) -> bytes:
    """The first bytes of a slot.

    Raises:
        CheckpointError: the names in it are too long for a page.
    """
    text = json.dumps(attrs.asdict(record), separators=(",", ":")).encode()
    if _HEAD.size + len(text) > SEAL_AT:
        raise CheckpointError(
            f"a snapshot's record has at most {SEAL_AT} bytes, and that of step "
            f"{record.step} has {_HEAD.size + len(text)}: use a shorter path than {record.folder!r}"
        )
    return _HEAD.pack(MAGIC, len(text), _sum(text)) + text


def decode(page: bytes | memoryview) -> Record | None:
    """The record that the first bytes of a slot hold; None if that is not a whole one."""
    if len(page) < _HEAD.size:
        return None
    magic, length, summed = _HEAD.unpack_from(page)
    text = bytes(page[_HEAD.size : _HEAD.size + length])
    if magic != MAGIC or len(text) != length or summed != _sum(text):
        return None
    try:
        return read_record(read_json(text))
    except ValueError:
        return None


def word_sum(data: memoryview) -> int:
    """What a seal says of these bytes: the sum of their 64-bit words (little-endian) modulo `SUMS`.

    Any one bit that flips changes it, and it costs no more than to read memory; where torch is it
    is made with that, a hundred times as fast.
    """
    words = len(data) // 8 * 8
    rest = int.from_bytes(data[words:], "little")
    return (sum(data[:words].cast("Q")) + rest) % SUMS


def encode_seal(record: Record, summed: int) -> bytes:
    """What stands at `SEAL_AT`: the `word_sum` of this snapshot's bytes, and of no other's."""
    seal = _SEAL.pack(_SEAL_MAGIC, summed, zlib.crc32(encode(record)))
    return seal + zlib.crc32(seal).to_bytes(4, "little")


def decode_seal(page: bytes, record: Record) -> int | None:
    """The sum of a snapshot's bytes, by its slot's first page; None if it has none yet."""
    seal = page[SEAL_AT : SEAL_AT + _SEAL.size + 4]
    if len(seal) < _SEAL.size + 4:
        return None
    _, summed, _ = _SEAL.unpack_from(seal)
    return int(summed) if seal == encode_seal(record, summed) else None


def read_record(fields: Any) -> Record:
    """The record with these fields, each of its type and in its range.

    Raises:
        ValueError: they are not a record's.
    """
    record = read_fields(Record, fields)
    if not (0 <= record.part < record.parts and record.size > 0 and record.sequence > 0):
        raise ValueError(f"no record of a snapshot: {record!s:.200}")
    return record


def _sum(text: bytes) -> int:
    return zlib.crc32(text, len(text))


@attrs.frozen
class Slot:
    """One slot of a writer; capacity: bytes behind its record; record: None if it holds nothing."""

    name: str
    capacity: int
    record: Record | None = None


@attrs.frozen
class Choice:
    """Which slots may be written, the best first, and which are of no more use."""

    use: tuple[str, ...]
    drop: tuple[str, ...]


def choose(slots: Iterable[Slot], size: int, keep: int) -> Choice:
    """Where the next snapshot of `size` bytes goes; a new slot, if none of `use` is free.

    The newest `keep` whole ones are in neither list.
    """
    slots = tuple(slots)
    whole = sorted((s for s in slots if s.record), key=_sequence, reverse=True)
    kept = {slot.name for slot in whole[:keep]}
    free = sorted((slot for slot in slots if slot.name not in kept), key=_sequence)
    fits = [slot.name for slot in free if size <= slot.capacity <= size * ROOMY]
    return Choice(tuple(fits), tuple(slot.name for slot in free if slot.name not in fits))


def _sequence(slot: Slot) -> int:
    return slot.record.sequence if slot.record else 0


@attrs.frozen
class Found:
    """A whole snapshot in an agent's memory.

    era: the how manieth start of the agent's workers it was put there in. owner: who put it there:
    empty for workers here, else what names the node that sent it. file: its path in the memory.
    """

    era: int
    owner: str
    file: str
    record: Record

    @property
    def _line(self) -> tuple[str, str, int, int]:
        return (self.owner, self.record.name, self.record.part, self.record.parts)

    @property
    def _order(self) -> tuple[int, int]:
        return (self.era, self.record.sequence)


def that_count(found: Iterable[Found]) -> tuple[Found, ...]:
    """Those that may be gone back to, the newest step first, and of one step our own first.

    Who has gone back to an earlier step has given up the later ones: a snapshot counts only if
    all that were made after it in its place are of later steps.
    """
    lowest: dict[tuple[str, str, int, int], int] = {}
    counts = []
    for one in sorted(found, key=lambda one: one._order, reverse=True):
        step = one.record.step
        if step < lowest.get(one._line, step + 1):
            lowest[one._line] = step
            counts.append(one)
    return tuple(sorted(counts, key=lambda one: (-one.record.step, one.owner != "", one.file)))


def outlived(found: Iterable[Found], era: int, name: str) -> tuple[Found, ...]:
    """The snapshots of earlier eras that are of no more use once this one's stand on their own.

    They do once a worker here has made as many in this era as are kept: then all ranks have one.
    Replicas count as what they are replicas of. Of a state in parts a step that earlier eras have
    here is the one that was restored: a copy of a part that this node was sent says nothing of
    where the other ranks are, which may have to go back to that step.
    """
    found = tuple(one for one in found if one.record.name == name)
    before = {one.record.step for one in found if one.era < era}
    made: dict[int, list[Record]] = {}
    for one in found:
        restored = one.record.parts > 1 and one.record.step in before
        if one.era == era and not one.owner and not restored:
            made.setdefault(one.record.part, []).append(one.record)
    if not any(len(records) >= records[0].keep for records in made.values()):
        return ()
    return tuple(one for one in found if one.era < era)


def given_up(found: Iterable[Found], era: int, name: str, step: int) -> tuple[Found, ...]:
    """The snapshots of earlier eras that are of no more use, as this one goes on from `step`.

    Those that were made after it; and those before the last ones that are kept while another is
    written: so there is room for the new era's first beside what it can go back to.
    """
    earlier = tuple(one for one in found if one.era < era and one.record.name == name)
    kept: dict[tuple[str, str, int, int], list[Found]] = {}
    for one in that_count(earlier):
        last = kept.setdefault(one._line, [])
        if one.record.step <= step and len(last) < one.record.keep:
            last.append(one)
    gone = (one for one in earlier if one not in kept.get(one._line, []))
    # Killed in between, what was gone back behind must not be all that is left.
    return tuple(sorted(gone, key=lambda one: (-one.record.step, one._order)))


def newest_of_each(found: Sequence[Found]) -> tuple[Found, ...]:
    """The last one that each worker has made, of each name and part."""
    last: dict[tuple[str, str, int, int], Found] = {}
    for one in found:
        if one._line not in last or one._order > last[one._line]._order:
            last[one._line] = one
    return tuple(last.values())
