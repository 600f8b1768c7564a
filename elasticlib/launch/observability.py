"""Observability of a launch: its events file, its observer in the store, and its HTTP pages.

None of this takes part in the job. A run whose events cannot be written runs all the same, with a
warning. A port is bound before the node joins the job, and requests never delay the job.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .._version import versions
from ..agent.elastic_agent import ElasticAgent
from ..clock import monotonic
from ..errors import ConfigError, OptionError, format_error
from ..observe import event_kinds as kinds
from ..observe.aggregate import NodeStatus
from ..observe.event import Event
from ..observe.http_server import HttpResponse, HttpServer, Pages, text_response
from ..observe.job_status import Health, check_health, document_of_node
from ..observe.journal import EVENTS_FILE, EventListener, NodeJournal
from ..observe.metrics import CONTENT_TYPE, MetricsFormatter, MetricsSnapshot
from ..observe.runs import RunRegistration, remove_old_records
from ..observe.summary import NodeReport
from ..observe.totals import totals_of
from ..options import LaunchOptions, ObserveOptions
from ..rendezvous.handler import DynamicRendezvousHandler
from ..rendezvous.interface import RendezvousHandler
from ..rendezvous.membership import Node
from ..workers.interface import Workers
from ..workers.local_workers import LocalWorkers
from .backends import import_function
from .observer import NodeObserver, heartbeats_of
from .option_text import recorded_settings
from .rendezvous_setup import RendezvousSetup
from .torch_config import HEALTH_VARIABLE, health_address

log = logging.getLogger("elasticlib.launch")

OBSERVE_FLAG = "--observe-port"
HEALTH_PATH, STATUS_PATH, METRICS_PATH = "/healthz", "/status.json", "/metrics"


# -- events ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_journal(
    options: LaunchOptions,
    workers: Workers,
    node_id: str,
    *,
    endpoint: str = "",
) -> Iterator[NodeJournal]:
    """Open this node's journal, and record the start of the run.

    Args:
        options: the options of this node.
        workers: the workers, whose log directory holds the events if it is kept.
        node_id: the id of this node.
        endpoint: the endpoint at which this node serves the store, or an empty string.

    Raises:
        ConfigError: the user's `on_event` cannot be imported.
    """
    log_dir = persistent_log_dir(workers)
    with contextlib.ExitStack() as stack:
        listeners: list[EventListener] = [MissingRestoreWarning()]
        if options.observe.on_event is not None:
            listeners.append(stack.enter_context(EventHook(options.observe.on_event)))
        run_id, path, selector = options.rendezvous.run_id, None, ""
        if options.observe.events:
            path, selector = _register_run(stack, run_id, log_dir)
        journal = NodeJournal(
            run_id,
            node_id,
            path,
            listeners=listeners,
            run_selector=selector,
        )
        stack.callback(journal.close)
        started = kinds.RunStarted(
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=options.workers.count,
            settings=recorded_settings(options),
            log_dir=log_dir,
            lease_ttl_seconds=options.rendezvous.timeouts.lease_ttl,
            endpoint=endpoint,
            versions=versions(),
            command=command_line(),
        )
        journal.record(started)
        yield journal


def command_line() -> str:
    """Return the command line of this process, with the short name of elasticlib's commands."""
    program, *args = sys.argv or [""]
    path = Path(program)
    if path.name == "elasticrun":
        program = path.name
    elif path.parts[-3:] == ("elasticlib", "launch", "__main__.py"):
        return f"python -m elasticlib.launch {shlex.join(args)}"
    return shlex.join([program, *args])


def persistent_log_dir(workers: Workers) -> str:
    """Return the log directory of the workers, or an empty string if it is removed at the end."""
    if not isinstance(workers, LocalWorkers) or not workers.keeps_run_dir:
        return ""
    return str(workers.run_dir)


def _register_run(
    stack: contextlib.ExitStack, run_id: str, log_dir: str
) -> tuple[Path | None, str]:
    """Register the run on this machine.

    Returns:
        The path of the events file, or None if no events are kept; and the name by which commands
        find the run: its id, or the path if the run could not be registered.
    """
    events = Path(log_dir) / EVENTS_FILE if log_dir else None
    try:
        registration = RunRegistration(run_id, events)
    except OSError as error:
        suffix = ", and its events are not kept" * (events is None)
        log.warning("`elasticlib status` cannot find this run by its id%s: %s", suffix, error)
        return events, str(events or "")
    stack.callback(registration.close)
    try:
        remove_old_records(registration.path.parent)
    except OSError as error:
        log.info("cannot remove the records of earlier runs: %s", error)
    return registration.events, run_id


