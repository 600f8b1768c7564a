"""The ports at which a launch is observed: `/healthz`, `/status.json` and `/metrics`.

They are bound before the node takes part in anything, and what they answer is read off what the
agent tells and what its workers show; nothing waits for who asks.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from .._version import versions
from ..agent.loop import ElasticAgent
from ..errors import ConfigError
from ..observe.exposed import Moment
from ..observe.health import Health, judge
from ..observe.journal import NodeJournal
from ..observe.port import ObservePort, Page, plain
from ..observe.prometheus import Exposition
from ..observe.story import NodeStatus
from .config import (
    HEALTH_VARIABLE,
    LOOPBACK,
    OBSERVE_FLAG,
    LaunchConfig,
    health_port,
    read_port,
)

log = logging.getLogger("elasticlib.launch")

STATUS_VERSION = 1
HEALTH, STATUS, METRICS = "/healthz", "/status.json", "/metrics"


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
            log.warning("no health checks are answered: %s", error)

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
            self._journal.story.counts,
            alive=self._judged(status).good,
            silent=self._agent.silent(),
            events_lost=self._journal.lost,
            versions=self._versions,
        )

    def _health(self) -> Page:
        found = self._judged(self._now())
        return plain(200 if found.good else 503, found.sentence)

    def _status(self) -> Page:
        status = self._now()
        found = self._judged(status)
        said = {
            "version": STATUS_VERSION,
            "healthy": found.good,
            "health": found.sentence,
            **attrs.asdict(status, value_serializer=_value),
        }
        return Page(200, "application/json", json.dumps(said, indent=2).encode() + b"\n")

    def _metrics(self) -> Page:
        if isinstance(self._exposition, str):
            return plain(501, self._exposition)
        return Page(200, *self._exposition.text())


def _value(_kind: Any, _field: Any, value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value
