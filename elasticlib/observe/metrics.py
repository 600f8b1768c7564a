"""What /metrics shows: every metric by name, with its meaning, and its values of one moment.

A value that is not known is left out, and not shown as 0; names and units are as Prometheus has
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import attrs

from .history import PHASES, JobState, Pace
from .story import BUCKETS, Durations, NodeStatus, Sums


@attrs.frozen
class Family:
    """shape: as Prometheus calls it. labels: beside run and node, which all have."""

    name: str
    shape: str
    meaning: str
    labels: tuple[str, ...] = ()


@attrs.frozen
class Sample:
    """One value of a family; labels in the family's order."""

    family: str
    value: float | Durations
    labels: tuple[str, ...] = ()


@attrs.frozen
class Moment:
    """All that is shown. alive: whether /healthz says so; silent: seconds for which the agent's
    loop has not turned; events_lost: that could not be written to the file of events."""

    status: NodeStatus
    sums: Sums
    pace: Pace | None = None
    alive: bool = True
    silent: float = 0.0
    events_lost: int = 0
    versions: Mapping[str, str] = attrs.field(factory=dict)


_G, _C, _H = "gauge", "counter", "histogram"
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("elasticlib_up", _G, "1 if /healthz answers 200, else 0"),
        Family("elasticlib_info", _G, "always 1", ("elasticlib", "torch", "python", "host")),
        Family("elasticlib_state", _G, "1 for the state that this node is in", ("state",)),
        Family("elasticlib_loop_silent_seconds", _G, "since the agent's loop last turned"),
        Family("elasticlib_generation", _G, "that this node is in, 0 before the first"),
        Family("elasticlib_generations_total", _C, "that began on this node"),
        Family("elasticlib_nodes", _G, "in this generation"),
        Family("elasticlib_node_rank", _G, "this node's, among the nodes"),
        Family("elasticlib_world_size", _G, "workers in the job"),
        Family("elasticlib_restarts_total", _C, "of the job after failures"),
        Family("elasticlib_restarts_left", _G, "until a failure ends the job"),
        Family("elasticlib_failures_total", _C, "that this node reported", ("kind",)),
        Family("elasticlib_worker_up", _G, "1 while the worker runs", ("rank",)),
        Family("elasticlib_worker_step", _G, "its last", ("rank",)),
        Family("elasticlib_worker_steps_per_second", _G, "by its last steps", ("rank",)),
        Family("elasticlib_worker_silent_seconds", _G, "since its sign of life", ("rank",)),
        Family("elasticlib_steps_per_second", _G, "of this node's slowest worker, last known"),
        Family("elasticlib_samples_per_second", _G, "of this node's workers, last known"),
        Family("elasticlib_loss", _G, "of the node's lowest rank, last known"),
        Family("elasticlib_last_checkpoint_step", _G, "of the newest durable checkpoint"),
        Family("elasticlib_last_snapshot_step", _G, "of the newest snapshot in memory"),
        Family("elasticlib_steps_redone_total", _C, "steps that this node made again"),
        Family("elasticlib_lost_seconds_total", _C, "without a step that counts", ("phase",)),
        Family(
            "elasticlib_recovery_seconds",
            _H,
            "from what ended a generation until the next was started, or had made a step (trained)",
            ("until",),
        ),
        Family("elasticlib_events_lost_total", _C, "that events.jsonl could not take"),
    )
}
"""Each metric by its name."""

FAILURES = ("ordinary", "killed")
"""Kinds of failures that are shown as 0 until there is one."""


def samples(moment: Moment) -> Iterator[Sample]:
    """All that is known, family by family, in the order of `FAMILIES`."""
    found: dict[str, list[Sample]] = {name: [] for name in FAMILIES}
    for sample in (*_of_node(moment), *_of_workers(moment.status), *_of_sums(moment)):
        found[sample.family].append(sample)
    for of_family in found.values():
        yield from of_family


