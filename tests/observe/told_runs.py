"""Events of made-up nodes, as agents tell them, for tests of what is read from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elasticlib.observe.event import Event

WALL = 1_700_000_000.0
START = "the job starts"


class Agent:
    """Tells what happens at job seconds that it is given.

    ahead: seconds by which its wall clock is wrong. booted: job seconds at which its monotonic
    clock was 0.
    """

    def __init__(
        self, node: str, *, ahead: float = 0.0, booted: float = -1000.0, slots: int = 1
    ) -> None:
        self.node = node
        self.slots = slots
        self.generation = 0
        self.launches = 0
        self.events: list[Event] = []
        self._ahead = ahead
        self._booted = booted

    def tell(self, at: float, kind: str, rank: int | None = None, **facts: Any) -> Agent:
        own = at - self._booted
        wall = WALL + at + self._ahead
        event = Event(kind, "job", self.node, self.generation, wall, own, rank, facts)
        self.events.append(event)
        return self

    def launch(self, at: float) -> Agent:
        self.generation = 0
        self.launches += 1
        self.tell(
            at,
            "run.started",
            host=self.node,
            pid=7,
            slots=self.slots,
            log_dir="/logs",
            lease_ttl_seconds=5.0,
        )
        return self.tell(at, "rendezvous.started", reason="this node is new")

    def begin(
        self,
        at: float,
        generation: int,
        *,
        rank: int = 0,
        nodes: int = 1,
        restarts: int = 0,
        cause: str = START,
        why: str | None = None,
        imports: float = 0.0,
    ) -> Agent:
        """why: as the rendezvous tells it; None: it does not."""
        self.generation = generation
        first, last = rank * self.slots, (rank + 1) * self.slots - 1
        return self.tell(
            at,
            "generation.started",
            duration_seconds=1.0,
            import_seconds=imports,
            node_rank=rank,
            node_count=nodes,
            ranks=[first, last],
            world_size=nodes * self.slots,
            restarts=restarts,
            max_restarts=3,
            reason=cause,
            trigger=why,
            incarnation=f"launch {self.launches}",
        )

    def restore(self, at: float, step: int, seconds: float) -> Agent:
        return self.tell(at, "state.restored", step=step, source="disk", duration_seconds=seconds)

    def train(self, at: float, step: int) -> Agent:
        """at: the end of the first step."""
        began = next(e for e in reversed(self.events) if e.kind == "generation.started")
        took = at - self._booted - began.monotonic
        # The agent sees it a little later.
        return self.tell(at + 0.4, "training.started", step=step, duration_seconds=took)

    def steps(self, at: float, step: int, per_second: float | None = None) -> Agent:
        return self.tell(
            at, "progress", step=step, steps_per_second=per_second, seconds_since_heartbeat=0.0
        )

    def fail(self, at: float, reason: str, rank: int = 0, **more: Any) -> Agent:
        self.tell(
            at,
            "worker.exited",
            rank,
            exit_code=1,
            succeeded=False,
            stopped=False,
            description=reason,
        )
        return self.tell(at, "failure", reason=reason, failure_kind="", **more)

    def stop(self, at: float, until: float, why: str = "", **more: Any) -> Agent:
        self.tell(at, "stopping", notice=why, grace_seconds=30.0 if why else 0.0, **more)
        self.tell(until, "stopped", duration_seconds=until - at, survivors="")
        return self.tell(until, "rendezvous.started", reason="it was over")

    def succeed(self, at: float) -> Agent:
        self.tell(
            at, "worker.exited", 0, exit_code=0, succeeded=True, stopped=False, description="ended"
        )
        return self.end(at + 0.1, "succeeded", "1 node done")

    def end(self, at: float, state: str, reason: str, **more: Any) -> Agent:
        codes = {"succeeded": 0, "drained": 75, "stopped": 143}
        facts = {"root_cause": None, **more}
        code = codes.get(state, 1)
        return self.tell(at, "run.finished", state=state, reason=reason, exit_code=code, **facts)


def files(*agents: Agent) -> dict[str, Iterable[Event]]:
    return {f"{n}.jsonl": agent.events for n, agent in enumerate(agents)}
