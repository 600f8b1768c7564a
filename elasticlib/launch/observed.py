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
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import attrs

from .._version import versions
from ..agent.loop import ElasticAgent
from ..clock import monotonic
from ..errors import ConfigError
from ..observe.journal import FILE, NodeJournal, View
from ..observe.metrics import Exposition, Moment
from ..observe.port import ObservePort, Page, plain
from ..observe.published import Published, Publisher
from ..observe.runs import RunRecord, remove_old
from ..observe.stacks import Answerer, Stacks
from ..observe.status import Health, document_of_node, judge
from ..observe.story import NodeStatus
from ..rendezvous.handler import DynamicRendezvousHandler
from ..stores.file import FileStore
from ..workers.interface import Workers
from ..workers.processes import LocalWorkers
from .config import (
    HEALTH_VARIABLE,
    LOOPBACK,
    OBSERVE_FLAG,
    LaunchConfig,
    health_port,
    read_port,
)
from .rendezvous_setup import Meeting

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
    views: Iterable[View] = (),
) -> Iterator[NodeJournal]:
    """The node's events, begun with what the launch is, and in a file if they are to be kept.
    endpoint: where this node serves the job's store, if it does."""
    logs = kept_logs(workers)
    with contextlib.ExitStack() as stack:
        path, found_by = None, ""
        if config.events:
            path, found_by = _place(stack, config.run_id, logs)
        journal = NodeJournal(config.run_id, node, path, views=views, found_by=found_by)
        stack.callback(journal.close)
        journal.tell(
            "run.began",
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=config.nproc_per_node,
            settings=_settings(config),
            logs=logs,
            lease=config.timing.lease,
            endpoint=endpoint,
            versions=versions(),
        )
        yield journal


def kept_logs(workers: Workers) -> str:
    """The folder of the workers' logs, empty where it goes with the run."""
    if not isinstance(workers, LocalWorkers) or not workers.keeps_folder:
        return ""
    return str(workers.folder)


def _place(stack: contextlib.ExitStack, run: str, logs: str) -> tuple[Path | None, str]:
    """The file, and what it is found by: the run's id if that has a record, which is closed with
    the stack, else its path."""
    events = Path(logs) / FILE if logs else None
    try:
        record = RunRecord(run, events)
    except OSError as error:
        kept = "; no events of it are kept" * (events is None)
        log.warning("this run cannot be found by its name%s: %s", kept, error)
        return events, str(events or "")
    stack.callback(record.close)
    try:
        remove_old(record.path.parent)
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
    return {**{name: str(value) for name, value in found.items()}, **_conf(config)}


def _conf(config: LaunchConfig) -> dict[str, str]:
    """The keys of --rdzv-conf, where they are ours to know: secrets among them are files' names."""
    if config.foreign or not config.rdzv_configs:
        return {}
    return {"rdzv_conf": ",".join(f"{key}={text}" for key, text in config.rdzv_configs.items())}


# -- what others see of it through the store -------------------------------------------------------


@contextlib.contextmanager
def answering(meeting: Meeting, journal: NodeJournal, agent: ElasticAgent) -> Iterator[None]:
    """Lets `elasticlib status` and `stacks` see this node, from `with` to its end; not where the
    nodes meet in a store that is not ours to speak to."""
    store, handler = meeting.store, meeting.handler
    if store is None:
        yield
        return

    def look() -> Published:
        heard = handler.heard() if isinstance(handler, DynamicRendezvousHandler) else None
        status = journal.status(agent.workers.beats())
        return Published.at(monotonic(), status, heard=heard, loop_silent=agent.silent())

    poll = POLL_SECONDS if isinstance(store, FileStore) else 0.0
    with (
        Publisher(store, meeting.run_id, meeting.me, look) as publisher,
        Answerer(store, meeting.run_id, meeting.me, stacks_of(agent), look_every=poll),
    ):
        journal.on_event = publisher.wake
        yield


