"""A journal is felt by nobody: not when its disk is full, nor when it never answers."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import pytest

from elasticlib.clock import monotonic
from elasticlib.observe.event import Event, decode
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


def await_lines(path: Path, count: int) -> list[Event]:
    wait_until(f"{count} lines", lambda: path.exists() and len(read(path)) >= count)
    return read(path)


def test_events_stand_in_the_file_in_the_order_in_which_they_were_told(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = NodeJournal("job", "node", path)
    assert not path.exists()
    for number in range(50):
        journal.record("worker.started", generation=2, rank=number, local_rank=number, name="pid 1")
    journal.close()
    found = read(path)
    assert [event.rank for event in found] == list(range(50))
    assert {(e.run, e.node, e.generation) for e in found} == {("job", "node", 2)}
    assert [e.monotonic for e in found] == sorted(e.monotonic for e in found)


def test_two_journals_of_one_file_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journals = [NodeJournal("job", f"node{n}", path) for n in range(2)]
    for _ in range(200):
        for journal in journals:
            journal.record("failure", reason="x" * 300)
    for journal in journals:
        journal.close()
    assert len(read(path)) == 400


def test_a_disk_that_never_answers_is_not_waited_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    # Nobody reads at its other end, so whoever opens it to write stands still.
    os.mkfifo(path)
    journal = NodeJournal("job", "node", path, max_pending=8)
    began = monotonic()
    for _ in range(1000):
        journal.record("failure", reason="x")
    journal.close()
    assert monotonic() - began < CLOSE_TIMEOUT_S + 5
    # Let its thread go.
    with path.open("rb"):
        pass


@pytest.mark.parametrize("disk", ["full", "slow"])
def test_events_that_no_disk_took_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, disk: str
) -> None:
    path = tmp_path / "events.jsonl"
    if disk == "full":
        path = Path("/dev/full")
    else:
        os.mkfifo(path)  # without a reader, opening it for writing blocks
    journal = NodeJournal("job", "node", path, max_pending=8)
    for _ in range(100):
        journal.record("failure", reason="x")
    journal.close()
    said = f"100 of 100 events of this run are missing in {path}: the disk was full or too slow"
    assert said in caplog.text
    if disk == "slow":
        with path.open("rb"):  # lets the thread of the journal end
            pass


def test_events_that_a_slow_view_has_no_room_for_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(EventListener):
        def __init__(self) -> None:
            self.heard: list[Event] = []

        def on_event(self, event: Event) -> None:
            self.heard.append(event)
            entered.set()
            assert go_on.wait(60)

    view = Slow()
    guard = SafeCaller(view, max_pending=8)
    event = Event("failure", "job", "node", 1, 0.0, 0.0)
    guard.call(partial(view.on_event, event), is_nonblocking=False)
    assert entered.wait(60)
    for _ in range(20):
        guard.call(partial(view.on_event, event), is_nonblocking=False)
    assert caplog.text.count("Slow is too slow: 8 events are waiting for it") == 1
    go_on.set()
    guard.flush()
    assert len(view.heard) == 9
    assert "Slow was too slow: it missed 12 events" in caplog.text


def test_what_a_full_disk_did_not_take_is_counted_when_it_takes_again(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "away"
    journal = NodeJournal(
        "job", "node", folder / "events.jsonl", max_pending=8, retry_interval=0.05
    )
    for number in range(100):
        journal.record("failure", reason=str(number))
    folder.mkdir()
    journal.record("failure", reason="the last")
    await_lines(folder / "events.jsonl", 2)
    journal.close()
    found = read(folder / "events.jsonl")
    lost = sum(event.data["count"] for event in found if event.kind == "events.dropped")
    assert lost > 0
    assert lost + sum(event.kind == "failure" for event in found) == 101


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    full = Path("/dev/full")
    assert not append_line(str(full), b"x\n")
    assert append_line(str(path), b"x\n")
    assert path.read_bytes() == b"x\n"
