"""The `elasticrun` command in real jobs: environment of workers, log files and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from etcd_server import EtcdServer, needs_etcd
from jobs import PROGRAMS, Job, check_consistent_world
from launch_commands import DUMP_ENVIRONMENT, ELASTICRUN, SPAWN, run
from ports import free_port

from elasticlib import EtcdStore

pytestmark = pytest.mark.faults


FAIL_WITH_RECORD = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("the loss is not finite")
main()
"""


def run_two_workers(directory: Path, *launcher: str, **extra: str) -> list[dict[str, str]]:
    """Run a job of two workers and return the environment of each."""
    directory.mkdir()
    (directory / "dump.py").write_text(DUMP_ENVIRONMENT)
    script = (str(directory / "dump.py"), str(directory))
    done = run(*launcher, "--standalone", "--nproc-per-node", "2", *script, **extra)
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_workers_have_the_environment_of_torchrun(tmp_path: Path) -> None:
    inherited = {"RANK": "5", "WORLD_SIZE": "9"}
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    expected_environments = run_two_workers(tmp_path / "torch", *torchrun, **inherited)
    environments = run_two_workers(tmp_path / "elastic", *ELASTICRUN, **inherited)
    for expected, environment in zip(expected_environments, environments, strict=True):
        names = {name for name in expected if expected[name] != os.environ.get(name)}
        # Only torch's own agent reads the first; elasticrun chooses another value for the second.
        names -= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS"}
        # These differ between any two launches.
        vary = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        assert names <= set(environment)
        same = names - vary
        assert {n: environment[n] for n in same} == {n: expected[n] for n in same}
        assert environment["ELASTICLIB_GENERATION"] == "1"


def test_log_files_have_the_paths_of_torchrun(tmp_path: Path) -> None:
    text = ("sh", "-c", "echo out $RANK; echo err $RANK >&2")
    flags = ("--rdzv-id", "job", "--log-dir", str(tmp_path), "-r", "3", "-t", "0:1")
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}> "}
    done = run(*SPAWN, "--nproc-per-node", "2", *flags, "--no-python", *text, **template)
    assert done.returncode == 0
    (attempt,) = tmp_path.glob("job_*/attempt_0")
    logs = {str(file.relative_to(attempt)): file.read_text() for file in attempt.rglob("*.log")}
    assert logs == {
        "0/stdout.log": "out 0\n",
        "0/stderr.log": "err 0\n",
        "1/stdout.log": "out 1\n",
        "1/stderr.log": "err 1\n",
    }
    assert done.stdout == "<default 0> out 0\n"


def test_last_line_of_the_console_is_the_error_that_record_caught(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAIL_WITH_RECORD)
    done = run(*SPAWN, "--standalone", str(script))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "exited with code 1: ValueError: the loss is not finite" in last
    report = done.stderr.partition("elasticrun: root cause")[2]
    assert report.count("in main\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--numa-binding node", "--numa-binding node: torch.numa cannot bind 2 workers"),
        ("--virtual-local-rank", "local rank 1 has none: CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_missing_hardware_is_an_error_before_anything_starts(
    tmp_path: Path, flags: str, message: str
) -> None:
    more = ("--nproc-per-node", "2", "--no-python", "touch", str(tmp_path / "started"))
    done = run(*SPAWN, *flags.split(), *more, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "started").exists()


def test_installed_command_equals_the_module() -> None:
    installed = run(str(Path(sys.executable).with_name("elasticrun")), "--help")
    assert installed.returncode == 0
    assert installed.stdout == run(*SPAWN, "--help").stdout


