"""A byte of shared memory that changes is found out before it is trained on, sent or written."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticlib import CheckpointManager, MemoryStore
from elasticlib.checkpoint import memory
from elasticlib.checkpoint.memory import (
    RECORD_BYTES,
    SEAL_AT,
    Record,
    decode_seal,
    encode_seal,
    word_sum,
)
from elasticlib.checkpoint.persist import LastWrites
from elasticlib.testing.waiting import wait_until


def state(value: float, size: int = 100_000) -> dict[str, Any]:
    return {"w": torch.full((size,), value)}


def snapshot_beside_a_checkpoint(folder: Path, kept: Path, *, summed: bool = True) -> Path:
    """A checkpoint of step 1, and in memory step 2: its file."""
    with CheckpointManager(folder) as manager:
        manager.save(1, state(1))
        manager.wait()
        assert manager.snapshot(2, state(2))
        (found,) = memory.look(kept)
        if summed:
            wait_until("the sum", lambda: memory.sum_of(kept, found) is not None)
    return kept / found.file


def flip(path: Path, at: int) -> None:
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), at)


def restored(folder: Path) -> tuple[int, set[float], tuple[str, ...]]:
    found = state(0)
    with CheckpointManager(folder) as manager:
        what = manager.restore(found)
        return what.step, set(found["w"].tolist()), what.passed_over


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_byte_in_memory_is_passed_over_with_its_reason_for_what_the_disk_has(
    tmp_path: Path, kept: Path, place: float
) -> None:
    path = snapshot_beside_a_checkpoint(tmp_path / "disk", kept)
    assert restored(tmp_path / "disk") == (2, {2.0}, ())
    last = path.stat().st_size - 1
    flip(path, RECORD_BYTES + int(place * (last - RECORD_BYTES)))
    step, values, (why,) = restored(tmp_path / "disk")
    assert (step, values) == (1, {1.0})
    assert "rank 0's step 2 (memory, " in why
    assert "was changed in memory: its checksum was " in why


def test_a_snapshot_whose_worker_ended_before_it_was_summed_is_used_as_it_is(
    tmp_path: Path, kept: Path
) -> None:
    path = snapshot_beside_a_checkpoint(tmp_path / "disk", kept)
    for seal in (bytes(64), b"ELSEAL1\n" + bytes(56)):
        with path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), seal, SEAL_AT)
        assert restored(tmp_path / "disk") == (2, {2.0}, ())


def test_each_snapshot_is_summed_when_there_is_time_also_where_slots_are_used_again(
    tmp_path: Path, kept: Path
) -> None:
    with CheckpointManager(tmp_path / "disk") as manager:
        for step in range(1, 40):
            assert manager.snapshot(step, state(step, size=1 << (step % 20)))
            if step % 7:
                continue
            newest = max(memory.look(kept), key=lambda one: one.record.sequence)
            wait_until("the sum", lambda newest=newest: memory.sum_of(kept, newest) is not None)
            found = state(0, size=1 << (step % 20))
            with CheckpointManager(tmp_path / "disk") as reader:
                assert reader.restore(found).step == step
            assert set(found["w"].tolist()) == {float(step)}


def test_what_was_changed_in_memory_is_not_written_to_the_disk_when_the_job_ends(
    tmp_path: Path, kept: Path
) -> None:
    path = snapshot_beside_a_checkpoint(tmp_path / "disk", kept)
    flip(path, RECORD_BYTES + 5000)
    said = LastWrites(kept, None, MemoryStore).run()
    assert said.startswith("the snapshot of step 2 was not written to ")
    assert ": the snapshot of step 2 was changed in memory: " in said
    assert CheckpointManager(tmp_path / "disk").steps() == [1]
    flip(path, RECORD_BYTES + 5000)
    assert LastWrites(kept, None, MemoryStore).run() == ""
    assert CheckpointManager(tmp_path / "disk").steps() == [1, 2]


@given(st.binary(max_size=3000), st.data())
def test_both_ways_to_sum_are_one_and_any_flipped_bit_changes_it(
    data: bytes, drawn: st.DataObject
) -> None:
    summed = word_sum(memoryview(bytearray(data)))
    assert summed == word_sum(memoryview(bytearray(data)), serial=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        assert summed == word_sum(memoryview(data))
    if data:
        bit = drawn.draw(st.integers(0, 8 * len(data) - 1))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert word_sum(memoryview(flipped)) != summed


@given(st.data())
def test_a_seal_that_was_changed_or_is_anothers_is_none(data: st.DataObject) -> None:
    record, other = (Record("state", step, step, 64, "run", 2) for step in (7, 8))
    page = bytes(SEAL_AT) + encode_seal(record, 0x1234 << 48)
    assert decode_seal(page, record) == 0x1234 << 48
    assert decode_seal(page, other) is None
    at = data.draw(st.integers(SEAL_AT, len(page) - 1))
    changed = page[:at] + bytes([page[at] ^ data.draw(st.integers(1, 255))]) + page[at + 1 :]
    assert decode_seal(changed, record) is None
    assert decode_seal(page[:at], record) is None
