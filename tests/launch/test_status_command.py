"""`elasticlib status` of runs that are over, and of runs that cannot be reached."""

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

from elasticlib.clock import wall
from elasticlib.errors import StoreConnectionError
from elasticlib.launch import status_command
from elasticlib.launch.cli import main
from elasticlib.launch.cli_output import CLEAR_SCREEN
from elasticlib.launch.status_command import JobStatusReader, _watch
from elasticlib.observe.aggregate import NodeStatus
from elasticlib.observe.event import Event, encode
from elasticlib.observe.history import JobState
from elasticlib.observe.job_status import (
    EXIT_CODES,
    FIELDS,
    NODE_FIELDS,
    JobStatus,
    NodeEntry,
    status_of,
)
from elasticlib.observe.node_status import NodeReport, observer_prefix
from elasticlib.observe.node_status import encode as encode_status
from elasticlib.observe.runs import RunRegistration
from elasticlib.observe.stack_query import MAX_QUERY_BYTES, StackQuery, encode_query
from elasticlib.rendezvous.membership import NodeRecord
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.rendezvous.store_layout import encode as encode_node
from elasticlib.stores.file_store import FileStore
from elasticlib.workers.output_plan import MAX_NAMED_RANKS, parse_ranks

GENERATION = {"node_rank": 0, "node_count": 1, "world_size": 1, "restarts": 0, "max_restarts": 2}


def written(folder: Path, *more: tuple[str, dict[str, Any]], **settings: str) -> str:
    """A folder with the events of a run that nobody runs any more."""
    settings = {"rdzv_backend": "tcp", **settings}
    began = {"host": "h", "pid": 1, "slots": 1, "settings": settings}
    kinds = (
        ("run.started", began),
        ("generation.started", {**GENERATION, "reason": "the job starts"}),
        ("worker.started", {"rank": 0, "local_rank": 0, "name": "pid 2"}),
        ("checkpoint.saved", {"step": 40}),
        *more,
    )
    lines = []
    for at, (kind, facts) in enumerate(kinds):
        rest = {name: value for name, value in facts.items() if name != "rank"}
        number = int(at > 0)
        event = Event(kind, "job", "n1", number, wall() - 60, float(at), facts.get("rank"), rest)
        lines.append(encode(event))
    (folder / "events.jsonl").write_bytes(b"".join(lines) + b'{"version":2,"kin')
    return str(folder)


TOLD = r"job: FAILED, 1 min( \d+ s)? ago"
ENDED = ("run.finished", {"state": "failed", "reason": "rank 0 raised", "exit_code": 1})


@pytest.mark.parametrize("watch", [[], ["--watch"]])
def test_result_of_a_run_that_is_over_is_told_with_the_way_to_its_report(
    watch: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *watch, written(tmp_path, ENDED)]) == 1
    said = capsys.readouterr()
    assert said.err == ""
    assert re.search(TOLD, said.out)
    assert "reason: rank 0 raised" in said.out
    assert f"more: elasticlib report {tmp_path}\n" in said.out


def test_who_has_read_enough_of_it_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["status", "--json", written(tmp_path, ENDED)]) == 0


def test_events_that_cannot_be_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(written(tmp_path, ENDED))
    path, text = folder / "events.jsonl", (folder / "events.jsonl").read_bytes()
    line = text.splitlines()[0] + b"\n"
    far = line.replace(b'"monotonic":0.0', b'"monotonic":-1e999').replace(
        b'"timestamp":', b'"timestamp":-1e999, "w":'
    )
    path.write_bytes(far + text.rpartition(b"\n")[0] + b"\n" + far)
    assert main(["status", str(folder)]) == 1
    assert re.search(TOLD, capsys.readouterr().out)
    path.write_bytes(far)
    assert main(["status", str(folder)]) == 4


def test_text_that_no_terminal_can_show_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "cannot tokenise 'half \ud83d a pair' of donn\udce9es.bin"
    ended = ("run.finished", {"state": "failed", "reason": reason, "exit_code": 1})
    folder, shown = written(tmp_path, ended), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="utf-8"))
    assert main(["status", folder]) == 1
    assert b"'half \\ud83d a pair' of donn\\udce9es.bin" in shown.getvalue()


