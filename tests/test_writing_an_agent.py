"""docs/writing_an_agent.md: its workers and its launchers work, and its test suite passes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from modules import extend_pythonpath
from pages import check_suite_passes, name_blocks, read_page

from elasticlib import ElasticAgent, FileStore, WorkerState, read_history
from elasticlib.observe.history import JobState
from elasticlib.observe.job_status import read_job
from elasticlib.testing import AgentRequest
from elasticlib.testing.agent_job import AgentJob
from elasticlib.testing.waiting import wait_until
from elasticlib.testing.worker_behavior import WorkerBehavior
from elasticlib.testing.worker_harness import Scenario, WorkerHarness

_, BLOCKS = read_page("writing_an_agent.md")
FILES = name_blocks([code for _, code in BLOCKS])
MODULE, LAUNCHER, SUITE = "elasticlib_remote", "launch_remote.py", "test_elasticlib_remote.py"
OBSERVED = "launch_observed.py"
TIMEOUT_S = 20.0

# This `ssh` simulates another host: the command gets none of the environment variables of this
# side, and a shell parses the command line.
SSH = """#!/bin/sh
for command; do :; done
exec env -i PATH='{python}:/usr/bin:/bin' PYTHONPATH='{path}' sh -c "exec $command"
"""
SCRIPT = """
import os, sys
rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("rank", rank, "of", world_size, "remote:", "HOME" not in os.environ)
"""
STEPS = """
from elasticlib import context
for step in range(1, 4):
    context().step(step)
"""
AGENT = """
import sys
from pathlib import Path
from elasticlib.testing import AgentRequest
from elasticlib.testing.agent_job import AgentJob
from elasticlib.testing.worker_behavior import WorkerBehavior
from elasticlib.testing.worker_harness import Scenario, WorkerHarness
from elasticlib import ElasticAgent
from elasticlib_remote import RemoteWorkers

class ExistingPipes(WorkerHarness):
    def __init__(self):
        self.use_functions, self._pipe_dir = False, Path(sys.argv[1])

def make(request):
    workers = RemoteWorkers(("ssh", "gpu7"))
    return ElasticAgent(request.spec, request.handler, workers, **request.settings)

scenario = Scenario.of(WorkerBehavior.IGNORE_SIGTERM, WorkerBehavior.RUN)
AgentJob(make, ExistingPipes(), 20.0, 1.0).node(scenario).agent.run()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with an `ssh` and the files of the page, on the path of both sides."""
    site = tmp_path / "site"
    site.mkdir()
    for name, code in FILES.items():
        (site / name).write_text(code)
    python = str(Path(sys.executable).parent)
    (site / "ssh").write_text(SSH.format(python=python, path=extend_pythonpath(site)))
    (site / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{site}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", extend_pythonpath(site))
    return site


@pytest.fixture
def module(site: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WorkerHarness]:
    pipe_dir = tmp_path / "pipes"
    pipe_dir.mkdir()
    with closing(WorkerHarness(pipe_dir, TIMEOUT_S)) as harness:
        yield harness


@pytest.fixture
def job(module: Any, harness: WorkerHarness) -> Iterator[AgentJob]:
    def make(request: AgentRequest) -> ElasticAgent:
        workers = module.RemoteWorkers(("ssh", "gpu7"))
        return ElasticAgent(request.spec, request.handler, workers, **request.settings)

    with closing(AgentJob(make, harness, TIMEOUT_S, 2.0)) as job:
        yield job


def test_each_block_of_the_page_has_a_test() -> None:
    assert set(FILES) == {f"{MODULE}.py", LAUNCHER, OBSERVED, SUITE}
    assert len(BLOCKS) == len(FILES)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_test_suite_of_the_page_passes(site: Path) -> None:
    check_suite_passes(site, SUITE, 150.0)


def test_the_launcher_of_the_page_runs_a_script_on_the_other_host(site: Path) -> None:
    (site / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, LAUNCHER],
        cwd=site,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("WorkerState.SUCCEEDED")
    lines = sorted(line for line in done.stderr.splitlines() if "remote:" in line)
    assert [line[line.index("rank") :] for line in lines] == [
        f"rank {rank} of 2 remote: True" for rank in range(2)
    ]


def test_the_observable_launcher_of_the_page_has_a_status_and_a_report(site: Path) -> None:
    (site / "train.py").write_text(STEPS)
    out = subprocess.check_output([sys.executable, OBSERVED], cwd=site, text=True, timeout=110)
    assert out.splitlines()[-1].startswith("WorkerState.SUCCEEDED")
    history = read_history(site / "events.jsonl")
    assert (history.run, history.state) == ("job7", JobState.SUCCEEDED)
    assert history.progress[-1].step == 3
    (node,) = read_job(FileStore(str(site / "meeting")), "job7").summaries.values()
    assert node.summary.generation == 1


def test_a_killed_agent_leaves_no_worker_on_the_other_host(
    site: Path, harness: WorkerHarness
) -> None:
    (site / "agent.py").write_text(AGENT)
    pipe_dir = site.parent / "pipes"
    with subprocess.Popen([sys.executable, str(site / "agent.py"), str(pipe_dir)]) as agent:
        try:
            harness.wait_until_started(1, 2)
        finally:
            agent.kill()
    wait_until("the workers to exit", lambda: not harness.is_running(1), TIMEOUT_S)


def test_a_lost_connection_is_a_failure_that_uses_a_restart(job: AgentJob) -> None:
    node = job.node(Scenario.of(WorkerBehavior.RUN, WorkerBehavior.RUN), max_restarts=1)
    node.start()
    job.harness.wait_until_started(1, 2)
    node.agent.workers._process.kill()  # type: ignore[attr-defined]
    result = node.result()
    assert (result.state, result.restarts) == (WorkerState.SUCCEEDED, 1), result.reason


def test_a_missing_remote_shell_is_named_in_the_result(module: Any, harness: WorkerHarness) -> None:
    def make(request: AgentRequest) -> ElasticAgent:
        workers = module.RemoteWorkers(("no-such-shell", "gpu7"))
        return ElasticAgent(request.spec, request.handler, workers, **request.settings)

    with closing(AgentJob(make, harness, TIMEOUT_S, 1.0)) as job:
        result = job.node(Scenario.of(WorkerBehavior.SUCCEED, WorkerBehavior.SUCCEED)).run()
    assert result.state is WorkerState.FAILED
    assert "cannot run no-such-shell: No such file or directory" in result.reason
