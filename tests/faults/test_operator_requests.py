"""Operators control real jobs: they drain a node, stop the job, and restart its workers."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from context_steps import (
    check_no_step_is_lost,
    completed_steps,
    read_stop_request,
    wait_for_steps,
)
from jobs import (
    PROGRAMS,
    WITHOUT_TORCH,
    Job,
    Node,
    check_consistent_world,
    generation_of,
    is_alive,
)

from elasticlib.observe.requests import Request, RequestKeys, RequestKind, Seal, encode_request
from elasticlib.stores.file_store import FileStore
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

CONTEXT = str(PROGRAMS / "context_worker.py")
REGROUP = str(PROGRAMS / "regroup_worker.py")
LEASE = ("--rdzv-conf", "last_call_timeout=0.3")
# Workers that get SIGTERM instead of a notice have no time to save.
SHORT = ("--shutdown-timeout", "0.1")


def start_nodes(job: Job, names: str, *flags: str, program: str = CONTEXT) -> dict[str, Node]:
    """Start agents whose workers poll `should_stop` in each step."""
    command = job.agent_command(*LEASE, *SHORT, *flags, program=program)
    return {name: job.start(name, *command, PYTHONPATH=WITHOUT_TORCH) for name in names}


def control(job: Job, *arguments: str, code: int | None = 0) -> dict[str, Any]:
    """Run a command of an operator, and return its answers."""
    command, *rest = arguments
    output, _ = job.run_command(command, "--json", *rest, code=code)
    document: dict[str, Any] = json.loads(output)
    return document


def running_status(job: Job) -> dict[str, Any]:
    """Return the status of the job once its nodes have published that they train."""
    statuses: list[dict[str, Any]] = []

    def is_running() -> bool:
        statuses.append(job.status("job7", code=None))
        return statuses[-1]["state"] == "RUNNING"

    wait_until("a status of a running job", is_running)
    return statuses[-1]


def control_events(job: Job, run: str) -> list[tuple[str, str]]:
    """Return the action and the operator of each request that an agent has recorded."""
    return [
        (event.data["action"], event.data["by"])
        for events in job.events(run)
        for event in events
        if event.kind == "control.requested"
    ]


def read_report(job: Job) -> str:
    """Return the HTML report of the run."""
    path = job.folder / "report.html"
    job.run_command("report", "job7", "-o", str(path))
    return path.read_text()


@pytest.mark.parametrize("backend", ["tcp", "file"])
def test_a_node_that_is_drained_saves_and_leaves_and_a_spare_takes_over(
    job: Job, backend: str
) -> None:
    endpoint = job.start_store() if backend == "tcp" else str(job.folder / "store")
    flags = (
        *("--nnodes", "1:2", "--rdzv-id", "job7", "--spares", "1"),
        *("--rdzv-backend", backend, "--rdzv-endpoint", endpoint),
    )
    nodes = start_nodes(job, "ab", *flags)
    before = job.wait_for_world(2)
    nodes |= start_nodes(job, "c", *flags)
    wait_until("the spare", lambda: len(job.status("job7", code=None)["nodes"]) == 3)
    wait_for_steps(job)
    leaving = before[1]["node"]
    target = nodes.pop(leaving)
    members = {node["rank"]: node for node in running_status(job)["nodes"]}
    assert members[1]["pid"] == target.pid
    document = control(job, "drain", "job7", "1")
    (answer,) = document["answers"]
    assert (answer["node"], answer["rank"]) == (members[1]["node"], 1)
    assert answer["text"] == "leaves the job once its 1 worker has stopped"
    assert target.exit_code() == 75
    assert "DRAINED: received a drain request from " in target.text
    after = job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(after)
    assert "c" in {report["node"] for report in after}
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    assert read_stop_request(job, before)["reason"] == "drain"
    wait_for_steps(job)
    assert f"drains (a drain request from {document['by']})" in running_status(job)["reason"]
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0], job.logs
    check_no_step_is_lost(job)
    assert [action for action, _ in control_events(job, "job7")] == ["drain"]
    assert "drain by " in read_report(job)


@pytest.mark.parametrize("store", ["process", "node", "directory"])
def test_a_job_that_is_stopped_saves_and_all_its_nodes_end(job: Job, store: str) -> None:
    backend = "file" if store == "directory" else "tcp"
    endpoint = str(job.folder / "store")
    if store != "directory":
        endpoint = job.start_store() if store == "process" else f"127.0.0.1:{job.reserve_port()}"
    flags = (
        *("--nnodes", "2", "--rdzv-id", "job7"),
        *("--rdzv-backend", backend, "--rdzv-endpoint", endpoint),
    )
    nodes = start_nodes(job, "abc", *flags)
    reports = job.wait_for_world(2)
    wait_until("the spare", lambda: len(job.status("job7", code=None)["nodes"]) == 3)
    wait_for_steps(job)
    document = control(job, "stop", "job7")
    assert len(document["answers"]) == 3
    assert [node.exit_code() for node in nodes.values()] == [76, 76, 76], job.logs
    who = f"everyone who {'can write to' if store == 'directory' else 'reaches'} {endpoint}"
    remedy = "can stop this job: set ELASTICLIB_SECRET on all nodes to prevent that"
    assert all(f"{who} {remedy}" in node.text for node in nodes.values())
    assert read_stop_request(job, reports)["reason"] == "drain"
    assert json.loads((job.folder / "checkpoint").read_text()) == completed_steps(job)[-1]
    check_no_step_is_lost(job)
    for node in nodes.values():
        # A node may learn of the end of the job before it reads the request.
        assert re.search(rf"STOPPED: (received )?a stop request from {document['by']}", node.text)
    assert set(control_events(job, "job7")) == {("stop", document["by"])}
    status = job.status("job7", code=5)
    assert status["state"] == "STOPPED"
    assert f"a stop request from {document['by']}" in status["reason"]
    # The same command starts a new run, which continues from the checkpoint.
    again = start_nodes(job, "de", *flags)
    wait_for_steps(job)
    job.finish()
    assert [node.exit_code() for node in again.values()] == [0, 0], job.logs
    check_no_step_is_lost(job)


def test_all_workers_are_restarted_on_request_without_using_a_restart(job: Job) -> None:
    flags = ("--nnodes", "2", "--rdzv-id", "job7", "--rdzv-endpoint", job.start_store())
    nodes = start_nodes(job, "ab", *flags, "--max-restarts", "0")
    before = job.wait_for_world(2)
    wait_for_steps(job)
    document = control(job, "restart", "job7")
    texts = {answer["text"] for answer in document["answers"]}
    # The node that answers later may have heard of the restart from the other one.
    assert "restarts its 1 worker" in texts
    assert texts <= {"restarts its 1 worker", "is stopping its workers already"}
    after = job.wait_for_world(2, after=generation_of(before))
    check_consistent_world(after)
    assert not {report["pid"] for report in before} & {report["pid"] for report in after}
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    assert read_stop_request(job, before)["reason"] == "restart"
    wait_for_steps(job)
    status = running_status(job)
    assert (status["generation"], status["restarts"]) == (2, 0)
    assert status["reason"] == f"a restart request from {document['by']}"
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0], job.logs
    check_no_step_is_lost(job)
    for events in job.events("job7"):
        triggers = [e.data["trigger"] for e in events if e.kind == "generation.started"]
        assert triggers == ["start", "restart"]
    assert "Generation 2, on request" in read_report(job)


def test_workers_that_can_regroup_are_restarted_too(job: Job) -> None:
    flags = ("--nnodes", "2", "--rdzv-id", "job7", "--rdzv-endpoint", job.start_store())
    nodes = start_nodes(job, "ab", *flags, program=REGROUP)
    before = job.wait_for_world(2)
    paths = [job.folder / f"stepped.{report['pid']}" for report in before]
    wait_until("the first steps", lambda: all(path.exists() for path in paths))
    control(job, "restart", "job7")
    after = job.wait_for_world(2, after=generation_of(before))
    assert not {report["pid"] for report in before} & {report["pid"] for report in after}
    assert not any(is_alive(int(report["pid"])) for report in before)
    assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0, 0], job.logs


def test_a_node_that_drains_when_the_job_is_stopped_ends_as_stopped(job: Job) -> None:
    flags = ("--nnodes", "1:2", "--rdzv-id", "job7", "--rdzv-endpoint", job.start_store())
    command = job.agent_command(*LEASE, *flags, program=CONTEXT, worker=("save", "3"))
    nodes = {name: job.start(name, *command, PYTHONPATH=WITHOUT_TORCH) for name in "ab"}
    before = job.wait_for_world(2)
    wait_for_steps(job)
    nodes[before[1]["node"]].signal(signal.SIGUSR2)
    nodes[before[1]["node"]].wait_for_log("drain: the workers have")
    assert len(control(job, "stop", "job7")["answers"]) == 2
    assert [node.exit_code() for node in nodes.values()] == [76, 76], job.logs
    check_no_step_is_lost(job)


def test_two_operators_at_once_are_both_answered(job: Job) -> None:
    flags = ("--nnodes", "1:3", "--rdzv-id", "job7", "--rdzv-endpoint", job.start_store())
    nodes = start_nodes(job, "abc", *flags)
    before = job.wait_for_world(3)
    wait_for_steps(job)
    ids = [node["node"] for node in running_status(job)["nodes"]]
    command = (sys.executable, "-m", "elasticlib.launch.cli", "drain", "--json", "job7")
    operators = [job.start(f"operator{n}", *command, ids[n]) for n in (1, 2)]
    assert [process.exit_code() for process in operators] == [0, 0], job.logs
    answers = [json.loads(process.text)["answers"][0] for process in operators]
    assert [answer["node"] for answer in answers] == ids[1:]
    leaving = [nodes.pop(report["node"]) for report in before[1:]]
    assert [node.exit_code() for node in leaving] == [75, 75], job.logs
    (survivor,) = job.wait_for_world(1, after=generation_of(before))
    assert (survivor["node"], survivor["TORCHELASTIC_RESTART_COUNT"]) == (before[0]["node"], "0")
    job.finish()
    assert [node.exit_code() for node in nodes.values()] == [0], job.logs
    check_no_step_is_lost(job)


@pytest.mark.parametrize("backend", ["tcp", "file"])
def test_a_job_with_a_secret_is_controlled_only_with_it(job: Job, backend: str) -> None:
    secret = job.folder / "secret"
    secret.write_text("known to all the nodes")
    if backend == "tcp":
        endpoint = job.start_store("--secret-file", str(secret))
        name, code, message = f"tcp://{endpoint}/job7", 4, "secret"
    else:
        # The store checks no secret, and the node refuses the request itself.
        endpoint = str(job.folder / "store")
        name, code, message = f"file:{endpoint}/job7", 1, "the request was refused by"
    flags = ("--nnodes", "1", "--rdzv-id", "job7", "--rdzv-endpoint", endpoint)
    flags = (*flags, "--rdzv-backend", backend)
    conf = ("--rdzv-conf", f"secret_file={secret}")
    command = job.agent_command(*flags, *conf, program=CONTEXT)
    node = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    reports = job.wait_for_world(1)
    wait_for_steps(job)
    assert message in job.run_command("stop", name, code=code)[1]
    job.check_unchanged(reports, 0.5)
    control(job, "stop", name, "--secret-file", str(secret))
    assert node.exit_code() == 76
    assert "can stop this job" not in node.text
    assert "no node of run 'job7' is alive" in job.run_command("stop", "job7", code=4)[1]


def test_a_node_that_does_not_exist_changes_nothing(job: Job) -> None:
    nodes = start_nodes(job, "a", "--standalone", "--rdzv-id", "job7")
    reports = job.wait_for_world(1)
    _, message = job.run_command("drain", "job7", "gpu-z", code=2)
    assert "NODE 'gpu-z' is not the id, host or rank of a live node; choose one of " in message
    job.check_unchanged(reports, 0.5)
    job.finish()
    assert nodes["a"].exit_code() == 0


def test_a_request_that_an_earlier_run_left_in_the_store_has_no_effect(job: Job) -> None:
    directory = job.folder / "store"
    flags = ("--rdzv-backend", "file", "--rdzv-endpoint", str(directory), "--rdzv-id", "job7")
    with FileStore(directory) as store:
        request = Request("0" * 16, RequestKind.STOP, "", "job7", "earlier", 1, "ann@login", 3600.0)
        key = RequestKeys("job7").request(request.id)
        store.set(key, Seal(None, "job7").sign(key, encode_request(request)))
        nodes = start_nodes(job, "a", "--nnodes", "1", *flags)
        reports = job.wait_for_world(1)
        wait_for_steps(job)
        job.check_unchanged(reports, 2.0)
        assert store.get(key) is not None
    job.finish()
    assert nodes["a"].exit_code() == 0
    assert not control_events(job, "job7")


def test_workers_without_should_stop_are_stopped_by_signals(job: Job) -> None:
    flags = ("--standalone", "--rdzv-id", "job7", "--start-method", "spawn")
    script = Path(job.folder) / "sleeps.py"
    script.write_text("import sys, time\nopen(sys.argv[1] + '/up', 'w').close()\ntime.sleep(600)\n")
    command = job.agent_command(*flags, program=str(script))
    node = job.start("a", *command, PYTHONPATH=WITHOUT_TORCH)
    wait_until("the worker", (job.folder / "up").exists)
    control(job, "stop", "job7")
    assert node.exit_code() == 76
