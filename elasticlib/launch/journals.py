"""Where a launch keeps its events: beside the workers' logs, if these are kept, and in its record.

A run whose events cannot be kept is run all the same, with a warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from .._version import versions
from ..observe.journal import FILE, NodeJournal, View
from ..observe.records import RunRecord, remove_old
from ..workers.interface import Workers
from ..workers.processes import LocalWorkers
from .config import LaunchConfig

log = logging.getLogger("elasticlib.launch")

_ALWAYS = (
    *("min_nodes", "max_nodes", "nproc_per_node", "max_restarts", "start_method"),
    *("rdzv_backend", "rdzv_endpoint", "role"),
)


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
        log.warning("this run is not among those that are found by name%s: %s", kept, error)
        return events, str(events or "")
    stack.callback(record.close)
    try:
        remove_old(record.path.parent)
    except OSError as error:
        log.info("the records of earlier runs stay for now: %s", error)
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
