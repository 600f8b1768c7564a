"""`elasticlib logs` of real jobs: whose lines they are, as they come, over restarts."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node, until

from elasticlib.launch.commands import main
from elasticlib.observe.event import Event, encode

pytestmark = pytest.mark.faults
COMMAND = (sys.executable, "-m", "elasticlib.launch.commands", "logs")
TALKER = str(PROGRAMS / "talking_worker.py")
FLAGS = ("--standalone", "--nproc-per-node", "2", "--start-method", "spawn")


def started(job: Job, *flags: str) -> Node:
    command = job.agent(*FLAGS, *flags, program=TALKER)
    node = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    talks(job, 0)
    return node


def talks(job: Job, attempt: int) -> None:
    for rank in range(2):
        path = job.folder / f"talks.{attempt}.{rank}"
        until(f"rank {rank} to talk in attempt {attempt}", path.exists)


Logs = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def logs(job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Logs:
    """The command, with its exit code, its lines and its complaints."""
    monkeypatch.setattr(tempfile, "tempdir", str(job.shortcut))

    def run(*args: str) -> tuple[int, list[str], str]:
        try:
            code = main(["logs", *args])
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capfd.readouterr()
        return code, said.out.splitlines(), said.err

    return run


def test_lines_are_followed_over_a_restart_until_the_run_is_over(job: Job, logs: Logs) -> None:
    folder = str(job.folder / "logs")
    flags = ("--max-restarts", "1", "--log-dir", folder, "--redirects", "3")
    agent = started(job, *flags)
    follower = job.start("logs", *COMMAND, "-f", "-r", "1")
    follower.says(r"\[1\] err 1 0")
    (job.folder / "fail.1").touch()
    talks(job, 1)
    follower.says(r"\[1\] err 1 1")
    # A line that was never ended is whole once another attempt has begun.
    follower.says(r"\[1\] last words 1\n")
    assert follower.process.poll() is None
    job.finish()
    assert agent.exit_code() == 0
    assert follower.exit_code() == 0
    assert sorted(follower.text.splitlines()) == sorted(
        [
            "[1] out 1 0",
            "[1] err 1 0",
            "[1] last words 1",
            "[1] out 1 1",
            "[1] err 1 1",
            "[1] bye 1",
        ]
    )
    newest = ["[0] out 0 1", "[0] bye 0", "[0] err 0 1", "[1] out 1 1", "[1] bye 1", "[1] err 1 1"]
    assert logs() == (0, newest, "")
    first = ["[0] err 0 0", "[1] err 1 0"]
    assert logs(folder, "--attempt", "0", "--stream", "err") == (0, first, "")
    both = [*first[:1], "[0] err 0 1"]
    assert logs("--attempt", "all", "--stream", "err", "-r", "0") == (0, both, "")
    assert logs("-n", "1", "--stream", "out")[1] == ["[0] bye 0", "[1] bye 1"]
    code, lines, said = logs("-r", "1,7")
    assert (code, len(lines)) == (1, 3)
    assert "has ranks 0-1 there, not 7" in said
    assert "has attempts 0-1, and not 4" in logs("--attempt", "4")[2]


def test_attempts_that_come_and_go_within_one_look_are_shown_and_the_last_of_an_agent_that_ends(
    logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, agent, asked = tmp_path / "run", "/proc/999999999", itertools.count()
    folder.mkdir()

    def tell(kind: str, **told: Any) -> None:
        with (folder / "events.jsonl").open("ab") as events:
            events.write(encode(Event(kind, "run", "n", 1, 1.0, 1.0, None, told)))

    def attempt(number: int) -> None:
        tell("generation.began", attempt=number, ranks=[0, 0])
        log = folder / f"attempt_{number}/0/stdout.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"of attempt {number}\n")

    def exists(path: str, found: Callable[[str], bool] = os.path.exists) -> bool:
        if path != agent:
            return found(path)
        lives = next(asked) < 5
        if not lives and not found(str(folder / "attempt_1")):
            # It starts its workers twice more after its events were read, and ends.
            attempt(1)
            attempt(2)
        return lives

    tell("run.began", host=socket.gethostname(), pid=999999999, logs="x")
    attempt(0)
    monkeypatch.setattr(os.path, "exists", exists)
    assert logs("-f", str(folder)) == (0, [f"[0] of attempt {number}" for number in range(3)], "")


@pytest.mark.parametrize(("hosts", "shown"), [("ab", "ab"), ("aa", ["n0", "n1"])])
def test_ranks_of_several_nodes_have_their_nodes_name_beside_them(
    logs: Logs, tmp_path: Path, hosts: str, shown: list[str]
) -> None:
    for rank, host in enumerate(hosts):
        folder = tmp_path / f"run_{rank}"
        (folder / "attempt_0" / "0").mkdir(parents=True)
        (folder / "attempt_0" / "0" / "stdout.log").write_text(f"from {rank}\n")
        events = [
            Event("run.began", "run", f"n{rank}", 0, 1.0, 1.0, None, {"host": host, "logs": "x"}),
            Event("generation.began", "run", f"n{rank}", 1, 1.0, 1.0, None),
        ]
        told = {"attempt": 0, "ranks": [rank, rank], "world": 2}
        events[1] = attrs.evolve(events[1], facts=told)
        (folder / "events.jsonl").write_bytes(b"".join(map(encode, events)))
    lines = [f"[{rank} {name}] from {rank}" for rank, name in enumerate(shown)]
    assert logs(str(tmp_path)) == (0, lines, "")
    # Of a node whose logs are elsewhere, it is said that they are not here.
    (tmp_path / "run_1").rename(tmp_path.parent / f"{tmp_path.name}-away")
    code, lines, said = logs(str(tmp_path / "run_0"))
    assert (code, lines) == (0, ["[0] from 0"])
    assert "1 of its 2 workers ran on other nodes, whose logs are not here" in said


def test_a_run_that_keeps_nothing_says_how_to_keep_it(job: Job, logs: Logs) -> None:
    agent = started(job, "--redirects", "0:1", "--log-dir", str(job.folder / "logs"))
    code, lines, said = logs()
    assert (code, lines) == (0, ["[0] out 0 0"])
    assert "no output of rank 1 was kept" in said
    code, lines, said = logs("-r", "1")
    assert (code, lines) == (1, [])
    assert "start it with --tee 3" in said
    assert "--tee 3" in said
    # Nobody says that it is over: the follower finds the agent gone.
    follower = job.start("logs", *COMMAND, "-f")
    follower.says(r"\[0\] out 0 0")
    agent.kill()
    assert follower.exit_code() == 0


def test_a_run_that_is_not_there_and_ranks_that_are_none_are_said_so(
    logs: Logs, tmp_path: Path
) -> None:
    code, lines, said = logs(str(tmp_path / "nothing"))
    assert (code, lines) == (1, [])
    assert "nothing" in said
    for bad in (("-r", "x"), ("--attempt", "-1"), ("-n", "no"), ("--stream", "in")):
        assert logs(*bad)[0] == 2
