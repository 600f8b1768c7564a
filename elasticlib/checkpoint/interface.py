"""Where whole states are kept: on a disk, in an agent's memory, or somewhere of your own."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Sequence

from .held import Held as Held


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
            CheckpointCorrupt: it is damaged.
            CheckpointError: it cannot be read, or is not there any more.
        """
