"""The summary that the launcher prints at the end of a real run."""

from __future__ import annotations

import html
import os
import re
import shutil
import signal
import sys

import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job
from modules import extend_pythonpath

from elasticlib import LaunchConfig, LaunchOptions
from elasticlib.launch.elastic_launch import _remote_status_hint
from elasticlib.observe.history import GenerationTrigger
from elasticlib.observe.history_reader import read_history

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("endpoint", "hint"),
    [("n1", ' (from other machines: "elasticlib status tcp://n1:29400/j")'), ("127.0.0.1:7", "")],
)
def test_multi_node_run_prints_the_status_command_for_other_machines(
    endpoint: str, hint: str
) -> None:
    config = LaunchConfig(min_nodes=2, max_nodes=2, run_id="j", rdzv_endpoint=endpoint)
    assert _remote_status_hint(config.options()) == hint
    assert _remote_status_hint(LaunchOptions()) == ""


def test_run_that_lost_a_worker_prints_the_lost_time_and_the_report_command(job: Job) -> None:
    logs = job.folder / "logs"
    flags = ("--max-restarts", "1", "--rdzv-id", "a b", "--log-dir", str(logs))
    agent = job.start("a", *job.agent_command("--standalone", *flags), PYTHONPATH=WITHOUT_TORCH)
    os.kill(job.wait_for_world(1)[0]["pid"], signal.SIGKILL)
    job.wait_for_world(1, after=1)
    job.finish()
    assert agent.exit_code() == 0
    (directory,) = logs.iterdir()
    started = agent.text.splitlines()[0]
    assert started.endswith("elasticrun: run a b started; status: \"elasticlib status 'a b'\"")
    *_, duration, generation, lost_time, files, last = agent.text.splitlines()
    assert "s in 2 generations" in duration
    assert generation.startswith("  generation 2 after a failure, ")
    assert "was killed by SIGKILL" in generation
    assert re.match(
        r"  time lost on this node: shutdown (under )?\d.*, rendezvous (under )?\d", lost_time
    )
    assert files == f"logs and events in {directory}; more: elasticlib report 'a b'"
    assert last == "elasticrun: SUCCEEDED: 1 node done"
    history = read_history(directory)
    assert [generation.trigger for generation in history.generations] == [
        GenerationTrigger.START,
        GenerationTrigger.FAILURE,
    ]
    assert history.generations[1].cost.seconds > 0


def test_undisturbed_run_prints_a_summary_of_three_lines(job: Job) -> None:
    command = job.agent_command("--standalone", "--rdzv-id", "undisturbed")
    job.finish()
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH, LOGLEVEL="ERROR")
    assert agent.exit_code() == 0
    duration, files, last = agent.text.splitlines()
    assert " s in 1 generation, first workers started after imports " in duration
    assert files.startswith("events in ")
    assert files.endswith("events.jsonl; more: elasticlib report undisturbed")
    assert last == "elasticrun: SUCCEEDED: 1 node done"


def test_import_of_torch_is_not_counted_as_rendezvous(job: Job) -> None:
    torch = job.folder / "slow" / "torch"
    shutil.copytree(PROGRAMS / "stub_torch" / "torch", torch)
    with (torch / "__init__.py").open("a") as module:
        module.write("\nimport time; time.sleep(3)\n")
    job.finish()
    command = job.agent_command("--standalone", "--start-method", "forkserver")
    agent = job.start("a", *command, PYTHONPATH=extend_pythonpath(torch.parent))
    assert agent.exit_code() == 0
    line = agent.wait_for_log(r"generation 1: imports took (\S+) s, rendezvous took (\S+) s; ")
    assert float(line.group(1)) > 2
    assert float(line.group(2)) < float(line.group(1))
    (event,) = (e for e in job.events()[0] if e.kind == "generation.started")
    assert 2 < event.data["import_seconds"] <= event.data["duration_seconds"]
    assert re.search(r"first workers started after imports \d.* s, rendezvous ", agent.text)


def test_run_without_events_prints_no_report_command(job: Job) -> None:
    job.finish()
    command = job.agent_command("--standalone", fields={"observe.events": False})
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH, LOGLEVEL="ERROR")
    assert agent.exit_code() == 0
    duration, last = agent.text.splitlines()
    assert " s in 1 generation" in duration
    assert last == "elasticrun: SUCCEEDED: 1 node done"


def test_a_failed_run_shows_command_line_and_traceback_in_summary_and_report(job: Job) -> None:
    script = job.folder / "train.py"
    script.write_text("def train(batch):\n    raise ValueError(batch)\n\ntrain('bad batch')\n")
    flags = ("--standalone", "--start-method=spawn", "--rdzv-id", "job7")
    command = (sys.executable, "-m", "elasticlib.launch", *flags, str(script), "--lr", "1 e-3")
    agent = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 1
    shown = f"python -m elasticlib.launch {' '.join(flags)} {script} --lr '1 e-3'"
    lines = agent.text.splitlines()
    assert f"command: {shown}" in lines
    assert lines.index(f"command: {shown}") < lines.index("    ValueError: bad batch")
    assert "    Traceback (most recent call last):" in lines
    page = job.folder / "page.html"
    job.run_command("report", "job7", "-o", str(page))
    text = html.unescape(page.read_text())
    assert f"<td><code>{shown}</code></td>" in text
    assert re.search(
        r"<summary>Traceback</summary><pre>.*in train.*ValueError: bad batch", text, re.S
    )


def test_summary_suggests_to_preload_the_modules_whose_imports_delayed_a_restart(job: Job) -> None:
    package = job.folder / "slow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import time; time.sleep(3)\n")
    (job.folder / "threads.py").write_text(
        "import threading, time; time.sleep(0.3)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    script = job.folder / "train.py"
    script.write_text(
        "import os, sys, threads, slow.part, elasticlib\n"
        "elasticlib.context().step(1)\n"
        "assert [finder.__module__ for finder in sys.meta_path].count(\n"
        "    'elasticlib.workers.import_timer') == 0\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )

    def summary(*flags: str) -> str:
        launch = (sys.executable, "-m", "elasticlib.launch", "--standalone", "--max-restarts=1")
        agent = job.start("a", *launch, *flags, str(script), PYTHONPATH=WITHOUT_TORCH)
        assert agent.exit_code() == 0, agent.text
        text = agent.text
        agent.log.unlink()
        return text

    assert re.search(
        r"^  most of the lost time was the start of workers: add slow\.part to --preload to import "
        r"\d.* s of each start in advance$",
        summary(),
        re.MULTILINE,
    )
    assert "most of the lost time" not in summary("--preload=slow.part")
