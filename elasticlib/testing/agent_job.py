"""The agents of one job, each in a thread as if on a node of its own. Every wait is bounded.

The agents use elasticlib's rendezvous over a store in memory. Closing the job stops all agents, and
checks that no process of a worker is still running.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import attrs

from ..agent.elastic_agent import ElasticAgent
from ..agent.interface import RunResult
from ..agent.messages import Effect
from ..options import AgentOptions, RendezvousSettings, RendezvousTimeouts
from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node
from ..stores.memory_store import MemoryStore
from ..workers.spec import Entrypoint, WorkerSpec
from .rendezvous_cluster import FakeBootstrapStore, run_in_thread
from .waiting import wait_until
from .worker_harness import Scenario, WorkerHarness

WORKERS_PER_NODE = 2
_JOB_NUMBERS = itertools.count(1)


@attrs.frozen
class AgentRequest:
    """The parameters of `make_agent`, which creates an agent for a test."""

    spec: WorkerSpec
    handler: RendezvousHandler
    settings: dict[str, Any]  #: keyword arguments of ElasticAgent


MakeAgent = Callable[[AgentRequest], ElasticAgent]
Execute = Callable[[Effect], None]


class AgentNode:
    """An agent of a test, and the result of its run."""

    def __init__(self, agent: ElasticAgent, handler: RendezvousHandler, timeout_s: float) -> None:
        self.agent = agent
        self.handler = handler
        self._timeout_s = timeout_s
        self._is_released = threading.Event()
        self._result: Future[RunResult] = Future()
        self._thread: threading.Thread | None = None

    def intercept(self, around: Callable[[Execute, Effect], None]) -> None:
        """Call `around` instead of the agent's `execute`, as a subclass would override it.

        Args:
            around: Receives the agent's own method, and each effect.
        """
        execute = partial(around, self.agent.execute)
        self.agent.execute = execute  # type: ignore[method-assign]

    def start(self) -> None:
        """Run the agent in a thread."""
        self._thread = threading.Thread(target=self._run, name="contract-agent", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.set_result(self.agent.run())
        except BaseException as error:
            self._result.set_exception(error)
        # Workers may be killed when the thread that started them exits.
        self._is_released.wait()

    def result(self) -> RunResult:
        """Wait for the result of the run that `start` started, and return it."""
        result = self._result.result(self._timeout_s)
        assert isinstance(result, RunResult), f"run returned {result!r}, which is no RunResult"
        return result

    def run(self) -> RunResult:
        """Run the agent in a thread, and return the result."""
        self.start()
        return self.result()

    def run_in_current_thread(self, action: Callable[[], None]) -> RunResult:
        """Run the agent in this thread, which may receive signals, and `action` in another one."""
        is_finished = threading.Event()

        def act_and_watch() -> None:
            try:
                action()
            finally:
                if not is_finished.wait(self._timeout_s):
                    self.handler.set_closed()

        watching = run_in_thread(act_and_watch)
        try:
            return self.agent.run()
        finally:
            is_finished.set()
            watching.result(self._timeout_s)

    def stop(self) -> None:
        """Close the job and wait for the agent; shut the handler down if the agent never ran."""
        if self._thread is None:
            run_in_thread(self.handler.shutdown).result(self._timeout_s)
        elif not self._result.done():
            run_in_thread(self.handler.set_closed).result(self._timeout_s)
            # The agent may need all stages of the stop procedure.
            self._result.result(2 * self._timeout_s)

    def release(self) -> None:
        """Close the workers, unless the agent still runs, and wait for the thread.

        If the run is finished, the agent has closed them before.
        """
        self._is_released.set()
        if self._thread is None or self._result.done():
            self.agent.workers.close()
        if self._thread is not None:
            self._thread.join(self._timeout_s)


class AgentJob:
    """The agents of a test. `close` stops them, and checks that no process is still running.

    Args:
        make: Creates an agent.
        harness: Entry points and reports of the workers.
        timeout_s: Seconds after which an expected event counts as missing.
        exit_timeout_s: Seconds in which the processes must exit after all agents have stopped.
    """

    def __init__(
        self, make: MakeAgent, harness: WorkerHarness, timeout_s: float, exit_timeout_s: float
    ) -> None:
        self.harness = harness
        self.nodes: list[AgentNode] = []
        self._make = make
        self._timeout_s = timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._store = MemoryStore()
        self._run_id = f"agents-{next(_JOB_NUMBERS)}"

    def node(
        self,
        scenario: Scenario | Entrypoint,
        *,
        nodes: tuple[int, int] = (1, 1),
        max_restarts: int = 0,
        shutdown_timeout: float | None = None,
        options: AgentOptions | None = None,
    ) -> AgentNode:
        """Create an agent, which does not run yet.

        Args:
            scenario: Behavior of the workers, or another entry point.
            nodes: Minimum and maximum number of nodes of the job.
            max_restarts: Restart budget of the job.
            shutdown_timeout: Seconds between SIGTERM and SIGKILL.
            options: Options of the agent.
        """
        name = f"node{len(self.nodes)}"
        handler = DynamicRendezvousHandler(
            self._store.client(),
            self._run_id,
            Node(f"{self._run_id}-{name}", name, "127.0.0.1", WORKERS_PER_NODE),
            RendezvousSettings(*nodes, max_restarts, last_call_timeout=0.0),
            timeouts=RendezvousTimeouts(
                join_timeout=self._timeout_s,
                lease_ttl=2.0,
                keep_alive_interval=0.2,
                close_timeout=5.0,
            ),
            open_bootstrap_store=FakeBootstrapStore,
        )
        if isinstance(scenario, Scenario):
            entrypoint = self.harness.entrypoint(scenario)
        else:
            entrypoint = scenario
        half_s = self._timeout_s / 2
        stop_timeout = half_s if shutdown_timeout is None else shutdown_timeout
        options = attrs.evolve(
            options or AgentOptions(), shutdown_timeout=stop_timeout, kill_timeout=half_s
        )
        settings = {"options": options}
        request = AgentRequest(WorkerSpec(entrypoint, WORKERS_PER_NODE), handler, settings)
        self.nodes.append(AgentNode(self._make(request), handler, self._timeout_s))
        return self.nodes[-1]

    def close(self) -> None:
        """Stop all agents, and check that no process of a worker is still running."""
        try:
            for node in self.nodes:
                node.stop()
            wait_until(
                "all processes of the workers to exit",
                lambda: not self.harness.running_generations(),
                self._exit_timeout_s,
            )
        finally:
            for node in self.nodes:
                node.release()
