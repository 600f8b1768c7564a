"""How a launch can be looked at: its events on the disk, what its nodes answer through the store,
and a port that serves `/healthz`, `/status.json` and `/metrics`.

Nothing of it takes part in the job. A run whose events cannot be kept is run all the same, with a
warning. A port is bound before the node takes part in anything; nothing waits for who asks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from .._version import versions
from ..agent.elastic_agent import ElasticAgent
from ..clock import monotonic
from ..errors import ConfigError
from ..observe.aggregate import NodeStatus
from ..observe.event import Event
from ..observe.http_server import HttpResponse, HttpServer, Pages, text_response
from ..observe.job_status import Health, check_health, document_of_node
from ..observe.journal import EVENTS_FILE, EventListener, NodeJournal
from ..observe.metrics import CONTENT_TYPE, MetricsFormatter, MetricsSnapshot
from ..observe.node_status import NodeReport, StatusPublisher
from ..observe.runs import RunRegistration, remove_old_records
from ..observe.stack_query import NodeStacks, StackResponder
from ..observe.totals import totals_of
from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.membership import Node
from ..stores.file_store import FileStore
from ..stores.interface import Store
from ..workers.interface import Workers
from ..workers.local_workers import LocalWorkers
from .launch_config import (
    HEALTH_VARIABLE,
    OBSERVE_FLAG,
    LaunchConfig,
    health_port,
)
from .rendezvous_setup import RendezvousSetup

log = logging.getLogger("elasticlib.launch")

POLL_SECONDS = 1.0
"""Between looks for a question where waiting is a poll of files."""
HEALTH, STATUS, METRICS = "/healthz", "/status.json", "/metrics"
_ALWAYS = (
    *("min_nodes", "max_nodes", "nproc_per_node", "max_restarts", "start_method"),
    *("rdzv_backend", "rdzv_endpoint", "role"),
)


# -- its events ------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_journal(
    config: LaunchConfig,
    workers: Workers,
    node: str,
    *,
    endpoint: str = "",
) -> Iterator[NodeJournal]:
    """The node's events, begun with what the launch is, and in a file if they are to be kept.
    endpoint: where this node serves the job's store, if it does."""
    logs = kept_logs(workers)
    with contextlib.ExitStack() as stack:
        path, found_by = None, ""
        if config.events:
            path, found_by = _place(stack, config.run_id, logs)
        journal = NodeJournal(
            config.run_id, node, path, listeners=[RestoreHint()], run_selector=found_by
        )
        stack.callback(journal.close)
        journal.record(
            "run.started",
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=config.nproc_per_node,
            settings=_settings(config),
            log_dir=logs,
            lease_ttl_seconds=config.rendezvous_timeouts.lease_ttl,
            endpoint=endpoint,
            versions=versions(),
            command=shlex.join(sys.argv),
        )
        yield journal


def kept_logs(workers: Workers) -> str:
    """The folder of the workers' logs, empty where it goes with the run."""
    if not isinstance(workers, LocalWorkers) or not workers.keeps_run_dir:
        return ""
    return str(workers.run_dir)


def _place(stack: contextlib.ExitStack, run: str, logs: str) -> tuple[Path | None, str]:
    """The file, and what it is found by: the run's id if that has a record, which is closed with
    the stack, else its path."""
    events = Path(logs) / EVENTS_FILE if logs else None
    try:
        record = RunRegistration(run, events)
    except OSError as error:
        kept = "; no events of it are kept" * (events is None)
        log.warning("this run cannot be found by its name%s: %s", kept, error)
        return events, str(events or "")
    stack.callback(record.close)
    try:
        remove_old_records(record.path.parent)
    except OSError as error:
        log.info("cannot remove the records of earlier runs: %s", error)
    return record.events, run


