"""An iterator that knows what the job has used once all that it yielded is used.

Loaders that save their own state, as torchdata's StatefulDataLoader, ask the iterator for it with
each batch that they draw, and keep the answer until that batch has been handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import length_hint
from typing import Any, TypeVar, cast

import attrs

from ..errors import StateMismatch
from .deal import Position, advance
from .state import encode

T = TypeVar("T")


@attrs.frozen
class Source:
    """Where an iterator's items come from.

    runs: the items from a position to the epoch's end, in lists.
    stride: how many positions all ranks together use while this rank is given one item.
    restore: goes to a state, and says where that is.
    ended: is told that an iterator that began at a position has run out.
    kept: is told that somebody keeps an iterator's position.
    """

    runs: Callable[[Position], Iterator[list[Any]]]
    stride: int
    restore: Callable[[Mapping[str, Any]], Position]
    ended: Callable[[Position], None]
    kept: Callable[[], None]


class Course:
    """What an iterator has been given, run by run, and how far it has come in that."""

    def __init__(self, source: Source, start: Position) -> None:
        self._source = source
        self._over = False
        self._begin(start)

    def _begin(self, start: Position) -> None:
        self._start, self._given = start, 0
        self._current: Iterator[Any] = iter(())
        self._runs = self._source.runs(start)

    def position(self) -> Position:
        """What is used when all that was yielded is, by all ranks alike."""
        self._source.kept()
        yielded = self._given - length_hint(self._current)
        return advance(self._start, yielded * self._source.stride)

    def move(self, state: Mapping[str, Any]) -> None:
        """Go on at `state` instead.

        Raises:
            StateMismatch: the state is another sampler's, or this iterator has run out.
        """
        if self._over:
            raise StateMismatch("an iterator that has run out cannot go on: load into a new one")
        start = self._source.restore(state)
        for _ in self._current:  # whoever iterates holds this run: empty it in their hands
            pass
        self._begin(start)

    def given(self) -> Iterator[Iterator[Any]]:
        """The runs, each as an iterator of which we see how much is left."""
        while (run := next(self._runs, None)) is not None:
            self._given += len(run)
            self._current = iter(run)
            yield self._current
        self._over = True
        self._source.ended(self._start)


class Drawn(chain[T]):
    """Made by `draw`. Yields as fast as a list: nothing of ours runs between two items of a run."""

    course: Course

    def state_dict(self) -> dict[str, Any]:
        """A state for `load_state_dict` of the sampler or of another iterator."""
        return encode(self.course.position())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at `state`, and the sampler with it.

        Raises:
            StateMismatch: the state is another sampler's, of another epoch than `set_epoch`
                named, or this iterator has run out.
        """
        self.course.move(state)


def draw(source: Source, start: Position) -> Drawn[Any]:
    """An iterator over the source's items from `start`."""
    course = Course(source, start)
    drawn = cast(Drawn[Any], Drawn.from_iterable(cast(Iterable[Iterable[Any]], course.given())))
    drawn.course = course
    return drawn
