"""Elastic, fault-tolerant distributed training on PyTorch.

`import elasticlib` costs milliseconds and does not import torch: each public name is loaded from
its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

_HOMES = {
    "errors": ("ElasticError",),
    "stores.interface": (
        "Store",
        "Entry",
        "CompareSet",
        "Listing",
        "ABSENT",
    ),
    "stores.memory": ("MemoryStore",),
    "stores.file": ("FileStore",),
    "stores.tcp_client": ("TcpStore",),
    "stores.tcp_server": ("TcpStoreServer",),
    "stores.etcd": ("EtcdStore",),
    "rendezvous.interface": (
        "RendezvousHandler",
        "RendezvousInfo",
        "BootstrapStoreInfo",
        "Seat",
        "deal_seats",
    ),
    "rendezvous.document": (
        "FailureKind",
        "Limits",
        "Node",
        "Timing",
    ),
    "rendezvous.handler": ("DynamicRendezvousHandler", "StaticRendezvousHandler"),
    "workers.spec": (
        "Ladder",
        "WorkerSpec",
        "WorkerGroup",
        "Worker",
        "WorkerState",
        "Script",
        "Module",
        "Command",
        "Function",
        "worker_environment",
    ),
    "workers.exit": ("WorkerExit",),
    "compat.failures": ("ChildFailedError", "ProcessFailure", "SignalException", "record"),
    "compat.launching": ("TorchrunOptions",),
    "workers.interface": ("Notice", "Workers"),
    "workers.context": ("Context", "Stop", "context"),
    "workers.processes": ("LocalWorkers",),
    "agent.interface": ("RunResult",),
    "agent.loop": (
        "ElasticAgent",
        "LocalElasticAgent",
    ),
    "agent.options": ("AgentOptions",),
    "launch.backends": ("BackendRequest",),
    "launch.config": ("LaunchConfig", "SupervisionOptions"),
    "launch.elastic_launch": ("elastic_launch", "keep_snapshots"),
    "launch.observed": ("observed",),
    "data.sampler": ("ElasticDistributedSampler",),
    "logical.logical_workers": (
        "LogicalWorkers",
        "LogicalWorker",
    ),
    "data.batch_sampler": ("ElasticBatchSampler", "EmptyBatchCollator"),
    "data.loader_workers": ("ignore_signals_worker_init",),
    "data.shard_dataset": ("ShardDataset",),
    "checkpoint.file": (
        "save_checkpoint",
        "load_checkpoint",
        "latest_checkpoint",
    ),
    "checkpoint.manager": ("CheckpointManager",),
    "checkpoint.restore": ("Restored",),
    "checkpoint.commit": ("Save",),
    "in_place.process_group": ("init_process_group",),
    "in_place.step_loop": ("steps", "StepLoop", "StepAttempt"),
    "observe.report": ("Report", "report"),
    "observe.history": ("History",),
    "observe.reading": ("read_history",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]

if TYPE_CHECKING:
    from .agent.interface import RunResult as RunResult
    from .agent.loop import ElasticAgent as ElasticAgent
    from .agent.loop import LocalElasticAgent as LocalElasticAgent
    from .agent.options import AgentOptions as AgentOptions
    from .checkpoint.commit import Save as Save
    from .checkpoint.file import latest_checkpoint as latest_checkpoint
    from .checkpoint.file import load_checkpoint as load_checkpoint
    from .checkpoint.file import save_checkpoint as save_checkpoint
    from .checkpoint.manager import CheckpointManager as CheckpointManager
    from .checkpoint.restore import Restored as Restored
    from .compat.failures import ChildFailedError as ChildFailedError
    from .compat.failures import ProcessFailure as ProcessFailure
    from .compat.failures import SignalException as SignalException
    from .compat.failures import record as record
    from .compat.launching import TorchrunOptions as TorchrunOptions
    from .data.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from .data.batch_sampler import EmptyBatchCollator as EmptyBatchCollator
    from .data.loader_workers import ignore_signals_worker_init as ignore_signals_worker_init
    from .data.sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from .data.shard_dataset import ShardDataset as ShardDataset
    from .errors import ElasticError as ElasticError
    from .in_place.process_group import init_process_group as init_process_group
    from .in_place.step_loop import StepAttempt as StepAttempt
    from .in_place.step_loop import StepLoop as StepLoop
    from .in_place.step_loop import steps as steps
    from .launch.backends import BackendRequest as BackendRequest
    from .launch.config import LaunchConfig as LaunchConfig
    from .launch.config import SupervisionOptions as SupervisionOptions
    from .launch.elastic_launch import elastic_launch as elastic_launch
    from .launch.elastic_launch import keep_snapshots as keep_snapshots
    from .launch.observed import observed as observed
    from .logical.logical_workers import LogicalWorker as LogicalWorker
    from .logical.logical_workers import LogicalWorkers as LogicalWorkers
    from .observe.history import History as History
    from .observe.reading import read_history as read_history
    from .observe.report import Report as Report
    from .observe.report import report as report
    from .rendezvous.document import FailureKind as FailureKind
    from .rendezvous.document import Limits as Limits
    from .rendezvous.document import Node as Node
    from .rendezvous.document import Timing as Timing
    from .rendezvous.handler import DynamicRendezvousHandler as DynamicRendezvousHandler
    from .rendezvous.handler import StaticRendezvousHandler as StaticRendezvousHandler
    from .rendezvous.interface import BootstrapStoreInfo as BootstrapStoreInfo
    from .rendezvous.interface import RendezvousHandler as RendezvousHandler
    from .rendezvous.interface import RendezvousInfo as RendezvousInfo
    from .rendezvous.interface import Seat as Seat
    from .rendezvous.interface import deal_seats as deal_seats
    from .stores.etcd import EtcdStore as EtcdStore
    from .stores.file import FileStore as FileStore
    from .stores.interface import ABSENT as ABSENT
    from .stores.interface import CompareSet as CompareSet
    from .stores.interface import Entry as Entry
    from .stores.interface import Listing as Listing
    from .stores.interface import Store as Store
    from .stores.memory import MemoryStore as MemoryStore
    from .stores.tcp_client import TcpStore as TcpStore
    from .stores.tcp_server import TcpStoreServer as TcpStoreServer
    from .workers.context import Context as Context
    from .workers.context import Stop as Stop
    from .workers.context import context as context
    from .workers.exit import WorkerExit as WorkerExit
    from .workers.interface import Notice as Notice
    from .workers.interface import Workers as Workers
    from .workers.processes import LocalWorkers as LocalWorkers
    from .workers.spec import Command as Command
    from .workers.spec import Function as Function
    from .workers.spec import Ladder as Ladder
    from .workers.spec import Module as Module
    from .workers.spec import Script as Script
    from .workers.spec import Worker as Worker
    from .workers.spec import WorkerGroup as WorkerGroup
    from .workers.spec import WorkerSpec as WorkerSpec
    from .workers.spec import WorkerState as WorkerState
    from .workers.spec import worker_environment as worker_environment


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'elasticlib' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
