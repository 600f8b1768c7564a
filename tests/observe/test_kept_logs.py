"""Files that grow, as their lines come, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticlib.observe.event import Event, encode
from elasticlib.observe.kept_logs import NodeLogs, Tail, with_neighbours


def test_lines_come_once_whole_and_the_rest_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert list(tail.lines()) == [b"one"]
        file.write(b"o\n\nthree")
        assert list(tail.lines()) == [b"two", b""]
        assert list(tail.lines()) == []
    assert list(tail.rest()) == [b"three"]
    assert list(tail.rest()) == []


def test_a_file_that_is_made_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a long line\nhalf")
    tail = Tail(path)
    assert list(tail.lines()) == [b"a long line"]
    path.write_bytes(b"new\n")
    assert list(tail.lines()) == [b"new"]


@settings(max_examples=40, deadline=None)
@given(
    chunk=st.sampled_from([1, 3, 1 << 18]),
    text=st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r"]), max_size=12).map(b"".join),
    count=st.integers(0, 4),
)
@example(chunk=1, text=b"a\nbc\n", count=1)
def test_the_last_lines_are_those_that_tail_would_show(
    tmp_path_factory: pytest.TempPathFactory, chunk: int, text: bytes, count: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"log.{os.getpid()}"
    path.write_bytes(text)
    tail = Tail(path, chunk=chunk)
    tail.skip_to_last(count)
    found = path.read_bytes()[tail._at :]
    whole = text.removesuffix(b"\n").split(b"\n") if text else []
    assert found.removesuffix(b"\n").split(b"\n") == (whole[-count:] if whole and count else [b""])


def events(folder: Path, run: str, *told: tuple[float, str, dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    path = folder / "events.jsonl"
    lines = [
        encode(Event(kind, run, folder.name, 1, at, at, None, facts)) for at, kind, facts in told
    ]
    path.write_bytes(b"".join(lines))
    return path


def test_an_agent_that_was_killed_is_over_though_it_never_said_so(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(20)
    host = os.uname().nodename
    for pid, over in ((ended.pid, True), (os.getpid(), False)):
        began = {"host": host, "pid": pid, "logs": "x"}
        path = events(tmp_path / f"job_{pid}", "job", (1.0, "run.began", began))
        assert NodeLogs(path).over is over


def test_nodes_that_ran_together_in_a_shared_folder_are_shown_and_earlier_ones_not(
    tmp_path: Path,
) -> None:
    def node(name: str, run: str, began: float, ended: float) -> Path:
        first = (began, "run.began", {"host": f"elsewhere-{name}", "pid": 1, "logs": "x"})
        return events(tmp_path / name, run, first, (ended, "run.ended", {"state": "failed"}))

    node("job_a", "job", 1.0, 5.0)
    node("job_b", "job", 10.0, 20.0)
    node("other_d", "other", 10.0, 20.0)
    newest = node("job_c", "job", 12.0, 30.0)
    found = with_neighbours([NodeLogs(newest)])
    assert [one.folder.name for one in found] == ["job_b", "job_c"]
