"""Agents of one job, each in a thread as on a node of its own, with a bound on every wait.

They meet by our own handler over a store in memory. When the job is closed, all have ended and
nothing of their workers is left, or that is said.
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
    """The agent that a test needs: what it runs, how it meets the others, and the rest of
    `ElasticAgent`'s arguments, by name."""

    spec: WorkerSpec
    handler: RendezvousHandler
    settings: dict[str, Any]


MakeAgent = Callable[[AgentRequest], ElasticAgent]


class AgentNode:
    """One agent, and how its run ended."""

    def __init__(self, agent: ElasticAgent, handler: RendezvousHandler, patience: float) -> None:
        self.agent = agent
        self.handler = handler
        self._patience = patience
        self._over = threading.Event()
        self._ended: Future[RunResult] = Future()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="contract-agent", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._ended.set_result(self.agent.run())
        except BaseException as error:
            self._ended.set_exception(error)
        # Workers may be tied to the life of the thread that started them, and their end is the
        # agent's business.
        self._over.wait()

    def result(self) -> RunResult:
        """That of the run that has begun."""
        result = self._ended.result(self._patience)
        assert isinstance(result, RunResult), f"run returned {result!r}, which is no RunResult"
        return result

    def runs(self) -> RunResult:
        """What a run comes to."""
        self.begin()
        return self.result()

    def runs_here(self, meanwhile: Callable[[], None]) -> RunResult:
        """The same in this thread, which may be the one that hears signals."""
        over = threading.Event()

        def watch() -> None:
            try:
                meanwhile()
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
        """Have it end, if it has not, by ending the job."""
        if self._thread is None:
            in_thread(self.handler.shutdown).result(self._patience)
        elif not self._ended.done():
            in_thread(self.handler.set_closed).result(self._patience)
            # Up the whole ladder, if need be, and then to give up.
            self._ended.result(2 * self._patience)

    def free(self) -> None:
        """Closing once more does no harm, when it has ended."""
        self._over.set()
        if self._thread is None or self._ended.done():
            self.agent.workers.close()
        if self._thread is not None:
            self._thread.join(self._patience)


class Job:
    """The agents of a test; `close` has them all end, and looks for what they have left."""

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
        """One that has not begun yet, of a job of so many nodes, from and to."""
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
        """Nothing that was started is left, whatever the end."""
        try:
            for node in self.nodes:
                node.end()
            wait_until(
                "nothing to be left of the workers", lambda: not self.stage.left(), self._moment
            )
        finally:
            for node in self.nodes:
                node.free()
