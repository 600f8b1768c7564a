"""A job, each command and all imports work if prometheus-client is not installed."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from http_requests import get
from jobs import PROGRAMS, WITHOUT_TORCH, Job

from elasticlib.launch.cli_output import CLEAR_SCREEN
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults
NO_EXTRAS = str(PROGRAMS / "no_extras")
PRINTING_WORKER = str(PROGRAMS / "printing_worker.py")
COMMAND = (sys.executable, "-m", "elasticlib.launch.cli")


def environment(job: Job, *paths: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((NO_EXTRAS, *paths)),
        "TMPDIR": str(job.shortcut),
    }


def run_command(job: Job, *arguments: str, code: int | None = 0) -> str:
    """Run an `elasticlib` command, and return its stdout and stderr."""
    done = subprocess.run(
        (*COMMAND, *arguments),
        env=environment(job, WITHOUT_TORCH),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert code in (None, done.returncode), done.stdout
    return done.stdout


def run_in_terminal(job: Job, *arguments: str) -> str:
    """Run an `elasticlib` command whose output is a terminal, and return the output."""
    terminal, stdout = pty.openpty()
    try:
        variables = environment(job, WITHOUT_TORCH)
        variables.pop("NO_COLOR", None)
        subprocess.run(
            (*COMMAND, *arguments),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout,
            timeout=100,
            check=True,
        )
        return os.read(terminal, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(stdout)


def test_job_commands_and_imports_work_without_prometheus_client(job: Job) -> None:
    flags = ("--standalone", "--nproc-per-node", "2", "--start-method", "spawn")
    flags = (*flags, "--observe-port", "0", "--rdzv-id", "plain", "--log-dir", f"{job.folder}/logs")
    agent = job.start(
        "a",
        *job.agent_command(*flags, "--redirects", "3", program=PRINTING_WORKER),
        PYTHONPATH=os.pathsep.join((NO_EXTRAS, WITHOUT_TORCH)),
    )
    address = agent.wait_for_log(r"at http://(127\.0\.0\.1:\d+)/healthz").group(1)
    wait_until(
        "both workers", lambda: all((job.folder / f"printed.0.{n}").exists() for n in (0, 1))
    )
    assert get(address, "/healthz") == (200, "RUNNING\n")
    assert get(address, "/status.json")[0] == 200
    code, metrics = get(address, "/metrics")
    assert (code, "elasticlib_up{" in metrics) == (200, True)
    assert re.search(r"plain.*RUNNING", run_command(job, "status", "plain"))
    assert re.search(r"printing_worker\.py.*in main", run_command(job, "stacks", "plain"))
    # The exit code depends on this machine.
    assert "shared memory" in run_command(job, "doctor", code=None)
    job.finish()
    assert agent.exit_code() == 0
    assert "elasticlib report plain" in agent.text
    shown = run_in_terminal(job, "status", "--watch", "plain")
    assert shown.startswith(CLEAR_SCREEN)
    assert "SUCCEEDED" in shown
    page = job.folder / "run.html"
    run_command(job, "report", "plain", "-o", str(page))
    assert "<svg" in page.read_text()
    imported = subprocess.run(
        (sys.executable, "-c", IMPORT_ALL, str(page)),
        env=environment(job),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr


IMPORT_ALL = """
import importlib, pkgutil
import elasticlib

assert "<svg" in elasticlib.build_report("plain")._repr_html_()
# These modules need the extras of frameworks.
skipped = "integrations.", "examples.with_"
for found in pkgutil.walk_packages(elasticlib.__path__, "elasticlib."):
    name = found.name.partition(".")[2]
    if not name.startswith(skipped) and not name.endswith("__main__"):
        importlib.import_module(found.name)
"""
