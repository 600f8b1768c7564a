"""Checksums of files that are written in segments and read by several threads at once."""

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
from elasticlib.checkpoint.storage import (
    SEGMENT_BYTES,
    FsspecStorage,
    LocalStorage,
    OnChunk,
    checksum,
    encode_checksum,
    read_with_checksum,
)
from elasticlib.errors import CheckpointError

SIZE = 3 * SEGMENT_BYTES + 12345  # of the data, which are followed by their checksum


@pytest.mark.parametrize("at", [0, SEGMENT_BYTES - 1, SEGMENT_BYTES, SIZE - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_checksum_changes_with_each_bit(at: int, bit: int) -> None:
    data = bytearray(SIZE)
    before = checksum(memoryview(data))
    data[at] ^= 1 << bit
    assert checksum(memoryview(data)) != before


@pytest.mark.parametrize(
    "storage", [LocalStorage, lambda folder: FsspecStorage(f"file://{folder}")]
)
def test_a_file_ends_with_the_checksum_of_its_data(tmp_path: Path, storage: Any) -> None:
    data = memoryview(os.urandom(SIZE))
    assert storage(tmp_path).write("folder/file", data) == checksum(data)
    assert (tmp_path / "folder" / "file").read_bytes() == file_of(data)


def file_of(data: bytes | memoryview) -> bytes:
    return bytes(data) + encode_checksum(checksum(memoryview(data)))


def reader_of(data: bytes, max_chunk: int) -> Callable[..., int]:
    """Return a function that reads from these bytes, at most `max_chunk` of them at a time."""

    def read(buffer: memoryview, start: int, on_chunk: OnChunk) -> int:
        part = data[start : start + len(buffer)]
        buffer[: len(part)] = part
        for at in range(0, len(part), max_chunk):
            on_chunk(buffer[at : min(at + max_chunk, len(part))])
        return len(part)

    return read


@pytest.mark.parametrize("max_threads", [1, 4])
@pytest.mark.parametrize("max_chunk", [SEGMENT_BYTES, SEGMENT_BYTES // 3 + 1])
@pytest.mark.parametrize("size", [1, SEGMENT_BYTES - 4, SEGMENT_BYTES, SEGMENT_BYTES + 1, SIZE])
def test_each_byte_is_read_once_and_the_checksum_does_not_depend_on_threads(
    max_threads: int, max_chunk: int, size: int
) -> None:
    file = file_of(os.urandom(size))
    into, chunk_sizes = bytearray(len(file)), []
    result = read_with_checksum(
        reader_of(file, max_chunk),
        len(file),
        memoryview(into),
        max_threads=max_threads,
        on_chunk=lambda chunk: chunk_sizes.append(len(chunk)),
    )
    assert result == (len(file), checksum(memoryview(file)[:-8]), file[-8:])
    assert (bytes(into), sum(chunk_sizes)) == (file, len(file))
    read = reader_of(file, max_chunk)
    assert read_with_checksum(read, len(file), max_threads=max_threads) == result
    for end in {0, size // 2, size, size + 7}:
        read = reader_of(file[:end], max_chunk)
        assert read_with_checksum(read, len(file), max_threads=max_threads)[0] == end


def test_an_error_of_one_thread_is_raised_after_all_threads_have_finished() -> None:
    num_threads = threading.active_count()

    def read(_buffer: memoryview, start: int, _on_chunk: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"byte {start}")

    with pytest.raises(OSError, match="byte "):
        read_with_checksum(read, SIZE, max_threads=3)
    assert threading.active_count() == num_threads


class TwoReaders(LocalStorage):
    """Storage on which the reads of the first two segments wait for each other."""

    max_readers = 2

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.barrier = threading.Barrier(2)

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0, **options: Any) -> int:
        if start in (0, SEGMENT_BYTES) and len(buffer) == SEGMENT_BYTES:
            self.barrier.wait(60)
        return super().read_into(name, buffer, start=start, **options)


def test_several_threads_read_a_checkpoint_and_detect_a_changed_byte(tmp_path: Path) -> None:
    expected = torch.arange(SIZE // 4, dtype=torch.float32)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": expected})
    assert torch.equal(CheckpointManager(TwoReaders(tmp_path)).load()["w"], expected)
    (pack,) = tmp_path.glob("step-*/*.safetensors")
    with pack.open("r+b") as file:
        (byte,) = os.pread(file.fileno(), 1, SEGMENT_BYTES + 4097)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), SEGMENT_BYTES + 4097)
    with pytest.raises(CheckpointError, match=r"must have the checksum [0-9a-f]{8}, but its bytes"):
        CheckpointManager(tmp_path).load(1)