def test_no_word_of_a_run_reaches_the_terminal_as_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m"
    ended = ("run.finished", {"state": "failed", "reason": f"why{evil}", "exit_code": 1})
    main(["status", written(tmp_path, ended)])
    main(["status", f"{tmp_path}/{evil}"])
    said = capsys.readouterr()
    assert "\\x1b]0;title\\x07" in said.out
    assert "\\x1b]0;title\\x07" in said.err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", said.out + said.err)


def test_error_of_the_store_is_told_if_the_result_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["status", written(tmp_path)])
    said = capsys.readouterr().err
    assert (
        said
        == "elasticlib status: no agent on this machine serves the store of this run any more\n"
    )
    main(["status", written(tmp_path, ENDED)])
    assert capsys.readouterr().err == ""


def test_a_run_whose_node_has_not_joined_yet_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "store").mkdir()
    settings = {"rdzv_backend": "file", "rdzv_endpoint": str(tmp_path / "store")}
    facts = {"host": "h", "pid": 1, "slots": 1, "settings": settings}
    with contextlib.closing(RunRegistration("job")) as record:
        record.events.write_bytes(
            encode(Event("run.started", "job", "n", 0, wall(), 1.0, None, facts))
        )
        assert main(["status"]) == 3
        said = capsys.readouterr()
        assert said.err == ""
        assert "job: RENDEZVOUS" in said.out
        assert "reason: its agents are starting" in said.out
    assert main(["status"]) == 4
    assert "job: terminated unexpectedly (killed?)" in capsys.readouterr().out


def test_state_of_a_run_whose_agents_were_killed_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json", written(tmp_path)]) == 4
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["source"], said["exit_code"]) == (None, "events", 4)
    assert said["state_seconds"] >= 60
    assert said["nodes"] == []


def test_a_folder_of_old_statuses_is_looked_at_until_a_node_renews_its_own_or_its_lease_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours, keys = FileStore(tmp_path), FileStore(tmp_path), StoreKeys("job")
    node = NodeRecord("n1", "h", "", 1)

    def publish(generation: int) -> None:
        """With a clock that is an hour behind."""
        status = NodeStatus("job", "n1", state=JobState.RUNNING, generation=generation)
        data = encode_status(NodeReport(status, 1.0, 2.0), wall() - 3600.0)
        theirs.set(f"{observer_prefix('job', 'status')}n1", data, ttl=60.0)

    def look(lease: float) -> list[bool]:
        theirs.set(keys.node("n1"), encode_node(node), ttl=lease)
        publish(1)
        status = status_of(JobStatusReader(ours, "job").read())
        return [] if status is None else [one.reporting for one in status.nodes]

    renews = threading.Timer(0.7, publish, (2,))
    renews.start()
    assert look(lease=60.0) == [True]
    renews.join()
    assert look(lease=1.0) == [], "the job is gone"
    monkeypatch.setattr(status_command, "REFRESH_TIMEOUT_S", 0.5)
    assert look(lease=60.0) == [False], "nobody renewed it in that time"
    for store in (theirs, ours):
        store.close()


