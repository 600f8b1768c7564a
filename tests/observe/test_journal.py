"""Journals: they write events in order, and a full or blocked disk never delays the agent."""

from __future__ import annotations

import os
import re
import resource
import sys
import threading
from collections import UserDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_events import make_event

from elasticlib.clock import monotonic
from elasticlib.launch.observability import EventHook
from elasticlib.observe.event import Event, decode
from elasticlib.observe.event_kinds import (
    EventsDropped,
    Failure,
    GenerationStarted,
    OtherEvent,
    RunStarted,
    WorkerStarted,
)
from elasticlib.observe.journal import (
    CLOSE_TIMEOUT_S,
    EventListener,
    NodeJournal,
    SafeCaller,
    append_line,
)
from elasticlib.testing.waiting import wait_until


def read(path: Path) -> list[Event]:
    return [decode(line) for line in path.read_bytes().splitlines()]


def test_events_are_written_in_the_order_in_which_they_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = NodeJournal("job", "node", path)
    assert not path.exists()
    for number in range(50):
        body = WorkerStarted(local_rank=number, name="pid 1")
        journal.record(body, generation=2, rank=number)
    journal.close()
    events = read(path)
    assert [event.rank for event in events] == list(range(50))
    assert {(e.run, e.node, e.generation) for e in events} == {("job", "node", 2)}
    assert [e.monotonic for e in events] == sorted(e.monotonic for e in events)


def test_events_of_several_threads_are_written_in_the_order_of_their_times(tmp_path: Path) -> None:
    path, interval = tmp_path / "events.jsonl", sys.getswitchinterval()
    journal = NodeJournal("job", "node", path)

    def record_many() -> None:
        for number in range(300):
            journal.record(Failure(reason=str(number)))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for recorded in [pool.submit(record_many) for _ in range(4)]:
                recorded.result(60)
    finally:
        sys.setswitchinterval(interval)
    journal.close()
    times = [event.monotonic for event in read(path)]
    assert len(times) == 1200
    assert times == sorted(times)


def test_lines_of_two_journals_in_one_file_are_not_interleaved(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journals = [NodeJournal("job", f"node{n}", path) for n in range(2)]
    for _ in range(200):
        for journal in journals:
            journal.record(Failure(reason="x" * 300))
    for journal in journals:
        journal.close()
    assert len(read(path)) == 400


@pytest.mark.parametrize("disk", ["full", "blocked"])
def test_events_of_a_full_or_blocked_disk_are_dropped_without_delay_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, disk: str
) -> None:
    path = tmp_path / "events.jsonl"
    if disk == "full":
        path = Path("/dev/full")
    else:
        os.mkfifo(path)  # without a reader, opening it for writing blocks
    journal = NodeJournal("job", "node", path, max_pending=8)
    start = monotonic()
    for _ in range(1000):
        journal.record(Failure(reason="x"))
    journal.close()
    assert monotonic() - start < CLOSE_TIMEOUT_S + 5
    message = (
        f"1000 of 1000 events of this run are missing in {path}: the disk was full or too slow"
    )
    assert message in caplog.text
    if disk == "blocked":
        with path.open("rb"):  # lets the thread of the journal end
            pass


def test_events_that_a_slow_listener_misses_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, released = threading.Event(), threading.Event()

    class Slow(EventListener):
        def __init__(self) -> None:
            self.events: list[Event] = []

        def on_event(self, event: Event) -> None:
            self.events.append(event)
            entered.set()
            assert released.wait(60)

    listener = Slow()
    caller = SafeCaller(listener, max_pending=8)
    event = make_event("failure", "job", "node", 1, 0.0, 0.0)
    caller.call(partial(listener.on_event, event), is_nonblocking=False)
    assert entered.wait(60)
    for _ in range(20):
        caller.call(partial(listener.on_event, event), is_nonblocking=False)
    assert caplog.text.count("Slow is too slow: 8 events are waiting for it") == 1
    released.set()
    caller.flush()
    assert len(listener.events) == 9
    assert "Slow was too slow: it missed 12 events" in caplog.text


