"""Sums of files that several threads read at once."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticlib import CheckpointManager
from elasticlib.checkpoint.place import (
    SEGMENT,
    LocalPlace,
    checksum,
    checksum_beside,
    read_summed,
)
from elasticlib.errors import CheckpointError

SIZE = 3 * SEGMENT + 12345


@pytest.mark.parametrize("at", [0, SEGMENT - 1, SEGMENT, SIZE - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_checksum_changes_with_each_bit(at: int, bit: int) -> None:
    data = bytearray(SIZE)
    before = checksum(memoryview(data))
    data[at] ^= 1 << bit
    assert checksum(memoryview(data)) != before


def from_memory(data: bytes, most: int) -> Callable[..., int]:
    """Gives so many bytes at a time at most, and none behind its end."""

    def fill(start: int, buffer: memoryview, piece: Callable[[memoryview], None]) -> int:
        part = data[start : start + min(most, len(buffer))]
        buffer[: len(part)] = part
        piece(buffer[: len(part)])
        return len(part)

    return fill


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("most", [SEGMENT, SEGMENT // 3 + 1])
def test_all_is_read_and_summed_once_whoever_reads_it(threads: int, most: int) -> None:
    data = os.urandom(SIZE)
    into, seen = bytearray(SIZE), []
    found = read_summed(
        from_memory(data, most),
        SIZE,
        memoryview(into),
        threads=threads,
        seen=lambda piece: seen.append(len(piece)),
    )
    assert found == (SIZE, checksum(memoryview(data)))
    assert (bytes(into), sum(seen)) == (data, SIZE)
    assert read_summed(from_memory(data, most), SIZE, threads=threads) == found
    done: list[bool] = []
    assert checksum_beside(memoryview(data), lambda: done.append(True)) == found[1]
    assert done == [True]
    for cut in (0, SEGMENT, 2 * SEGMENT - 7):
        short = read_summed(from_memory(data[:cut], most), SIZE, threads=threads)
        assert short == (cut, checksum(memoryview(data)[:cut]))


def test_what_one_thread_raises_is_raised_once_all_have_ended() -> None:
    at_work = threading.active_count()

    def fill(start: int, _buffer: memoryview, _piece: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"byte {start}")

    with pytest.raises(OSError, match="byte "):
        read_summed(fill, SIZE, threads=3)
    assert threading.active_count() == at_work


class Slow(LocalPlace):
    """Says whether two threads were ever reading at once, each of which waits for the other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.together = threading.Barrier(2)

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0, **options: Any) -> int:
        if start % SEGMENT == 0 and len(buffer) == SEGMENT and start < 2 * SEGMENT:
            self.together.wait(60)
        return super().read_into(name, buffer, start=start, **options)


def test_a_checkpoint_is_read_by_several_threads_and_a_changed_byte_in_the_middle_found(
    tmp_path: Path,
) -> None:
    want = torch.arange(SIZE // 4, dtype=torch.float32)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": want})
    place = Slow(tmp_path)
    place.readers = 2
    # They wait for each other: with one thread alone it would never end.
    assert torch.equal(CheckpointManager(place).load()["w"], want)
    (pack,) = tmp_path.glob("step-*/*.pack")
    with pack.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, SEGMENT + 4097)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), SEGMENT + 4097)
    with pytest.raises(CheckpointError, match=r"should have checksum [0-9a-f]{8}, its bytes give"):
        CheckpointManager(tmp_path).load(1)
