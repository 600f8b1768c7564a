"""Heartbeat of a worker: the progress that it has reported to its agent. Values."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

NO_STEP = -1  # a step that was not reported
RESTORE_SOURCES = ("memory", "peer", "disk")  # where restored state was read from, fastest first


@attrs.frozen
class RestoreReport:
    """The state that a worker restored last. Times are on this machine's monotonic clock."""

    step: int
    source: str  # one of RESTORE_SOURCES
    started_at: float
    finished_at: float


@attrs.frozen
class Heartbeat:
    """The progress that a worker has reported. Times are on this machine's monotonic clock."""

    step: int = NO_STEP  #: last reported step
    num_steps: int = 0  #: number of reported steps
    last_step_at: float = 0.0
    last_activity_at: float = 0.0  #: last step, save, or call of should_stop()
    step_durations: tuple[float, ...] = ()  #: seconds of the last few steps, unordered
    last_saved_step: int = NO_STEP
    num_saves: int = 0
    can_dump_stacks: bool = False  #: the worker writes its stacks on request
    is_attached: bool = False  #: the worker has called context()
    first_step: int = NO_STEP
    first_at: float = 0.0  #: time of the first step, 0 before
    last_restore: RestoreReport | None = None
    num_restores: int = 0
    last_snapshot_step: int = NO_STEP
    num_snapshots: int = 0
    loss: float | None = None  #: last reported loss
    num_samples: float = 0.0  #: samples of all steps
    #: Seconds of the modules that a forked worker imported before its first step, if it took long.
    slow_imports: Mapping[str, float] = attrs.field(factory=dict)