def test_dropped_events_are_counted_in_the_file_once_writing_succeeds(
    tmp_path: Path,
) -> None:
    path = tmp_path / "missing" / "events.jsonl"
    journal = NodeJournal("job", "node", path, max_pending=8, retry_interval=0.05)
    for number in range(100):
        journal.record(Failure(reason=str(number)))
    path.parent.mkdir()
    journal.record(Failure(reason="the last"))
    wait_until("two lines", lambda: path.exists() and len(read(path)) >= 2)
    journal.close()
    events = read(path)
    num_dropped = sum(event.data["count"] for event in events if event.kind == "events.dropped")
    assert num_dropped > 0
    assert num_dropped + sum(event.kind == "failure" for event in events) == 101


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def contains_itself() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


def raises_an_unprintable_error() -> Mapping[str, object]:
    class Odd(UserDict[str, object]):
        def items(self) -> Any:
            raise UnprintableError

    return Odd(a=1)


@pytest.mark.parametrize(
    "value",
    [
        *(contains_itself(), {"deep": [Unprintable()]}, {Unprintable(): 1}, 10**5000),
        *(raises_an_unprintable_error(), 10**4299),
    ],
    ids=["cycle", "value", "name", "number", "error", "long-number"],
)
def test_a_value_that_has_no_json_form_is_recorded_by_the_name_of_its_type(
    tmp_path: Path, value: object
) -> None:
    path = tmp_path / "events.jsonl"
    heard: list[str] = []
    journal = NodeJournal(
        "job", "node", path, listeners=[EventHook(lambda e: heard.append(e.kind))]
    )
    journal.record(RunStarted(host="h", slots=2))
    journal.record(OtherEvent("my.kind", {"value": value, "x": 1}))
    journal.record(GenerationStarted(world_size=2), generation=1)
    journal.close()
    events = read(path)
    kinds = ["run.started", "my.kind", "generation.started"]
    assert [event.kind for event in events] == heard == kinds
    assert events[1].data["x"] == 1
    assert re.search("<(list|Unprintable|dict|int|Odd)>", str(events[1].data["value"]))
    assert journal.status({}).world_size == 2
    assert journal.num_dropped == 0


def test_an_event_with_an_invalid_head_costs_only_itself_and_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    journal = NodeJournal("job", "node", path)
    for _ in range(3):
        journal.record(OtherEvent("k" * 2000))
    journal.record(GenerationStarted(world_size=2), generation=1)
    journal.close()
    dropped, written = sorted(read(path), key=lambda event: event.kind)
    assert (dropped.body, written.kind) == (EventsDropped(count=3), "generation.started")
    (line,) = (record.getMessage() for record in caplog.records)
    assert "is not recorded: kind of an event must have at most 1024 characters" in line
    assert journal.num_dropped == 3


def test_data_of_an_event_cannot_overwrite_its_head_or_change_after_it_was_recorded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    journal = NodeJournal("job", "node", path)
    growing = [1]
    head = {"run": "other", "node": "n", "timestamp": 1.0, "monotonic": 2.0, "version": 9}
    body = OtherEvent("my.kind", {"kind": "other", "data": growing, **head})
    journal.record(body, generation=3, rank=4)
    growing.append(2)
    journal.close()
    (event,) = read(path)
    assert (event.kind, event.run, event.node) == ("my.kind", "job", "node")
    assert (event.generation, event.rank) == (3, 4)
    assert event.data == {**head, "kind": "other", "data": [1]}


def test_line_that_is_written_in_part_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert append_line(str(path), b"complete\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # With this limit, the kernel writes only the first 3 bytes of the next line.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(b"complete\n") + 3, hard))
    try:
        assert not append_line(str(path), b"truncated\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"complete\n"
    assert not append_line("/dev/full", b"x\n")