def stacks_of(agent: ElasticAgent) -> Callable[[frozenset[int] | None], Stacks]:
    """What gathers the stacks of this node's workers, all of them or those of some ranks."""

    def gathered(ranks: frozenset[int] | None) -> Stacks:
        group = agent.get_worker_group()
        if group is None:
            return Stacks({})
        ranked = {worker.local_rank: worker.rank for worker in group.workers}
        running = {
            local: name
            for local, name in agent.workers.running().items()
            if local in ranked and (ranks is None or ranked[local] in ranks)
        }
        if not running:
            return Stacks({})
        texts, beats = agent.workers.dump_stacks_of(running), agent.workers.beats()
        silent = [local for local in running if local not in texts]
        asked = [local for local in silent if local in beats and beats[local].dumps]
        return Stacks(
            {ranked[local]: texts[local] for local in running if local in texts},
            silent=tuple(sorted(ranked[local] for local in asked)),
            mute={ranked[local]: running[local] for local in silent if local not in asked},
        )

    return gathered


# -- its ports -------------------------------------------------------------------------------------


class Observed:
    """The ports of one launch, bound from the start; none where nobody asked for one.

    Raises:
        ConfigError: --observe-port cannot be bound.
    """

    def __init__(self, config: LaunchConfig, environment: Mapping[str, str]) -> None:
        self._ports: list[tuple[ObservePort, tuple[str, ...]]] = []
        checked = health_port(environment)
        if config.observe_port is not None:
            where = read_port(config.observe_port, OBSERVE_FLAG, LOOPBACK)
            self._open(OBSERVE_FLAG, where, (HEALTH, STATUS, METRICS))
        if checked is not None:
            try:
                # Health alone: it is open to all who reach this machine, and need know no more.
                self._open(HEALTH_VARIABLE, checked, (HEALTH, "/"))
            except ConfigError as error:
                # Other launches on this machine may have the variable, too: the first has the port.
                log.warning("cannot answer health checks: %s", error)

    def _open(self, name: str, where: tuple[str, int], paths: tuple[str, ...]) -> None:
        host, number = where
        try:
            port = ObservePort(host, number)
        except OSError as error:
            why = error.strerror or str(error)
            other = ", or 0 for any that is free" if name == OBSERVE_FLAG else ""
            raise ConfigError(
                f"{name}: {host}, port {number}, cannot be served ({why}): give another port{other}"
            ) from error
        self._ports.append((port, paths))

    def begin(self, agent: ElasticAgent, journal: NodeJournal) -> None:
        """Answer from now on."""
        if not self._ports:
            return
        pages, lacking = _pages(agent, journal)
        for port, paths in self._ports:
            port.begin({path: pages[path] for path in paths})
            shown = [path for path in paths if path != METRICS or not lacking]
            log.info("observed at http://%s%s", port.address, ", ".join(shown))
            if METRICS in paths and lacking:
                log.warning("%s", lacking)

    def close(self) -> None:
        for port, _ in self._ports:
            port.close()


def _pages(
    agent: ElasticAgent, journal: NodeJournal
) -> tuple[Mapping[str, Callable[[], Page]], str]:
    """What makes each page, by its path; and why there is no METRICS, empty where there is."""
    known = versions()

    def now() -> tuple[NodeStatus, Health]:
        status = journal.status(agent.workers.beats())
        return status, judge(status.state, status.reason, agent.silent())

    def health() -> Page:
        _, found = now()
        return plain(200 if found.good else 503, found.sentence)

    def status() -> Page:
        published = Published.at(monotonic(), now()[0], loop_silent=agent.silent())
        text = json.dumps(document_of_node(published), indent=2)
        return Page(200, "application/json", text.encode() + b"\n")

    def moment() -> Moment:
        status, found = now()
        return Moment(
            status,
            journal.story.sums(),
            journal.story.pace,
            alive=found.good,
            silent=agent.silent(),
            events_lost=journal.lost,
            versions=known,
        )

    pages = {"/": health, HEALTH: health, STATUS: status}
    try:
        exposition = Exposition(moment)
    except ConfigError as error:
        lacking = str(error)
        return {**pages, METRICS: lambda: plain(501, lacking)}, lacking
    return {**pages, METRICS: lambda: Page(200, *exposition.text())}, ""