@pytest.mark.parametrize("command", ["status", "stacks"])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--rdzv-conf secretfile=x", "unknown --rdzv-conf key 'secretfile'"),
        ("--rdzv-conf join_timeout=5,,colour=red", "unknown --rdzv-conf key 'colour'"),
        ("--rdzv-conf join_timeout=5,join_timeout=6", "must have each key once"),
        ("--rdzv-conf cacert=x", "cacert applies only to --rdzv-backend etcd, not to tcp"),
        (
            "--rdzv-conf cacert=x --rdzv-backend file",
            "applies only to --rdzv-backend etcd, not to file",
        ),
        ("--rdzv-conf secret_file=", "--rdzv-conf must be k=v,k=v"),
    ],
)
def test_a_key_that_means_nothing_is_refused_and_not_passed_over(
    command: str, flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--timeout", "1", *flags.split(), "127.0.0.1:1"]) == 2
    assert sentence in capsys.readouterr().err


def test_white_space_around_a_key_means_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = f"join_timeout=5, secret_file = {tmp_path}/gone"
    assert main(["status", "--timeout", "1", "--rdzv-conf", conf, "127.0.0.1:1"]) == 2
    assert f"'{tmp_path}/gone' cannot be read" in capsys.readouterr().err


def test_a_secret_that_cannot_be_read_is_blamed_on_who_named_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = f"secret_file={tmp_path}/gone"
    run = written(tmp_path, rdzv_endpoint="127.0.0.1:1", rdzv_conf=conf)
    assert main(["status", run]) == 4
    assert "secret_file of the run's --rdzv-conf" in capsys.readouterr().err
    assert main(["status", "--secret-file", f"{tmp_path}/no", run]) == 2
    assert f"--secret-file '{tmp_path}/no' cannot be read" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(folder: str, patch: pytest.MonkeyPatch, **environment: str) -> str:
    terminal = Terminal()
    patch.setattr(sys, "stdout", terminal)
    patch.delenv("NO_COLOR", raising=False)
    for name, text in environment.items():
        patch.setenv(name, text)
    assert main(["status", "--watch", folder]) == 1
    return terminal.getvalue()


def test_watch_clears_a_terminal_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = watched(written(tmp_path, ENDED), monkeypatch)
    assert said.startswith(CLEAR_SCREEN)
    assert "\x1b" not in said.removeprefix(CLEAR_SCREEN)
    assert "reason: rank 0 raised" in said


def test_watch_prints_plain_text_with_no_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = watched(written(tmp_path, ENDED), monkeypatch, NO_COLOR="1")
    assert "\x1b" not in said
    assert "reason: rank 0 raised" in said


@pytest.mark.parametrize("returns", [True, False])
def test_who_is_watched_may_be_away_for_a_while(
    returns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_command, "UNREACHABLE_TIMEOUT_S", 60.0 if returns else 0.1)
    node = NodeEntry("n1", "h", 0, 1, alive=True)
    runs = JobStatus("job", JobState.RUNNING, nodes=(node,))
    gone = JobStatus("job", None, "no node is alive")
    away = StoreConnectionError("the store is away")
    ends = JobStatus("job", JobState.SUCCEEDED)
    looks = iter([runs, gone, away, away, runs, ends] if returns else [runs, *[away] * 1000])

    def look() -> JobStatus:
        found = next(looks)
        if isinstance(found, StoreConnectionError):
            raise found
        return found

    chosen = argparse.Namespace(json=False, every=0.01)
    if returns:
        assert _watch(look, chosen) == 0
    else:
        with pytest.raises(StoreConnectionError):
            _watch(look, chosen)
    said = capsys.readouterr().out
    assert "job: unreachable or terminated" in said
    assert "reason: the store is away" in said


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ("x", "ranks are numbers as in 0,3 or 0-7, got 'x'"),
        ("1,-2", "ranks are numbers as in 0,3 or 0-7, got '1,-2'"),
        ("0,5-3", "ranks go from the lower to the higher, as in 3-5, got '5-3'"),
        ("9999999", "a rank is at most 99999, got 9999999"),
        ("0-10000", "at most 10000 ranks can be named, got 10001"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(
    ranks: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["stacks", "-r", ranks])
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


def test_as_many_ranks_as_can_be_named_fit_into_a_question() -> None:
    ranks = parse_ranks("90000-99999")
    assert len(ranks) == MAX_NAMED_RANKS
    assert len(encode_query(StackQuery(10**9, ranks))) <= MAX_QUERY_BYTES


def test_the_help_describes_every_exit_code_and_every_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    said = capsys.readouterr().out
    for code, meaning in EXIT_CODES.items():
        assert f"  {code}  {meaning}" in said
    assert all(f"  {name}: " in said for name in (*FIELDS, *NODE_FIELDS))
