"""Where states are kept: on a disk, in an agent's memory, or somewhere of your own.

What somebody holds is a value, so that restore chooses among what all ranks hold, wherever it lies.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import attrs

from ..errors import CheckpointError

MEMORY, DISK, SHARDED_DISK = "memory", "disk", "sharded disk"
"""What holds a state. Who reaches a `sharded disk` reaches all of its parts."""


@attrs.frozen
class Held:
    """A state, or one rank's part of it, as somebody here holds it.

    step: after which the state was taken. kind: what holds it, such as `memory` or `disk`. name:
    for the one who holds it to find it again, and for people. parts: over how many ranks it is
    sharded, and part, which rank's part this is; 0 of 0 is a state that is the same on all ranks.
    run, generation: by which launch of the job, and in which of its generations, it was made. A
    step that was trained twice, before a loss and after it, is two states, and their parts do not
    fit together.
    """

    step: int
    kind: str
    name: str
    part: int = 0
    parts: int = 0
    run: str = ""
    generation: int = 0

    @property
    def has(self) -> range:
        """The numbers of the parts that this is; of a state that is the same on all ranks, 0."""
        return range(self.parts) if self.kind == SHARDED_DISK else range(self.part, self.part + 1)


class Unreadable(CheckpointError):
    """Nobody can say what is there: it was not read and found damaged, it could not be read."""


class Source(abc.ABC):
    """What one process can reach of the states that are kept: packs (`elasticlib.checkpoint.pack`).

    What reads one raises CheckpointCorrupt if it is damaged; Unreadable if it may be whole, so that
    no older state is taken in its place; and CheckpointError for another reason, such as that it is
    not there any more.
    """

    @abc.abstractmethod
    def held(self) -> Sequence[Held]:
        """What is here, newest first; what is known to be damaged or half written is not."""

    @abc.abstractmethod
    def view(self, held: Held, part: int = 0) -> memoryview:
        """The pack of what `held` names, or of that part of it; writable, and not yet checked.

        Nothing that is saved meanwhile changes it until `release`. What is written to it changes
        no other's.
        """

    @abc.abstractmethod
    def check(self, held: Held, part: int = 0) -> None:
        """Verify every byte of it by its sum, where it has one."""

    def head(self, held: Held, part: int = 0) -> memoryview | bytes:
        """The first bytes of it, all of its outline at least; not checked."""
        return self.view(held, part)

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """What was viewed is not needed any more."""

    def left_out(self) -> Sequence[tuple[int, str]]:
        """What the last `held` left out as it is damaged, newest first: its step, and why."""
        return ()

    def unread(self) -> Sequence[tuple[int, str]]:
        """What the last `held` left out as it could not be read, newest first: step, and why."""
        return ()