def _settings(config: LaunchConfig) -> dict[str, str]:
    """Those that people ask for, and others that are not as they are by default."""
    found = {name: getattr(config, name) for name in _ALWAYS}
    for field in attrs.fields(LaunchConfig):
        value = getattr(config, field.name)
        plain = isinstance(value, str | int | float | bool)
        if plain and value != field.default and field.name != "run_id":
            found[field.name] = value
    if config.rdzv_configs and not config.is_plugin_backend:
        # Where the keys are ours to know: secrets among them are files' names.
        pairs = (f"{key}={text}" for key, text in config.rdzv_configs.items())
        found["rdzv_conf"] = ",".join(pairs)
    return {name: str(value) for name, value in found.items()}


class RestoreHint(EventListener):
    """Warns if workers train from the start although a step was saved.

    Workers that are kept from an earlier generation have a state, and need not restore one.
    """

    def __init__(self) -> None:
        self._kept = -1  # the newest step that was saved
        self._restored = -1  # the last generation whose workers have a state
        self._attempt = 0  # in which the new workers of the generation are started

    def on_event(self, event: Event) -> None:
        step = int(event.number("step") or 0)
        anew = step <= self._kept and self._restored != event.generation
        if event.kind == "generation.started":
            self._attempt = int(event.number("attempt") or 0)
        is_kept = event.kind == "worker.started" and event.number("attempt") != self._attempt
        if event.kind == "state.restored" or is_kept:
            self._restored = event.generation
        elif event.kind in ("checkpoint.saved", "snapshot.taken"):
            self._kept = max(self._kept, step)
        elif event.kind == "training.started" and anew:
            log.warning(
                "training restarted at step %d although step %d was saved; does the script call "
                "CheckpointManager.restore()?",
                *(step, self._kept),
            )


# -- what others see of it through the store -------------------------------------------------------


@contextlib.contextmanager
def observed(
    run_id: str, node: Node, workers: Workers, store: Store, path: str | os.PathLike[str]
) -> Iterator[NodeJournal]:
    """Gives the journal for an `ElasticAgent` that a launcher of your own makes.

    From `with` to its end events are appended to the file at `path`, for `elasticlib report`, and
    `elasticlib status` finds the node in the store in which the job meets.
    """
    with contextlib.closing(NodeJournal(run_id, node.id, path)) as journal:
        journal.record("run.started", host=node.host, pid=os.getpid(), slots=node.slots)

        def look() -> NodeReport:
            return NodeReport.at(monotonic(), journal.status(workers.heartbeats()))

        with StatusPublisher(store, run_id, node.id, look) as publisher:
            journal.on_recorded = publisher.wake
            yield journal


@contextlib.contextmanager
def answering(
    rendezvous: RendezvousSetup, journal: NodeJournal, agent: ElasticAgent
) -> Iterator[None]:
    """Lets `elasticlib status` and `stacks` see this node, from `with` to its end; not where the
    nodes meet in a store that is not ours to speak to."""
    store, handler = rendezvous.store, rendezvous.handler
    if store is None:
        yield
        return

    def look() -> NodeReport:
        heard = (
            handler.seconds_since_refresh()
            if isinstance(handler, DynamicRendezvousHandler)
            else None
        )
        status = journal.status(agent.workers.heartbeats())
        return NodeReport.at(
            monotonic(),
            status,
            store_contact_age_seconds=heard,
            loop_blocked_seconds=agent.stalled_s(),
        )

    poll = POLL_SECONDS if isinstance(store, FileStore) else 0.0
    with (
        StatusPublisher(store, rendezvous.run_id, rendezvous.node_id, look) as publisher,
        StackResponder(
            store, rendezvous.run_id, rendezvous.node_id, stacks_of(agent), poll_interval=poll
        ),
    ):
        journal.on_recorded = publisher.wake
        yield


