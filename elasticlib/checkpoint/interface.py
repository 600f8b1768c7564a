"""Where whole states are kept: on a disk, in an agent's memory, or somewhere of your own."""

from __future__ import annotations

import abc
import mmap
from collections.abc import MutableMapping, Sequence
from typing import Any

from ..errors import CheckpointError
from .held import Held as Held


class Unreadable(CheckpointError):
    """Nobody can say what is there: it was not read and found damaged, it could not be read."""


class Source(abc.ABC):
    """What one process can reach of the states that are kept."""

    @abc.abstractmethod
    def held(self) -> Sequence[Held]:
        """What is here, newest first; what is known to be damaged or half written is not."""

    @abc.abstractmethod
    def read(self, held: Held) -> mmap.mmap | bytearray:
        """The pack (see `elasticlib.checkpoint.pack`) of what `held` names, all of it checked.

        The memory is the caller's own: nothing that is saved later changes it.

        Raises:
            CheckpointCorrupt: it is damaged. Unreadable: it may be whole, so no older state is
                taken in its place.
            CheckpointError: for another reason, such as that it is not there any more.
        """

    def left_out(self) -> Sequence[tuple[int, str]]:
        """What the last `held` left out as it is damaged, newest first: its step, and why."""
        return ()

    def unread(self) -> Sequence[tuple[int, str]]:
        """What the last `held` left out as it could not be read, newest first: step, and why."""
        return ()


class DirectSource(Source):
    """A source that also holds states of the kind `sharded disk`: every rank can reach all of
    one, and loads its own share of it by itself."""

    @abc.abstractmethod
    def check(self, held: Held) -> None:
        """Verify it, all ranks at once, each its share or all of it; nothing is changed.

        Raises:
            CheckpointError: it is damaged, or cannot be read. Then no rank loads it.
        """

    @abc.abstractmethod
    def load(self, held: Held, state: MutableMapping[str, Any], *, strict: bool = True) -> None:
        """Load it into `state`, all ranks at once, after all have checked it. What fails here
        fails all ranks, since `state` may have been changed in part."""
