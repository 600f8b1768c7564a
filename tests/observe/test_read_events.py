"""What is read of files of events, in whatever state they were left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest
from told_runs import Agent

import elasticlib
from elasticlib.errors import ConfigError, RunNotFoundError
from elasticlib.observe import journal
from elasticlib.observe.event import MAX_EVENT_BYTES, encode
from elasticlib.observe.history_reader import read_files, read_history
from elasticlib.observe.journal import EventFile


def lines() -> list[bytes]:
    return [encode(e) for e in Agent("n1").launch(0.0).begin(1.0, 1).steps(9.0, 8).events]


def test_a_line_that_a_crash_cut_is_not_read_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(lines())[:-7])
    file = EventFile(path)
    assert [event.kind for event in file] == [
        "run.started",
        "rendezvous.started",
        "generation.started",
    ]
    assert (file.invalid_lines, file.is_truncated) == (0, True)
    assert read_files([path]).invalid_lines == 0


def test_of_a_line_that_is_being_written_the_rest_is_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    text, passed_over = b"".join(lines()), journal._skip_line
    path.write_bytes(text[:-7])

    def written_meanwhile(file: BinaryIO) -> bool:
        path.write_bytes(text)
        return passed_over(file)

    monkeypatch.setattr(journal, "_skip_line", written_meanwhile)
    file = EventFile(path)
    assert len(list(file)) == 3
    assert (file.invalid_lines, file.is_truncated) == (0, True)


def test_lines_that_are_no_events_are_counted_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long = b'{"v":1,"kind":"' + b"x" * 3 * MAX_EVENT_BYTES + b'"}\n'
    odd = [b"{}\n", b"\xff\xfe\n", b"[" * 9999 + b"\n", long, b'{"v":2}\n']
    one, *rest = lines()
    path.write_bytes(b"".join([one, *odd, *rest]))
    file = EventFile(path)
    assert len(list(file)) == 4
    assert (file.invalid_lines, file.is_truncated) == (5, False)
    history = read_files([path, path])
    assert (history.invalid_lines, len(history.nodes)) == (5, 1)


def test_what_holds_no_events_is_said_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match=r"events.jsonl \(1 lines are something else\)"):
        read_files([path])
    with pytest.raises(ConfigError, match=r"cannot read .*gone.jsonl: No such file"):
        read_files([tmp_path / "gone.jsonl"])


def test_a_folder_of_the_logs_of_several_nodes_is_one_history(tmp_path: Path) -> None:
    for rank, name in enumerate(("n1", "n2")):
        agent = Agent(name, booted=-9.0 * rank).launch(0.0).begin(1.0, 1, rank=rank, nodes=2)
        agent.succeed(20.0)
        (tmp_path / name).mkdir()
        written = b"".join(map(encode, agent.events))
        (tmp_path / name / "events.jsonl").write_bytes(written)
    history = elasticlib.read_history(tmp_path)
    assert [node.node for node in history.nodes] == ["n1", "n2"]
    (generation,) = history.generations
    assert generation.node_count == 2
    assert len(read_history(tmp_path / "n1").nodes) == 1
    with pytest.raises(RunNotFoundError):
        read_history(tmp_path / "n3")


def test_a_file_that_is_named_twice_is_one_agents(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(lines()))
    (link := tmp_path / "link.jsonl").symlink_to(path)
    assert len(read_files([path, link, os.path.relpath(path)]).nodes) == 1