def _of_node(moment: Moment) -> Iterator[Sample]:
    now, versions = moment.status, moment.versions
    known = tuple(versions.get(name, "") for name in ("elasticlib", "torch", "python"))
    yield Sample("elasticlib_info", 1.0, (*known, now.host))
    for state in JobState:
        yield Sample("elasticlib_state", float(state is now.state), (state.value,))
    left = None if now.max_restarts is None else max(0, now.max_restarts - now.restarts)
    yield from _known(
        elasticlib_up=moment.alive,
        elasticlib_loop_silent_seconds=moment.silent,
        elasticlib_generation=now.generation,
        elasticlib_nodes=now.nodes,
        elasticlib_node_rank=now.node_rank,
        elasticlib_world_size=now.world,
        elasticlib_restarts_left=left,
        elasticlib_last_checkpoint_step=now.saved,
        elasticlib_last_snapshot_step=now.snapshot,
        elasticlib_events_lost_total=moment.events_lost,
    )


def _of_workers(status: NodeStatus) -> Iterator[Sample]:
    for worker in status.workers:
        labels = (str(worker.rank),)
        yield Sample("elasticlib_worker_up", float(worker.running), labels)
        values = {
            "elasticlib_worker_step": worker.step,
            "elasticlib_worker_steps_per_second": worker.per_second,
            "elasticlib_worker_silent_seconds": worker.silent,
        }
        for name, value in values.items():
            if value is not None and worker.running:
                yield Sample(name, float(value), labels)


def _of_sums(moment: Moment) -> Iterator[Sample]:
    sums, cost, pace = moment.sums, moment.sums.cost, moment.pace
    for kind in dict.fromkeys((*FAILURES, *sums.failures)):
        yield Sample("elasticlib_failures_total", float(sums.failures.get(kind, 0)), (kind,))
    for phase in PHASES:
        yield Sample("elasticlib_lost_seconds_total", cost.phases.get(phase, 0.0), (phase,))
    yield Sample("elasticlib_recovery_seconds", sums.started, ("started",))
    yield Sample("elasticlib_recovery_seconds", sums.resumed, ("trained",))
    yield from _known(
        elasticlib_generations_total=sums.generations,
        elasticlib_restarts_total=sums.restarts,
        elasticlib_steps_redone_total=cost.redone,
    )
    if pace is not None:
        yield from _known(
            elasticlib_steps_per_second=pace.per_second,
            elasticlib_samples_per_second=pace.samples_per_second,
            elasticlib_loss=pace.loss,
        )


def _known(**values: float | None) -> Iterator[Sample]:
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            yield Sample(name, float(value))


def buckets(durations: Durations) -> list[tuple[str, float]]:
    """A histogram's buckets as Prometheus has them: the bound, and how many are within it."""
    found = [(str(most), float(n)) for most, n in zip(BUCKETS, durations.within, strict=True)]
    return [*found, ("+Inf", float(durations.count))]


# -- in Prometheus' text format 0.0.4 --------------------------------------------------------------

CONTENT = "text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """Shows each moment as it is asked for. It keeps of each counter the highest value shown: a
    later event may say that less was lost, and a counter that falls has begun anew."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._highest: dict[tuple[str, ...], float] = {}

    def text(self) -> str:
        moment = self._moment()
        shared, lines = {"run": moment.status.run, "node": moment.status.node}, list[str]()
        for name, of_family in groupby(samples(moment), key=lambda sample: sample.family):
            family = FAMILIES[name]
            lines += [f"# HELP {name} {family.meaning}", f"# TYPE {name} {family.shape}"]
            for sample in of_family:
                labels = {**shared, **dict(zip(family.labels, sample.labels, strict=True))}
                if isinstance(sample.value, Durations):
                    for most, within in buckets(sample.value):
                        lines.append(_line(f"{name}_bucket", {**labels, "le": most}, within))
                    lines.append(_line(f"{name}_count", labels, float(sample.value.count)))
                    lines.append(_line(f"{name}_sum", labels, sample.value.seconds))
                else:
                    lines.append(_line(name, labels, self._counted(sample, sample.value)))
        return "".join(f"{line}\n" for line in lines)

    def _counted(self, sample: Sample, value: float) -> float:
        if FAMILIES[sample.family].shape != _C:
            return value
        name = (sample.family, *sample.labels)
        self._highest[name] = max(value, self._highest.get(name, value))
        return self._highest[name]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    said = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
    return f"{name}{{{said}}} {value!r}"


_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