def stacks_of(agent: ElasticAgent) -> Callable[[frozenset[int] | None], NodeStacks]:
    """What gathers the stacks of this node's workers, all of them or those of some ranks."""

    def gathered(ranks: frozenset[int] | None) -> NodeStacks:
        group = agent.get_worker_group()
        if group is None:
            return NodeStacks({})
        ranked = {worker.local_rank: worker.rank for worker in group.workers}
        running = {
            local: name
            for local, name in agent.workers.running().items()
            if local in ranked and (ranks is None or ranked[local] in ranks)
        }
        if not running:
            return NodeStacks({})
        texts, beats = agent.workers.dump_stacks(running), agent.workers.heartbeats()
        silent = [local for local in running if local not in texts]
        asked = [local for local in silent if local in beats and beats[local].can_dump_stacks]
        return NodeStacks(
            {ranked[local]: texts[local] for local in running if local in texts},
            unresponsive_ranks=tuple(sorted(ranked[local] for local in asked)),
            unsupported={ranked[local]: running[local] for local in silent if local not in asked},
        )

    return gathered


# -- its ports -------------------------------------------------------------------------------------


class Observed:
    """The ports of one launch, bound from the start; none where nobody asked for one.

    Raises:
        ConfigError: --observe-port cannot be bound.
    """

    def __init__(self, config: LaunchConfig, environment: Mapping[str, str]) -> None:
        self._servers: list[tuple[HttpServer, tuple[str, ...]]] = []
        checked = health_port(environment)
        if config.observe_address is not None:
            self._open(OBSERVE_FLAG, config.observe_address, (HEALTH, STATUS, METRICS))
        if checked is not None:
            try:
                # Only the health page, because probes from other machines need no more.
                self._open(HEALTH_VARIABLE, checked, (HEALTH, "/"))
            except ConfigError as error:
                # Other launches on this machine may have the variable, too: the first has the port.
                log.warning("cannot answer health checks: %s", error)

    def _open(self, name: str, where: tuple[str, int], paths: tuple[str, ...]) -> None:
        host, number = where
        try:
            server = HttpServer(host, number)
        except OSError as error:
            why = error.strerror or str(error)
            other = ", or 0 for any that is free" if name == OBSERVE_FLAG else ""
            raise ConfigError(
                f"{name}: {host}, port {number}, cannot be served ({why}): give another port{other}"
            ) from error
        self._servers.append((server, paths))

    def begin(self, agent: ElasticAgent, journal: NodeJournal) -> None:
        """Answer from now on."""
        if not self._servers:
            return
        pages = _pages(agent, journal)
        for server, paths in self._servers:
            server.start({path: pages[path] for path in paths})
            log.info("observed at http://%s%s", server.address, ", ".join(paths))

    def close(self) -> None:
        for server, _ in self._servers:
            server.close()


def _pages(agent: ElasticAgent, journal: NodeJournal) -> Pages:
    """What makes each page, by its path."""
    known = versions()

    def now() -> tuple[NodeStatus, Health]:
        status = journal.status(agent.workers.heartbeats())
        return status, check_health(status.state, status.reason, agent.stalled_s())

    def health() -> HttpResponse:
        _, found = now()
        return text_response(200 if found.is_healthy else 503, found.message)

    def status() -> HttpResponse:
        published = NodeReport.at(monotonic(), now()[0], loop_blocked_seconds=agent.stalled_s())
        text = json.dumps(document_of_node(published), indent=2)
        return HttpResponse(200, "application/json", text.encode() + b"\n")

    def moment() -> MetricsSnapshot:
        status, found = now()
        return MetricsSnapshot(
            status,
            totals_of(journal.aggregate),
            journal.aggregate.last_progress,
            is_healthy=found.is_healthy,
            loop_blocked_seconds=agent.stalled_s(),
            dropped_events=journal.num_dropped,
            versions=known,
        )

    exposition = MetricsFormatter(moment)

    def metrics() -> HttpResponse:
        return HttpResponse(200, CONTENT_TYPE, exposition.text().encode(errors="backslashreplace"))

    return {"/": health, HEALTH: health, STATUS: status, METRICS: metrics}
