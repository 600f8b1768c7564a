"""elasticlib.events and .metrics are the installed torch's, and an agent's numbers go there."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch.distributed.elastic.events as torch_events
import torch.distributed.elastic.metrics as torch_metrics
import torch.distributed.elastic.metrics.api as torch_metrics_api

from elasticlib import events, metrics
from elasticlib.compat.views import PutMetrics
from elasticlib.observe.event import Event
from elasticlib.observe.journal import NodeJournal


def public(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("torch.distributed.elastic")
    ]


PAIRS = [
    *((torch_events, events, name) for name in public(torch_events)),
    *((torch_metrics, metrics, name) for name in public(torch_metrics)),
    *((torch_metrics_api, metrics, name) for name in torch_metrics_api.__all__),
]


@pytest.mark.parametrize(("theirs", "ours", "name"), PAIRS, ids=lambda value: str(value)[:20])
def test_each_public_name_of_torch_is_torchs_own(
    theirs: ModuleType, ours: ModuleType, name: str
) -> None:
    assert name in ours.__all__
    assert getattr(ours, name) is getattr(theirs, name)


class Kept(metrics.MetricHandler):
    def __init__(self) -> None:
        self.data: list[tuple[str, str, int]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.data.append((metric_data.group_name, metric_data.name, metric_data.value))


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    metrics.configure(kept)
    yield kept
    metrics.configure(metrics.NullMetricHandler())


@pytest.mark.usefixtures("kept")
def test_without_a_handler_of_the_program_nothing_waits_for_one() -> None:
    assert not PutMetrics("r").prompt
    metrics.configure(metrics.NullMetricHandler())
    assert PutMetrics("r").prompt
    program = (
        "import sys; from elasticlib.compat.views import PutMetrics; "
        "sys.exit(not PutMetrics('r').prompt or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_an_agent_puts_the_numbers_that_torchs_puts(kept: Kept) -> None:
    journal = NodeJournal("job", "node", views=[PutMetrics("trainer")])
    journal.tell("generation.began", generation=1, restarts=0, max_restarts=3)
    journal.tell("generation.began", generation=2, restarts=1, max_restarts=3)
    journal.tell("run.ended", state="succeeded")
    journal.close()
    told = {name.removeprefix("workers.trainer."): value for _, name, value in kept.data}
    assert told == {
        "remaining_restarts": 2,
        "flakiness": 25,
        "run_total": 1,
        "succeeded": 1,
        "run_success_with_retries": 1,
        "run_success_no_retries": 0,
        "run_failed_with_retries": 0,
        "run_failed_no_retries": 0,
    }


def test_a_handler_that_raises_ends_no_job(kept: Kept) -> None:
    class Broken(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            raise ValueError(metric_data.name)

    metrics.configure(Broken())
    PutMetrics("r").hear(Event("run.ended", "job", "node", 1, 0.0, 0.0, None, {"state": "failed"}))
    assert not kept.data
