"""Reading of event files that are truncated, invalid or spread over several nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest
from recorded_runs import Agent

import elasticlib
from elasticlib.errors import ConfigError, RunNotFoundError
from elasticlib.observe import journal
from elasticlib.observe.event import encode
from elasticlib.observe.event_kinds import MAX_EVENT_BYTES
from elasticlib.observe.history_reader import read_files, read_history
from elasticlib.observe.journal import EventFile


def lines() -> list[bytes]:
    return [encode(e) for e in Agent("n1").launch(0.0).join(1.0, 1).advance(9.0, 8).events]


def test_line_that_was_truncated_by_a_crash_is_skipped(tmp_path: Path) -> None:
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


def test_rest_of_a_line_that_is_being_written_is_not_an_invalid_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    text, skip_line = b"".join(lines()), journal._skip_line
    path.write_bytes(text[:-7])

    def complete_and_skip(file: BinaryIO) -> bool:
        path.write_bytes(text)
        return skip_line(file)

    monkeypatch.setattr(journal, "_skip_line", complete_and_skip)
    file = EventFile(path)
    assert len(list(file)) == 3
    assert (file.invalid_lines, file.is_truncated) == (0, True)


def test_invalid_lines_are_counted_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long = b'{"v":1,"kind":"' + b"x" * 3 * MAX_EVENT_BYTES + b'"}\n'
    invalid = [b"{}\n", b"\xff\xfe\n", b"[" * 9999 + b"\n", long, b'{"v":2}\n']
    first, *rest = lines()
    path.write_bytes(b"".join([first, *invalid, *rest]))
    file = EventFile(path)
    assert len(list(file)) == 4
    assert (file.invalid_lines, file.is_truncated) == (5, False)
    history = read_files([path, path])
    assert (history.invalid_lines, len(history.nodes)) == (5, 1)


def test_file_without_events_is_rejected_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match=r"events.jsonl \(1 lines are something else\)"):
        read_files([path])
    with pytest.raises(ConfigError, match=r"cannot read .*missing.jsonl: No such file"):
        read_files([tmp_path / "missing.jsonl"])


def test_log_directory_of_several_nodes_is_read_as_one_history(tmp_path: Path) -> None:
    for rank, name in enumerate(("n1", "n2")):
        agent = Agent(name, booted_at=-9.0 * rank).launch(0.0).join(1.0, 1, rank=rank, nodes=2)
        agent.succeed(20.0)
        (tmp_path / name).mkdir()
        data = b"".join(map(encode, agent.events))
        (tmp_path / name / "events.jsonl").write_bytes(data)
    history = elasticlib.read_history(tmp_path)
    assert [node.node for node in history.nodes] == ["n1", "n2"]
    (generation,) = history.generations
    assert generation.node_count == 2
    assert len(read_history(tmp_path / "n1").nodes) == 1
    with pytest.raises(RunNotFoundError):
        read_history(tmp_path / "n3")


def test_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(lines()))
    (link := tmp_path / "link.jsonl").symlink_to(path)
    assert len(read_files([path, link, os.path.relpath(path)]).nodes) == 1