class EventHook(EventListener):
    """Calls the user's `on_event` function with each event.

    The journal calls it in a thread of its own, and drops events if the function is too slow. If
    the function raises, the first exception is logged, and the next event is passed to it as usual.
    As a context manager, it logs at the end how many calls failed.

    Args:
        function: the function, or its name, `package.module:function`.

    Raises:
        ConfigError: the name cannot be imported, or does not name a function.
    """

    def __init__(self, function: Callable[[Event], object] | str) -> None:
        name = function if isinstance(function, str) else _name_of(function)
        self.label = f"the on_event function {name}"
        self._num_failed = 0  # calls that raised
        if isinstance(function, str):
            function = import_function(function, ObserveOptions, "on_event")
            if not callable(function):
                rule = f"must name a function, and {name} is none"
                raise OptionError(ObserveOptions, "on_event", rule, function)
        self._function = function

    def __enter__(self) -> EventHook:
        return self

    def on_event(self, event: Event) -> None:
        try:
            # A copy, because the journal may write the event at the same time.
            self._function(copy.deepcopy(event))
        except Exception as error:
            self._num_failed += 1
            if self._num_failed == 1:
                log.warning(
                    "%s failed for an event %s: %s; it is called again for the next event",
                    *(self.label, event.kind, format_error(error)),
                    exc_info=error,
                )

    def __exit__(self, *_: object) -> None:
        if self._num_failed > 1:
            log.warning("%s failed for %d events in total", self.label, self._num_failed)


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


class MissingRestoreWarning(EventListener):
    """Warns if workers repeat steps that an earlier generation saved, and restored no state.

    Workers that are retained from an earlier generation have a state, and need not restore one. A
    worker may save before the slowest one completes its first step, so saves of the same generation
    do not count.
    """

    is_nonblocking = True

    def __init__(self) -> None:
        self._saved_step = -1  # the newest step that was saved
        self._saved_before = -1  # the newest step that was saved before this generation
        self._restored = -1  # the last generation whose workers have a state
        self._attempt = 0  # in which the new workers of the generation are started

    def on_event(self, event: Event) -> None:
        match event.body:
            case kinds.GenerationStarted(attempt=attempt):
                self._attempt = attempt or 0
                self._saved_before = self._saved_step
            case kinds.WorkerStarted(attempt=attempt) if attempt != self._attempt:
                self._restored = event.generation  # It is retained.
            case kinds.StateRestored():
                self._restored = event.generation
            case kinds.StateSaved(step=step):
                self._saved_step = max(self._saved_step, step or 0)
            case kinds.TrainingStarted(step=step):
                if (step or 0) <= self._saved_before and self._restored != event.generation:
                    log.warning(
                        "training restarted at step %d although step %d was saved; does the "
                        "script call CheckpointManager.restore()?",
                        *(step or 0, self._saved_before),
                    )


# -- status and requests through the store ---------------------------------------------------------


@contextlib.contextmanager
def observe_node(
    handler: RendezvousHandler,
    workers: Workers,
    path: str | os.PathLike[str],
    *,
    node: Node | None = None,
    on_event: Callable[[Event], object] | None = None,
) -> Iterator[NodeJournal]:
    """Yield the journal for an `ElasticAgent` of a custom launcher.

    While the agent runs, `elasticlib status` finds this node in the store of the job, if the
    handler is a `DynamicRendezvousHandler`. Handlers of other classes have no such store.

    Args:
        handler: the rendezvous of the agent.
        workers: the workers of the agent.
        path: the file to which events are appended, for `elasticlib report`.
        node: this node; by default, the node of a `DynamicRendezvousHandler`.
        on_event: called with each event of this node, as `on_event` of `ObserveOptions` is.

    Raises:
        ConfigError: `node` is missing, and the handler has no node.
    """
    run_id = handler.get_run_id()
    if isinstance(handler, DynamicRendezvousHandler):
        node = node or handler.node
    if node is None:
        raise ConfigError(
            f"observe_node needs node=Node(...), because {type(handler).__name__} is no "
            "DynamicRendezvousHandler, which has a node"
        )
    with contextlib.ExitStack() as stack:
        hooks = [] if on_event is None else [stack.enter_context(EventHook(on_event))]
        journal = NodeJournal(run_id, node.id, path, listeners=hooks)
        stack.callback(journal.close)
        journal.record(kinds.RunStarted(host=node.host, pid=os.getpid(), slots=node.slots))

        if not isinstance(handler, DynamicRendezvousHandler):
            yield journal
            return

        def report() -> NodeReport:
            return NodeReport.at(monotonic(), journal.status(heartbeats_of(workers.view())))

        observer = NodeObserver(handler.store, run_id, node, report)
        journal.call_when_recorded(observer.wake)
        with observer:
            yield journal


