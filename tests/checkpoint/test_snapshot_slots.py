"""The pure rules of snapshot slots: headers, the choice of a slot, and what is freed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from managers import snapshot_ref

from elasticlib.checkpoint.refs import (
    MEMORY,
    REPLICA,
    StateRef,
    Writer,
    begin,
    may_free,
    without_old_copies,
)
from elasticlib.checkpoint.snapshot_slots import (
    Slot,
    choose_slots,
    decode_header,
    encode_header,
)
from elasticlib.errors import CheckpointError

HEADER = snapshot_ref("state", 7, 64, part=1, parts=4, folder="/där")


@given(st.data())
def test_a_header_with_a_changed_byte_or_a_truncated_header_is_rejected(
    data: st.DataObject,
) -> None:
    text = encode_header(HEADER)
    assert decode_header(text + bytes(100)) == HEADER
    at = data.draw(st.integers(0, len(text) - 1))
    flipped = bytes([text[at] ^ data.draw(st.integers(1, 255))])
    assert decode_header(text[:at] + flipped + text[at + 1 :]) is None
    # A slot is cleared before it is written, so a killed writer leaves a part of the header.
    assert decode_header(text[:at] + bytes(len(text) - at)) is None
    assert decode_header(bytes(at) + text[at + 1 :]) is None


def test_a_header_longer_than_a_page_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="at most 8192 bytes, and that of step 7"):
        encode_header(attrs.evolve(HEADER, folder="x" * 8192))


@given(st.integers(1, 2), st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), max_size=60))
def test_the_newest_complete_snapshots_are_never_overwritten(
    keep: int, history: list[tuple[int, int]]
) -> None:
    slots: list[Slot] = []
    complete: list[int] = []
    parts = 2 if keep > 1 else 1
    for sequence, (size, pins) in enumerate(history, 1):
        use, drop = choose_slots(slots, size, keep)
        slots = [slot for slot in slots if slot not in drop]
        slot = use[pins] if pins < len(use) else Slot(size)
        slot.header = None
        if slot not in slots:
            slots.append(slot)
        existing = [s.header.number for s in slots if s.header]
        # If the writer is killed now, the last complete snapshots still exist.
        assert set(complete[-keep:]) <= set(existing)
        if pins < 2:  # The write succeeds, and fails otherwise.
            slot.header = snapshot_ref("state", sequence, size, part=0, parts=parts)
            complete.append(sequence)
        assert size <= slot.capacity
        assert len(slots) <= keep + 3


OLD, NEW = Writer("run", "launch", 1), Writer("run", "launch", 2)


def snapshot(writer: Writer, step: int, *, base: StateRef | None = None, **more: Any) -> StateRef:
    era, tier = writer.generation, more.pop("tier", MEMORY)
    place = f"{era}/{tier}.{more.get('part')}.{step}"
    line = begin(base, writer)
    return StateRef(
        line[-1].id, step, line=line, writer=writer, tier=tier, place=place, number=step, **more
    )


def freed(refs: list[StateRef], new: StateRef) -> set[StateRef]:
    earlier = {ref.place for ref in refs if ref.place.startswith("1/")}
    return set(may_free(refs, new.line, earlier))


def test_snapshots_of_earlier_attempts_are_freed_once_the_new_attempt_is_complete() -> None:
    old = snapshot(OLD, 5)
    replica = snapshot(OLD, 4, tier=REPLICA)
    new = snapshot(NEW, 6, base=old)
    assert freed([old, replica], new) == set()
    # A replica of another node does not replace own snapshots, and neither does a copy of the
    # restored state.
    assert freed([old, snapshot(NEW, 6, base=old, tier=REPLICA)], new) == set()
    assert freed([old, snapshot(NEW, 5, base=old)], new) == set()
    assert freed([old, replica, new], new) == {old, replica}


def test_at_a_start_the_newest_snapshots_of_each_branch_and_part_are_kept() -> None:
    first = [snapshot(OLD, step) for step in (3, 4, 5)]
    after = [snapshot(NEW, step, base=first[0]) for step in (4, 5)]
    assert set(without_old_copies([*first, *after])) == {*first[:2], after[0]}
    parts = [snapshot(OLD, step, parts=2, part=part) for step in (3, 4, 5) for part in (0, 1)]
    assert {ref.step for ref in without_old_copies(parts)} == {3}
    replicas = [snapshot(OLD, step, tier=REPLICA) for step in (4, 5)]
    assert set(without_old_copies([*first, *replicas])) == {*first[:2], replicas[0]}
