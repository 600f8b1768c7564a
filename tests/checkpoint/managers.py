"""Managers of workers that stand anywhere in a job, as their launcher would say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elasticlib import CheckpointManager
from elasticlib.errors import CheckpointError

NAMES = {
    "run": "TORCHELASTIC_RUN_ID",
    "launch": "ELASTICLIB_INCARNATION",
    "generation": "ELASTICLIB_GENERATION",
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world": "WORLD_SIZE",
}


def manager_at(folder: Any, place: dict[str, object], **options: Any) -> CheckpointManager:
    """That of a worker with this place in its job, by `NAMES`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(NAMES[name], str(value))
        manager = CheckpointManager(folder, **options)
        assert manager.writes in (True, False)  # it has looked for its place
    return manager


@contextmanager
def told() -> Iterator[list[str]]:
    """The sentence of what is raised."""
    said: list[str] = []
    try:
        yield said
    except CheckpointError as error:
        said.append(str(error))
