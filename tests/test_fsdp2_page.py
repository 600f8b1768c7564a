"""docs/fsdp2.md: its script trains, survives a killed worker and resumes at another world size."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Job, Node
from pages import name_blocks, read_page
from test_guide_pages import parse_command_line

from elasticlib import CheckpointManager
from elasticlib.testing.waiting import wait_until

TEXT, BLOCKS = read_page("fsdp2.md")
FILES = name_blocks([code for kind, code in BLOCKS if kind == "python"])
FIRST_RUN, KILL, SECOND_RUN, CLUSTER_RUN, VERIFY = (
    code.strip() for kind, code in BLOCKS if kind == "sh"
)
OUTPUTS = [block.splitlines() for block in re.findall(r"```\n(\d ranks.*?)```", TEXT, re.DOTALL)]


def test_page_has_two_files_and_five_commands() -> None:
    assert set(FILES) == {"train.py", "evaluate.py"}
    assert len(BLOCKS) == 7
    assert len(OUTPUTS) == 2


def test_lines_to_change_for_gpus_are_in_the_script() -> None:
    rows = re.findall(r"^\| `(.*?)` \| `.*` \|$", TEXT, re.MULTILINE)
    assert len(rows) == 3
    for line in rows:
        assert FILES["train.py"].count(f"{line}\n") == 1, line


def test_command_line_for_a_cluster_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert parse_command_line(*shlex.split(CLUSTER_RUN))


def start(job: Job, command: str) -> Node:
    """Start a command line of the page in the directory of the job."""
    program, *arguments = shlex.split(command)
    assert program == "elasticrun"
    script = f"cd {shlex.quote(str(job.folder))} && exec {sys.executable} -m elasticlib.launch "
    return job.start("node", "/bin/sh", "-c", script + shlex.join(arguments), OMP_NUM_THREADS="1")


def printed_lines(node: Node) -> list[str]:
    """Return what rank 0 of the script has printed."""
    return re.findall(r"(\d ranks, .*|done after .*)$", node.text, re.MULTILINE)


@pytest.mark.timeout(400)
def test_script_survives_a_killed_worker_and_resumes_at_another_world_size(job: Job) -> None:
    for name, code in FILES.items():
        (job.folder / name).write_text(code)
    checkpoints = job.folder / "checkpoints"
    first = start(job, FIRST_RUN)
    # The worker is killed after the first checkpoint, so that it has a snapshot as well.
    wait_until("a checkpoint", lambda: list(checkpoints.glob("step-*/manifest.json")), 120.0)
    assert KILL == "kill -9 $(cat rank1.pid)"
    subprocess.run(["/bin/sh", "-c", KILL], cwd=job.folder, check=True)
    assert first.exit_code(150.0) == 0, first.text
    start_line, restart_line, end_line = OUTPUTS[0]
    lines = printed_lines(first)
    assert [lines[0], lines[-1]] == [start_line, end_line]
    assert re.sub(r"step \d+", "step N", lines[1]) == re.sub(r"step \d+", "step N", restart_line)
    assert len(lines) == 3
    assert parts(checkpoints, 200) == 3

    second = start(job, SECOND_RUN)
    assert second.exit_code(150.0) == 0, second.text
    assert printed_lines(second)[-2:] == OUTPUTS[1]
    assert parts(checkpoints, 250) == 2
    check_checkpoints(job)


def parts(checkpoints: Path, step: int) -> int:
    """Return the number of files with parts of the state after a step."""
    return len(list(checkpoints.glob(f"step-{step:010}.*/part-*.safetensors")))


def check_checkpoints(job: Job) -> None:
    program, *arguments = shlex.split(VERIFY)
    assert program == "elasticlib"
    command, option = arguments[0], arguments[2]
    out, _ = job.run_command(command, str(job.folder / arguments[1]), option)
    assert out.count("verified") == len(CheckpointManager(job.folder / "checkpoints").steps())
    shapes = subprocess.check_output(
        [sys.executable, "evaluate.py"], cwd=job.folder, text=True, timeout=100
    )
    assert "'0.weight': (32, 16)" in shapes
