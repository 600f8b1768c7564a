"""The pure rules of snapshot slots: headers, the choice of a slot, and valid snapshots."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticlib.checkpoint.snapshot_slots import (
    Slot,
    SnapshotHeader,
    SnapshotRef,
    abandoned_snapshots,
    choose_slots,
    decode_header,
    encode_header,
    superseded_snapshots,
    valid_snapshots,
)
from elasticlib.errors import CheckpointError

HEADER = SnapshotHeader("state", 7, 3, 64, "run", 2, part=1, parts=4, folder="/där")


def create_ref(era: int, sequence: int, step: int, owner: str = "", **more: int) -> SnapshotRef:
    parts = {"part": 0, "parts": 1, "generation": era, **more}
    record = SnapshotHeader("state", step, sequence, 64, "run", folder="/f", **parts)
    file = f"{era}/{owner or 'own'}.{record.part}.{sequence}"
    return SnapshotRef(era, owner, file, record)


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
        existing = [s.header.sequence for s in slots if s.header]
        # If the writer is killed now, the last complete snapshots still exist.
        assert set(complete[-keep:]) <= set(existing)
        if pins < 2:  # The write succeeds, and fails otherwise.
            slot.header = SnapshotHeader("state", sequence, sequence, size, "run", 1, parts=parts)
            complete.append(sequence)
        assert size <= slot.capacity
        assert len(slots) <= keep + 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=12))
def test_snapshots_after_a_step_that_was_restored_later_are_not_valid(
    history: list[tuple[bool, int]],
) -> None:
    era, refs, valid_steps = 1, [], []
    for sequence, (restarted, step) in enumerate(history, 1):
        era += restarted
        refs.append(create_ref(era, sequence, step))
        valid_steps = [*(s for s in valid_steps if s < step), step]
    assert [one.header.step for one in valid_snapshots(refs)] == valid_steps[::-1]


def test_snapshots_of_earlier_attempts_are_superseded_once_the_new_attempt_is_complete() -> None:
    old = [create_ref(1, 5, 5), create_ref(1, 4, 4, owner="2")]
    assert superseded_snapshots(old, 2) == ()
    # A replica of another node does not supersede own snapshots.
    assert superseded_snapshots([*old, create_ref(2, 1, 6, owner="2")], 2) == ()
    new = create_ref(2, 1, 6)
    other = attrs.evolve(new, header=attrs.evolve(new.header, name="other"))
    assert superseded_snapshots([*old, other], 2) == ()
    assert set(superseded_snapshots([*old, new], 2)) == set(old)
    assert superseded_snapshots([*old, new], 1) == ()
    # The first snapshot of a sharded state may not be complete on all ranks; with two it is.
    one, two = (create_ref(2, n, 5 + n, parts=2) for n in (1, 2))
    assert superseded_snapshots([*old, one], 2) == ()
    assert set(superseded_snapshots([*old, one, two], 2)) == set(old)
    # A copy of a restored part, whose node was lost, does not count as a first snapshot.
    part_of_5 = create_ref(1, 5, 5, part=1, parts=2)
    copy, first, second = (create_ref(2, n, 4 + n, parts=2) for n in (1, 2, 3))
    assert superseded_snapshots([part_of_5, copy, first], 2) == ()
    assert superseded_snapshots([part_of_5, copy, first, second], 2) == (part_of_5,)
    # The rule does not depend on the number of parts before and after.
    assert set(superseded_snapshots([create_ref(1, 5, 5, part=3, parts=4), one, two], 2))


def test_snapshots_after_the_restored_step_are_abandoned() -> None:
    old, late, new = create_ref(1, 4, 4), create_ref(1, 5, 5, owner="1"), create_ref(2, 1, 6)
    assert abandoned_snapshots([old, late, new], 2, 4) == (late,)


def test_only_the_newest_snapshots_up_to_the_restored_step_are_kept() -> None:
    complete = [create_ref(1, n, n) for n in (3, 4, 5)]
    assert set(abandoned_snapshots(complete, 2, 5)) == {complete[0], complete[1]}
    assert set(abandoned_snapshots(complete, 2, 4)) == {complete[0], complete[2]}
    # A snapshot that is not valid any more does not replace a valid one.
    assert abandoned_snapshots([create_ref(1, 9, 7), create_ref(2, 1, 5)], 3, 8) == (
        create_ref(1, 9, 7),
    )
    parts = [create_ref(1, n, n, part=part, parts=2) for n in (3, 4, 5) for part in (0, 1)]
    assert {one.header.step for one in abandoned_snapshots(parts, 2, 5)} == {3}
    # The same number of replicas of each node is kept.
    replicas = [create_ref(1, n, n, owner="1") for n in (4, 5)]
    assert set(abandoned_snapshots([*complete, *replicas], 2, 5)) == {*complete[:2], replicas[0]}
