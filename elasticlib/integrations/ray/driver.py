"""The driver of a job on a Ray cluster: it hosts the store, and places and watches the agents.

Agents are actors, one a node, between as few and as many as may run; `decide` says where, of what
the cluster has now. How the job stands is what its nodes have written in the store, and not what
one agent believes.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import secrets
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ...agent.elastic_agent import ElasticAgent
from ...agent.interface import RunResult
from ...agent.options import SignalObserver
from ...clock import monotonic
from ...errors import ConfigError, ElasticError, StoreError
from ...launch.console import start_logging
from ...launch.elastic_launch import run_node, shutdown_timeout_of
from ...launch.launch_config import LaunchConfig
from ...launch.launcher_process import raise_open_file_limit
from ...launch.run_id import generate_run_id
from ...launch.store_host import CONNECT_TIMEOUT_S, RESERVED_DESCRIPTORS
from ...observe.runs import NO_ID
from ...rendezvous.store_layout import JobListing, StoreKeys
from ...signals import signal_name
from ...stores.authentication import SECRET_ENV as SECRET
from ...stores.tcp_client import TcpStore
from ...stores.tcp_server import TcpStoreServer
from ...workers.exits import WorkerExit
from ...workers.spec import Entrypoint, WorkerState

log = logging.getLogger("elasticlib.integrations")

LOOK_SECONDS = 0.5
"""Between looks at the cluster; a signal waits as long."""
YOUNG = 60.0
"""An agent that dies within so many seconds speaks against its node."""
DEATHS = 3
"""So many agents in a row that died young, and a node is not tried again."""
MARGIN = 15.0
CALLS = 4
"""Of an agent at one time: `run`, which lasts as long as the job does, and others beside it."""
BREAKPOINT = "ray.util.rpdb.set_trace"
# Ray ends all that an actor has started along with it, even the supervisor process that cleans up.
KEEP_SUPERVISOR = {"RAY_kill_child_processes_on_worker_exit": "false"}


# -- where agents go: pure -------------------------------------------------------------------------


@attrs.frozen
class RayNode:
    """A living node of the cluster.

    room: all the resources that it has, whether in use or not. deaths: how many agents in a row
    died there soon after they began. vain: how many waited there for room that never came.
    """

    id: str
    room: Mapping[str, float]
    deaths: int = 0
    vain: int = 0

    def fits(self, demand: Mapping[str, float]) -> bool:
        return all(self.room.get(name, 0.0) >= amount for name, amount in demand.items())


@attrs.frozen
class Placed:
    """An agent that has been asked for; waiting: seconds since, or None once it runs."""

    number: int
    node: str
    waiting: float | None = None


@attrs.frozen
class Needs:
    """What the job asks of the cluster: demand is what each agent takes of its node.

    patience: seconds that an agent may wait for room while another node stands idle. join: seconds
    for which there may be fewer than min_nodes agents.
    """

    demand: Mapping[str, float]
    min_nodes: int
    max_nodes: int
    patience: float = 10.0
    join: float = 600.0


@attrs.frozen
class Plan:
    """What is to be done: agents (by number) to take back, then nodes to place one on each.

    gives_up: the job cannot be run on this cluster; the reason says why.
    """

    reason: str
    withdraw: tuple[int, ...] = ()
    place: tuple[str, ...] = ()
    gives_up: bool = False


def decide(nodes: Sequence[RayNode], agents: Sequence[Placed], needs: Needs, short: float) -> Plan:
    """The next step. A node on which agent after agent dies is left alone, and one that has no
    room loses its turn to another.

    short: seconds for which fewer than min_nodes agents have run.
    """
    taken = {agent.node for agent in agents}
    free = [node for node in nodes if node.id not in taken and node.fits(needs.demand)]
    usable = sorted((n for n in free if n.deaths < DEATHS), key=lambda n: (n.deaths, n.vain))
    waiting = [agent for agent in agents if agent.waiting is not None]
    reason = _described(nodes, len(agents) - len(waiting), len(waiting), needs)
    if len(agents) - len(waiting) < needs.min_nodes and short >= needs.join:
        return Plan(f"for {needs.join:g} s, {reason}", gives_up=True)
    if not agents and free and not usable:
        return Plan(f"{DEATHS} agents in a row died on each node; {reason}", gives_up=True)
    # An agent on a node that is gone will not come back, whatever Ray knows of it yet.
    living = {node.id for node in nodes}
    gone = [agent.number for agent in agents if agent.node not in living]
    wanted = max(0, needs.max_nodes - len(agents) + len(gone))
    # Those that have waited for too long are moved, as many as there are idle nodes for them.
    waiting.sort(key=lambda agent: -(agent.waiting or 0.0))
    late = [a.number for a in waiting if (a.waiting or 0.0) >= needs.patience and a.node in living]
    moved = late[: len(usable[wanted:])]
    place = usable[: wanted + len(moved)]
    return Plan(reason, (*gone, *moved), tuple(node.id for node in place))


def _described(nodes: Sequence[RayNode], running: int, waiting: int, needs: Needs) -> str:
    small = sum(not node.fits(needs.demand) for node in nodes)
    shunned = sum(node.deaths >= DEATHS for node in nodes)
    parts = [f"{running} of {needs.min_nodes} to {needs.max_nodes} agents run"]
    if waiting:
        parts.append(f"{waiting} {'wait' if waiting > 1 else 'waits'} for room")
    if small:
        asked = ", ".join(f"{name} {amount:g}" for name, amount in needs.demand.items())
        parts.append(f"{small} of {len(nodes)} nodes are too small for {asked}")
    if shunned:
        parts.append(f"{shunned} of {len(nodes)} nodes are not tried again")
    return "; ".join(parts)


# What one node knows of the whole job goes before what it knows of itself.
_WEIGHT = (WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.DRAINED, WorkerState.STOPPED)


def merged(results: Sequence[RunResult], asked: int = 0, failure: str = "") -> RunResult:
    """How the job ended, of how it did on the nodes whose agents came back: values and failures
    are by global rank.

    asked: the signal that the driver passed on to the agents. failure: why the job was given up,
    where none of them knows.
    """
    if not results:
        if asked and not failure:
            reason = f"signal {asked} came before any agent ran"
            return RunResult(WorkerState.STOPPED, reason, signal=asked)
        return RunResult(WorkerState.FAILED, failure or "no agent came back")
    best = min(results, key=lambda result: _WEIGHT.index(result.state))
    if failure and best.state is not WorkerState.SUCCEEDED:
        best = attrs.evolve(best, state=WorkerState.FAILED, reason=failure)
    values: dict[int, Any] = {}
    failures: dict[int, WorkerExit] = {}
    for result in sorted(results, key=lambda result: result is not best):
        values.update(result.return_values)
        failures = {**result.failures, **failures}
    first = -1 if best.root_cause is None else best.root_cause.rank
    ordered = dict(sorted(failures.items(), key=lambda item: (item[0] != first, item[0])))
    cause = best.root_cause or next(
        (r.root_cause for r in results if r.root_cause is not None), None
    )
    return attrs.evolve(
        best, return_values=dict(sorted(values.items())), failures=ordered, root_cause=cause
    )


# -- in an actor -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Order:
    """What the driver sends to every agent: its part in the job, and how things are at the driver.

    folder, argv: where the driver runs and what as. level: of what it logs. threads: of each
    worker.
    """

    config: LaunchConfig
    entrypoint: Entrypoint
    secret: str
    folder: str
    argv: tuple[str, ...]
    level: int
    threads: int


class NodeAgent:
    """One node's agent, as an actor: it dies with its driver, and its workers with it.

    Its methods are called from threads of Ray's, where no signal arrives: what the driver wants of
    the agent comes in as a call instead.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._asked: list[int] = []
        self._agent: ElasticAgent | None = None

    def hello(self) -> str:
        """Where it is, which answers once Ray has found room for it."""
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def run(self) -> RunResult | ElasticError:
        """Take part in the job until it is over for this node; an error is one of its settings."""
        start_logging(self._order.level, "%(asctime)s elasticlib: %(message)s")
        self._be_like_the_driver()
        try:
            return run_node(self._order.config, self._order.entrypoint, on_start=self._began)
        except ElasticError as error:
            return error

    def heed(self, number: int) -> None:
        """Act as if this signal had come."""
        with self._lock:
            self._asked.append(number)
            if self._agent is not None:
                self._agent.handle_signal(number)

    def _began(self, agent: ElasticAgent) -> None:
        with self._lock:
            self._agent = agent
            for number in self._asked:
                agent.handle_signal(number)

    def _be_like_the_driver(self) -> None:
        """Make this process one that workers can be started from as at the driver."""
        given = importlib.import_module("ray").get_runtime_context().runtime_env
        # Not in the actor's description, which Ray's dashboard shows.
        os.environ[SECRET] = self._order.secret
        if "OMP_NUM_THREADS" not in given.get("env_vars", {}):
            # Ray gives each worker what is meant for all of them together.
            os.environ["OMP_NUM_THREADS"] = str(self._order.threads)
        if os.environ.get("PYTHONBREAKPOINT") == BREAKPOINT:
            # The workers are no processes of Ray's.
            del os.environ["PYTHONBREAKPOINT"]
        sys.argv = list(self._order.argv)
        # Else multiprocessing has every worker import this process's, which is all of Ray.
        vars(sys.modules["__main__"]).pop("__file__", None)
        if "working_dir" not in given:
            try:
                os.chdir(self._order.folder)
            except OSError as error:
                log.warning(
                    "the workers run in %s: the driver's folder %s is not here (%s); "
                    "ray.init(runtime_env={'working_dir': ...}) has Ray bring it",
                    os.getcwd(),
                    self._order.folder,
                    error.strerror,
                )