def test_static_nodes_have_the_requested_ranks(job: Job) -> None:
    endpoint_flags = (
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    nodes = [
        job.start_agent(f"n{rank}", *endpoint_flags, "--node-rank", str(rank)) for rank in (1, 0)
    ]
    reports = job.wait_for_world(2)
    check_consistent_world(reports)
    assert [report["node"] for report in reports] == ["n0", "n1"]
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_node_with_the_address_of_the_endpoint_hosts_the_store(job: Job, host: str) -> None:
    flags = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{free_port()}")
    nodes = [job.start_agent(name, *flags) for name in "ab"]
    check_consistent_world(job.wait_for_world(2))
    hosting = [node.name for node in nodes if "this node hosts the store" in node.text]
    assert len(hosting) == 1
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_node_of_another_job_at_the_same_port_is_rejected_by_run_id(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first = job.start_agent("a", "--nnodes", "1", "--rdzv-id", "red", "--rdzv-endpoint", endpoint)
    job.wait_for_world(1)
    other = job.start_agent("b", "--nnodes", "1", "--rdzv-id", "blue", "--rdzv-endpoint", endpoint)
    assert other.exit_code() == 1
    assert re.search(r"'red'.*'blue'", other.text)
    job.finish()
    assert first.exit_code() == 0


def test_node_that_starts_after_the_job_has_finished_explains_the_missing_store(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    job.finish()
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    assert job.start_agent("a", *flags).exit_code() == 0
    # With is_host=false, the node cannot host the store, like a node on another machine.
    late = job.start_agent("late", *flags, "--rdzv-conf", "is_host=false,join_timeout=3")
    assert late.exit_code() == 1
    assert "the job is already over" in late.text
    assert "this node fails after 3 s" in late.text
    assert "the store was never reached: if the job is already over" in late.text


def test_store_directory_that_cannot_be_created_fails_with_the_remedy(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    flags = ("--rdzv-id", "job", "--rdzv-backend", "file", "--rdzv-endpoint")
    node = job.start_agent("a", "--nnodes", "1:2", *flags, str(tmp_path / "file" / "store"))
    assert node.exit_code() == 1
    assert f"store folder {tmp_path}/file/store cannot be used" in node.text
    assert "choose a folder" in node.text


@pytest.mark.parametrize("limit", [20, 24])  # met by the thread of the rendezvous, torch's store
def test_limit_of_open_files_that_is_too_low_is_named_with_the_remedy(
    tmp_path: Path, limit: int
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = [sys.executable, "-m", "elasticlib.launch", "--start-method", "spawn", str(script)]
    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    remedy = rf"this process may have {limit} open files \(ulimit -n\), and has .*: raise the limit"
    assert re.search(f"elasticrun: FAILED: .*{remedy}", done.stderr), done.stderr


def test_node_with_other_settings_than_the_job_is_rejected_by_name(job: Job) -> None:
    endpoint = job.start_store()
    first = job.start_agent("a", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    job.wait_for_world(1)
    other = job.start_agent("b", "--nnodes", "1:3", "--rdzv-endpoint", endpoint)
    assert other.exit_code() == 1
    assert re.search(r"max_nodes\b.*\b3\b.*\b2\b", other.text)
    job.finish()
    assert first.exit_code() == 0


def test_store_host_serves_until_the_other_nodes_have_finished(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    host = job.start_agent("host", *flags)
    host.wait_for_log("hosts the store")
    guest = job.start_agent("guest", *flags)
    job.wait_for_world(2)
    (job.folder / "fail.host").touch()
    (survivor,) = job.wait_for_world(1, after=1)
    assert survivor["node"] == "guest"
    host.wait_for_log("serves the store until 1 node")
    job.finish()
    assert guest.exit_code() == 0
    assert host.exit_code() == 1


@needs_etcd
def test_nodes_that_use_etcd_leave_records_and_no_leases_there(job: Job, tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        dead = f"127.0.0.1:{free_port()}"
        flags = ("--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-id", "job")
        endpoint_flags = ("--rdzv-endpoint", f"{dead},{etcd.endpoint}")
        nodes = [job.start_agent(name, *flags, *endpoint_flags) for name in "ab"]
        check_consistent_world(job.wait_for_world(2))
        job.finish()
        assert [node.exit_code() for node in nodes] == [0, 0]
        with EtcdStore(etcd.endpoint) as store:
            assert store.list("").entries
        assert not etcd.post("lease/leases").get("leases")


@needs_etcd
def test_killed_node_is_lost_after_its_lease_in_etcd_expires(job: Job, tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        endpoint_flags = ("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", etcd.endpoint)
        flags = ("--nnodes", "1:2", "--rdzv-id", "job", *endpoint_flags)
        conf = ("--rdzv-conf", "keep_alive_interval=0.5,keep_alive_max_attempt=4,etcd_prefix=/jobs")
        nodes = {name: job.start_agent(name, *flags, *conf) for name in "ab"}
        job.wait_for_world(2)
        nodes["a"].kill()
        (survivor,) = job.wait_for_world(1, after=1)
        assert survivor["node"] == "b"
        job.finish()
        assert nodes["b"].exit_code() == 0


def test_invalid_number_is_rejected_by_an_optimised_python_too(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text("raise SystemExit('it was started')")
    optimised = (sys.executable, "-O", "-m", "elasticlib.launch")
    done = run(*optimised, "--max-restarts=-1", str(script))
    assert done.returncode == 2
    assert "elasticrun: error: " in done.stderr
    assert "it was started" not in done.stderr


def test_thread_inside_torch_at_exit_does_not_abort_the_command() -> None:
    code = "import sys; from agent_inside_torch import main; sys.exit(main())"
    job = ("--standalone", "--start-method=spawn", "--no-python", "true")
    # Without the fix, at least one of five such processes is nearly always aborted.
    commands = [
        subprocess.Popen([sys.executable, "-c", code, *job], cwd=PROGRAMS, stderr=subprocess.PIPE)
        for _ in range(5)
    ]
    results = [(process.communicate(timeout=100)[1], process.returncode) for process in commands]
    assert [returncode for _, returncode in results] == [0] * 5, results
