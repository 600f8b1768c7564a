"""Driver of a job on a Ray cluster: hosts the store, creates the agents as actors and watches them.

Each node has at most one agent. `plan_placement` decides where agents are created. The driver reads
from the store whether the job is finished, and does not rely on a single agent for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ...agent.interface import RunResult
from ...clock import monotonic
from ...errors import ConfigError, ElasticError, StoreError
from ...launch.launcher_process import raise_open_file_limit
from ...launch.run_id import generate_run_id
from ...launch.store_host import CONNECT_TIMEOUT_S, RESERVED_DESCRIPTORS
from ...launch.torch_config import with_environment
from ...options import NO_ID, LaunchOptions
from ...rendezvous.store_layout import JobListing, StoreKeys
from ...signal_inbox import SignalInbox
from ...signals import signal_name
from ...stores.tcp_client import TcpStore
from ...stores.tcp_server import TcpStoreServer
from ...workers.exits import WorkerExit
from ...workers.spec import Entrypoint, WorkerState
from .agent_actor import AgentConfig, NodeAgent
from .placement import JobRequirements, PlacedAgent, RayNode, plan_placement

log = logging.getLogger("elasticlib.integrations")

POLL_INTERVAL_S = 0.5  # between two looks at the cluster; a signal is handled within this time
EARLY_DEATH_S = 60.0  # an agent that dies within this time is counted against its node
STOP_MARGIN_S = 15.0  # added to the configured timeouts before agents are killed
MAX_CONCURRENT_CALLS = 4  # of one actor: `run`, which lasts as long as the job, and others
# By default, Ray kills all descendants of an actor with it. The guardian process must survive for a
# moment to clean up.
ACTOR_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "false"}

# A node that knows the result of the whole job outweighs a node that was only stopped.
_STATE_PRECEDENCE = (
    WorkerState.SUCCEEDED,
    WorkerState.FAILED,
    WorkerState.DRAINED,
    WorkerState.STOPPED,
)


def run_driver(
    ray: Any, options: LaunchOptions, entrypoint: Entrypoint, resources: Mapping[str, float]
) -> RunResult:
    """Run a job on the cluster to which Ray is connected, and return the result over all nodes.

    Args:
        ray: The module `ray`.
        options: The options of every node.
        entrypoint: The program of the workers.
        resources: The resources of each agent, with Ray's names.

    Raises:
        ElasticError: No agent can start with these options.
    """
    rendezvous, num_workers = options.rendezvous, options.workers.count
    run_id = rendezvous.run_id
    if run_id in ("", NO_ID):
        run_id = generate_run_id(entrypoint)
    secret = secrets.token_hex(32)
    # The server leaves RESERVED_DESCRIPTORS to this process; add as many for Ray and the program.
    raise_open_file_limit(options.job.max_nodes + 2 * RESERVED_DESCRIPTORS)
    address = ray.util.get_node_ip_address()
    with TcpStoreServer(address, 0, job=run_id, secret=secret.encode()) as server:
        agent_config = AgentConfig(
            options=attrs.evolve(
                options,
                rendezvous=attrs.evolve(
                    rendezvous,
                    run_id=run_id,
                    backend="tcp",
                    endpoint=server.address,
                    is_host=False,
                ),
            ),
            entrypoint=entrypoint,
            secret=secret,
            working_dir=os.getcwd(),
            argv=tuple(sys.argv),
            log_level=logging.getLogger("elasticlib").getEffectiveLevel(),
            threads_per_worker=max(1, int(resources["CPU"]) // num_workers),
        )
        return Driver(ray, agent_config, server, resources).run()


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return Ray's options of an agent's actor."""
    custom = dict(resources)
    return {
        "num_cpus": custom.pop("CPU"),
        "num_gpus": custom.pop("GPU", 0),
        "memory": custom.pop("memory", None),
        "resources": custom,
        "runtime_env": {"env_vars": ACTOR_ENVIRONMENT},  # merged with that of ray.init
        "max_concurrency": MAX_CONCURRENT_CALLS,
        "max_restarts": 0,
        "max_task_retries": 0,
    }


def merge_results(
    results: Sequence[RunResult], signal_number: int = 0, failure: str = ""
) -> RunResult:
    """Return the result of the job, with the return values and failures of all nodes.

    Args:
        results: The results of the agents that have returned one.
        signal_number: The signal that the driver forwarded to the agents, or 0.
        failure: The reason for which the driver stopped the job, or an empty string.
    """
    if not results:
        if signal_number and not failure:
            reason = f"signal {signal_number} arrived before any agent ran"
            return RunResult(WorkerState.STOPPED, reason, signal=signal_number)
        return RunResult(WorkerState.FAILED, failure or "no agent returned a result")
    main = min(results, key=lambda result: _STATE_PRECEDENCE.index(result.state))
    if failure and main.state is not WorkerState.SUCCEEDED:
        main = attrs.evolve(main, state=WorkerState.FAILED, reason=failure)
    values: dict[int, Any] = {}
    failures: dict[int, WorkerExit] = {}
    for result in sorted(results, key=lambda result: result is not main):
        values.update(result.return_values)
        failures = {**result.failures, **failures}
    root_cause = main.root_cause or next(
        (result.root_cause for result in results if result.root_cause is not None), None
    )
    first = -1 if main.root_cause is None else main.root_cause.rank
    return attrs.evolve(
        main,
        return_values=dict(sorted(values.items())),
        failures=dict(sorted(failures.items(), key=lambda item: (item[0] != first, item[0]))),
        root_cause=root_cause,
    )


