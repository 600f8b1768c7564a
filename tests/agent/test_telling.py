"""What an agent's loop tells of itself, and when."""

from __future__ import annotations

from typing import Any

from elasticlib import BootstrapStoreInfo, Node, RendezvousInfo, deal_seats
from elasticlib.agent.policy import GroupStopped, Hung
from elasticlib.agent.telling import Telling
from elasticlib.observe.interface import Journal
from elasticlib.workers.spec import Script, WorkerGroup, WorkerSpec, deal_ranks


class Kept(Journal):
    prompt = True

    def __init__(self) -> None:
        self.told: dict[str, dict[str, Any]] = {}

    def tell(
        self, kind: str, *, generation: int = 0, rank: int | None = None, **facts: Any
    ) -> None:
        del generation, rank
        self.told[kind] = facts


def test_a_generations_seconds_count_from_when_the_last_workers_were_gone() -> None:
    """Not from the failure for which they had to be stopped: that is told by `stopped`."""
    journal, now = Kept(), [100.0]
    telling = Telling(journal, lambda: now[0])
    telling.idle(Hung("rank 0 hangs"))
    telling.stopping(None)
    now[0] = 130.0
    telling.stopped(GroupStopped())
    now[0] = 132.0
    (seat,) = deal_seats([Node("n-1", "n", "127.0.0.1", slots=1)])
    info = RendezvousInfo("job", 2, seat, BootstrapStoreInfo("here", 1))
    group = WorkerGroup(WorkerSpec(Script("x")), deal_ranks(seat), "job", 2, 0, 1, "here", 1)
    telling.starting(info, group)
    assert journal.told["stopped"]["seconds"] == 30.0
    assert journal.told["generation.began"]["seconds"] == 2.0
