"""A save that all ranks make together: each writes its part, and the first commits them all.

If one of them fails, none counts, and all of them know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from ..errors import CheckpointError
from . import fence as fences
from .commit import Committer
from .host import HostBuffer
from .manifest import DataFile
from .sharded import lay_out_part
from .together import Together


class PartSaver:
    """Made by all ranks at once."""

    def __init__(self, commits: Committer, group: dist.ProcessGroup | None) -> None:
        self._commits = commits
        self._together = Together(group)
        self._count = 0
        # The files of all parts bear the name of the writer that will commit them.
        own = bytes.fromhex(commits.writer.token)
        self._token = self._together.one_says(own).hex()

    def prepare(self, step: int, values: object, host: HostBuffer) -> Callable[[], None]:
        """Copy this rank's part; what is then to be done behind the training step."""
        first = self._together.rank == 0
        data = host.take(lay_out_part(step, values, whole=first, copies=False))
        self._count += 1
        return partial(self._write, step, data, self._count)

    def close(self) -> None:
        """Give the group back."""
        self._together.close()

    def _write(self, step: int, data: memoryview, number: int) -> None:
        ranks = range(self._together.count)
        names = [fences.data_name(f"part-{rank:05d}", self._token, number) for rank in ranks]
        rank = self._together.rank
        commits, first = self._commits, self._together.rank == 0
        self._agree(step, commits.claim if first else _nothing)
        try:
            rows = self._agree(step, lambda: commits.write(step, names[rank], data))
            files = tuple(DataFile(names[at], *row) for at, row in enumerate(rows))
            commit = partial(commits.commit, step, files, len(files))
            self._agree(step, commit if first else _nothing)
        except BaseException:
            commits.abandon(step, [names[rank]])
            raise

    def _agree(self, step: int, act: Callable[[], DataFile | None]) -> list[tuple[int, int]]:
        """Do this rank's part of something; every rank's size and sum, if all could do theirs."""
        error: Exception | None = None
        row = [1, 0, 0]
        try:
            file = act()
            row = [1, file.size, file.crc32] if file else row
        except Exception as failure:
            error, row = failure, [0, 0, 0]
        try:
            rows = self._together.all_say(row)
        except RuntimeError as lost:
            raise CheckpointError(
                f"step {step} was not saved: another rank is gone: {lost}"
            ) from error
        if error is not None:
            raise error
        failed = [rank for rank, (ok, _, _) in enumerate(rows) if not ok]
        if failed:
            raise CheckpointError(
                f"step {step} was not saved: rank {failed[0]} failed, and says why"
            )
        return [(size, crc32) for _, size, crc32 in rows]


def _nothing() -> None:
    pass
