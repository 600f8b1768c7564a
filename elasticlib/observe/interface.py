"""What an agent tells of its node's part in a job, to whoever wants to keep it."""

from __future__ import annotations

import abc
import logging
from typing import Any

from ..errors import describe
from ..threads import Aside

log = logging.getLogger("elasticlib.observe")

CLOSE_SECONDS = 2.0


class Journal(abc.ABC):
    """Is told what happens, while it happens, by the agent's loop and by threads beside it.

    What is told is never worth a stop of the training: a journal that raises is told no more, and
    one that is not `prompt` is told in a thread of its own, in order.
    """

    prompt = False
    """Whether `tell` never waits, whatever becomes of the disk or the network behind it."""

    @abc.abstractmethod
    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        """One event; its kinds and their facts are in `elasticlib.observe.event.KINDS`."""

    @property
    def lost(self) -> int:
        """How many of the events told so far could not be kept."""
        return 0

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Nothing more will be told; what was is put where it belongs, within some seconds."""


class NoJournal(Journal):
    """Keeps nothing."""

    prompt = True

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        del kind, generation, rank, facts


class Journals(Journal):
    """Tells each of several, in their order; none is felt by the others, or by who tells."""

    prompt = True

    def __init__(self, *parts: Journal) -> None:
        self._views = [_View(part) for part in parts]

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        for view in self._views:
            view.tell(kind, generation, rank, facts)

    @property
    def lost(self) -> int:
        return sum(view.part.lost + view.missed for view in self._views)

    def settle(self) -> None:
        """Nothing more will be told; returns when all has been heard, or after some seconds. The
        parts stay open."""
        for view in self._views:
            view.settle()

    def close(self) -> None:
        for view in self._views:
            view.close()


class _View:
    """One part of several, which is told until it raises."""

    def __init__(self, part: Journal) -> None:
        self.part = part
        self.missed = 0
        self._broken = False
        self._aside = None if part.prompt else Aside("agent-view", self._broke)

    def tell(self, kind: str, generation: int, rank: int | None, facts: dict[str, Any]) -> None:
        if self._broken:
            return
        if self._aside is not None:
            told = self._aside.call(lambda: self._tell(kind, generation, rank, facts))
            self.missed += not told
            return
        try:
            self._tell(kind, generation, rank, facts)
        except Exception as error:
            self._broke(error)

    def _tell(self, kind: str, generation: int, rank: int | None, facts: dict[str, Any]) -> None:
        self.part.tell(kind, generation=generation, rank=rank, **facts)

    def _broke(self, error: BaseException) -> None:
        self._broken = True
        name = type(self.part).__name__
        log.warning("%s is told no more of what happens: %s", name, describe(error), exc_info=error)

    def settle(self) -> None:
        if self._aside is not None and not self._aside.close(CLOSE_SECONDS):
            name = type(self.part).__name__
            log.warning("%s has not heard all within %g s", name, CLOSE_SECONDS)

    def close(self) -> None:
        self.settle()
        try:
            self.part.close()
        except Exception as error:
            self._broke(error)
