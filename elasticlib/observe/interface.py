"""What an agent tells of its node's part in a job, to whoever wants to keep it."""

from __future__ import annotations

import abc
from typing import Any


class Journal(abc.ABC):
    """Is told what happens, while it happens, by the agent's loop and by threads beside it.

    `tell` neither waits nor raises, whatever becomes of the disk or the network behind it: what
    is told is never worth a stop of the training.
    """

    @abc.abstractmethod
    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        """One event; its kinds and their facts are in `elasticlib.observe.event.KINDS`."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Nothing more will be told; what was is put where it belongs, within some seconds."""


class NoJournal(Journal):
    """Keeps nothing."""

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        del kind, generation, rank, facts


class Journals(Journal):
    """Tells each of several, in their order."""

    def __init__(self, *parts: Journal) -> None:
        self._parts = parts

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        for part in self._parts:
            part.tell(kind, generation=generation, rank=rank, **facts)

    def close(self) -> None:
        for part in self._parts:
            part.close()
