"""Memory page that the soak shares with its workers: their progress, and the requested fault.

Each number has one writer and is read as one machine word, so no lock is needed.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import attrs

MAX_RANKS = 16
PAGE_BYTES = 4096
# The words that the soak writes: the last request, and the step up to which the job may train.
_REQUEST, _GENERATION, _RANK, _FAULT, _PART, _ARGUMENT, _LIMIT = range(7)
# The words that each rank writes into its slot.
_FIRST_SLOT, _SLOT_WORDS = 16, 8
_SLOT_GENERATION, _SLOT_WORLD, _SLOT_NODE, _SLOT_PID, _SLOT_STARTED, _SLOT_DONE = range(6)


@attrs.frozen
class RankState:
    """The progress of one rank."""

    generation: int
    world: int
    node: int
    pid: int
    started: int  # the last step that it has started
    done: int  # the last step that it has finished


@attrs.frozen
class JobView:
    """All ranks of one generation, each of which has started a step."""

    generation: int
    ranks: tuple[RankState, ...]

    @property
    def step(self) -> int:
        """The last step that any rank has started."""
        return max(rank.started for rank in self.ranks)

    @property
    def done(self) -> int:
        """The last step that all ranks have finished."""
        return min(rank.done for rank in self.ranks)

    @property
    def nodes(self) -> frozenset[int]:
        """The numbers of the nodes of the ranks."""
        return frozenset(rank.node for rank in self.ranks)


class SharedPage:
    """The page, as the soak or one of its workers opens it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(PAGE_BYTES))
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(handle, PAGE_BYTES)
        finally:
            os.close(handle)
        self._words = memoryview(self._memory).cast("q")

    # -- methods of the soak ------------------------------------------------------------------

    def view(self) -> JobView | None:
        """Return the newest generation, or None unless all of its ranks train."""
        # The slots are read once, because workers write at the same time.
        ranks = [self._read_rank(number) for number in range(MAX_RANKS)]
        newest = max(rank.generation for rank in ranks)
        members = [rank for rank in ranks if rank.generation == newest]
        is_complete = newest and len(members) == members[0].world == ranks.index(members[-1]) + 1
        return JobView(newest, tuple(members)) if is_complete else None

    def request_fault(
        self, generation: int, rank: int, fault: int, part: int, argument: int
    ) -> None:
        """Request that one worker causes a fault in its next step.

        Args:
            generation: The generation of the worker.
            rank: Its rank.
            fault: EXCEPTION, EXIT, SEGFAULT or SLOW of campaign.py.
            part: The part of the step, as an index of STEP_PARTS.
            argument: The exit code of EXIT, or the milliseconds of SLOW.
        """
        number = self._words[_REQUEST] + 1
        self._words[_GENERATION], self._words[_RANK] = generation, rank
        self._words[_FAULT], self._words[_PART], self._words[_ARGUMENT] = fault, part, argument
        self._words[_REQUEST] = number

    def set_step_limit(self, step: int) -> None:
        """Let the job train up to this step, and wait there."""
        self._words[_LIMIT] = step

    def _read_rank(self, rank: int) -> RankState:
        at = self._slot(rank)
        return RankState(*(self._words[at + offset] for offset in range(6)))

    @staticmethod
    def _slot(rank: int) -> int:
        return _FIRST_SLOT + rank * _SLOT_WORDS

    # -- methods of a worker ------------------------------------------------------------------

    def register(self, generation: int, rank: int, world: int, node: int) -> None:
        """Take the slot of a rank for this process, before its first step."""
        self._generation, self._own_rank, self._last_request = generation, rank, 0
        at = self._slot(rank)
        self._words[at + _SLOT_GENERATION] = 0
        for offset, value in ((_SLOT_WORLD, world), (_SLOT_NODE, node), (_SLOT_PID, os.getpid())):
            self._words[at + offset] = value
        self._words[at + _SLOT_DONE] = 0

    def may_start(self, step: int) -> bool:
        """Return whether the job may start this step. Without a limit it may start any step."""
        return step <= (self._words[_LIMIT] or step)

    def start_step(self, step: int) -> None:
        """Record that this rank starts a step."""
        at = self._slot(self._own_rank)
        self._words[at + _SLOT_STARTED] = step
        self._words[at + _SLOT_GENERATION] = self._generation

    def finish_step(self, step: int) -> None:
        """Record that this rank has finished a step."""
        self._words[self._slot(self._own_rank) + _SLOT_DONE] = step

    def take_request(self) -> tuple[int, int, int] | None:
        """Return a new request for this worker as (fault, part, argument), or None."""
        number = self._words[_REQUEST]
        if number == self._last_request:
            return None
        self._last_request = number
        if (self._words[_GENERATION], self._words[_RANK]) != (self._generation, self._own_rank):
            return None
        return self._words[_FAULT], self._words[_PART], self._words[_ARGUMENT]
