"""What a node gathers when it is asked for its workers' stacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elasticlib.launch.live import stacks_of
from elasticlib.workers.interface import Heartbeat


def test_only_those_are_asked_whose_stacks_are_wanted() -> None:
    asked: list[set[int]] = []

    def dump(local_ranks: Any) -> dict[int, str]:
        asked.append(set(local_ranks))
        return {local: f"of {local}" for local in local_ranks if local != 2}

    workers = [SimpleNamespace(local_rank=local, rank=4 + local) for local in range(4)]
    agent: Any = SimpleNamespace(
        get_worker_group=lambda: SimpleNamespace(workers=workers),
        workers=SimpleNamespace(
            running=lambda: {local: f"pid {local}" for local in range(4)},
            dump_stacks_of=dump,
            beats=lambda: {local: Heartbeat(dumps=True) for local in range(4)},
        ),
    )
    found = stacks_of(agent)(frozenset({5, 6, 9}))
    assert asked == [{1, 2}]
    assert (found.texts, found.silent, found.mute) == ({5: "of 1"}, (6,), {})
