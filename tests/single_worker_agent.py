"""An agent with one worker that is not a process.

Tests can replace each part: the rendezvous handler, the workers and the agent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from elasticlib import (
    Command,
    ElasticAgent,
    Node,
    RendezvousHandler,
    RunResult,
    Workers,
    WorkerSpec,
)
from elasticlib.rendezvous.interface import RendezvousInfo, RendezvousStoreInfo, assign_ranks
from elasticlib.testing.waiting import wait_until
from elasticlib.workers.exits import WorkerExit
from elasticlib.workers.interface import StopHow, WorkerView
from elasticlib.workers.spec import WorkerGroup


class SingleNodeHandler(RendezvousHandler):
    """A rendezvous handler for a single node, which returns at once."""

    def __init__(self, **fields: Any) -> None:
        self.generation = 0
        self.fields = fields  # of the RendezvousInfo; they override the defaults

    def get_backend(self) -> str:
        return "single"

    def get_run_id(self) -> str:
        return "run"

    def next_rendezvous(self) -> RendezvousInfo:
        self.generation += 1
        defaults: dict[str, Any] = {
            "assignment": assign_ranks([Node("n-1", "n", "127.0.0.1", slots=1)])[0],
            "bootstrap_store_info": RendezvousStoreInfo("127.0.0.1", 1),
        }
        return RendezvousInfo("run", self.generation, **{**defaults, **self.fields})

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class OneWorker(Workers):
    """A worker that runs until `stop` or `end`. By default, `end` makes it succeed."""

    def __init__(self) -> None:
        self.up = threading.Event()
        self.starts = 0
        self._on_exit: Callable[[WorkerExit, str], None] | None = None  # while it runs

    def start(self, group: WorkerGroup, on_exit: Callable[[WorkerExit, str], None]) -> None:
        self.rank = group.workers[0].rank
        self._on_exit = on_exit
        self.starts += 1
        self.up.set()

    def end(self, code: int = 0, *, was_stopped: bool = False) -> None:
        on_exit, self._on_exit = self._on_exit, None
        if on_exit is not None:
            on_exit(self.make_exit(code, was_stopped=was_stopped), "")

    def make_exit(self, code: int, *, was_stopped: bool) -> WorkerExit:
        """Return the description of an exit."""
        return WorkerExit(0, self.rank, 1, code, stop_was_requested=was_stopped)

    def view(self) -> Mapping[int, WorkerView]:
        return {} if self._on_exit is None else {0: WorkerView("the worker")}

    def stop(self, local_ranks: Collection[int], how: StopHow) -> None:
        del local_ranks, how
        self.end(-15, was_stopped=True)

    def close(self, grace_s: float = 0.0) -> None:
        del grace_s
        self._on_exit = None


class Run:
    """A run of an agent in another thread."""

    def __init__(self, agent: ElasticAgent) -> None:
        self.agent = agent
        self._results: list[RunResult] = []
        self._thread = threading.Thread(target=lambda: self._results.append(agent.run()))
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Return True if the run ends within this time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> RunResult:
        self._thread.join(60)
        assert self._results, "the run has not returned"
        return self._results[0]


@contextlib.contextmanager
def running(
    workers: OneWorker,
    handler: RendezvousHandler | None = None,
    *,
    kind: Callable[..., ElasticAgent] = ElasticAgent,
    **settings: Any,
) -> Iterator[Run]:
    """Run an agent until its worker has started; at the end, stop it and wait for its threads."""
    before = set(threading.enumerate())
    spec = WorkerSpec(Command("none"))
    run = Run(kind(spec, handler or SingleNodeHandler(), workers, **settings))
    try:
        wait_until("the worker to be up", workers.up.is_set)
        yield run
    finally:
        workers.end()
        run.result()
        wait_until("the run's threads to end", lambda: set(threading.enumerate()) <= before)
