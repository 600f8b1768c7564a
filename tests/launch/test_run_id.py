"""Readable run ids, which the launcher generates for jobs without an id."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
from jobs import WITHOUT_TORCH, Job

from elasticlib import Function, LaunchConfig, Module, Script, elastic_launch
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.run_id import generate_run_id
from elasticlib.workers.spec import Command

pytestmark = pytest.mark.faults


def train() -> str:
    return os.environ["TORCHELASTIC_RUN_ID"]


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        (Script("some/where/train.py"), "train"),
        (Script("experiments/fit/__main__.py"), "fit"),
        (Script("fine tune (2).v2.py"), "fine-tune-2-.v2"),
        (Script("-.py"), "run"),
        (Script("x" * 200 + ".py"), "x" * 40),
        (Module("package.tasks.fit"), "fit"),
        (Module("package.fit.__main__"), "fit"),
        (Command("/usr/bin/env", ("python",)), "env"),
        (Function(train), "train"),
        (Function(lambda: 0), "lambda"),
        (Function(functools.partial(train)), "run"),
    ],
)
def test_the_id_has_the_name_of_the_program(entrypoint: Any, name: str) -> None:
    assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{4}}", generate_run_id(entrypoint))


def test_the_directories_the_status_and_the_report_of_a_job_use_its_generated_name(
    job: Job,
) -> None:
    logs = job.folder / "logs"
    agent = job.start(
        "a", *job.agent_command("--standalone", "--log-dir", str(logs)), PYTHONPATH=WITHOUT_TORCH
    )
    job.wait_for_world(1)
    name = agent.wait_for_log(r'run (\S+) started; status: "elasticlib status (\S+)"').group(1)
    assert re.fullmatch(r"fault_worker-[0-9a-f]{4}", name)
    assert job.status(name, code=None)["run"] == name
    job.finish()
    assert agent.exit_code() == 0
    (directory,) = logs.iterdir()
    assert directory.name.startswith(f"{name}_")
    assert f"more: elasticlib report {name}" in agent.text
    page = job.folder / "page.html"
    job.run_command("report", name, "-o", str(page))
    assert f"<h1>{name}</h1>" in page.read_text()


@pytest.mark.parametrize(
    "fields", [{}, {"run_id": ""}, {"run_id": "", "rdzv_endpoint": "localhost:0"}]
)
def test_a_launch_from_python_without_an_id_is_named_after_its_function(
    fields: dict[str, Any],
) -> None:
    config = LaunchConfig(start_method="spawn", **fields)
    first, second = (elastic_launch(config, train)()[0] for _ in range(2))
    assert re.fullmatch(r"train-[0-9a-f]{4}", first)
    assert first != second


def test_a_job_of_up_to_one_node_in_a_shared_store_gets_an_id_if_it_is_empty(
    tmp_path: Path,
) -> None:
    store = {"rdzv_backend": "file", "rdzv_endpoint": str(tmp_path / "store")}
    config = LaunchConfig(run_id="", start_method="spawn", **store)
    assert elastic_launch(config, train)()[0].startswith("train-")


def test_given_id_is_used_and_multi_node_jobs_share_the_default(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert parse_options(["--rdzv-id", "job7", str(script)])[0].rendezvous.run_id == "job7"
    assert (
        parse_options(["--standalone", "--rdzv-id", "job7", str(script)])[0].rendezvous.run_id
        == "job7"
    )
    several = ["--nnodes", "2", "--rdzv-endpoint", "node0", str(script)]
    assert (
        parse_options(several)[0].rendezvous.run_id
        == parse_options(several)[0].rendezvous.run_id
        == "none"
    )
