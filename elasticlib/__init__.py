"""Elastic, fault-tolerant distributed training on PyTorch.

`import elasticlib` costs milliseconds and does not import torch: each public name is loaded from
its module when it is first used. What only the author of a store, a rendezvous handler or a class
of workers needs is imported from its module, as `elasticlib.stores.interface`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

_HOMES = {
    # In a training script.
    "workers.context": ("context",),
    "compat.failures": ("record", "ChildFailedError"),
    "data.sampler": ("ElasticDistributedSampler",),
    "data.batch_sampler": ("ElasticBatchSampler",),
    "data.shard_dataset": ("ShardDataset",),
    "data.loader_workers": ("ignore_signals_worker_init",),
    "checkpoint.manager": ("CheckpointManager",),
    "checkpoint.single_file": ("save_checkpoint", "load_checkpoint", "latest_checkpoint"),
    "in_place.process_group": ("init_process_group",),
    "in_place.step_loop": ("steps",),
    "logical.logical_workers": ("LogicalWorkers",),
    # Launching a job, and reading what it left.
    "launch.launch_config": ("LaunchConfig", "SupervisionOptions"),
    "launch.elastic_launch": ("elastic_launch", "keep_snapshots"),
    "launch.observability": ("observe_node",),
    "observe.event": ("Event",),
    "observe.report": ("report",),
    "observe.history_reader": ("read_history",),
    # Parts of a launcher of your own.
    "agent.elastic_agent": ("ElasticAgent",),
    "agent.options": ("AgentOptions",),
    "agent.interface": ("RunResult",),
    "workers.interface": ("Workers",),
    "workers.local_workers": ("LocalWorkers",),
    "workers.spec": (
        "WorkerSpec",
        "Script",
        "Module",
        "Command",
        "Function",
        "StopTimeouts",
        "WorkerState",
    ),
    "rendezvous.interface": ("RendezvousHandler",),
    "rendezvous.handler": ("DynamicRendezvousHandler", "StaticRendezvousHandler"),
    "rendezvous.membership": ("Node", "RendezvousSettings", "RendezvousTimeouts"),
    "stores.interface": ("Store",),
    "stores.memory_store": ("MemoryStore",),
    "stores.file_store": ("FileStore",),
    "stores.tcp_client": ("TcpStore",),
    "stores.tcp_server": ("TcpStoreServer",),
    "stores.etcd_store": ("EtcdStore",),
    # The base class of every error that elasticlib raises on purpose.
    "errors": ("ElasticError",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]

if TYPE_CHECKING:
    from .agent.elastic_agent import ElasticAgent as ElasticAgent
    from .agent.interface import RunResult as RunResult
    from .agent.options import AgentOptions as AgentOptions
    from .checkpoint.manager import CheckpointManager as CheckpointManager
    from .checkpoint.single_file import latest_checkpoint as latest_checkpoint
    from .checkpoint.single_file import load_checkpoint as load_checkpoint
    from .checkpoint.single_file import save_checkpoint as save_checkpoint
    from .compat.failures import ChildFailedError as ChildFailedError
    from .compat.failures import record as record
    from .data.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from .data.loader_workers import ignore_signals_worker_init as ignore_signals_worker_init
    from .data.sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from .data.shard_dataset import ShardDataset as ShardDataset
    from .errors import ElasticError as ElasticError
    from .in_place.process_group import init_process_group as init_process_group
    from .in_place.step_loop import steps as steps
    from .launch.elastic_launch import elastic_launch as elastic_launch
    from .launch.elastic_launch import keep_snapshots as keep_snapshots
    from .launch.launch_config import LaunchConfig as LaunchConfig
    from .launch.launch_config import SupervisionOptions as SupervisionOptions
    from .launch.observability import observe_node as observe_node
    from .logical.logical_workers import LogicalWorkers as LogicalWorkers
    from .observe.event import Event as Event
    from .observe.history_reader import read_history as read_history
    from .observe.report import report as report
    from .rendezvous.handler import DynamicRendezvousHandler as DynamicRendezvousHandler
    from .rendezvous.handler import StaticRendezvousHandler as StaticRendezvousHandler
    from .rendezvous.interface import RendezvousHandler as RendezvousHandler
    from .stores.etcd_store import EtcdStore as EtcdStore
    from .stores.file_store import FileStore as FileStore
    from .stores.interface import Store as Store
    from .stores.memory_store import MemoryStore as MemoryStore
    from .stores.tcp_client import TcpStore as TcpStore
    from .stores.tcp_server import TcpStoreServer as TcpStoreServer
    from .workers.context import context as context
    from .workers.interface import Workers as Workers
    from .workers.local_workers import LocalWorkers as LocalWorkers
    from .workers.spec import Command as Command
    from .workers.spec import Function as Function
    from .workers.spec import Module as Module
    from .workers.spec import Script as Script
    from .workers.spec import StopTimeouts as StopTimeouts
    from .workers.spec import WorkerSpec as WorkerSpec
    from .workers.spec import WorkerState as WorkerState


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'elasticlib' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
