"""LocalElasticAgent: an agent whose workers are processes of this machine."""

from __future__ import annotations

import os

from ..agent.elastic_agent import CheckNode, ElasticAgent
from ..clock import Clock, monotonic
from ..observe.journal import Journal
from ..options import AgentOptions, RendezvousSettings
from ..rendezvous.interface import RendezvousHandler
from ..workers.local_workers import LocalWorkers
from ..workers.spec import WorkerSpec
from .elastic_launch import create_snapshot_service


class LocalElasticAgent(ElasticAgent):
    """An `ElasticAgent` whose workers are processes of this machine.

    It stores the snapshots of the workers, and writes the last one to the disk if the job ends
    early.

    Args:
        spec: what to run.
        handler: the rendezvous. The agent closes it at the end of the run.
        workers: runs the workers. The default is a `LocalWorkers` with the environment of this
            process, which ignores the drain signals of `options`.
        job: as for `ElasticAgent`.
        options: as for `ElasticAgent`.
        check_node: as for `ElasticAgent`.
        journal: as for `ElasticAgent`.
        clock: the time source.

    Raises:
        ConfigError: the settings contradict each other, or those of the handler.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        handler: RendezvousHandler,
        workers: LocalWorkers | None = None,
        *,
        job: RendezvousSettings | None = None,
        options: AgentOptions | None = None,
        check_node: CheckNode | None = None,
        journal: Journal | None = None,
        clock: Clock = monotonic,
    ) -> None:
        options = options or AgentOptions()
        local = workers or LocalWorkers(
            os.environ, run_id=handler.get_run_id(), ignored_signals=options.agent_only_signals
        )
        super().__init__(
            spec,
            handler,
            local,
            job=job,
            options=options,
            check_node=check_node,
            snapshot_service=create_snapshot_service(local, replicas=options.snapshot_replicas),
            journal=journal,
            clock=clock,
        )