@attrs.define
class _Agent:
    """An agent as the driver sees it."""

    node: str
    actor: Any
    started: Any  # reference to the result of NodeAgent.ping
    finished: Any  # reference to the result of NodeAgent.run
    since: float  # when the actor was created, or when it started if `is_running`
    is_running: bool = False

    @property
    def age(self) -> float:
        return monotonic() - self.since


class Driver:
    """Runs one job until it ends; `run` is called once.

    A single loop creates and removes agents, receives their results and forwards signals.
    """

    def __init__(
        self,
        ray: Any,
        agent_config: AgentConfig,
        server: TcpStoreServer,
        resources: Mapping[str, float],
    ) -> None:
        self._ray = ray
        self._agent_config = ray.put(agent_config)
        self._options = with_environment(agent_config.options, os.environ)
        self._server = server
        self._store = TcpStore(
            server.host,
            server.port,
            job=self._options.rendezvous.run_id,
            connect_timeout=CONNECT_TIMEOUT_S,
            secret=agent_config.secret.encode(),
        )
        self._actor_class = ray.remote(NodeAgent).options
        self._actor_options = actor_options(resources)
        self._requirements = JobRequirements(
            {name: amount for name, amount in resources.items() if amount},
            self._options.job.min_nodes,
            self._options.job.max_nodes,
            join_timeout_s=self._options.rendezvous.timeouts.join_timeout,
        )
        self._agents: dict[int, _Agent] = {}  # by number
        self._num_created = 0
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._forwarded_signal = 0  # the first one, or 0
        self._results: list[RunResult] = []
        self._early_deaths: Counter[str] = Counter()  # by node, agents in a row
        self._failed_placements: Counter[str] = Counter()  # by node
        self._below_min_since = monotonic()
        self._last_summary = ""  # that was logged
        self._last_loss = ""  # reason for which the last agent was lost
        self._failure = ""  # reason for which the driver stopped the job
        self._error: ElasticError | None = None  # of an agent whose settings cannot work
        self._deadline: float | None = None  # for the remaining agents; None while the job runs

    def run(self) -> RunResult:
        """Run the job, and return its result. No process of the job is left afterwards."""
        inbox = SignalInbox()
        inbox.forward_to(self._signals.put)
        with inbox.captured(self._options.agent.handled_signals):
            try:
                while not self._is_finished():
                    self._run_once()
            finally:
                self._kill_all()
                self._store.close()
        if self._error is not None:
            raise self._error
        return merge_results(self._results, self._forwarded_signal, self._failure)

    def _run_once(self) -> None:
        if self._deadline is None:
            self._update_placement()
        for number, reference in self._wait_for_actors():
            self._handle_result(number, reference)
        while not self._signals.empty():
            self._forward_signal(self._signals.get())
        if not self._server.is_serving:
            self._fail_job("the store of the driver has stopped")

    def _wait_for_actors(self) -> list[tuple[int, Any]]:
        """Wait up to POLL_INTERVAL_S; return agents' numbers with references to ready results."""
        pending = {agent.finished: number for number, agent in self._agents.items()}
        for number, agent in self._agents.items():
            if not agent.is_running:
                pending[agent.started] = number
        if not pending:
            # Wait for a signal, because there is no agent to wait for.
            with contextlib.suppress(queue.Empty):
                self._signals.put(self._signals.get(timeout=POLL_INTERVAL_S))
            return []
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=POLL_INTERVAL_S)
        return [(pending[reference], reference) for reference in ready]

    def _is_finished(self) -> bool:
        if self._deadline is None:
            return False
        if self._agents and monotonic() >= self._deadline:
            nodes = ", ".join(agent.node[:8] for agent in self._agents.values())
            log.warning("agents on Ray nodes %s did not exit in time: killing them", nodes)
            return True
        return not self._agents

    # -- ending the job ------------------------------------------------------------------------

    def _end_job(self, seconds: float) -> None:
        """Create no more agents, kill those that have not started, and set the others a deadline.

        Args:
            seconds: time that the running agents have to exit, in addition to `close_timeout` and
                STOP_MARGIN_S. Only the first call sets the deadline.
        """
        if self._deadline is None:
            close_timeout = self._options.rendezvous.timeouts.close_timeout
            self._deadline = monotonic() + seconds + close_timeout + STOP_MARGIN_S
        for number in [n for n, agent in self._agents.items() if not agent.is_running]:
            self._kill_agent(number)

    def _fail_job(self, reason: str) -> None:
        """End the job as failed, and kill all agents. The first reason is reported."""
        self._failure = self._failure or reason
        self._end_job(0.0)
        self._kill_all()

    def _forward_signal(self, number: int) -> None:
        """Send a signal to all running agents, and end the job."""
        log.warning("received %s: forwarding it to all agents", signal_name(number))
        self._forwarded_signal = self._forwarded_signal or number
        limits = self._options.agent
        self._end_job(limits.checkpoint_grace + limits.shutdown_timeout_s)
        for agent in self._agents.values():
            agent.actor.handle_signal.remote(number)

    def _kill_agent(self, number: int) -> None:
        """Kill the actor of an agent. Its workers are killed with it."""
        agent = self._agents.pop(number)
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # already dead
            self._ray.kill(agent.actor, no_restart=True)

    def _kill_all(self) -> None:
        for number in list(self._agents):
            self._kill_agent(number)

    # -- placement -----------------------------------------------------------------------------

    def _update_placement(self) -> None:
        plan = plan_placement(
            self._ray_nodes(),
            [
                PlacedAgent(number, agent.node, None if agent.is_running else agent.age)
                for number, agent in self._agents.items()
            ],
            self._requirements,
            self._seconds_below_min(),
        )
        if plan.is_infeasible:
            cause = f"; the last agent was lost because: {self._last_loss}"
            self._fail_job(plan.summary + (cause if self._last_loss else ""))
            return
        for number in plan.remove:
            self._failed_placements[self._agents[number].node] += 1
            self._kill_agent(number)
        for node in plan.place:
            self._create_agent(node)
        if plan.summary != self._last_summary:
            self._last_summary = plan.summary
            log.info("%s", plan.summary)

    def _ray_nodes(self) -> list[RayNode]:
        return [
            RayNode(
                node["NodeID"],
                node["Resources"],
                self._early_deaths[node["NodeID"]],
                self._failed_placements[node["NodeID"]],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _seconds_below_min(self) -> float:
        if self._num_running() >= self._requirements.min_nodes:
            self._below_min_since = monotonic()
        return monotonic() - self._below_min_since

    def _num_running(self) -> int:
        return sum(agent.is_running for agent in self._agents.values())

    def _create_agent(self, node: str) -> None:
        strategies = self._ray.util.scheduling_strategies
        on_node = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {**self._actor_options, "scheduling_strategy": on_node}
        actor = self._actor_class(**options).remote(self._agent_config)
        self._num_created += 1
        self._agents[self._num_created] = _Agent(
            node, actor, actor.ping.remote(), actor.run.remote(), monotonic()
        )
        log.debug("created agent %d on Ray node %s", self._num_created, node)

    # -- results of agents -----------------------------------------------------------------------

    def _handle_result(self, number: int, reference: Any) -> None:
        agent, errors = self._agents[number], self._ray.exceptions
        try:
            value = self._ray.get(reference)
        except errors.RuntimeEnvSetupError as error:
            value = ConfigError(f"Ray cannot set up the agents' runtime_env: {error}")
        except errors.RayTaskError as error:
            value = ElasticError(f"an agent raised an exception: {error}")
        except errors.RayError as error:
            self._handle_loss(number, f"{type(error).__name__}: {' '.join(str(error).split())}")
            return
        if isinstance(value, ElasticError):
            # Another agent would raise the same error.
            self._error = self._error or value
            self._fail_job(str(value))
        elif reference == agent.started:
            agent.is_running, agent.since = True, monotonic()
            log.info("agent %d started on Ray node %s (%s)", number, agent.node[:8], value)
        elif value.state is WorkerState.FAILED and self._continues_after_failure():
            self._handle_loss(number, value.reason)
        else:
            self._results.append(value)
            self._kill_agent(number)
            self._end_job(self._options.agent.shutdown_timeout_s)

    def _continues_after_failure(self) -> bool:
        """Return True if the job continues although one of its agents has failed."""
        if self._deadline is not None or self._is_job_finished():
            return False
        # With fewer agents, the failed agent has waited in vain for other nodes.
        return self._num_running() >= max(2, self._requirements.min_nodes)

    def _handle_loss(self, number: int, reason: str) -> None:
        """Remove an agent that is dead or has failed, and count it against its node."""
        agent = self._agents[number]
        is_early = agent.age < EARLY_DEATH_S
        self._early_deaths[agent.node] = self._early_deaths[agent.node] + 1 if is_early else 0
        self._last_loss = reason
        self._kill_agent(number)
        log.warning("lost agent %d on Ray node %s: %s", number, agent.node[:8], reason)
        if self._deadline is None and self._is_job_finished():
            self._end_job(self._options.agent.shutdown_timeout_s)

    def _is_job_finished(self) -> bool:
        """Return True if the nodes have recorded the end of the job in the store."""
        keys = StoreKeys(self._options.rendezvous.run_id)
        try:
            state = JobListing(keys, self._store.list(keys.job_prefix)).state
        except StoreError as error:
            log.warning("the driver cannot read its own store: %s", error)
            return False
        return state is not None and state.phase.is_terminal
