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
        self.tell(at, "run.began", host=self.node, pid=7, slots=self.slots, logs="/logs", lease=5.0)
        return self.tell(at, "rendezvous.began", why="this node is new")

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
            "generation.began",
            seconds=1.0,
            imports=imports,
            node_rank=rank,
            nodes=nodes,
            ranks=[first, last],
            world=nodes * self.slots,
            restarts=restarts,
            max_restarts=3,
            cause=cause,
            why=why,
        )

    def restore(self, at: float, step: int, seconds: float) -> Agent:
        return self.tell(at, "restored", step=step, source="disk", seconds=seconds)

    def train(self, at: float, step: int) -> Agent:
        """at: the end of the first step."""
        began = next(e for e in reversed(self.events) if e.kind == "generation.began")
        took = at - self._booted - began.at
        # The agent sees it a little later.
        return self.tell(at + 0.4, "training.began", step=step, seconds=took)

    def steps(self, at: float, step: int, per_second: float | None = None) -> Agent:
        return self.tell(at, "steps", step=step, per_second=per_second, silent=0.0)

    def fail(self, at: float, reason: str, rank: int = 0, **more: Any) -> Agent:
        self.tell(at, "worker.ended", rank, code=1, ok=False, stopped=False, how=reason)
        return self.tell(at, "failure", reason=reason, failure="", **more)

    def stop(self, at: float, until: float, why: str = "", **more: Any) -> Agent:
        self.tell(at, "stopping", why=why, seconds=30.0 if why else 0.0, **more)
        self.tell(until, "stopped", seconds=until - at, left="")
        return self.tell(until, "rendezvous.began", why="it was over")

    def succeed(self, at: float) -> Agent:
        self.tell(at, "worker.ended", 0, code=0, ok=True, stopped=False, how="ended")
        return self.end(at + 0.1, "succeeded", "1 node done")

    def end(self, at: float, state: str, reason: str, **more: Any) -> Agent:
        codes = {"succeeded": 0, "drained": 75, "stopped": 143}
        facts = {"cause": None, **more}
        code = codes.get(state, 1)
        return self.tell(at, "run.ended", state=state, reason=reason, exit_code=code, **facts)


def files(*agents: Agent) -> dict[str, Iterable[Event]]:
    return {f"{n}.jsonl": agent.events for n, agent in enumerate(agents)}
