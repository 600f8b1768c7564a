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
        asked = config.observe_port
        try:
            if asked is not None:
                where = read_port(asked, OBSERVE_FLAG, LOOPBACK)
                self._open(OBSERVE_FLAG, where, (HEALTH, STATUS, METRICS))
            checked = health_port(environment)
            if checked is not None:
                # Health alone: it is open to all who reach this machine, and need know no more.
                self._open_checked(checked)
        except ConfigError:
            self.close()
            raise

    def _open_checked(self, where: tuple[str, int]) -> None:
        """As torch's variable says, which other launches on this machine may have been told, too:
        the first of them has the port, and the others go on without."""
        try:
            self._open(HEALTH_VARIABLE, where, (HEALTH, "/"))
        except ConfigError as error:
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
        pages = _Pages(agent, journal)
        for port, paths in self._ports:
            port.begin({path: pages.by_path[path] for path in paths})
            shown = [path for path in paths if path != METRICS or not pages.lacking]
            log.info("observed at http://%s%s", port.address, ", ".join(shown))
            if METRICS in paths and pages.lacking:
                log.warning("%s", pages.lacking)

    def close(self) -> None:
        for port, _ in self._ports:
            port.close()


class _Pages:
    def __init__(self, agent: ElasticAgent, journal: NodeJournal) -> None:
        self._agent = agent
        self._journal = journal
        self._versions = versions()
        try:
            self._exposition: Exposition | str = Exposition(self._moment)
        except ConfigError as error:
            self._exposition = str(error)
        self.by_path: Mapping[str, Callable[[], Page]] = {
            "/": self._health,
            HEALTH: self._health,
            STATUS: self._status,
            METRICS: self._metrics,
        }

    @property
    def lacking(self) -> str:
        """Why there is no METRICS; empty where there is."""
        return self._exposition if isinstance(self._exposition, str) else ""

    def _now(self) -> NodeStatus:
        return self._journal.status(self._agent.workers.beats())

    def _judged(self, status: NodeStatus) -> Health:
        return judge(status.state, status.reason, self._agent.silent())

    def _moment(self) -> Moment:
        status = self._now()
        return Moment(
            status,
            self._journal.story.sums(),
            self._journal.story.pace,
            alive=self._judged(status).good,
            silent=self._agent.silent(),
            events_lost=self._journal.lost,
            versions=self._versions,
        )

    def _health(self) -> Page:
        found = self._judged(self._now())
        return plain(200 if found.good else 503, found.sentence)

    def _status(self) -> Page:
        now = Published.at(monotonic(), self._now(), loop_silent=self._agent.silent())
        said = document_of_node(now)
        return Page(200, "application/json", json.dumps(said, indent=2).encode() + b"\n")

    def _metrics(self) -> Page:
        if isinstance(self._exposition, str):
            return plain(501, self._exposition)
        return Page(200, *self._exposition.text())
