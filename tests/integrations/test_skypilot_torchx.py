"""The tasks of docs/skypilot.md and the component of docs/torchx.md run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Cluster, reason_hosts_unavailable
from jobs import PROGRAMS, WITHOUT_TORCH, Job, check_consistent_world
from pages import name_blocks, read_page

yaml = pytest.importorskip("yaml", reason="PyYAML reads the tasks")

BLOCKS = read_page("skypilot.md")[1] + read_page("torchx.md")[1]
TASKS = name_blocks([code for language, code in BLOCKS if language == "yaml"])
VENV = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def put_script(folder: Path) -> None:
    shutil.copy(PROGRAMS / "slurm_worker.py", folder / "train.py")
    shutil.copy(PROGRAMS / "fault_worker.py", folder)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_skypilot_task_trains_on_both_nodes(
    name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = cluster.job
    put_script(job.folder)
    # The nodes start in the directory of the test.
    monkeypatch.chdir(job.folder)
    task = yaml.safe_load(TASKS[name])
    hosts = cluster.add_hosts(task["num_nodes"])
    shared = {
        "SKYPILOT_NODE_IPS": "\n".join(host.address for host in hosts),
        "SKYPILOT_NUM_NODES": str(len(hosts)),
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_TASK_ID": "sky-2026-11-21-06-21-18-563597_cluster_1",
        "PATH": VENV,
        "PYTHONPATH": WITHOUT_TORCH,
    }
    for rank, host in enumerate(hosts):
        own = {"SKYPILOT_NODE_RANK": str(rank), **shared}
        host.start(host.name, "bash", "-ec", task["run"], **own)
    reports = job.wait_for_world(4)
    check_consistent_world(reports)
    assert [report["node"] for report in reports] == ["h1", "h1", "h2", "h2"]
    if name == "elastic.yaml":
        assert {report["id"] for report in reports} == {shared["SKYPILOT_TASK_ID"]}
        # A drained node exits with this code.
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    job.finish()
    for node in job.nodes:
        assert node.exit_code() == 0, node.text


def test_torchx_starts_elasticrun_with_its_command_line_for_torchrun(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchx", reason="torchx is not installed")
    if reason_hosts_unavailable():
        pytest.skip(reason_hosts_unavailable())
    put_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    (component,) = (code for language, code in BLOCKS if language == "python")
    (tmp_path / "elastic.py").write_text(component)
    (command,) = (code for language, code in BLOCKS if language == "sh")
    environment = {"PATH": VENV, "PYTHONPATH": WITHOUT_TORCH, "HOME": str(tmp_path)}
    # Port 29500 is free in the network namespace of the test.
    network = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    node = job.start("torchx", *network, "bash", "-ec", command, **environment)
    reports = job.wait_for_world(4)
    check_consistent_world(reports)
    assert len({report["agent"] for report in reports}) == 2
    (app,) = {report["id"] for report in reports}
    assert re.fullmatch(r"train-\w+", app)
    job.finish()
    assert node.exit_code() == 0, node.text
    output = subprocess.run(
        ["torchx", "run", "--dryrun", *command.split()[2:]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    # The arguments are those of dist.ddp, except for the program and the flags of elasticlib.
    assert "elasticrun --max-restarts 3 --rdzv_backend c10d" in output
    assert "--tee 3 --role ''" in output
