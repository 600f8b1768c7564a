"""Elastic, fault-tolerant distributed training on PyTorch.

`import elasticlib` costs milliseconds and does not import torch: each public name is loaded from
its module when it is first used. Authors of a store, a rendezvous handler or a class of workers
find what they need in `elasticlib.interfaces`, and the classes of errors are in
`elasticlib.errors`. All other modules are internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import lazy_exports
from ._version import __version__ as __version__

# The public names by the module that defines them.
_EXPORTS = {
    # In a training script.
    "workers.context": ("context", "WorkerContext", "StopRequest"),
    "compat.failures": ("record", "ChildFailedError", "ProcessFailure", "SignalException"),
    "data.sampler": ("ElasticDistributedSampler",),
    "data.batch_sampler": ("ElasticBatchSampler", "EmptyBatchCollator"),
    "data.shard_dataset": ("ShardDataset",),
    "data.loader_workers": ("ignore_signals_worker_init",),
    "checkpoint.manager": ("CheckpointManager",),
    "checkpoint.save_handle": ("SaveHandle",),
    "checkpoint.restore": ("RestoreResult",),
    "checkpoint.refs": ("KeepBest", "KeepEvery", "KeepLast", "any_of"),
    "checkpoint.single_file": ("save_checkpoint", "load_checkpoint", "latest_checkpoint"),
    "in_place.process_group": ("init_process_group",),
    "in_place.step_loop": ("steps", "StepLoop", "StepAttempt"),
    "logical.logical_workers": ("LogicalWorkers", "LogicalWorker"),
    # Launching a job, and reading what it recorded.
    "launch.torch_config": ("LaunchConfig",),
    "launch.elastic_launch": ("elastic_launch", "create_snapshot_service"),
    "launch.observability": ("observe_node",),
    "observe.event": ("Event",),
    "observe.event_kinds": ("OtherEvent",),
    "observe.report": ("build_report", "Report"),
    "observe.history": ("History",),
    "observe.history_reader": ("read_history",),
    # Options of a launch, and of the parts of a custom launcher.
    "options": (
        "LaunchOptions",
        "RendezvousSettings",
        "RendezvousOptions",
        "RendezvousTimeouts",
        "AgentOptions",
        "HangLimits",
        "WorkerOptions",
        "OutputOptions",
        "StreamChoice",
        "Streams",
        "ObserveOptions",
    ),
    # Parts of a custom launcher.
    "agent.elastic_agent": ("ElasticAgent",),
    "agent.interface": ("RunResult",),
    "workers.interface": ("Workers",),
    "workers.local_workers": ("LocalWorkers",),
    "launch.local_agent": ("LocalElasticAgent",),
    "workers.spec": (
        "WorkerSpec",
        "WorkerGroup",
        "Script",
        "Module",
        "Command",
        "Function",
        "WorkerState",
    ),
    "rendezvous.interface": ("RendezvousHandler", "RendezvousInfo"),
    "rendezvous.handler": ("DynamicRendezvousHandler", "StaticRendezvousHandler"),
    "rendezvous.membership": ("Node",),
    "stores.interface": ("Store",),
    "stores.memory_store": ("MemoryStore",),
    "stores.file_store": ("FileStore",),
    "stores.tcp_client": ("TcpStore",),
    "stores.tcp_server": ("TcpStoreServer",),
    "stores.etcd_store": ("EtcdStore",),
    # The base class of all errors of elasticlib.
    "errors": ("ElasticError",),
}

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, _EXPORTS, ("errors", "integrations", "interfaces", "testing")
)
__all__ += ["__version__"]

if TYPE_CHECKING:
    from .agent.elastic_agent import ElasticAgent as ElasticAgent
    from .agent.interface import RunResult as RunResult
    from .checkpoint.manager import CheckpointManager as CheckpointManager
    from .checkpoint.refs import KeepBest as KeepBest
    from .checkpoint.refs import KeepEvery as KeepEvery
    from .checkpoint.refs import KeepLast as KeepLast
    from .checkpoint.refs import any_of as any_of
    from .checkpoint.restore import RestoreResult as RestoreResult
    from .checkpoint.save_handle import SaveHandle as SaveHandle
    from .checkpoint.single_file import latest_checkpoint as latest_checkpoint
    from .checkpoint.single_file import load_checkpoint as load_checkpoint
    from .checkpoint.single_file import save_checkpoint as save_checkpoint
    from .compat.failures import ChildFailedError as ChildFailedError
    from .compat.failures import ProcessFailure as ProcessFailure
    from .compat.failures import SignalException as SignalException
    from .compat.failures import record as record
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
    from .launch.elastic_launch import create_snapshot_service as create_snapshot_service
    from .launch.elastic_launch import elastic_launch as elastic_launch
    from .launch.local_agent import LocalElasticAgent as LocalElasticAgent
    from .launch.observability import observe_node as observe_node
    from .launch.torch_config import LaunchConfig as LaunchConfig
    from .logical.logical_workers import LogicalWorker as LogicalWorker
    from .logical.logical_workers import LogicalWorkers as LogicalWorkers
    from .observe.event import Event as Event
    from .observe.event_kinds import OtherEvent as OtherEvent
    from .observe.history import History as History
    from .observe.history_reader import read_history as read_history
    from .observe.report import Report as Report
    from .observe.report import build_report as build_report
    from .options import AgentOptions as AgentOptions
    from .options import HangLimits as HangLimits
    from .options import LaunchOptions as LaunchOptions
    from .options import ObserveOptions as ObserveOptions
    from .options import OutputOptions as OutputOptions
    from .options import RendezvousOptions as RendezvousOptions
    from .options import RendezvousSettings as RendezvousSettings
    from .options import RendezvousTimeouts as RendezvousTimeouts
    from .options import StreamChoice as StreamChoice
    from .options import Streams as Streams
    from .options import WorkerOptions as WorkerOptions
    from .rendezvous.handler import DynamicRendezvousHandler as DynamicRendezvousHandler
    from .rendezvous.handler import StaticRendezvousHandler as StaticRendezvousHandler
    from .rendezvous.interface import RendezvousHandler as RendezvousHandler
    from .rendezvous.interface import RendezvousInfo as RendezvousInfo
    from .rendezvous.membership import Node as Node
    from .stores.etcd_store import EtcdStore as EtcdStore
    from .stores.file_store import FileStore as FileStore
    from .stores.interface import Store as Store
    from .stores.memory_store import MemoryStore as MemoryStore
    from .stores.tcp_client import TcpStore as TcpStore
    from .stores.tcp_server import TcpStoreServer as TcpStoreServer
    from .workers.context import StopRequest as StopRequest
    from .workers.context import WorkerContext as WorkerContext
    from .workers.context import context as context
    from .workers.interface import Workers as Workers
    from .workers.local_workers import LocalWorkers as LocalWorkers
    from .workers.spec import Command as Command
    from .workers.spec import Function as Function
    from .workers.spec import Module as Module
    from .workers.spec import Script as Script
    from .workers.spec import WorkerGroup as WorkerGroup
    from .workers.spec import WorkerSpec as WorkerSpec
    from .workers.spec import WorkerState as WorkerState
