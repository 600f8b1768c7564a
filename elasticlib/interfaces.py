"""Everything that authors of a store, a rendezvous handler or a class of workers need.

The contracts are in the docstrings of `Store`, `RendezvousHandler` and `Workers`.
`elasticlib.testing` tests them, and `elasticlib.errors` has the errors that they name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import lazy_exports

_EXPORTS = {
    "stores.interface": ("CancelWatch", "Store"),
    "stores.key_space": (
        "ABSENT",
        "CompareSetResult",
        "Entry",
        "Listing",
        "WatchResult",
        "check_key",
        "check_ttl",
    ),
    "rendezvous.blame": ("Evidence", "FailureKind", "Verdict"),
    "rendezvous.interface": (
        "RendezvousHandler",
        "RendezvousInfo",
        "RendezvousStoreInfo",
        "Report",
        "ReportKind",
    ),
    "rendezvous.membership": (
        "Change",
        "ChangeKind",
        "GenerationTrigger",
        "Node",
    ),
    "options": ("RendezvousSettings", "RendezvousTimeouts"),
    "rendezvous.rank_assignment": ("RankAssignment", "assign_ranks"),
    "workers.heartbeat": ("Heartbeat",),
    "workers.interface": ("StopHow", "StopNotice", "Workers", "WorkerView"),
    "workers.spec": ("Worker", "WorkerGroup", "WorkerSpec", "worker_environment"),
    "workers.exits": ("WorkerExit",),
    "launch.backends": ("BackendParameters",),
    "launch.preemption_notice": ("PreemptionNotice",),
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)

if TYPE_CHECKING:
    from .launch.backends import BackendParameters as BackendParameters
    from .launch.preemption_notice import PreemptionNotice as PreemptionNotice
    from .options import RendezvousSettings as RendezvousSettings
    from .options import RendezvousTimeouts as RendezvousTimeouts
    from .rendezvous.blame import Evidence as Evidence
    from .rendezvous.blame import FailureKind as FailureKind
    from .rendezvous.blame import Verdict as Verdict
    from .rendezvous.interface import RendezvousHandler as RendezvousHandler
    from .rendezvous.interface import RendezvousInfo as RendezvousInfo
    from .rendezvous.interface import RendezvousStoreInfo as RendezvousStoreInfo
    from .rendezvous.interface import Report as Report
    from .rendezvous.interface import ReportKind as ReportKind
    from .rendezvous.membership import Change as Change
    from .rendezvous.membership import ChangeKind as ChangeKind
    from .rendezvous.membership import GenerationTrigger as GenerationTrigger
    from .rendezvous.membership import Node as Node
    from .rendezvous.rank_assignment import RankAssignment as RankAssignment
    from .rendezvous.rank_assignment import assign_ranks as assign_ranks
    from .stores.interface import CancelWatch as CancelWatch
    from .stores.interface import Store as Store
    from .stores.key_space import ABSENT as ABSENT
    from .stores.key_space import CompareSetResult as CompareSetResult
    from .stores.key_space import Entry as Entry
    from .stores.key_space import Listing as Listing
    from .stores.key_space import WatchResult as WatchResult
    from .stores.key_space import check_key as check_key
    from .stores.key_space import check_ttl as check_ttl
    from .workers.exits import WorkerExit as WorkerExit
    from .workers.heartbeat import Heartbeat as Heartbeat
    from .workers.interface import StopHow as StopHow
    from .workers.interface import StopNotice as StopNotice
    from .workers.interface import Workers as Workers
    from .workers.interface import WorkerView as WorkerView
    from .workers.spec import Worker as Worker
    from .workers.spec import WorkerGroup as WorkerGroup
    from .workers.spec import WorkerSpec as WorkerSpec
    from .workers.spec import worker_environment as worker_environment
