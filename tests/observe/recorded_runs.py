"""Events of simulated nodes, in the form in which agents record them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from made_events import make_event

from elasticlib.observe.event import Event

WALL = 1_700_000_000.0
START_REASON = "the job starts"


class Agent:
    """An agent that records its events at given times.

    All times are seconds since the start of the job.

    Args:
        node: id of the node.
        clock_error: seconds by which the wall clock of the node is fast.
        booted_at: time at which the monotonic clock of the node was 0.
        slots: number of workers.
    """

    def __init__(
        self, node: str, *, clock_error: float = 0.0, booted_at: float = -1000.0, slots: int = 1
    ) -> None:
        self.node = node
        self.slots = slots
        self.generation = 0
        self.launches = 0
        self.events: list[Event] = []
        self._clock_error = clock_error
        self._booted_at = booted_at

    def record(self, at: float, kind: str, rank: int | None = None, **data: Any) -> Agent:
        """Record an event of any kind."""
        monotonic = at - self._booted_at
        wall = WALL + at + self._clock_error
        event = make_event(kind, "job", self.node, self.generation, wall, monotonic, rank, data)
        self.events.append(event)
        return self

    def launch(self, at: float) -> Agent:
        self.generation = 0
        self.launches += 1
        self.record(
            at,
            "run.started",
            host=self.node,
            pid=7,
            slots=self.slots,
            log_dir="/logs",
            lease_ttl_seconds=5.0,
        )
        return self.record(at, "rendezvous.started", reason="this node is new")

    def join(
        self,
        at: float,
        generation: int,
        *,
        rank: int = 0,
        nodes: int = 1,
        restarts: int = 0,
        reason: str = START_REASON,
        trigger: str | None = None,
        imports: float = 0.0,
    ) -> Agent:
        """Record that the node joined a generation; the trigger is None if it is not known."""
        self.generation = generation
        first, last = rank * self.slots, (rank + 1) * self.slots - 1
        return self.record(
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
            reason=reason,
            trigger=trigger,
            incarnation=f"launch {self.launches}",
        )

    def restore(self, at: float, step: int, seconds: float) -> Agent:
        return self.record(at, "state.restored", step=step, source="disk", duration_seconds=seconds)

    def train(self, at: float, step: int) -> Agent:
        """Record that the workers completed their first step at this time."""
        started = next(e for e in reversed(self.events) if e.kind == "generation.started")
        duration = at - self._booted_at - started.monotonic
        # The agent detects the step a little later.
        return self.record(at + 0.4, "training.started", step=step, duration_seconds=duration)

    def advance(self, at: float, step: int, per_second: float | None = None) -> Agent:
        return self.record(
            at, "progress", step=step, steps_per_second=per_second, seconds_since_heartbeat=0.0
        )

    def fail(self, at: float, reason: str, rank: int = 0, **data: Any) -> Agent:
        self.record(
            at,
            "worker.exited",
            rank,
            exit_code=1,
            succeeded=False,
            stopped=False,
            description=reason,
        )
        return self.record(at, "failure", reason=reason, failure_kind="", **data)

    def stop(self, at: float, until: float, notice: str = "", **data: Any) -> Agent:
        """Record that the agent stops its workers from `at` until `until`."""
        grace_s = 30.0 if notice else 0.0
        self.record(at, "stopping", notice=notice, grace_seconds=grace_s, **data)
        self.record(until, "stopped", duration_seconds=until - at, survivors="")
        return self.record(until, "rendezvous.started", reason="the generation ended")

    def succeed(self, at: float) -> Agent:
        self.record(
            at,
            "worker.exited",
            0,
            exit_code=0,
            succeeded=True,
            stopped=False,
            description="succeeded",
        )
        return self.finish(at + 0.1, "succeeded", "1 node done")

    def finish(self, at: float, state: str, reason: str, **data: Any) -> Agent:
        codes = {"succeeded": 0, "drained": 75, "stopped": 143}
        data = {"root_cause": None, **data}
        code = codes.get(state, 1)
        return self.record(at, "run.finished", state=state, reason=reason, exit_code=code, **data)


def event_files(*agents: Agent) -> dict[str, Iterable[Event]]:
    """Return the events of each agent by the name of its file."""
    return {f"{n}.jsonl": agent.events for n, agent in enumerate(agents)}
