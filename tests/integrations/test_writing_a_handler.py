"""The files, tests and command line of docs/writing_a_handler.md work."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, check_consistent_world
from modules import extend_pythonpath, write_module
from pages import name_blocks, read_page, run_suite
from single_worker_agent import OneWorker, Run

from elasticlib import (
    AgentOptions,
    Command,
    ElasticAgent,
    Node,
    RendezvousSettings,
    WorkerSpec,
    WorkerState,
)
from elasticlib.testing.waiting import wait_until

TEXT, BLOCKS = read_page("writing_a_handler.md")
FILES = name_blocks([code for kind, code in BLOCKS if kind != "sh"])
MODULE, SUITE = "elasticlib_register", "test_elasticlib_register.py"
(COMMAND,) = (code.strip() for kind, code in BLOCKS if kind == "sh")
MEMBER = """
import sys
from elasticlib import Node, RendezvousSettings
from elasticlib_register import RegisterHandler

node = Node(sys.argv[2], sys.argv[2], "127.0.0.1", 1)
handler = RegisterHandler(sys.argv[1], "job", node, RendezvousSettings(1, 2), 20.0)
while True:
    print(handler.next_rendezvous().world_size, flush=True)
    while handler.wait_for_change(1.0) is None:
        pass
"""

pytestmark = pytest.mark.faults


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a directory with the module of the page."""
    return write_module(tmp_path / "site", MODULE, FILES[f"{MODULE}.py"])


def test_each_block_of_the_page_has_a_test() -> None:
    assert set(FILES) == {f"{MODULE}.py", SUITE}
    assert len(BLOCKS) == len(FILES) + 1


def test_the_test_suite_of_the_page_passes(site: Path, tmp_path: Path) -> None:
    (tmp_path / SUITE).write_text(FILES[SUITE])
    output = run_suite(
        tmp_path, SUITE, 100.0, {**os.environ, "PYTHONPATH": extend_pythonpath(site)}
    )
    # The agents handle failures.
    assert re.search(r"^\d\d passed, 2 skipped in", output, re.MULTILINE), output


def test_the_pages_command_line_runs_a_job(job: Job, site: Path, tmp_path: Path) -> None:
    arguments = shlex.split(COMMAND)
    assert (arguments[0], arguments[-1]) == ("elasticrun", "train.py")
    meeting = str(tmp_path / "meeting")
    flags = [meeting if argument == "meeting" else argument for argument in arguments[1:-1]]
    assert flags != arguments[1:-1]
    nodes = [job.start_agent(name, *flags, PYTHONPATH=extend_pythonpath(site)) for name in "ab"]
    check_consistent_world(job.wait_for_world(2))
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


class TwoAgents:
    """Two agents in threads with the handler of the page. Their workers are not processes."""

    def __init__(self, folder: Path, register: Any, max_restarts: int) -> None:
        self.workers = {name: OneWorker() for name in "ab"}
        self.runs = {}
        for name, workers in self.workers.items():
            node = Node(name, name, "127.0.0.1", 1)
            handler = register(folder, "job", node, RendezvousSettings(2, 2), 60.0)
            spec = WorkerSpec(Command("none"))
            settings = RendezvousSettings(max_restarts=max_restarts)
            options = AgentOptions(monitor_interval=0.01)
            agent = ElasticAgent(spec, handler, workers, job=settings, options=options)
            self.runs[name] = Run(agent)

    def started(self, times: int) -> None:
        wait_until(
            f"start {times} on both nodes",
            lambda: all(workers.starts == times for workers in self.workers.values()),
        )

    def close(self) -> None:
        for name, run in self.runs.items():
            run.agent.handle_signal(signal.SIGTERM)
            self.workers[name].end()
        for run in self.runs.values():
            run.result()


@pytest.fixture
def two_agents(tmp_path: Path) -> Iterator[TwoAgents]:
    """Start two agents, each with a budget of one restart."""
    module = types.ModuleType(MODULE)
    exec(compile(FILES[f"{MODULE}.py"], f"{MODULE}.py", "exec"), module.__dict__)
    with contextlib.closing(TwoAgents(tmp_path, module.RegisterHandler, 1)) as agents:
        agents.started(1)
        yield agents


def test_a_finished_node_waits_for_the_others_and_all_succeed(two_agents: TwoAgents) -> None:
    two_agents.workers["a"].end()
    wait_until("a to be done", lambda: two_agents.workers["a"].view() == {})
    # Each agent polls the job every 10 ms.
    assert not two_agents.runs["a"].ends_within(0.5)
    assert two_agents.workers["b"].view()
    two_agents.workers["b"].end()
    results = [run.result() for run in two_agents.runs.values()]
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert [workers.starts for workers in two_agents.workers.values()] == [1, 1]


def test_a_failure_after_another_node_has_finished_restarts_both(
    two_agents: TwoAgents,
) -> None:
    two_agents.workers["a"].end()
    wait_until("a to be done", lambda: two_agents.workers["a"].view() == {})
    two_agents.workers["b"].end(1)
    two_agents.started(2)
    for workers in two_agents.workers.values():
        workers.end()
    results = [run.result() for run in two_agents.runs.values()]
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert [result.generation for result in results] == [2, 2]


def test_a_node_without_restarts_left_ends_the_job_for_both_with_the_reason(
    two_agents: TwoAgents,
) -> None:
    two_agents.workers["b"].end(1)
    two_agents.started(2)
    two_agents.workers["b"].end(1)
    first, second = (run.result() for run in two_agents.runs.values())
    assert [first.state, second.state] == [WorkerState.FAILED] * 2
    assert first.reason == "closed by b: see its log"
    assert second.reason.endswith("exited with code 1 (1 of 1 restarts used)")


def test_a_killed_member_is_noticed_at_once(site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": extend_pythonpath(site)}

    def member(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEMBER, str(tmp_path / "meeting"), name]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def read_output(process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with member("a") as first:
        try:
            assert read_output(first) == "1"
            with member("b") as second:
                assert [read_output(first), read_output(second)] == ["2", "2"]
                second.send_signal(signal.SIGKILL)
                assert read_output(first) == "1"
        finally:
            first.kill()
