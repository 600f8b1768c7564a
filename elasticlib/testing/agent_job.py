"""The agents of one job, each in a thread as if on a node of its own. Every wait is bounded.

The agents use elasticlib's rendezvous over a store in memory. Closing the job stops all agents, and
checks that no process of a worker is left.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from ..agent.elastic_agent import ElasticAgent
from ..agent.interface import RunResult
from ..agent.options import AgentOptions
from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node, RendezvousSettings, RendezvousTimeouts
from ..stores.memory_store import MemoryStore
from ..workers.spec import Entrypoint, StopTimeouts, WorkerSpec
from .agent_stage import Scene, Stage
from .rendezvous_cluster import in_thread
from .rendezvous_over_store import Listener
from .waiting import wait_until

WORKERS = 2
"""A node."""
_NUMBERS = itertools.count(1)


@attrs.frozen
class AgentRequest:
    """The arguments of the agent that a test needs.

    `settings` has the keyword arguments of `ElasticAgent`.
    """

    spec: WorkerSpec
    handler: RendezvousHandler
    settings: dict[str, Any]


MakeAgent = Callable[[AgentRequest], ElasticAgent]


class AgentNode:
    """An agent of a test, and the result of its run."""

    def __init__(self, agent: ElasticAgent, handler: RendezvousHandler, patience: float) -> None:
        self.agent = agent
        self.handler = handler
        self._patience = patience
        self._over = threading.Event()
        self._result: Future[RunResult] = Future()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="contract-agent", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.set_result(self.agent.run())
        except BaseException as error:
            self._result.set_exception(error)
        # Workers may be killed when the thread that started them exits.
        self._over.wait()

    def result(self) -> RunResult:
        """Wait for the result of the run that `begin` started, and return it."""
        result = self._result.result(self._patience)
        assert isinstance(result, RunResult), f"run returned {result!r}, which is no RunResult"
        return result

    def runs(self) -> RunResult:
        """Run the agent in a thread, and return the result."""
        self.begin()
        return self.result()

    def runs_here(self, action: Callable[[], None]) -> RunResult:
        """Run the agent in this thread, which may receive signals, and `action` in another one."""
        over = threading.Event()

        def watch() -> None:
            try:
                action()
            finally:
                if not over.wait(self._patience):
                    self.handler.set_closed()

        watching = in_thread(watch)
        try:
            return self.agent.run()
        finally:
            over.set()
            watching.result(self._patience)

    def end(self) -> None:
        """Stop the agent by ending the job, if it is still running."""
        if self._thread is None:
            in_thread(self.handler.shutdown).result(self._patience)
        elif not self._result.done():
            in_thread(self.handler.set_closed).result(self._patience)
            # The agent may need all stages of the stop procedure.
            self._result.result(2 * self._patience)

    def free(self) -> None:
        """Close the workers, a second time if the run is over, and wait for the thread."""
        self._over.set()
        if self._thread is None or self._result.done():
            self.agent.workers.close()
        if self._thread is not None:
            self._thread.join(self._patience)


class Job:
    """The agents of a test. `close` stops them, and checks that no process is left."""

    def __init__(self, make: MakeAgent, stage: Stage, patience: float, moment: float) -> None:
        self.stage = stage
        self.nodes: list[AgentNode] = []
        self._make = make
        self._patience = patience
        self._moment = moment
        self._store = MemoryStore()
        self._id = f"agents-{next(_NUMBERS)}"

    def node(
        self,
        scene: Scene | Entrypoint,
        *,
        nodes: tuple[int, int] = (1, 1),
        max_restarts: int = 0,
        grace: float | None = None,
        options: AgentOptions | None = None,
    ) -> AgentNode:
        """Create an agent of a job with `nodes` (minimum, maximum) nodes."""
        name = f"node{len(self.nodes)}"
        handler = DynamicRendezvousHandler(
            self._store.client(),
            self._id,
            Node(f"{self._id}-{name}", name, "127.0.0.1", WORKERS),
            RendezvousSettings(*nodes, max_restarts, last_call_timeout=0.0),
            timeouts=RendezvousTimeouts(
                join_timeout=self._patience,
                lease_ttl=2.0,
                keep_alive_interval=0.2,
                close_timeout=5.0,
            ),
            open_bootstrap_store=Listener,
        )
        entrypoint = self.stage.entrypoint(scene) if isinstance(scene, Scene) else scene
        ladder = StopTimeouts(
            self._patience / 2 if grace is None else grace, kill_timeout=self._patience / 2
        )
        settings = {"stop_timeouts": ladder, "options": options or AgentOptions()}
        request = AgentRequest(WorkerSpec(entrypoint, WORKERS), handler, settings)
        self.nodes.append(AgentNode(self._make(request), handler, self._patience))
        return self.nodes[-1]

    def close(self) -> None:
        """Stop all agents, and check that no process of a worker is left."""
        try:
            for node in self.nodes:
                node.end()
            wait_until(
                "nothing to be left of the workers", lambda: not self.stage.left(), self._moment
            )
        finally:
            for node in self.nodes:
                node.free()
