"""Where a launch keeps its events: beside the workers' logs, if these are kept."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version

from .._version import __version__
from ..observe.interface import Journal, NoJournal
from ..observe.journal import FILE, FileJournal
from ..workers.interface import Workers
from ..workers.local import LocalWorkers
from .config import LaunchConfig

_TOLD = (
    *("min_nodes", "max_nodes", "nproc_per_node", "max_restarts", "start_method"),
    *("rdzv_backend", "rdzv_endpoint", "role"),
)


def open_journal(
    config: LaunchConfig, workers: Workers, node: str, *, endpoint: str = ""
) -> Journal:
    """`events.jsonl` in the folder of the run's logs, begun with what the launch is; nothing where
    that folder goes with the run. endpoint: where this node serves the job's store, if it does."""
    if not isinstance(workers, LocalWorkers) or not workers.keeps_folder:
        return NoJournal()
    journal = FileJournal(workers.folder / FILE, config.run_id, node)
    journal.tell(
        "run.began",
        host=socket.gethostname(),
        pid=os.getpid(),
        slots=config.nproc_per_node,
        settings={**{name: str(getattr(config, name)) for name in _TOLD}, **_conf(config)},
        endpoint=endpoint,
        versions={
            "elasticlib": __version__,
            "torch": _version("torch"),
            "python": platform.python_version(),
        },
    )
    return journal


def _conf(config: LaunchConfig) -> dict[str, str]:
    """The keys of --rdzv-conf, where they are ours to know: secrets among them are files' names."""
    if config.foreign or not config.rdzv_configs:
        return {}
    return {"rdzv_conf": ",".join(f"{key}={text}" for key, text in config.rdzv_configs.items())}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
