"""What /metrics shows, as prometheus-client's own parser reads it, and the dashboard made of it."""

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


def shown(moment: MetricsSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by the names and the further labels of their samples."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(MetricsFormatter(lambda: moment).text()):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run"), labels.pop("node")) == ("job", "n1")
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


def test_each_value_is_told_under_its_name() -> None:
    found = shown(FULL)
    assert found["elasticlib_up"] == {(): 1}
    assert found["elasticlib_state"][("RUNNING",)] == 1
    assert sum(found["elasticlib_state"].values()) == 1
    assert found["elasticlib_restarts_remaining"] == {(): 2}
    assert found["elasticlib_worker_step"] == {("0",): 52}
    assert found["elasticlib_worker_up"] == {("0",): 1, ("1",): 1}
    assert found["elasticlib_failures_total"][("killed",)] == 1
    assert found["elasticlib_failures_total"][("ordinary",)] == 0
    assert found["elasticlib_lost_seconds_total"][("shutdown",)] == 1.5
    assert found["elasticlib_last_checkpoint_step"] == {(): 40}
    assert found["elasticlib_events_dropped_total"] == {(): 2}
    buckets = found["elasticlib_recovery_seconds_bucket"]
    told = {labels for labels in buckets if "started" in labels}
    assert {labels: buckets[labels] for labels in told if "1.0" in labels or "5.0" in labels} == {
        labels: 1 if "1.0" in labels else 2 for labels in told if {"1.0", "5.0"} & {*labels}
    }
    assert found["elasticlib_recovery_seconds_sum"][("started",)] == pytest.approx(3.7)


def test_every_family_is_shown_where_all_is_known() -> None:
    found = shown(FULL)
    for name, family in FAMILIES.items():
        assert (f"{name}_count" if family.type == "histogram" else name) in found


def test_what_is_not_known_is_left_out() -> None:
    found = shown(MetricsSnapshot(NodeStatus("job", "n1"), NodeTotals()))
    for name in ("last_checkpoint_step", "loss", "restarts_remaining", "worker_step"):
        assert f"elasticlib_{name}" not in found
    assert found["elasticlib_restarts_total"] == {(): 0}


def test_a_counter_does_not_fall_where_a_later_event_says_that_less_was_lost() -> None:
    moments = iter(
        [
            FULL,
            attrs.evolve(
                FULL, totals=NodeTotals(lost=RecoveryCost(shutdown=1.0)), loop_blocked_seconds=0.1
            ),
        ]
    )
    exposition = MetricsFormatter(lambda: next(moments))
    for silent in ("0.5", "0.1"):
        text = exposition.text()
        assert re.search(r'lost_seconds_total\{.*phase="shutdown".*\} 1.5', text)
        assert re.search(rf"loop_blocked_seconds\{{.*\}} {silent}", text)


def test_what_nodes_are_called_breaks_no_line() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    odd = 'a"b\\c\nd{e="f"} 1'
    status = attrs.evolve(FULL.status, run=odd, host=odd)
    text = MetricsFormatter(lambda: attrs.evolve(FULL, status=status)).text()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    (info,) = families["elasticlib_info"].samples
    assert (info.labels["run"], info.labels["host"]) == (odd, odd)


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_nothing_that_is_not_told_and_for_all_that_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = [v["query"]["query"] for v in dashboard["templating"]["list"][1:]]
    asked = {
        name for text in queries(dashboard) + variables for name in re.findall(r"elastic\w+", text)
    }
    found = shown(FULL)
    assert asked - found.keys() == set()
    told = {
        f"{name}_bucket" if family.type == "histogram" else name
        for name, family in FAMILIES.items()
    }
    assert told - asked == set()
    for text in queries(dashboard):
        labels = set(re.findall(r"\bby \(([^)]*)\)", text))
        known = {"run", "node", "le", *(one for f in FAMILIES.values() for one in f.labels)}
        assert {one.strip() for group in labels for one in group.split(",")} <= known


def test_the_dashboard_is_laid_out_as_grafana_wants_it() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used - {"__all", "__rate_interval", "__range", "1"} == names
    panels = dashboard["panels"]
    assert (
        len({panel["id"] for panel in panels}) == len({p["title"] for p in panels}) == len(panels)
    )
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs
            assert len(set(refs)) == len(refs)
