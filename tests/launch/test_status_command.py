"""`elasticlib status` of runs that have finished, and of runs that cannot be reached."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from made_events import make_event

from elasticlib.clock import wall
from elasticlib.errors import StoreConnectionError
from elasticlib.launch import status_command
from elasticlib.launch.cli import main
from elasticlib.launch.cli_output import CLEAR_SCREEN
from elasticlib.launch.status_command import JobStatusReader, _watch
from elasticlib.observe.event import encode
from elasticlib.observe.formatting import NOT_JOINED_TEXT
from elasticlib.observe.history import JobState
from elasticlib.observe.job_status import (
    EXIT_CODES,
    FIELDS,
    NODE_FIELDS,
    JobStatus,
    NodeEntry,
    status_of,
)
from elasticlib.observe.runs import RunRegistration
from elasticlib.observe.summary import NodeSummary, StatusKeys, encode_summary
from elasticlib.rendezvous.membership import NodeRecord
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.rendezvous.store_layout import encode as encode_node
from elasticlib.stores.file_store import FileStore

GENERATION = {"node_rank": 0, "node_count": 1, "world_size": 1, "restarts": 0, "max_restarts": 2}


def write_events(directory: Path, *more: tuple[str, dict[str, Any]], **settings: str) -> str:
    """Write the events of a run whose agents are not alive, and return the directory."""
    settings = {"rdzv_backend": "tcp", **settings}
    run_started = {"host": "h", "pid": 1, "slots": 1, "settings": settings}
    kinds = (
        ("run.started", run_started),
        ("generation.started", {**GENERATION, "reason": "the job starts"}),
        ("worker.started", {"rank": 0, "local_rank": 0, "name": "pid 2"}),
        ("checkpoint.saved", {"step": 40}),
        *more,
    )
    lines = []
    for at, (kind, facts) in enumerate(kinds):
        data = {name: value for name, value in facts.items() if name != "rank"}
        generation = int(at > 0)
        rank = facts.get("rank")
        event = make_event(kind, "job", "n1", generation, wall() - 60, float(at), rank, data)
        lines.append(encode(event))
    (directory / "events.jsonl").write_bytes(b"".join(lines) + b'{"version":2,"kin')
    return str(directory)


FAILED_LINE = r"job: FAILED, 1 min( \d+ s)? ago"
RUN_FINISHED = ("run.finished", {"state": "failed", "reason": "rank 0 raised", "exit_code": 1})


@pytest.mark.parametrize("watch", [[], ["--watch"]])
def test_result_of_a_finished_run_is_printed_with_the_report_command(
    watch: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *watch, write_events(tmp_path, RUN_FINISHED)]) == 1
    output = capsys.readouterr()
    assert output.err == ""
    assert re.search(FAILED_LINE, output.out)
    assert "reason: rank 0 raised" in output.out
    assert f"more: elasticlib report {tmp_path}\n" in output.out


def test_closed_stdout_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["status", "--json", write_events(tmp_path, RUN_FINISHED)]) == 0


def test_events_with_impossible_times_are_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(write_events(tmp_path, RUN_FINISHED))
    path, text = directory / "events.jsonl", (directory / "events.jsonl").read_bytes()
    line = text.splitlines()[0] + b"\n"
    invalid = line.replace(b'"monotonic":0.0', b'"monotonic":-1e999').replace(
        b'"timestamp":', b'"timestamp":-1e999, "w":'
    )
    path.write_bytes(invalid + text.rpartition(b"\n")[0] + b"\n" + invalid)
    assert main(["status", str(directory)]) == 1
    assert re.search(FAILED_LINE, capsys.readouterr().out)
    path.write_bytes(invalid)
    assert main(["status", str(directory)]) == 4


def test_text_that_cannot_be_encoded_is_printed_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "cannot tokenise 'half \ud83d a pair' of donn\udce9es.bin"
    finished = ("run.finished", {"state": "failed", "reason": reason, "exit_code": 1})
    directory, output = write_events(tmp_path, finished), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="utf-8"))
    assert main(["status", directory]) == 1
    assert b"'half \\ud83d a pair' of donn\\udce9es.bin" in output.getvalue()


def test_control_characters_of_a_run_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = "\x1b]0;title\x07\x1b[2J\x9b31m"
    finished = ("run.finished", {"state": "failed", "reason": f"why{commands}", "exit_code": 1})
    main(["status", write_events(tmp_path, finished)])
    main(["status", f"{tmp_path}/{commands}"])
    output = capsys.readouterr()
    assert "\\x1b]0;title\\x07" in output.out
    assert "\\x1b]0;title\\x07" in output.err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", output.out + output.err)


def test_error_of_the_store_is_printed_only_if_the_result_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["status", write_events(tmp_path)])
    assert capsys.readouterr().err == (
        "elasticlib status: no agent on this machine serves the store of this run any more\n"
    )
    main(["status", write_events(tmp_path, RUN_FINISHED)])
    assert capsys.readouterr().err == ""


def test_run_whose_node_has_not_joined_yet_is_shown_as_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "store").mkdir()
    settings = {"rdzv_backend": "file", "rdzv_endpoint": str(tmp_path / "store")}
    facts = {"host": "h", "pid": 1, "slots": 1, "settings": settings}
    with contextlib.closing(RunRegistration("job")) as record:
        record.events.write_bytes(
            encode(make_event("run.started", "job", "n", 0, wall(), 1.0, None, facts))
        )
        assert main(["status"]) == 3
        output = capsys.readouterr()
        assert output.err == ""
        assert "job: RENDEZVOUS" in output.out
        assert "reason: its agents are starting" in output.out
        assert main(["stop", "job"]) == 4
        assert capsys.readouterr().err == (
            f"elasticlib stop: no node of run 'job' is alive: {NOT_JOINED_TEXT}\n"
        )
        store = str(tmp_path / "store")
        assert main(["status", f"file:{store}/"]) == 4
        assert capsys.readouterr().err == (
            f"elasticlib status: the store at {store} holds no job: {NOT_JOINED_TEXT}\n"
        )
    assert main(["status"]) == 4
    assert "job: terminated unexpectedly (killed?)" in capsys.readouterr().out


def test_state_of_a_run_whose_agents_were_killed_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json", write_events(tmp_path)]) == 4
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["source"], status["exit_code"]) == (None, "events", 4)
    assert status["state_seconds"] >= 60
    assert status["nodes"] == []


def test_reader_waits_until_an_old_status_is_renewed_or_its_lease_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_store, reader_store, keys = FileStore(tmp_path), FileStore(tmp_path), StoreKeys("job")
    node = NodeRecord("n1", "h", "", 1)

    def publish(generation: int) -> None:
        # The clock of the node is an hour slow.
        summary = NodeSummary(JobState.RUNNING, generation, written_at=wall() - 3600.0)
        key = f"{StatusKeys('job').summaries}n1"
        node_store.set(key, encode_summary(summary), ttl=60.0)

    def read_reporting(lease_ttl: float) -> list[bool]:
        node_store.set(keys.node("n1"), encode_node(node), ttl=lease_ttl)
        publish(1)
        status = status_of(JobStatusReader(reader_store, "job").read())
        return [] if status is None else [entry.reporting for entry in status.nodes]

    # The node publishes its next status only after the reader has read the old one.
    renewal = threading.Timer(0.7, publish, (2,))
    renewal.start()
    assert read_reporting(lease_ttl=60.0) == [True]
    renewal.join()
    assert read_reporting(lease_ttl=1.0) == [], "the lease has expired"
    monkeypatch.setattr(status_command, "REFRESH_TIMEOUT_S", 0.5)
    assert read_reporting(lease_ttl=60.0) == [False], "the node has not renewed its status"
    for store in (node_store, reader_store):
        store.close()


@pytest.mark.parametrize("command", ["status", "stacks"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rdzv-conf secretfile=x", "unknown --rdzv-conf key 'secretfile'"),
        ("--rdzv-conf join_timeout=5,colour=red", "unknown --rdzv-conf key 'colour'"),
        ("--rdzv-conf join_timeout=5,join_timeout=6", "must have each key once"),
        (
            "--rdzv-conf cacert=x",
            "--rdzv-conf must have keys of the tcp backend only, got ['cacert']",
        ),
        ("--rdzv-conf secret_file=", "--rdzv-conf must be k=v,k=v"),
    ],
)
def test_unknown_or_inapplicable_rdzv_conf_key_is_rejected(
    command: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--timeout", "1", *flags.split(), "127.0.0.1:1"]) == 2
    assert message in capsys.readouterr().err


def test_white_space_around_a_key_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = f"join_timeout=5, secret_file = {tmp_path}/missing"
    assert main(["status", "--timeout", "1", "--rdzv-conf", conf, "127.0.0.1:1"]) == 2
    assert f"'{tmp_path}/missing' cannot be read" in capsys.readouterr().err


def test_error_about_an_unreadable_secret_names_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = f"secret_file={tmp_path}/missing"
    run = write_events(tmp_path, rdzv_endpoint="127.0.0.1:1", rdzv_conf=conf)
    assert main(["status", run]) == 4
    assert "secret_file of the run's --rdzv-conf" in capsys.readouterr().err
    assert main(["status", "--secret-file", f"{tmp_path}/no", run]) == 2
    assert f"--secret-file '{tmp_path}/no' cannot be read" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch_status(directory: str, patch: pytest.MonkeyPatch, **environment: str) -> str:
    terminal = Terminal()
    patch.setattr(sys, "stdout", terminal)
    patch.delenv("NO_COLOR", raising=False)
    for name, text in environment.items():
        patch.setenv(name, text)
    assert main(["status", "--watch", directory]) == 1
    return terminal.getvalue()


def test_watch_clears_a_terminal_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = watch_status(write_events(tmp_path, RUN_FINISHED), monkeypatch)
    assert output.startswith(CLEAR_SCREEN)
    assert "\x1b" not in output.removeprefix(CLEAR_SCREEN)
    assert "reason: rank 0 raised" in output


def test_watch_prints_plain_text_with_no_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = watch_status(write_events(tmp_path, RUN_FINISHED), monkeypatch, NO_COLOR="1")
    assert "\x1b" not in output
    assert "reason: rank 0 raised" in output


@pytest.mark.parametrize("returns", [True, False])
def test_watch_continues_while_a_job_is_unreachable_for_a_limited_time(
    returns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_command, "UNREACHABLE_TIMEOUT_S", 60.0 if returns else 0.1)
    node = NodeEntry("n1", "h", 0, 1, alive=True)
    running = JobStatus("job", JobState.RUNNING, nodes=(node,))
    lost = JobStatus("job", None, "no node is alive")
    error = StoreConnectionError("the store is unreachable")
    finished = JobStatus("job", JobState.SUCCEEDED)
    readings = iter(
        [running, lost, error, error, running, finished] if returns else [running, *[error] * 1000]
    )

    def read() -> JobStatus:
        reading = next(readings)
        if isinstance(reading, StoreConnectionError):
            raise reading
        return reading

    options = argparse.Namespace(json=False, every=0.01)
    if returns:
        assert _watch(read, options) == 0
    else:
        with pytest.raises(StoreConnectionError):
            _watch(read, options)
    output = capsys.readouterr().out
    assert "job: unreachable or terminated" in output
    assert "reason: the store is unreachable" in output


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("x", "ranks are numbers as in 0,3 or 0-7, got 'x'"),
        ("1,-2", "ranks are numbers as in 0,3 or 0-7, got '1,-2'"),
        ("0,5-3", "ranks go from the lower to the higher, as in 3-5, got '5-3'"),
        ("9999999", "a rank is at most 99999, got 9999999"),
        ("0-10000", "at most 10000 ranks can be named, got 10001"),
    ],
)
def test_invalid_ranks_are_rejected(
    ranks: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["stacks", "-r", ranks])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_help_describes_every_exit_code_and_every_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    output = capsys.readouterr().out
    for code, meaning in EXIT_CODES.items():
        assert f"  {code}  {meaning}" in output
    assert all(f"  {name}: " in output for name in (*FIELDS, *NODE_FIELDS))