def make_node_observer(
    rendezvous: RendezvousSetup, journal: NodeJournal, agent: ElasticAgent, secret: bytes | None
) -> NodeObserver | None:
    """Return what publishes the status of this node and answers requests, once it is started.

    The commands `elasticlib status`, `stacks`, `drain`, `stop` and `restart` need this. If a
    plug-in opened the rendezvous handler, its store is not known here, and there is no observer.
    """
    store, handler = rendezvous.store, rendezvous.handler
    if store is None or not isinstance(handler, DynamicRendezvousHandler):
        return None

    def report() -> NodeReport:
        return NodeReport.at(
            monotonic(),
            journal.status(heartbeats_of(agent.view())),
            store_contact_age_seconds=handler.seconds_since_refresh(),
            loop_blocked_seconds=agent.stalled_s(),
        )

    observer = NodeObserver(
        store,
        rendezvous.run_id,
        handler.node,
        report,
        agent=agent,
        secret=secret,
        serves_store=lambda: rendezvous.server is not None,
    )
    journal.call_when_recorded(observer.wake)
    return observer


# -- HTTP ------------------------------------------------------------------------------------------


class ObservabilityServer:
    """The HTTP servers of a launch, bound at once and started by `start`.

    Raises:
        ConfigError: the port of --observe-port cannot be bound.
    """

    def __init__(self, options: LaunchOptions, environment: Mapping[str, str]) -> None:
        self._servers: list[tuple[HttpServer, tuple[str, ...]]] = []  # with the paths of each
        health, address = health_address(environment), options.observe.address
        if address is not None:
            paths = (HEALTH_PATH, STATUS_PATH, METRICS_PATH)
            self._bind(OBSERVE_FLAG, address, paths)
        if health is not None:
            try:
                # Only the health page, because probes from other machines need no more.
                self._bind(HEALTH_VARIABLE, health, (HEALTH_PATH, "/"))
            except ConfigError as error:
                # Other launches on this machine may have the same variable. The first one binds.
                log.warning("this node does not answer health checks: %s", error)

    def _bind(self, label: str, address: tuple[str, int], paths: tuple[str, ...]) -> None:
        host, port = address
        try:
            server = HttpServer(host, port)
        except OSError as error:
            hint = ", or 0 for a free one" if label == OBSERVE_FLAG else ""
            raise ConfigError(
                f"{label}: cannot bind port {port} of {host} ({error.strerror or error}): give "
                f"another port{hint}"
            ) from error
        self._servers.append((server, paths))

    def start(self, agent: ElasticAgent, journal: NodeJournal) -> None:
        """Answer requests from now on."""
        if not self._servers:
            return
        pages = _pages(agent, journal)
        for server, paths in self._servers:
            server.start({path: pages[path] for path in paths})
            log.info("HTTP requests are answered at http://%s%s", server.address, ", ".join(paths))

    def close(self) -> None:
        for server, _ in self._servers:
            server.close()


def _pages(agent: ElasticAgent, journal: NodeJournal) -> Pages:
    """Return the functions that create the pages, by path."""
    installed = versions()

    def current() -> tuple[NodeStatus, Health]:
        status = journal.status(heartbeats_of(agent.view()))
        return status, check_health(status.state, status.reason, agent.stalled_s())

    def health_page() -> HttpResponse:
        _, health = current()
        return text_response(200 if health.is_healthy else 503, health.message)

    def status_page() -> HttpResponse:
        report = NodeReport.at(monotonic(), current()[0], loop_blocked_seconds=agent.stalled_s())
        text = json.dumps(document_of_node(report), indent=2)
        return HttpResponse(200, "application/json", text.encode() + b"\n")

    def metrics_snapshot() -> MetricsSnapshot:
        status, health = current()
        return MetricsSnapshot(
            status,
            totals_of(journal.aggregate),
            journal.aggregate.last_progress,
            is_healthy=health.is_healthy,
            loop_blocked_seconds=agent.stalled_s(),
            dropped_events=journal.num_dropped,
            versions=installed,
        )

    formatter = MetricsFormatter(metrics_snapshot)

    def metrics_page() -> HttpResponse:
        return HttpResponse(200, CONTENT_TYPE, formatter.text().encode(errors="backslashreplace"))

    return {
        "/": health_page,
        HEALTH_PATH: health_page,
        STATUS_PATH: status_page,
        METRICS_PATH: metrics_page,
    }
