"""Each node reports the first failure of a job, with its traceback, last."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node

import elasticlib

pytestmark = pytest.mark.faults

SCRIPT = str(PROGRAMS / "fail_after_all_started.py")
LIBRARY = str(Path(elasticlib.__file__).parent)
ALLOCATE = "import itertools; blocks = [bytearray(b'x' * 2**20) for _ in itertools.count()]"


@attrs.frozen
class FailedJob:
    """Two nodes after a failure of a worker."""

    nodes: list[Node]
    reports: list[dict[str, object]]  # failure.json of each node
    roles: list[dict[str, str]]  # what the workers reported about their roles


@pytest.fixture(scope="module")
def failed_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailedJob]:
    folder = tmp_path_factory.mktemp("two")
    job = Job(folder)
    flags = ("--nnodes", "2", "--rdzv-endpoint", job.start_store())
    nodes = []
    for name, role, workers in (("a", "reader", "1"), ("b", "trainer", "2")):
        node_flags = ("--role", role, "--nproc-per-node", workers, "--log-dir", str(folder / name))
        command = job.agent_command(*flags, *node_flags, program=SCRIPT, worker=("2",))
        nodes.append(job.start(name, *command, PYTHONPATH=WITHOUT_TORCH))
    codes = [node.exit_code() for node in nodes]
    assert codes == [1, 1]
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("*/*/failure.json"))]
    roles = [json.loads(file.read_text()) for file in sorted(folder.glob("role.*.json"))]
    yield FailedJob(nodes, reports, roles)
    job.close()
    job.wait_until_gone()


def test_each_node_prints_the_traceback_of_the_failed_worker_last(failed_job: FailedJob) -> None:
    for node in failed_job.nodes:
        lines = node.text.splitlines()
        (start,) = (i for i, line in enumerate(lines) if "elasticrun: root cause in" in line)
        shown = "\n".join(lines[start:])
        assert shown.count("worker of rank 2") == 1  # in the last line
        assert 'train(float("nan"))' in shown
        assert lines[-2] == "    ValueError: the loss is nan"
        assert lines[-1].startswith("elasticrun: FAILED: ")
        assert re.search("worker of rank 2 .*ValueError: the loss is nan", lines[-1])
        assert LIBRARY not in shown.partition("Traceback")[2]


def test_failure_json_is_equal_on_all_nodes(failed_job: FailedJob) -> None:
    first, second = failed_job.reports
    assert first == second
    cause = first["root_cause"]
    assert isinstance(cause, dict)
    assert (cause["rank"], cause["message"]) == (2, "ValueError: the loss is nan")
    assert (Path(cause["log_dir"]) / "error.json").is_file()
    assert f"logs: {cause['log_dir']} on {cause['host']}" in failed_job.nodes[0].text


def test_role_ranks_count_the_workers_of_the_role_on_all_nodes(failed_job: FailedJob) -> None:
    names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    roles = [tuple(role[name] for name in names) for role in failed_job.roles]
    assert sorted(roles) == [("reader", "0", "1"), ("trainer", "0", "2"), ("trainer", "1", "2")]
    assert {role["LOCAL_WORLD_SIZE"] for role in failed_job.roles} == {"1", "2"}


def test_the_root_cause_of_a_program_without_python_is_the_end_of_its_stderr(job: Job) -> None:
    text = "echo 'terminate called after: boom' >&2; echo '  what():  no room' >&2; kill -ABRT $$"
    agent = job.start("a", *single_node("sh", "-c", text), PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 1
    head, *end, last = agent.text.splitlines()[-5:]
    assert head.startswith("elasticrun: root cause in generation 1")
    text = "terminate called after: boom: what(): no room"
    assert f"was killed by SIGABRT (not sent by this agent): {text}" in last
    ((*_, last_event),) = job.events()
    assert " ".join(last_event.data["root_cause"]["what"].split()) in last
    assert end == [
        "  the last lines of its stderr:",
        "    terminate called after: boom",
        "      what():  no room",
    ]


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Create a cgroup with little memory."""
    parents = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
    limits = ("memory.limit_in_bytes", "memory.max")
    for parent, limit in zip(parents, limits, strict=True):
        group = parent / f"elasticlib-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text("200000000")
                yield group
                return
            finally:
                group.rmdir()
    pytest.skip("cgroups cannot be created")


def test_a_worker_killed_for_lack_of_memory_is_reported_as_such(
    job: Job, small_cgroup: Path
) -> None:
    enter = f'echo $$ > {small_cgroup}/cgroup.procs; exec "$@"'
    allocate = single_node("python3", "-c", ALLOCATE)
    agent = job.start("a", "sh", "-c", enter, "sh", *allocate, PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 1
    assert agent.text.splitlines()[-1].endswith(
        "was killed by SIGKILL, likely out of memory (0 of 0 restarts used)"
    )
    killed = job.start("b", *single_node("sh", "-c", "kill -KILL $$"), PYTHONPATH=WITHOUT_TORCH)
    assert killed.exit_code() == 1
    assert "was killed by SIGKILL (not sent by this agent)" in killed.text.splitlines()[-1]


def single_node(*program: str) -> tuple[str, ...]:
    """Return the command of an agent that runs a program on one node."""
    return (sys.executable, "-m", "elasticlib.launch", "--standalone", "--no-python", *program)
