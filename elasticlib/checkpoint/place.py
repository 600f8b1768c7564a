"""A folder of checkpoints, wherever it lies: what must be possible there, and what it promises.

Names are relative, with `/` in them. Whatever fails is an OSError; a commit is data first, each
file new and durable before the next begins, and one small file put last.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager

CHUNK = 16 << 20
"""Bytes that are read or written at once: large, so that a disk streams, and few calls are made."""


PIECE = 1 << 20
"""Bytes that are read at once and then summed, while they are in a core's cache."""

MAX_SMALL = 64 << 20
"""Bytes of a small file, such as a manifest of a hundred thousand parts."""


class NotAFile(OSError):
    """Something else stands where a file belongs (a folder, a pipe), or one that is far too large.
    It was looked at: no disk has failed, and it will not be another thing the next time."""


def no_news(_chunk: memoryview) -> None:
    """Nobody wants to see the bytes as they come."""


class Place(abc.ABC):
    """One folder, and the folders in it.

    name: for messages. atomic: whether `put` leaves the old file or the new one whatever happens,
    and `locked` keeps others out.
    """

    name: str
    atomic: bool
    readers = 1
    """How many threads may call `read_into` at once, for one file or for several."""

    @abc.abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out, if that is possible here; makes the folder."""

    @abc.abstractmethod
    def folders(self) -> list[str]:
        """The names of the folders in it; none if it is not there."""

    def is_linked(self, folder: str) -> bool:  # noqa: ARG002 - most know no links
        """Whether a folder in it is a link to another place: it is read like any other, and what
        lies there is never written or deleted."""
        return False

    @abc.abstractmethod
    def files(self, folder: str) -> dict[str, int]:
        """The files in a folder in it (`""` for itself) with their bytes; none if not there."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes | None:
        """A small file whole; None if it is not there. Raises NotAFile where nothing can be read
        as one; it never waits for what may not come, as of a pipe."""

    @abc.abstractmethod
    def read_into(
        self,
        name: str,
        buffer: memoryview,
        *,
        start: int = 0,
        seen: Callable[[memoryview], None] = no_news,
    ) -> int:
        """Read a file from the byte `start` on into `buffer`, until either ends; how many bytes.

        seen: called with each part of the buffer once it is filled, in order.
        """

    @abc.abstractmethod
    def write(self, name: str, data: memoryview) -> None:
        """Write a new file, durably; makes its folder. Of one that fails nothing is left."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Put a small file in the place of what stands there, durably; the folder is there."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Take a file away, to stay away; harmless if it is not there."""

    @abc.abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Take an empty folder away; harmless if it is not there, or not empty."""