# -- the driver ------------------------------------------------------------------------------------


def run_on(
    ray: Any, config: LaunchConfig, entrypoint: Entrypoint, resources: Mapping[str, float]
) -> RunResult:
    """Run the job on the cluster that Ray is connected to; the result is that of all its nodes.

    resources: what each agent takes of its node, by Ray's names.

    Raises:
        ElasticError: no agent can be started as configured.
    """
    run_id = generate_run_id(entrypoint) if config.run_id in ("", NO_ID) else config.run_id
    secret = secrets.token_hex(32)
    # As many again are the server's to spare, for all else that this process does.
    raise_open_file_limit(config.max_nodes + 2 * RESERVED_DESCRIPTORS)
    address = ray.util.get_node_ip_address()
    with TcpStoreServer(address, 0, job=run_id, secret=secret.encode()) as server:
        order = Order(
            config=attrs.evolve(
                config,
                run_id=run_id,
                rdzv_backend="tcp",
                rdzv_endpoint=server.address,
                rdzv_configs={**config.rdzv_configs, "is_host": "false"},
            ),
            entrypoint=entrypoint,
            secret=secret,
            folder=os.getcwd(),
            argv=tuple(sys.argv),
            level=logging.getLogger("elasticlib").getEffectiveLevel(),
            threads=max(1, int(resources["CPU"]) // config.nproc_per_node),
        )
        return Driver(ray, order, server, resources).run()


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an agent's actor. Ray adds its environment variables to the job's."""
    custom = dict(resources)
    return {
        "num_cpus": custom.pop("CPU"),
        "num_gpus": custom.pop("GPU", 0),
        "memory": custom.pop("memory", None),
        "resources": custom,
        "runtime_env": {"env_vars": KEEP_SUPERVISOR},
        "max_concurrency": CALLS,
        "max_restarts": 0,
        "max_task_retries": 0,
    }


@attrs.define
class _Agent:
    """hello, ran: what Ray answers with once it has room for it, and once its run is over. since:
    when it was placed; then, when it began to run."""

    node: str
    actor: Any
    hello: Any
    ran: Any
    since: float
    runs: bool = False

    @property
    def age(self) -> float:
        return monotonic() - self.since


class Driver:
    """Takes one job to its end; `run` is called once. One loop: where agents are to be, what became
    of them, which signals came."""

    def __init__(
        self, ray: Any, order: Order, server: TcpStoreServer, resources: Mapping[str, float]
    ) -> None:
        self._ray = ray
        self._order = ray.put(order)
        self._config = order.config
        self._server = server
        self._store = TcpStore(
            server.host,
            server.port,
            job=order.config.run_id,
            connect_timeout=CONNECT_TIMEOUT_S,
            secret=order.secret.encode(),
        )
        self._new_agent = ray.remote(NodeAgent).options
        self._options = actor_options(resources)
        self._needs = Needs(
            {name: amount for name, amount in resources.items() if amount},
            order.config.min_nodes,
            order.config.max_nodes,
            join=order.config.rendezvous_timeouts.join_timeout,
        )
        self._agents: dict[int, _Agent] = {}
        self._count = 0
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._results: list[RunResult] = []
        self._deaths: Counter[str] = Counter()
        self._vain: Counter[str] = Counter()
        self._short_since = monotonic()
        self._said = self._last_loss = self._failure = ""
        self._asked = 0
        self._error: ElasticError | None = None
        self._deadline: float | None = None

    def run(self) -> RunResult:
        with SignalObserver(self._config.supervision.agent.handled_signals, self._signals.put):
            try:
                while not self._over():
                    self._turn()
            finally:
                # Whatever has come up: nothing of the job is left running.
                self._drop_all()
                self._store.close()
        if self._error is not None:
            raise self._error
        return merged(self._results, self._asked, self._failure)

    def _turn(self) -> None:
        if self._deadline is None:
            self._place()
        for number, answer in self._wait():
            self._take(number, answer)
        while not self._signals.empty():
            self._pass_on(self._signals.get())
        if not self._server.is_serving:
            self._fail("the driver's store has broken")

    def _wait(self) -> list[tuple[int, Any]]:
        """The answers that are there, each of an agent by its number."""
        waited = {agent.ran: number for number, agent in self._agents.items()}
        waited |= {one.hello: number for number, one in self._agents.items() if not one.runs}
        if not waited:
            # There is no agent to wait for; a signal can still come.
            with contextlib.suppress(queue.Empty):
                self._signals.put(self._signals.get(timeout=LOOK_SECONDS))
            return []
        ready, _ = self._ray.wait(list(waited), num_returns=1, timeout=LOOK_SECONDS)
        return [(waited[answer], answer) for answer in ready]

    @property
    def _running(self) -> int:
        return sum(agent.runs for agent in self._agents.values())

    def _over(self) -> bool:
        if self._deadline is None:
            return False
        if self._agents and monotonic() >= self._deadline:
            nodes = ", ".join(agent.node[:8] for agent in self._agents.values())
            log.warning("ending the agents on Ray nodes %s, which have not ended in time", nodes)
            return True
        return not self._agents

    def _end(self, seconds: float) -> None:
        """No agent is placed any more, and those that run have so long to come to their end."""
        if self._deadline is None:
            self._deadline = (
                monotonic() + seconds + self._config.rendezvous_timeouts.close_timeout + MARGIN
            )
        for number in [number for number, agent in self._agents.items() if not agent.runs]:
            self._drop(number)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._end(0.0)
        self._drop_all()

    def _pass_on(self, number: int) -> None:
        """A signal goes to all agents that run; those that wait are not waited for."""
        log.warning("%s: passed on to all agents", signal_name(number))
        self._asked = number
        self._end(
            self._config.supervision.agent.checkpoint_grace + shutdown_timeout_of(self._config)
        )
        for agent in self._agents.values():
            agent.actor.heed.remote(number)

    # -- placing ------------------------------------------------------------------------------

    def _place(self) -> None:
        living = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}
        nodes = [RayNode(id_, living[id_], self._deaths[id_], self._vain[id_]) for id_ in living]
        if self._running >= self._needs.min_nodes:
            self._short_since = monotonic()
        agents = [
            Placed(number, agent.node, None if agent.runs else agent.age)
            for number, agent in self._agents.items()
        ]
        plan = decide(nodes, agents, self._needs, monotonic() - self._short_since)
        if plan.gives_up:
            self._fail(plan.reason + (f"; the last: {self._last_loss}" if self._last_loss else ""))
            return
        for number in plan.withdraw:
            self._vain[self._agents[number].node] += 1
            self._drop(number)
        for node in plan.place:
            self._start(node)
        if plan.reason != self._said:
            self._said = plan.reason
            log.info("%s", plan.reason)

    def _start(self, node: str) -> None:
        strategies = self._ray.util.scheduling_strategies
        there = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        actor = self._new_agent(scheduling_strategy=there, **self._options).remote(self._order)
        self._count += 1
        hello, ran = actor.hello.remote(), actor.run.remote()
        self._agents[self._count] = _Agent(node, actor, hello, ran, monotonic())
        log.debug("agent %d is placed on Ray node %s", self._count, node)

    def _drop(self, number: int) -> None:
        """Take the agent back, whatever it does; its workers end with it."""
        agent = self._agents.pop(number)
        # What is dead already cannot be killed.
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(agent.actor, no_restart=True)

    def _drop_all(self) -> None:
        for number in list(self._agents):
            self._drop(number)

    # -- ends of agents ------------------------------------------------------------------------

    def _take(self, number: int, answer: Any) -> None:
        agent, errors = self._agents[number], self._ray.exceptions
        try:
            value = self._ray.get(answer)
        except errors.RuntimeEnvSetupError as error:
            value = ConfigError(f"Ray cannot set up the agents' runtime_env: {error}")
        except errors.RayTaskError as error:
            value = ElasticError(f"an agent broke: {error}")
        except errors.RayError as error:
            self._lose(number, f"{type(error).__name__}: {' '.join(str(error).split())}")
            return
        if isinstance(value, ElasticError):
            # Its settings cannot work, here or elsewhere.
            self._error = self._error or value
            self._fail(str(value))
        elif answer == agent.hello:
            agent.runs, agent.since = True, monotonic()
            log.info("agent %d runs on Ray node %s (%s)", number, agent.node[:8], value)
        elif value.state is WorkerState.FAILED and self._goes_on():
            self._lose(number, value.reason)
        else:
            self._results.append(value)
            self._drop(number)
            self._end(shutdown_timeout_of(self._config))

    def _goes_on(self) -> bool:
        """Whether the job does, although one of its agents has failed."""
        if self._deadline is not None or self._job_is_over():
            return False
        # With fewer than that, it is what the job has waited for in vain.
        return self._running >= max(2, self._needs.min_nodes)

    def _lose(self, number: int, reason: str) -> None:
        agent = self._agents[number]
        self._deaths[agent.node] = self._deaths[agent.node] + 1 if agent.age < YOUNG else 0
        self._last_loss = reason
        self._drop(number)
        log.warning("agent %d on Ray node %s is lost: %s", number, agent.node[:8], reason)
        if self._deadline is None and self._job_is_over():
            self._end(shutdown_timeout_of(self._config))

    def _job_is_over(self) -> bool:
        """Whether its nodes have written down that it is."""
        keys = StoreKeys(self._config.run_id)
        try:
            state = JobListing(keys, self._store.list(keys.job_prefix)).state
        except StoreError as error:
            log.warning("the driver cannot read its own store: %s", error)
            return False
        return state is not None and state.phase.is_terminal
