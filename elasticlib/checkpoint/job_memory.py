"""The snapshots of one manager: made, found again, and agreed on after a restart.

Where no agent keeps them there is no memory that outlives this process, so none are made.
"""

from __future__ import annotations

import logging

from ..errors import CheckpointError, present
from .interface import MEMORY
from .restore import Agreed
from .saving import RankInfo
from .snapshots import Snapshot, SnapshotMemory
from .told import Told, told

log = logging.getLogger("elasticlib.checkpoint")


class JobMemory:
    """One rank's.

    name: tells its snapshots from those of other managers. folder: where an agent writes the newest
    at the end; empty for nowhere. shared: whether that is one folder for all nodes. every: whether
    each rank keeps a state that is the same on all, and not only the first of each node.
    """

    def __init__(
        self, here: RankInfo, *, name: str, folder: str, shared: bool, every: bool = False
    ) -> None:
        self._here, self._name, self._every = here, name, every
        self._folder, self._shared = folder, shared
        self._told: Told | None = told()
        self._memory: SnapshotMemory | None = None

    @property
    def source(self) -> SnapshotMemory | None:
        """What is in the agent's memory; None without an agent."""
        if self._memory is None and self._told is not None:
            self._memory = self._opened(self._told)
        return self._memory

    @property
    def node(self) -> str:
        """Names this rank's node: whoever shares an agent's memory is on one."""
        return self._here.host if self._told is None else f"{self._here.host}:{self._told.folder}"

    def snapshot(self, step: int, state: object) -> Snapshot | None:
        """Keep this rank's part, or all, of the state; None where this rank keeps none."""
        if self._told is None:
            return None
        return present(self.source, "the memory for snapshots").snapshot(step, state)

    def go_on_from(self, found: Agreed, state: object) -> None:
        """All ranks have agreed on a step, and have the state: later snapshots count no more.

        What came from another node's memory is kept in this one's as well: that node may be the
        next to go. So does each rank of a sharded state if any was sent some of it: then they have
        it as these ranks cut it up. What is on a disk lasts by itself.
        """
        source, step = self.source, found.step
        if source is None:
            return
        source.go_on_from(step)
        lacks = found.moved or step not in [held.step for held in source.held()]
        if found.kind == MEMORY and lacks:
            try:
                self.snapshot(step, state)
            except CheckpointError as error:
                # All ranks have what they go on from: one that has no room beside it goes on too.
                log.warning("step %d is not kept on this node: %s", step, error)

    def close(self) -> None:
        """Let go; what is kept stays kept."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _opened(self, told: Told) -> SnapshotMemory:
        here = self._here
        return SnapshotMemory(
            told,
            name=self._name,
            rank=here.rank,
            world_size=here.world_size,
            writes=self._every or here.local_rank == 0,
            folder=self._folder,
            shared=self._shared,
        )
