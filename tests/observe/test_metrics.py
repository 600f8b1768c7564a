"""The metrics of /metrics as prometheus-client parses them, and the Grafana dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from elasticlib.observe.aggregate import NodeStatus, WorkerStatus
from elasticlib.observe.history import GenerationTrigger, JobState, ProgressSample, RecoveryCost
from elasticlib.observe.metrics import FAMILIES, MetricsFormatter, MetricsSnapshot
from elasticlib.observe.totals import DurationHistogram, NodeTotals

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
FULL = MetricsSnapshot(
    NodeStatus(
        "job",
        "n1",
        host="h",
        state=JobState.RUNNING,
        generation=2,
        node_rank=0,
        node_count=2,
        world_size=4,
        restarts=1,
        max_restarts=3,
        checkpoint_step=40,
        snapshot_step=49,
        workers=(
            WorkerStatus(0, 0, "pid 1", step=52, steps_per_second=9.5, seconds_since_heartbeat=0.1),
            WorkerStatus(1, 1, "pid 2"),
        ),
    ),
    NodeTotals(
        failures={"killed": 1},
        restarts=1,
        triggers={GenerationTrigger.START: 1, GenerationTrigger.FAILURE: 1},
        lost=RecoveryCost(shutdown=1.5, repeated_steps=3),
        restart_times=DurationHistogram().add(0.7).add(3.0),
    ),
    ProgressSample(1.0, "n1", 2, 52, steps_per_second=9.0, loss=0.25, samples_per_second=300.0),
    loop_blocked_seconds=0.5,
    dropped_events=2,
    versions={"elasticlib": "1", "torch": "2", "python": "3"},
)


def parse_metrics(snapshot: MetricsSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values by the name and the additional labels of their samples."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    metrics: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(MetricsFormatter(lambda: snapshot).text()):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run"), labels.pop("node")) == ("job", "n1")
            metrics.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return metrics


def test_each_value_has_the_name_and_labels_of_its_metric() -> None:
    metrics = parse_metrics(FULL)
    assert metrics["elasticlib_up"] == {(): 1}
    assert metrics["elasticlib_state"][("RUNNING",)] == 1
    assert sum(metrics["elasticlib_state"].values()) == 1
    assert metrics["elasticlib_restarts_remaining"] == {(): 2}
    assert metrics["elasticlib_worker_step"] == {("0",): 52}
    assert metrics["elasticlib_worker_up"] == {("0",): 1, ("1",): 1}
    assert metrics["elasticlib_failures_total"][("killed",)] == 1
    assert metrics["elasticlib_failures_total"][("ordinary",)] == 0
    assert metrics["elasticlib_lost_seconds_total"][("shutdown",)] == 1.5
    assert metrics["elasticlib_last_checkpoint_step"] == {(): 40}
    assert metrics["elasticlib_events_dropped_total"] == {(): 2}
    buckets = {
        frozenset(labels) & {"1.0", "5.0"}: count
        for labels, count in metrics["elasticlib_recovery_seconds_bucket"].items()
        if "started" in labels
    }
    assert (buckets[frozenset({"1.0"})], buckets[frozenset({"5.0"})]) == (1, 2)
    assert metrics["elasticlib_recovery_seconds_sum"][("started",)] == pytest.approx(3.7)


def test_all_metrics_are_exported_if_all_values_are_known() -> None:
    metrics = parse_metrics(FULL)
    for name, family in FAMILIES.items():
        assert (f"{name}_count" if family.type == "histogram" else name) in metrics


def test_unknown_values_are_not_exported() -> None:
    metrics = parse_metrics(MetricsSnapshot(NodeStatus("job", "n1"), NodeTotals()))
    for name in ("last_checkpoint_step", "loss", "restarts_remaining", "worker_step"):
        assert f"elasticlib_{name}" not in metrics
    assert metrics["elasticlib_restarts_total"] == {(): 0}


def test_counter_does_not_decrease_and_a_gauge_does() -> None:
    snapshots = iter(
        [
            FULL,
            attrs.evolve(
                FULL, totals=NodeTotals(lost=RecoveryCost(shutdown=1.0)), loop_blocked_seconds=0.1
            ),
        ]
    )
    formatter = MetricsFormatter(lambda: next(snapshots))
    for blocked_s in ("0.5", "0.1"):
        text = formatter.text()
        assert re.search(r'lost_seconds_total\{.*phase="shutdown".*\} 1.5', text)
        assert re.search(rf"loop_blocked_seconds\{{.*\}} {blocked_s}", text)


def test_special_characters_in_labels_are_escaped() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    name = 'a"b\\c\nd{e="f"} 1'
    status = attrs.evolve(FULL.status, run=name, host=name)
    text = MetricsFormatter(lambda: attrs.evolve(FULL, status=status)).text()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    (info,) = families["elasticlib_info"].samples
    assert (info.labels["run"], info.labels["host"]) == (name, name)


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_dashboard_queries_exactly_the_exported_metrics() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = [v["query"]["query"] for v in dashboard["templating"]["list"][1:]]
    queried = {
        name for text in queries(dashboard) + variables for name in re.findall(r"elastic\w+", text)
    }
    assert queried - parse_metrics(FULL).keys() == set()
    exported = {
        f"{name}_bucket" if family.type == "histogram" else name
        for name, family in FAMILIES.items()
    }
    assert exported - queried == set()
    known = {"run", "node", "le", *(label for f in FAMILIES.values() for label in f.labels)}
    for text in queries(dashboard):
        groups = re.findall(r"\bby \(([^)]*)\)", text)
        assert {label.strip() for group in groups for label in group.split(",")} <= known


def test_dashboard_has_a_valid_layout() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used - {"__all", "__rate_interval", "__range", "1"} == names
    panels = dashboard["panels"]
    assert (
        len({panel["id"] for panel in panels}) == len({p["title"] for p in panels}) == len(panels)
    )
    occupied: set[tuple[int, int]] = set()
    for panel in panels:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & occupied, panel["title"]
        occupied |= cells
        if panel["type"] != "row":
            assert panel["description"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs
            assert len(set(refs)) == len(refs)
