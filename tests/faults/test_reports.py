"""Row A13: the first cause, with its traceback, is last on the screen of every node."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from jobs import PROGRAMS, WITHOUT_TORCH, Job, Node

pytestmark = pytest.mark.faults

SCRIPT = str(PROGRAMS / "fail_once_all_are_here.py")
EAT = "import itertools; eaten = [bytearray(b'x' * 2**20) for _ in itertools.count()]"


@attrs.frozen
class Told:
    """What two nodes said at their ends, and what their workers saw."""

    nodes: list[Node]
    reports: list[dict[str, object]]
    roles: list[dict[str, str]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = tmp_path_factory.mktemp("two")
    job = Job(folder)
    flags = ("--nnodes", "2", "--rdzv-endpoint", job.start_store())
    nodes = []
    for name, role, workers in (("a", "reader", "1"), ("b", "trainer", "2")):
        own = ("--role", role, "--nproc-per-node", workers, "--log-dir", str(folder / name))
        command = job.agent_command(*flags, *own, program=SCRIPT, worker=("2",))
        nodes.append(job.start(name, *command, PYTHONPATH=WITHOUT_TORCH))
    codes = [node.exit_code() for node in nodes]
    assert codes == [1, 1]
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("*/*/failure.json"))]
    roles = [json.loads(file.read_text()) for file in sorted(folder.glob("role.*.json"))]
    yield Told(nodes, reports, roles)
    job.close()
    job.wait_until_gone()


def test_a13_every_node_ends_with_the_traceback_of_the_one_that_failed(told: Told) -> None:
    for node in told.nodes:
        lines = node.text.splitlines()
        (begin,) = (i for i, line in enumerate(lines) if "elasticrun: root cause in" in line)
        shown = "\n".join(lines[begin:])
        assert "worker of rank 2" in lines[begin + 1]
        assert 'train(float("nan"))' in shown
        assert lines[-2] == "    ValueError: the loss is nan"
        assert lines[-1].startswith("elasticrun: FAILED: ")
        assert "ValueError: the loss is nan" in lines[-1]
        assert "elasticlib" not in shown.partition("Traceback")[2]


def test_a_report_for_programs_says_the_same_on_every_node(told: Told) -> None:
    first, second = told.reports
    assert first == second
    cause = first["root_cause"]
    assert isinstance(cause, dict)
    assert (cause["rank"], cause["message"]) == (2, "ValueError: the loss is nan")
    assert (Path(cause["log_dir"]) / "error.json").is_file()
    assert f"logs: {cause['log_dir']} on {cause['host']}" in told.nodes[0].text


def test_each_role_counts_its_own_workers_over_all_agents(told: Told) -> None:
    said = {
        (place["ROLE_NAME"], place["ROLE_RANK"], place["ROLE_WORLD_SIZE"]) for place in told.roles
    }
    sizes = {"reader": 1, "trainer": 2}
    wanted = {(n, str(rank), str(size)) for n, size in sizes.items() for rank in range(size)}
    assert said == wanted
    assert {place["LOCAL_WORLD_SIZE"] for place in told.roles} == {"1", "2"}


def test_the_last_words_of_a_program_that_is_not_pythons_are_its_cause(job: Job) -> None:
    text = "echo 'terminate called after: boom' >&2; echo '  what():  no room' >&2; kill -ABRT $$"
    agent = job.start("a", *alone("sh", "-c", text), PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 1
    end = agent.text.splitlines()[-5:]
    assert end[0].endswith("terminate called after: boom: what():  no room")
    assert "was killed by SIGABRT (not sent by this agent)" in end[0]
    ((*_, over),) = job.events()
    assert over.data["root_cause"]["what"] in end[0]
    assert end[1:4] == [
        "  the last lines of its stderr:",
        "    terminate called after: boom",
        "      what():  no room",
    ]


@pytest.fixture
def cramped() -> Iterator[Path]:
    """A cgroup with little memory, to be entered."""
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
    pytest.skip("no cgroup can be made here")


def test_a_worker_that_the_kernel_killed_for_memory_is_told_from_other_kills(
    job: Job, cramped: Path
) -> None:
    enter = f'echo $$ > {cramped}/cgroup.procs; exec "$@"'
    eat = alone("python3", "-c", EAT)
    agent = job.start("a", "sh", "-c", enter, "sh", *eat, PYTHONPATH=WITHOUT_TORCH)
    assert agent.exit_code() == 1
    assert agent.text.splitlines()[-1].endswith(
        "was killed by SIGKILL, likely out of memory (0 of 0 restarts used)"
    )
    killed = job.start("b", *alone("sh", "-c", "kill -KILL $$"), PYTHONPATH=WITHOUT_TORCH)
    assert killed.exit_code() == 1
    assert "was killed by SIGKILL (not sent by this agent)" in killed.text.splitlines()[-1]


def alone(*program: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "elasticlib.launch", "--standalone", "--no-python", *program)
