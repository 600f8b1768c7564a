"""Files that grow, as their lines come, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticlib.launch.commands import main
from elasticlib.observe.event import Event, encode
from elasticlib.observe.runs import Neighbours, NodeLogs, Tail


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
    found = Neighbours().beside([NodeLogs(newest)])
    assert [one.folder.name for one in found] == ["job_b", "job_c"]


def test_jobs_that_were_given_no_id_are_told_apart_by_their_endpoints(tmp_path: Path) -> None:
    def node(name: str, endpoint: str) -> Path:
        first = {"host": "elsewhere", "logs": "x", "settings": {"rdzv_endpoint": endpoint}}
        return events(tmp_path / name, "none", (1.0, "run.began", first), (9.0, "saved", {}))

    node("none_a", "host:1")
    mine = node("none_b", "host:2")
    node("none_c", "host:2")
    found = Neighbours().beside([NodeLogs(mine)])
    assert [one.folder.name for one in found] == ["none_b", "none_c"]


def test_another_jobs_file_is_told_by_its_first_line_and_not_looked_at_again(
    tmp_path: Path,
) -> None:
    began = (1.0, "run.began", {"host": "elsewhere", "logs": "x"})
    mine = events(tmp_path / "job_a", "job", began)
    other = events(tmp_path / "other_b", "other", began)
    with other.open("ab") as file:
        file.write(mine.read_bytes())  # who reads on takes it for this job's
    neighbours = Neighbours()
    (found,) = neighbours.beside([NodeLogs(mine)])
    other.write_bytes(mine.read_bytes())
    assert neighbours.beside([found]) == [found]
    late = events(tmp_path / "job_c", "job", began)
    assert [one.events for one in neighbours.beside([found])] == [mine, late]


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("run.began", {"host": None, "pid": [1], "logs": 7}),
        ("generation.began", {"ranks": 5, "attempt": []}),
        ("generation.began", {"ranks": ["a", "b"], "attempt": None}),
    ],
)
def test_facts_of_another_type_than_theirs_were_not_told(
    kind: str, facts: dict[str, Any], tmp_path: Path
) -> None:
    node = NodeLogs(events(tmp_path / "job_a", "job", (1.0, kind, facts)))
    assert node.over is False
    assert [(one.number, one.first, one.last) for one in node.attempts] == [(0, 0, 0)] * (
        kind == "generation.began"
    )


@pytest.mark.parametrize("last", [10**15, 2**62 - 1, 2**70, 1e15])
def test_what_no_node_can_have_started_is_passed_by(
    tmp_path: Path, last: float, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def began(attempt: int, ranks: list[float]) -> bytes:
        told = {"attempt": attempt, "ranks": ranks, "cause": ""}
        return encode(Event("generation.began", "job", "n", 1, 1.0, 1.0, facts=told))

    (folder := tmp_path / "job_a").mkdir()
    (folder / "events.jsonl").write_bytes(
        encode(Event("run.began", "job", "n", 0, 0.0, 0.0, facts={"host": "h", "pid": 1}))
        + began(0, [0, 1])
        + began(1, [0, last])
    )
    (folder / "attempt_0" / "1").mkdir(parents=True)
    (folder / "attempt_0" / "1" / "stdout.log").write_bytes(b"a line\n")
    for more in ([], ["--attempt", "0"], ["--attempt", "all"]):
        assert main(["logs", str(folder), *more]) in (0, 1)
        assert capfdbinary.readouterr().out in (b"[1] a line\n", b"")
