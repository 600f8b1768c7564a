"""What a slot's record says, which slots are written, and which snapshots count: pure."""

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

RECORD = SnapshotHeader("state", 7, 3, 64, "run", 2, part=1, parts=4, folder="/där")


def found(era: int, sequence: int, step: int, owner: str = "", **more: int) -> SnapshotRef:
    parts = {"part": 0, "parts": 1, "generation": era, **more}
    record = SnapshotHeader("state", step, sequence, 64, "run", folder="/f", **parts)
    file = f"{era}/{owner or 'own'}.{record.part}.{sequence}"
    return SnapshotRef(era, owner, file, record)


@given(st.data())
def test_a_record_that_was_changed_in_any_byte_or_cut_is_none(data: st.DataObject) -> None:
    text = encode_header(RECORD)
    assert decode_header(text + bytes(100)) == RECORD
    at = data.draw(st.integers(0, len(text) - 1))
    flipped = bytes([text[at] ^ data.draw(st.integers(1, 255))])
    assert decode_header(text[:at] + flipped + text[at + 1 :]) is None
    # As a slot is cleared before it is written: bytes of it may be there when its writer dies.
    assert decode_header(text[:at] + bytes(len(text) - at)) is None
    assert decode_header(bytes(at) + text[at + 1 :]) is None


def test_a_record_that_does_not_fit_its_page_is_refused() -> None:
    with pytest.raises(CheckpointError, match="at most 4096 bytes, and that of step 7"):
        encode_header(attrs.evolve(RECORD, folder="x" * 4096))


@given(st.integers(1, 2), st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), max_size=60))
def test_the_newest_whole_ones_are_never_written_whatever_is_pinned_or_fails(
    keep: int, history: list[tuple[int, int]]
) -> None:
    slots: list[Slot] = []
    whole: list[int] = []
    parts = 2 if keep > 1 else 1
    for sequence, (size, pins) in enumerate(history, 1):
        use, drop = choose_slots(slots, size, keep)
        slots = [slot for slot in slots if slot not in drop]
        slot = use[pins] if pins < len(use) else Slot(size)
        slot.header = None
        if slot not in slots:
            slots.append(slot)
        held = [s.header.sequence for s in slots if s.header]
        # In the middle of writing: killed now, the last whole ones are there.
        assert set(whole[-keep:]) <= set(held)
        if pins < 2:  # else it fails
            slot.header = SnapshotHeader("state", sequence, sequence, size, "run", 1, parts=parts)
            whole.append(sequence)
        assert size <= slot.capacity
        assert len(slots) <= keep + 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=12))
def test_what_counts_is_what_was_not_gone_back_behind(made: list[tuple[bool, int]]) -> None:
    era, all_found, line = 1, [], []
    for sequence, (restarted, step) in enumerate(made, 1):
        era += restarted
        all_found.append(found(era, sequence, step))
        line = [*(s for s in line if s < step), step]
    assert [one.header.step for one in valid_snapshots(all_found)] == line[::-1]


def test_earlier_eras_go_when_the_new_one_stands_on_its_own() -> None:
    old = [found(1, 5, 5), found(1, 4, 4, owner="2")]
    assert superseded_snapshots(old, 2) == ()
    # A replica of another node's says nothing of what is made here.
    assert superseded_snapshots([*old, found(2, 1, 6, owner="2")], 2) == ()
    new = found(2, 1, 6)
    other = attrs.evolve(new, header=attrs.evolve(new.header, name="other"))
    assert superseded_snapshots([*old, other], 2) == ()
    assert set(superseded_snapshots([*old, new], 2)) == set(old)
    assert superseded_snapshots([*old, new], 1) == ()
    # Of a state in parts the other ranks may not have their first yet; with two they have.
    one, two = (found(2, n, 5 + n, parts=2) for n in (1, 2))
    assert superseded_snapshots([*old, one], 2) == ()
    assert set(superseded_snapshots([*old, one, two], 2)) == set(old)
    # A copy of what was restored, a part that came from a node that is gone, is no first one.
    part_of_5 = found(1, 5, 5, part=1, parts=2)
    copy, first, second = (found(2, n, 4 + n, parts=2) for n in (1, 2, 3))
    assert superseded_snapshots([part_of_5, copy, first], 2) == ()
    assert superseded_snapshots([part_of_5, copy, first, second], 2) == (part_of_5,)
    # In whatever way the new world cuts it up.
    assert set(superseded_snapshots([found(1, 5, 5, part=3, parts=4), one, two], 2))


def test_what_was_made_after_the_step_that_is_gone_back_to_is_given_up() -> None:
    old, late, new = found(1, 4, 4), found(1, 5, 5, owner="1"), found(2, 1, 6)
    assert abandoned_snapshots([old, late, new], 2, 4) == (late,)


def test_of_what_was_made_before_it_as_many_stay_as_are_kept_while_another_is_made() -> None:
    whole = [found(1, n, n) for n in (3, 4, 5)]
    assert set(abandoned_snapshots(whole, 2, 5)) == {whole[0], whole[1]}
    assert set(abandoned_snapshots(whole, 2, 4)) == {whole[0], whole[2]}
    # What was gone back behind counts no more, and does not take the place of what does.
    assert abandoned_snapshots([found(1, 9, 7), found(2, 1, 5)], 3, 8) == (found(1, 9, 7),)
    parts = [found(1, n, n, part=part, parts=2) for n in (3, 4, 5) for part in (0, 1)]
    assert {one.header.step for one in abandoned_snapshots(parts, 2, 5)} == {3}
    # Of each node that gave replicas as many.
    replicas = [found(1, n, n, owner="1") for n in (4, 5)]
    assert set(abandoned_snapshots([*whole, *replicas], 2, 5)) == {*whole[:2], replicas[0]}
