"""Jobs whose agents are actors of a real Ray cluster with several raylets on this machine.

The tests kill nodes, actors, workers and the driver. Jobs continue with the remaining nodes and use
added ones. No process of a job is left after its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Node, check_consistent_world, generation_of, is_alive
from pages import read_page
from processes import find_processes, read_environment

from elasticlib.testing.waiting import wait_until

pytest.importorskip("ray", reason="Ray is not installed here: make test-integrations has it")
from ray.cluster_utils import Cluster

# Each test starts several Ray processes, and a busy machine takes a minute for that.
pytestmark = pytest.mark.timeout(300)

DRIVER = str(Path(__file__).with_name("ray_driver.py"))
MARK = "ELASTICLIB_TEST_RAY"
SMALL = {"object_store_memory": 78 * 1024 * 1024}
# By default, Ray notices a lost node after about 15 s.
SHORT_TIMEOUTS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    # A killed process refuses connections at once, so the timeouts are for a busy machine only.
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 5,
    # By default, actors have a niceness of 15, and hardly run while other tests do.
    "worker_niceness": 0,
}


class RayCluster:
    """A Ray cluster: a head without CPUs for agents, and nodes that are added and killed."""

    def __init__(self, folder: str) -> None:
        self.mark = uuid.uuid4().hex
        # Ray records its newest cluster in this directory, and creates only the default one.
        os.environ.update({MARK: self.mark, "RAY_TMPDIR": folder})
        own = f"{folder}/ray"
        os.mkdir(own)
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": own, **SMALL}
        self._cluster = Cluster(True, head_node_args={**head, "_system_config": SHORT_TIMEOUTS})
        self.address = self._cluster.address
        self.nodes: list[Any] = []

    def add(self, **resources: float) -> Any:
        self.nodes.append(self._cluster.add_node(**{"num_cpus": 1, **resources}, **SMALL))
        return self.nodes[-1]

    def resize(self, count: int) -> None:
        """Add or kill nodes with one CPU until there are `count`."""
        while len(self.nodes) < count:
            self.add()
        while len(self.nodes) > count:
            self.kill(self.nodes[-1])

    def kill(self, node: Any) -> None:
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def raylet_of(self, pid: int) -> int:
        """Return the pid of the raylet that started the actor of this process."""
        return int(read_environment(pid)["RAY_RAYLET_PID"])

    def node_of(self, pid: int) -> Any:
        raylet = self.raylet_of(pid)
        (command_lines,) = (
            node
            for node in self.nodes
            if raylet in [process.process.pid for process in node.all_processes["raylet"]]
        )
        return command_lines

    def processes(self) -> dict[int, str]:
        """Return the command line of every process of the cluster, by pid."""
        command_lines = {}
        for pid in filter(is_alive, find_processes(MARK, self.mark)):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                command_lines[pid] = line.replace(b"\0", b" ").decode(errors="replace")
        return command_lines

    def job_processes(self) -> dict[int, str]:
        """Return the processes of jobs: agents, their guardians and workers."""
        rays = ("/ray/", "ray::")
        return {
            pid: line
            for pid, line in self.processes().items()
            if not any(text in line for text in rays) or "ray::NodeAgent" in line
        }

    def wait_for_exit(self) -> None:
        """Wait until no agent or worker is left."""
        try:
            wait_until("the exit of all processes of jobs", lambda: not self.job_processes(), 60.0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.job_processes()}") from None

    def close(self) -> None:
        self._cluster.shutdown()
        del os.environ[MARK], os.environ["RAY_TMPDIR"]
        wait_until("the exit of the cluster", lambda: not self.processes(), 60.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # The path is short, because the paths of sockets in it have a length limit.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        rays = RayCluster(folder)
        yield rays
        rays.close()


@pytest.fixture
def rays(cluster: RayCluster) -> Iterator[RayCluster]:
    """Return the cluster. No process of a job may be left after the test."""
    yield cluster
    cluster.wait_for_exit()


def start_driver(job: Job, rays: RayCluster, mode: str, *args: str) -> Node:
    """Start a process that runs a function, or the fault worker for the mode `work`."""
    command = (sys.executable, DRIVER, rays.address, mode, str(job.folder), *args)
    return job.start("driver", *command, RAY_ADDRESS=rays.address)


def read_result(driver: Node) -> Any:
    """Return the JSON value that the driver printed at the end."""
    assert driver.exit_code() == 0, driver.text
    return json.loads(driver.text.strip().splitlines()[-1])


def find_memory_dirs(reports: list[dict[str, Any]]) -> list[Path]:
    """Return the directories in shared memory of the agents of these workers."""
    return [Path(read_environment(p["pid"])["ELASTICLIB_SNAPSHOTS"]).parent for p in reports]


def wait_until_removed(folders: list[Path]) -> None:
    wait_until(
        "the removal of the snapshots in memory", lambda: not any(f.exists() for f in folders)
    )


def test_a_function_trains_on_two_nodes_and_returns_all_values(job: Job, rays: RayCluster) -> None:
    rays.resize(2)
    driver = start_driver(job, rays, "train")
    values = read_result(driver)
    assert [value["total"] for value in values.values()] == [3.0, 3.0]
    assert list(values) == ["0", "1"]
    for value in values.values():
        assert value["argv"][1:] == [rays.address, "train", str(job.folder)]
        assert value["folder"] == os.getcwd()
        assert (value["threads"], value["imported"]) == ("1", False)
    # Ray forwards the output of the workers to the driver.
    assert re.search(r"NodeAgent pid=\d+.*trained on rank 0", driver.text)


def test_workers_see_the_gpus_that_ray_gave_to_their_agent(job: Job, rays: RayCluster) -> None:
    rays.resize(2)
    node = rays.add(num_cpus=2, num_gpus=3)
    try:
        values = read_result(start_driver(job, rays, "gpus", "1:1"))
    finally:
        rays.kill(node)
    given = {value["devices"] for value in values.values()}
    assert len(values) == 2
    assert len(given) == 1
    assert {value["threads"] for value in values.values()} == {"3"}, "the runtime_env of ray.init"
    assert len(given.pop().split(",")) == 2


def test_a_job_continues_without_a_lost_node_and_uses_a_new_one(job: Job, rays: RayCluster) -> None:
    rays.resize(2)
    driver = start_driver(job, rays, "work", "1:2")
    two = job.wait_for_world(2)
    check_consistent_world(two)
    memory = find_memory_dirs(two)
    rays.kill(rays.node_of(two[1]["pid"]))
    one = job.wait_for_world(1, generation_of(two))
    wait_until("the exit of the worker of the lost node", lambda: not is_alive(two[1]["pid"]))
    rays.add()
    again = job.wait_for_world(2, generation_of(one))
    check_consistent_world(again)
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in again} == {"0"}
    memory += find_memory_dirs(again)
    job.finish()
    assert driver.exit_code() == 0, driver.text
    wait_until_removed(memory)


def test_workers_are_restarted_and_agents_replaced(job: Job, rays: RayCluster) -> None:
    rays.resize(2)
    driver = start_driver(job, rays, "work")
    first = job.wait_for_world(2)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = job.wait_for_world(2, generation_of(first))
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in second} == {"1"}
    memory = find_memory_dirs(second)
    os.kill(agent_of(second[0]["pid"]), signal.SIGKILL)
    third = job.wait_for_world(2, generation_of(second))
    memory += find_memory_dirs(third)
    # Replacing a lost agent uses no restart.
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in third} == {"1"}
    assert not any(is_alive(report["pid"]) for report in second)
    job.finish()
    assert driver.exit_code() == 0, driver.text
    wait_until_removed(memory)


def agent_of(worker: int) -> int:
    """Return the agent of a worker: its parent, or that of its fork servers."""
    pid = parent_of(worker)
    while Path(f"/proc/{pid}/comm").read_text() == "fork-server\n":
        pid = parent_of(pid)
    return pid


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def test_a_failure_is_raised_at_the_driver_with_its_cause(job: Job, rays: RayCluster) -> None:
    rays.resize(2)
    outcome = read_result(start_driver(job, rays, "fail"))
    assert outcome["state"] == "failed"
    assert outcome["cause"]["rank"] == 1
    assert outcome["cause"]["message"] == "ValueError: the loss is not a number"
    assert "in fail" in outcome["cause"]["traceback"]
    assert "1" in map(str, outcome["failures"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_without_the_driver(job: Job, rays: RayCluster, number: int) -> None:
    rays.resize(2)
    driver = start_driver(job, rays, "work")
    reports = job.wait_for_world(2)
    memory = find_memory_dirs(reports)
    driver.signal(number)
    if number == signal.SIGINT:
        assert read_result(driver)["state"] == "stopped"
    else:
        assert driver.exit_code() == -number, driver.text
    rays.wait_for_exit()
    wait_until_removed(memory)


def test_a_drain_of_the_driver_lets_all_workers_save_at_one_step(
    job: Job, rays: RayCluster
) -> None:
    rays.resize(2)
    driver = start_driver(job, rays, "save")
    job.wait_for_world(2)
    driver.signal(signal.SIGUSR2)
    assert read_result(driver)["state"] == "drained"
    saved = {path.name: path.read_text() for path in job.folder.glob("saved.*")}
    assert sorted(saved) == ["saved.0", "saved.1"], driver.text
    assert len(set(saved.values())) == 1, saved


def test_a_job_without_enough_resources_fails_with_the_reason(job: Job, rays: RayCluster) -> None:
    rays.resize(1)
    outcome = read_result(start_driver(job, rays, "starve", "2:2"))
    assert outcome["state"] == "failed"
    assert re.search(r"\(2 to 2 required\)|join_timeout", outcome["message"])


def test_the_program_of_the_page_runs(job: Job, rays: RayCluster) -> None:
    text, blocks = read_page("ray.md")
    [program] = [code for language, code in blocks if language == "python"]
    train = str(job.folder / "train.py")
    Path(train).write_text(program)
    node = rays.add(num_cpus=2, num_gpus=2)
    try:
        ran = job.start("page", sys.executable, train, RAY_ADDRESS=rays.address)
        assert ran.exit_code() == 0, ran.text
        assert "{0: 1.0, 1: 1.0}" in ran.text
    finally:
        rays.kill(node)
    assert "ray 2.60" in text
