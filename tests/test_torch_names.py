"""elasticlib.events and .metrics beside the installed torch's: names, signatures, what they do."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.elastic.events as torch_events
import torch.distributed.elastic.metrics as torch_metrics
import torch.distributed.elastic.metrics.api as torch_metrics_api

from elasticlib import events, metrics
from elasticlib.launch.put_metrics import PutMetrics
from elasticlib.observe.event import Event
from elasticlib.observe.journal import NodeJournal


def parameters(value: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(value).parameters.values()
    return [(one.name, one.kind, _plain(one.default)) for one in found]


def _plain(default: Any) -> Any:
    return str(default) if default is not inspect.Parameter.empty else default


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
def test_each_public_name_of_torch_is_here_with_its_arguments(
    theirs: ModuleType, ours: ModuleType, name: str
) -> None:
    one, other = getattr(theirs, name), getattr(ours, name)
    assert name in ours.__all__
    assert inspect.isclass(one) is inspect.isclass(other)
    if hasattr(one, "__members__"):
        assert [m.value for m in one] == [m.value for m in other]
        return
    assert parameters(one) == parameters(other)
    for method, value in vars(one).items():
        if not method.startswith("_") and callable(getattr(one, method)):
            assert parameters(getattr(one, method)) == parameters(getattr(other, method)), value


def test_events_read_and_write_as_torchs_do() -> None:
    said = ("e", "AGENT", 5, {"a": 1, "b": None})
    one = torch_events.Event(said[0], torch_events.EventSource(said[1]), *said[2:])
    other = events.Event(said[0], events.EventSource(said[1]), said[2], {"a": 1, "b": None})
    assert one.serialize() == other.serialize() == str(other)
    assert events.Event.deserialize(one.serialize()) == other
    assert events.Event.deserialize(other) is other
    node = events.RdzvEvent("n", "job", "m", "h", 7, events.NodeState.FAILED, rank=1)
    assert events.RdzvEvent.deserialize(node.serialize()) == node
    assert torch_events.RdzvEvent.deserialize(node.serialize()).serialize() == str(node)


def test_a_recorded_event_goes_to_its_destination_once(capfd: pytest.CaptureFixture[str]) -> None:
    event = events.Event("mine", events.EventSource.WORKER)
    events.record(event)
    console = events.get_logging_handler("console")
    assert isinstance(console, logging.StreamHandler)
    lines: list[str] = []
    stream = console.setStream(_Lines(lines))
    try:
        events.record(event, "console")
        events.record(event, "console")
    finally:
        console.setStream(stream)
    assert [json.loads(line)["name"] for line in lines if line.strip()] == ["mine", "mine"]
    assert capfd.readouterr() == ("", "")
    with pytest.raises(KeyError):
        events.get_logging_handler("elsewhere")


class _Lines:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, text: str) -> None:
        self._lines.append(text)

    def flush(self) -> None:
        pass


def test_an_event_of_a_rendezvous_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    events.construct_and_record_rdzv_event("job", "nobody listens", events.NodeState.INIT)
    lines: list[str] = []
    handler = logging.StreamHandler(_Lines(lines))
    monkeypatch.setitem(events._HANDLERS, "dynamic_rendezvous", handler)
    try:
        raise ValueError("lost")
    except ValueError:
        events.construct_and_record_rdzv_event("job", "m", events.NodeState.FAILED)
    [event] = [events.RdzvEvent.deserialize(line) for line in lines if line.strip()]
    assert event.name == "test_torch_names.py:test_an_event_of_a_rendezvous_is_filled_in"
    assert "ValueError: lost" in event.error_trace
    assert event.hostname


class Kept(metrics.MetricHandler):
    def __init__(self) -> None:
        self.data: list[tuple[str, str, int]] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.data.append((metric_data.group_name, metric_data.name, metric_data.value))


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept, before = Kept(), dict(metrics._handlers)
    metrics.configure(kept)
    yield kept
    metrics._handlers.clear()
    metrics._handlers.update(before)


@metrics.prof
def good() -> int:
    return 3


@metrics.prof(group="own")
def bad() -> None:
    raise ValueError


def test_numbers_go_to_the_handler_of_their_group_or_of_all(kept: Kept) -> None:
    other = Kept()
    metrics.configure(other, "own")
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2, "own")
    with pytest.warns(FutureWarning, match="put_metric"):
        metrics.publish_metric("else", "c", 3)
    assert kept.data == [("torchelastic", "a", 1), ("else", "c", 3)]
    assert other.data == [("own", "b", 2)]


def test_calls_are_measured_by_the_names_that_torch_gives_them(kept: Kept) -> None:
    assert good() == 3
    with pytest.raises(ValueError):
        bad()
    torch_kept = Kept()
    torch_metrics.configure(torch_kept)
    torch_metrics.prof(good.__wrapped__)()
    torch_metrics.configure(torch_metrics.NullMetricHandler())
    names = [(group, name) for group, name, _ in kept.data]
    assert names[:2] == [(group, name) for group, name, _ in torch_kept.data]
    assert names == [
        ("torchelastic", "test_torch_names.good.success"),
        ("torchelastic", "test_torch_names.good.duration.ms"),
        ("own", "test_torch_names.bad.failure"),
        ("own", "test_torch_names.bad.duration.ms"),
    ]
    with pytest.warns(FutureWarning, match="prof"):
        metrics.profile("p")(good.__wrapped__)()
    assert kept.data[-2][:2] == ("p", "good.success")


def test_the_console_handler_prints_the_line_that_torchs_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = (12.5, "g", "n", 3)
    torch_metrics.ConsoleMetricHandler().emit(torch_metrics.MetricData(*data))
    metrics.ConsoleMetricHandler().emit(metrics.MetricData(*data))
    one, other = capsys.readouterr().out.splitlines()
    assert one == other


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
