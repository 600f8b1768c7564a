"""The page of memory that the soak shares with its workers: how far each is, what one is asked.

Each number is written by one side, and read as one word, so nobody waits for a lock.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import attrs

RANKS = 16
_ASKED, _GENERATION, _RANK, _WHAT, _WHERE, _NUMBER, _LIMIT = range(7)
_SLOTS, _WIDTH = 16, 8
_OF, _WORLD, _NODE, _PID, _BEGUN, _DONE = range(6)
SIZE = 4096


@attrs.frozen
class Rank:
    """begun, done: steps."""

    generation: int
    world: int
    node: int
    pid: int
    begun: int
    done: int


@attrs.frozen
class View:
    """All ranks of one generation, each of which has begun a step."""

    generation: int
    ranks: tuple[Rank, ...]

    @property
    def step(self) -> int:
        return max(rank.begun for rank in self.ranks)

    @property
    def done(self) -> int:
        return min(rank.done for rank in self.ranks)

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(rank.node for rank in self.ranks)


class Board:
    """Either end of it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(SIZE))
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(handle, SIZE)
        finally:
            os.close(handle)
        self._words = memoryview(self._memory).cast("q")

    # -- the soak's side ----------------------------------------------------------------------

    def view(self) -> View | None:
        """The newest generation, if all of its ranks are at work; of older ones nothing."""
        # Read once: workers write meanwhile.
        ranks = [self._rank(number) for number in range(RANKS)]
        newest = max(rank.generation for rank in ranks)
        here = [rank for rank in ranks if rank.generation == newest]
        whole = newest and len(here) == here[0].world == ranks.index(here[-1]) + 1
        return View(newest, tuple(here)) if whole else None

    def ask(self, generation: int, rank: int, what: int, where: int, number: int) -> None:
        """Have one worker do something in its next step."""
        asked = self._words[_ASKED] + 1
        self._words[_GENERATION], self._words[_RANK] = generation, rank
        self._words[_WHAT], self._words[_WHERE], self._words[_NUMBER] = what, where, number
        self._words[_ASKED] = asked

    def let(self, step: int) -> None:
        """Let the job come as far as this step; there it waits."""
        self._words[_LIMIT] = step

    def _rank(self, rank: int) -> Rank:
        at = self._at(rank)
        return Rank(*(self._words[at + place] for place in range(6)))

    @staticmethod
    def _at(rank: int) -> int:
        return _SLOTS + rank * _WIDTH

    # -- a worker's ---------------------------------------------------------------------------

    def enter(self, generation: int, rank: int, world: int, node: int) -> None:
        """This process is that rank; to be called before `begin`."""
        self._generation, self._own, self._heard = generation, rank, 0
        at = self._at(rank)
        self._words[at + _OF] = 0
        for place, value in ((_WORLD, world), (_NODE, node), (_PID, os.getpid())):
            self._words[at + place] = value
        self._words[at + _DONE] = 0

    def may(self, step: int) -> bool:
        """Whether the job may begin this step; where the soak has not said, it may any."""
        return step <= (self._words[_LIMIT] or step)

    def begin(self, step: int) -> None:
        at = self._at(self._own)
        self._words[at + _BEGUN] = step
        self._words[at + _OF] = self._generation

    def finish(self, step: int) -> None:
        self._words[self._at(self._own) + _DONE] = step

    def asked(self) -> tuple[int, int, int] | None:
        """What this worker is to do and was not yet told: what, where, with which number."""
        asked = self._words[_ASKED]
        if asked == self._heard:
            return None
        self._heard = asked
        if (self._words[_GENERATION], self._words[_RANK]) != (self._generation, self._own):
            return None
        return self._words[_WHAT], self._words[_WHERE], self._words[_NUMBER]
