"""Metrics of one node in the text format of Prometheus. A value that is not known is omitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import attrs

from .aggregate import NodeStatus
from .history import PHASES, JobState, ProgressSample
from .totals import BUCKETS_S, DurationHistogram, NodeTotals


@attrs.frozen
class MetricFamily:
    """A metric: its name, type, help text and labels."""

    name: str
    type: str  # gauge, counter or histogram
    help: str
    labels: tuple[str, ...] = ()  # in addition to `run` and `node`


@attrs.frozen
class Sample:
    """A value of a metric, with its labels in the order of the family."""

    family: str
    value: float | DurationHistogram
    labels: tuple[str, ...] = ()


@attrs.frozen
class MetricsSnapshot:
    """Everything that metrics are made of, at one time."""

    status: NodeStatus
    totals: NodeTotals
    progress: ProgressSample | None = None  # last progress event
    is_healthy: bool = True  # as /healthz reports
    loop_blocked_seconds: float = 0.0
    dropped_events: int = 0
    versions: Mapping[str, str] = attrs.field(factory=dict)


_G, _C, _H = "gauge", "counter", "histogram"
FAMILIES: Mapping[str, MetricFamily] = {
    family[0]: MetricFamily(*family)
    for family in (
        ("elasticlib_up", _G, "1 if /healthz answers 200, else 0."),
        ("elasticlib_info", _G, "Always 1.", ("elasticlib", "torch", "python", "host")),
        ("elasticlib_state", _G, "1 for the state of the node, else 0.", ("state",)),
        (
            "elasticlib_agent_loop_blocked_seconds",
            _G,
            "Time since the event loop of the agent last ran.",
        ),
        ("elasticlib_generation", _G, "Current generation, 0 before the first."),
        ("elasticlib_generations_total", _C, "Generations that started on this node."),
        ("elasticlib_nodes", _G, "Nodes in the generation."),
        ("elasticlib_node_rank", _G, "Rank of this node."),
        ("elasticlib_world_size", _G, "Workers in the job."),
        ("elasticlib_restarts_total", _C, "Restarts of the job after failures."),
        ("elasticlib_restarts_remaining", _G, "Restarts left before a failure ends the job."),
        ("elasticlib_failures_total", _C, "Failures that this node reported.", ("kind",)),
        ("elasticlib_worker_up", _G, "1 while the worker runs, else 0.", ("rank",)),
        ("elasticlib_worker_step", _G, "Last step reported by the worker.", ("rank",)),
        (
            "elasticlib_worker_steps_per_second",
            _G,
            "Rate of the worker by its last steps.",
            ("rank",),
        ),
        (
            "elasticlib_worker_heartbeat_age_seconds",
            _G,
            "Time since the last sign of life of the worker.",
            ("rank",),
        ),
        ("elasticlib_steps_per_second", _G, "Last rate of the slowest worker of this node."),
        ("elasticlib_samples_per_second", _G, "Last rate of all workers of this node."),
        ("elasticlib_loss", _G, "Last loss of the lowest rank of this node."),
        ("elasticlib_last_checkpoint_step", _G, "Step of the newest durable checkpoint."),
        ("elasticlib_last_snapshot_step", _G, "Step of the newest snapshot in memory."),
        ("elasticlib_steps_repeated_total", _C, "Steps that this node repeated."),
        (
            "elasticlib_lost_seconds_total",
            _C,
            "Time that was not spent on productive steps.",
            ("phase",),
        ),
        (
            "elasticlib_recovery_seconds",
            _H,
            "Time from the end of a generation until the next one started, or completed a step.",
            ("until",),
        ),
        (
            "elasticlib_events_dropped_total",
            _C,
            "Events that could not be written to events.jsonl.",
        ),
    )
}
"""Each metric by name."""

FAILURE_KINDS = ("ordinary", "killed")  # shown as 0 until there is one


def samples(snapshot: MetricsSnapshot) -> Iterator[Sample]:
    """Yield the known values by family, in the order of FAMILIES."""
    by_family: dict[str, list[Sample]] = {name: [] for name in FAMILIES}
    node, workers = _node_samples(snapshot), _worker_samples(snapshot.status)
    for sample in (*node, *workers, *_total_samples(snapshot)):
        by_family[sample.family].append(sample)
    for found in by_family.values():
        yield from found


def _node_samples(snapshot: MetricsSnapshot) -> Iterator[Sample]:
    status, versions = snapshot.status, snapshot.versions
    known = tuple(versions.get(name, "") for name in ("elasticlib", "torch", "python"))
    yield Sample("elasticlib_info", 1.0, (*known, status.host))
    for state in JobState:
        yield Sample("elasticlib_state", float(state is status.state), (state.value,))
    remaining = None
    if status.max_restarts is not None:
        remaining = max(0, status.max_restarts - status.restarts)
    yield from _known_samples(
        elasticlib_up=snapshot.is_healthy,
        elasticlib_agent_loop_blocked_seconds=snapshot.loop_blocked_seconds,
        elasticlib_generation=status.generation,
        elasticlib_nodes=status.node_count,
        elasticlib_node_rank=status.node_rank,
        elasticlib_world_size=status.world_size,
        elasticlib_restarts_remaining=remaining,
        elasticlib_last_checkpoint_step=status.checkpoint_step,
        elasticlib_last_snapshot_step=status.snapshot_step,
        elasticlib_events_dropped_total=snapshot.dropped_events,
    )


def _worker_samples(status: NodeStatus) -> Iterator[Sample]:
    for worker in status.workers:
        labels = (str(worker.rank),)
        yield Sample("elasticlib_worker_up", float(worker.running), labels)
        values = {
            "elasticlib_worker_step": worker.step,
            "elasticlib_worker_steps_per_second": worker.steps_per_second,
            "elasticlib_worker_heartbeat_age_seconds": worker.seconds_since_heartbeat,
        }
        for name, value in values.items():
            if value is not None and worker.running:
                yield Sample(name, float(value), labels)


def _total_samples(snapshot: MetricsSnapshot) -> Iterator[Sample]:
    totals, progress = snapshot.totals, snapshot.progress
    cost = totals.cost
    for kind in dict.fromkeys((*FAILURE_KINDS, *totals.failures)):
        yield Sample("elasticlib_failures_total", float(totals.failures.get(kind, 0)), (kind,))
    for phase in PHASES:
        yield Sample("elasticlib_lost_seconds_total", cost.phases.get(phase, 0.0), (phase,))
    yield Sample("elasticlib_recovery_seconds", totals.restart_times, ("started",))
    yield Sample("elasticlib_recovery_seconds", totals.recovery_times, ("trained",))
    yield from _known_samples(
        elasticlib_generations_total=totals.num_generations,
        elasticlib_restarts_total=totals.restarts,
        elasticlib_steps_repeated_total=cost.repeated_steps,
    )
    if progress is not None:
        yield from _known_samples(
            elasticlib_steps_per_second=progress.steps_per_second,
            elasticlib_samples_per_second=progress.samples_per_second,
            elasticlib_loss=progress.loss,
        )


def _known_samples(**values: float | None) -> Iterator[Sample]:
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            yield Sample(name, float(value))


# -- text format 0.0.4 -----------------------------------------------------------------------------

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsFormatter:
    """Formats metrics. A counter never decreases, although a later event can lower an estimate.

    Args:
        read_snapshot: returns the current values.
    """

    def __init__(self, read_snapshot: Callable[[], MetricsSnapshot]) -> None:
        self._read_snapshot = read_snapshot
        self._highest: dict[tuple[str, ...], float] = {}  # value of each counter so far

    def text(self) -> str:
        """Return all metrics."""
        snapshot = self._read_snapshot()
        shared = {"run": snapshot.status.run, "node": snapshot.status.node}
        lines: list[str] = []
        for name, found in groupby(samples(snapshot), key=lambda sample: sample.family):
            family = FAMILIES[name]
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.type}"]
            for sample in found:
                labels = {**shared, **dict(zip(family.labels, sample.labels, strict=True))}
                if isinstance(sample.value, DurationHistogram):
                    lines += _histogram_lines(name, labels, sample.value)
                else:
                    lines.append(
                        _sample_line(name, labels, self._highest_so_far(sample, sample.value))
                    )
        return "".join(f"{line}\n" for line in lines)

    def _highest_so_far(self, sample: Sample, value: float) -> float:
        """Return the highest value of a counter so far; for another metric, return `value`."""
        if FAMILIES[sample.family].type != _C:
            return value
        key = (sample.family, *sample.labels)
        self._highest[key] = max(value, self._highest.get(key, value))
        return self._highest[key]


def _histogram_lines(
    name: str, labels: Mapping[str, str], histogram: DurationHistogram
) -> Iterator[str]:
    bounds = zip(map(str, BUCKETS_S), histogram.bucket_counts, strict=True)
    for bound, count in (*bounds, ("+Inf", histogram.count)):
        yield _sample_line(f"{name}_bucket", {**labels, "le": bound}, float(count))
    yield _sample_line(f"{name}_count", labels, float(histogram.count))
    yield _sample_line(f"{name}_sum", labels, histogram.seconds)


def _sample_line(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value!r}"


_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
