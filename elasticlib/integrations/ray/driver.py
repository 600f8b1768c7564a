"""The driver of a job on a Ray cluster: it hosts the store, has agents placed, and hears their end.

One loop: what became of agents, what signals came, what the cluster has now; then `decide`. How
the job stands is what its nodes have written in the store, and not what one agent believes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import sys
import uuid
from collections.abc import Callable
from typing import Any

import attrs

from ...agent.interface import RunResult
from ...agent.options import SignalObserver
from ...clock import monotonic
from ...errors import ElasticError, StoreError
from ...launch.config import LaunchConfig
from ...launch.elastic_launch import shutdown_seconds
from ...launch.process import allow_descriptors
from ...launch.store_host import SPARE_DESCRIPTORS
from ...rendezvous.layout import Keys, StoredJob
from ...signals import signal_name
from ...stores.tcp_client import TcpStore
from ...stores.tcp_server import TcpStoreServer
from ...workers.spec import Entrypoint, WorkerState
from .agent import Told
from .fleet import Began, Event, Fleet, Lost, Refused
from .options import RayOptions
from .outcome import merged
from .placement import Needs, RayNode, decide

log = logging.getLogger("elasticlib.integrations")

LOOK_SECONDS = 0.5
"""Between looks at the cluster; a signal waits as long."""
YOUNG = 60.0
"""An agent that dies within so many seconds speaks against its node."""
MARGIN = 15.0


def run_on(
    ray: Any, config: LaunchConfig, entrypoint: Entrypoint, options: RayOptions
) -> RunResult:
    """Run the job on the cluster that Ray is connected to; the result is that of all its nodes.

    Raises:
        ElasticError: no agent can be started as configured.
    """
    run_id = str(uuid.uuid4()) if config.run_id == "none" else config.run_id
    secret = secrets.token_hex(32)
    # As many again are the server's to spare, for all else that this process does.
    allow_descriptors(config.max_nodes + 2 * SPARE_DESCRIPTORS)
    address = ray.util.get_node_ip_address()
    with TcpStoreServer(address, 0, job=run_id, secret=secret.encode()) as server:
        told = Told(
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
            threads=max(1, int(options.cpus(config.nproc_per_node)) // config.nproc_per_node),
        )
        return Driver(Fleet(ray, told, options), told, server, options).run()


class Driver:
    """Takes one job to its end; `run` is called once."""

    def __init__(
        self, fleet: Fleet, told: Told, server: TcpStoreServer, options: RayOptions
    ) -> None:
        self._fleet = fleet
        self._config = told.config
        self._secret = told.secret.encode()
        self._server = server
        self._needs = Needs(
            options.demand(told.config.nproc_per_node),
            told.config.min_nodes,
            told.config.max_nodes,
            join=told.config.timing.join,
        )
        self._heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._results: list[RunResult] = []
        self._deaths: dict[str, int] = {}
        self._vain: dict[str, int] = {}
        self._short_since = monotonic()
        self._said = self._last_loss = ""
        self._failure = ""
        self._asked = 0
        self._error: ElasticError | None = None
        self._deadline: float | None = None

    def run(self) -> RunResult:
        with SignalObserver(self._config.supervision.agent.heeded, self._heard.put):
            try:
                while not self._over():
                    self._turn()
            finally:
                # Whatever has come up: nothing of the job is left running.
                self._fleet.end()
        if self._error is not None:
            raise self._error
        return merged(self._results, self._asked, self._failure)

    # -- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._deadline is None:
            self._place()
        for number, event in self._wait().items():
            self._take(number, event)
        while not self._heard.empty():
            self._heed(self._heard.get())
        if not self._server.serving:
            self._fail("the driver's store has broken")

    def _wait(self) -> dict[int, Event]:
        if self._fleet.placed():
            return self._fleet.wait(LOOK_SECONDS)
        # Nobody is there who could tell of anything; a signal can still come.
        with contextlib.suppress(queue.Empty):
            self._heard.put(self._heard.get(timeout=LOOK_SECONDS))
        return {}

    def _over(self) -> bool:
        if self._deadline is None:
            return False
        left = self._fleet.placed()
        if left and monotonic() >= self._deadline:
            nodes = ", ".join(agent.node[:8] for agent in left)
            log.warning("ending the agents on Ray nodes %s, which have not ended in time", nodes)
            return True
        return not left

    def _end(self, seconds: float) -> None:
        """No agent is placed any more, and those that run have so long to come to their end."""
        if self._deadline is None:
            self._deadline = monotonic() + seconds + self._config.timing.close + MARGIN
        for agent in self._fleet.placed():
            if agent.waiting is not None:
                self._fleet.drop(agent.number)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._end(0.0)
        self._fleet.end()

    def _heed(self, number: int) -> None:
        log.warning("%s: told to all agents", signal_name(number))
        self._asked = number
        options = self._config.supervision.agent
        self._fleet.tell(number)
        self._end(options.drain_grace + shutdown_seconds(self._config))

    # -- placing ------------------------------------------------------------------------------

    def _place(self) -> None:
        nodes = [
            RayNode(id_, room, self._deaths.get(id_, 0), self._vain.get(id_, 0))
            for id_, room in self._fleet.rooms().items()
        ]
        agents = self._fleet.placed()
        if sum(agent.waiting is None for agent in agents) >= self._needs.min_nodes:
            self._short_since = monotonic()
        plan = decide(nodes, agents, self._needs, monotonic() - self._short_since)
        if plan.gives_up:
            self._fail(plan.reason + (f"; the last: {self._last_loss}" if self._last_loss else ""))
            return
        where = {agent.number: agent.node for agent in agents}
        for number in plan.withdraw:
            self._vain[where[number]] = self._vain.get(where[number], 0) + 1
            self._fleet.drop(number)
        for node in plan.place:
            log.debug("agent %d is placed on Ray node %s", self._fleet.start(node), node)
        if plan.reason != self._said:
            self._said = plan.reason
            log.info("%s", plan.reason)

    # -- what becomes of agents ---------------------------------------------------------------

    def _take(self, number: int, event: Event) -> None:
        node = next(agent.node for agent in self._fleet.placed() if agent.number == number)
        if isinstance(event, Began):
            log.info("agent %d runs on Ray node %s (%s)", number, node[:8], event.place)
            return
        if isinstance(event, Lost):
            self._lose(number, node, event.reason)
        elif isinstance(event, Refused):
            self._error = self._error or event.error
            self._fail(str(event.error))
        elif event.result.state is WorkerState.FAILED and self._goes_on():
            self._lose(number, node, event.result.reason)
        else:
            self._results.append(event.result)
            self._fleet.drop(number)
            self._end(shutdown_seconds(self._config))

    def _goes_on(self) -> bool:
        """Whether the job does, although one of its agents has failed."""
        if self._deadline is not None or self._job_is_over():
            return False
        running = sum(agent.waiting is None for agent in self._fleet.placed())
        # With fewer than that, it is what the job has waited for in vain.
        return running >= self._needs.min_nodes and running > 1

    def _lose(self, number: int, node: str, reason: str) -> None:
        young = self._fleet.uptime(number) < YOUNG
        self._deaths[node] = self._deaths.get(node, 0) + 1 if young else 0
        self._last_loss = reason
        self._fleet.drop(number)
        log.warning("agent %d on Ray node %s is lost: %s", number, node[:8], reason)
        if self._deadline is None and self._job_is_over():
            self._end(shutdown_seconds(self._config))

    def _job_is_over(self) -> bool:
        """Whether its nodes have written down that it is."""
        return bool(self._ask(lambda read: read.state is not None and read.state.phase.terminal))

    def _ask(self, what: Callable[[StoredJob], Any]) -> Any:
        keys = Keys(self._config.run_id)
        store = TcpStore(
            self._server.host,
            self._server.port,
            job=self._config.run_id,
            timeout=self._config.answer_seconds,
            secret=self._secret,
        )
        try:
            return what(StoredJob(keys, store.list(keys.job)))
        except StoreError as error:
            log.warning("the driver cannot read its own store: %s", error)
            return None
        finally:
            store.close()
