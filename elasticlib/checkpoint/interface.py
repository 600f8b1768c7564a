"""Where whole states are kept: on a disk, in an agent's memory, or somewhere of your own."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Sequence

import attrs


@attrs.frozen
class Held:
    """A state, or one rank's part of it, as somebody here holds it.

    step: after which the state was taken. kind: what holds it, `memory` or `disk`. name: for the
    one who holds it to find it again, and for people. part, parts: the state is cut up over so
    many ranks, of which this is one's; 0 of 1 is a state that is the same on all ranks.
    """

    step: int
    kind: str
    name: str
    part: int = 0
    parts: int = 1


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
