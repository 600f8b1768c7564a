"""The CRC-32 of bytes while they are read or written, in a thread of its own.

A checkpoint is summed beside the disk's work, not before or after it: `zlib` sums several GB a
second, without Python's lock, and so hides behind a disk that is slower.
"""

from __future__ import annotations

import queue
import zlib
from types import TracebackType

from ..errors import CheckpointError
from ..threads import helper

CHUNK = 8 << 20


class Summing:
    """Sums what it is given, in order; `result` waits for the rest. To be used as a context."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._thread = helper(self._run, "elasticlib-sum", self._broke)
        self._sum = 0
        self._broken = ""

    def __enter__(self) -> Summing:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.result()

    def give(self, data: memoryview) -> None:
        """Sum these bytes behind those before them. They must not change until `result`."""
        self._given.put(data)

    def result(self) -> int:
        """The CRC-32 of all that was given.

        Raises:
            CheckpointError: it could not be summed.
        """
        if self._thread.is_alive():
            self._given.put(None)
            self._thread.join()
        if self._broken:
            raise CheckpointError(self._broken)
        return self._sum

    def _broke(self, sentence: str) -> None:
        self._broken = sentence

    def _run(self) -> None:
        while (data := self._given.get()) is not None:
            for start in range(0, len(data), CHUNK):
                self._sum = zlib.crc32(data[start : start + CHUNK], self._sum)
