"""`elasticlib events`: the events of real jobs as text lines and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import WITHOUT_TORCH, Job, Node
from made_events import make_event

from elasticlib.observe.event_kinds import KINDS
from elasticlib.observe.event_text import describe, format_event
from elasticlib.testing.waiting import DEFAULT_TIMEOUT_S

pytestmark = pytest.mark.faults

COMMAND = (sys.executable, "-m", "elasticlib.launch.cli", "events")


def test_events_of_a_finished_run_are_printed_one_per_line(job: Job) -> None:
    flags = ("--standalone", "--max-restarts", "1", "--rdzv-id", "job7")
    agent = job.start("a", *job.agent_command(*flags), PYTHONPATH=WITHOUT_TORCH)
    (report,) = job.wait_for_world(1)
    os.kill(report["pid"], signal.SIGKILL)
    job.wait_for_world(1, after=1)
    job.finish()
    assert agent.exit_code() == 0
    (events,) = job.events("job7")
    out, _ = job.run_command("events")
    lines = out.splitlines()
    assert len(lines) == len(events)
    for line, event in zip(lines, events, strict=True):
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  ", line), line
        assert line.split()[2:5] == [event.node, str(event.generation or "-"), event.kind]
    assert f"1 worker on {events[0].data['host']}: " in lines[0]
    (died,) = (line for line in lines if " worker.exited " in line and "SIGKILL" in line)
    assert f"worker of rank 0 (local 0, pid {report['pid']}) was killed by SIGKILL" in died
    assert lines[-1].endswith("succeeded: 1 node done (exit code 0)")
    printed, _ = job.run_command("events", "--json", "job7")
    assert printed.encode() == b"".join(path.read_bytes() for path in _event_files(job))


def _event_files(job: Job) -> list[Path]:
    return [*job.temporary.glob("*/*/events.jsonl")]


def test_a_run_is_followed_with_agents_that_join_later_until_it_has_finished(job: Job) -> None:
    flags = ("--nnodes", "1:2", "--rdzv-id", "job7", "--rdzv-endpoint", job.start_store())
    nodes = [_start_agent(job, "a", flags)]
    job.wait_for_world(1)
    follower = job.start("follower", *COMMAND, "-f", "--json")
    follower.wait_for_log('"generation":1')
    nodes.append(_start_agent(job, "b", flags))
    job.wait_for_world(2, after=1)
    follower.wait_for_log('"node_count":2')
    assert follower.process.poll() is None
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert follower.exit_code() == 0
    printed = [json.loads(line) for line in follower.text.splitlines()]
    recorded = [event for events in job.events("job7") for event in events]
    assert len(printed) == len(recorded)
    assert {event["node"] for event in printed} == {event.node for event in recorded}
    assert [event["kind"] for event in printed].count("run.finished") == 2


def _start_agent(job: Job, name: str, flags: tuple[str, ...]) -> Node:
    command = job.agent_command(*flags, "--rdzv-conf", "last_call_timeout=0.3")
    return job.start(name, *command, PYTHONPATH=WITHOUT_TORCH)


def test_following_ends_when_the_agent_is_killed(job: Job) -> None:
    agent = job.start("a", *job.agent_command("--standalone"), PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    follower = job.start("follower", *COMMAND, "--follow")
    follower.wait_for_log("worker.started")
    agent.kill()
    assert follower.exit_code() == 0
    assert "run.finished" not in follower.text


def test_unknown_run_is_an_error_that_names_the_recorded_runs(job: Job) -> None:
    job.finish()
    agent = job.start(
        "a", *job.agent_command("--standalone", "--rdzv-id", "job7"), PYTHONPATH=WITHOUT_TORCH
    )
    assert agent.exit_code() == 0
    out, error = job.run_command("events", "job8", code=4)
    assert out == ""
    assert error.startswith("elasticlib events: no recorded run 'job8' on this machine (recorded ")
    assert ": job7)" in error


def test_a_reader_that_closes_the_pipe_ends_the_command(job: Job) -> None:
    job.finish()
    agent = job.start("a", *job.agent_command("--standalone"), PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 0
    command = f"{' '.join(COMMAND)} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, "TMPDIR": str(job.shortcut)},
        capture_output=True,
        text=True,
        timeout=DEFAULT_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "run.started" in done.stdout


def test_interrupt_ends_following_with_exit_code_0(job: Job) -> None:
    job.start("a", *job.agent_command("--standalone"), PYTHONPATH=WITHOUT_TORCH)
    job.wait_for_world(1)
    follower = job.start("follower", *COMMAND, "-f")
    follower.wait_for_log("worker.started")
    follower.signal(signal.SIGINT)
    assert follower.exit_code() == 0
    assert "Traceback" not in follower.text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_line_even_if_all_of_its_data_are_missing(kind: str) -> None:
    event = make_event(kind, "job", "node\n1", 1, 1e300, 0.0)
    assert "\n" not in format_event(event)
    assert kind in format_event(event)


def test_a_kind_that_is_not_known_is_shown_with_its_data() -> None:
    event = make_event(
        "node.throttled", "job", "n", 1, 0.0, 0.0, data={"reason": "GPU 3\nis hot", "n": 2}
    )
    assert describe(event) == "reason: GPU 3 is hot, n: 2"
