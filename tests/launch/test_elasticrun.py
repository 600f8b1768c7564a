"""The command, run as a user would: what workers see, where logs go, how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from etcd_server import EtcdServer, needs_etcd
from jobs import Job, check_consistent_world
from ports import free_port

from elasticlib import EtcdStore
from elasticlib.testing.waiting import wait_until

pytestmark = pytest.mark.faults

PROGRAMS = Path(__file__).parents[1] / "programs"
WARM = (sys.executable, "-m", "elasticlib.launch")
# What runs here has no use for torch, which a fork server would import for two seconds.
RUN = (*WARM, "--start-method=spawn")
DUMP = """
import json, os, sys
folder = sys.argv[1]
name = f"{folder}/{os.environ['RANK']}.json"
json.dump(dict(os.environ), open(name, "w"))
"""
RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("the loss is not finite")
main()
"""


def run(*command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **extra}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )


def environments(folder: Path, *launcher: str, **extra: str) -> list[dict[str, str]]:
    """What each of two workers saw of its environment."""
    folder.mkdir()
    (folder / "dump.py").write_text(DUMP)
    script = (str(folder / "dump.py"), str(folder))
    done = run(*launcher, "--standalone", "--nproc-per-node", "2", *script, **extra)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_workers_see_what_torchrun_shows_them(tmp_path: Path) -> None:
    inherited = {"RANK": "5", "WORLD_SIZE": "9"}
    theirs = environments(
        tmp_path / "torch", sys.executable, "-m", "torch.distributed.run", **inherited
    )
    ours = environments(tmp_path / "elastic", *WARM, **inherited)
    for their, our in zip(theirs, ours, strict=True):
        told = {name for name in their if their[name] != os.environ.get(name)}
        # The time of the signal names is torch's own affair, and its master address a host name.
        told -= {"TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS"}
        vary = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        assert told <= set(our)
        assert {n: our[n] for n in told - vary} == {n: their[n] for n in told - vary}
        assert our["ELASTICLIB_GENERATION"] == "1"


def test_logs_stand_where_torchrun_puts_them(tmp_path: Path) -> None:
    text = ("sh", "-c", "echo out $RANK; echo err $RANK >&2")
    flags = ("--rdzv-id", "job", "--log-dir", str(tmp_path), "-r", "3", "-t", "0:1")
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}> "}
    done = run(*RUN, "--nproc-per-node", "2", *flags, "--no-python", *text, **template)
    assert done.returncode == 0
    (folder,) = tmp_path.glob("job_*/attempt_0")
    found = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.log")}
    assert found == {
        "0/stdout.log": "out 0\n",
        "0/stderr.log": "err 0\n",
        "1/stdout.log": "out 1\n",
        "1/stderr.log": "err 1\n",
    }
    assert done.stdout == "<default 0> out 0\n"


def test_torchs_record_names_the_cause_last_on_the_screen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RECORDED)
    done = run(*RUN, "--standalone", str(script))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "exited with code 1: ValueError: the loss is not finite" in last
    report = done.stderr.partition("elasticrun: root cause")[2]
    assert report.count("in main\n") == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--numa-binding node", "--numa-binding node: torch.numa cannot bind 2 workers"),
        ("--virtual-local-rank", "local rank 1 has none: CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_what_this_machine_cannot_give_is_refused_before_anything_starts(
    tmp_path: Path, flags: str, sentence: str
) -> None:
    more = ("--nproc-per-node", "2", "--no-python", "touch", str(tmp_path / "started"))
    done = run(*RUN, *flags.split(), *more, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not (tmp_path / "started").exists()


def test_the_installed_command_and_the_module_are_the_same() -> None:
    installed = run(str(Path(sys.executable).with_name("elasticrun")), "--help")
    assert installed.returncode == 0
    assert installed.stdout == run(*RUN, "--help").stdout


def test_static_nodes_have_the_ranks_they_ask_for(job: Job) -> None:
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    nodes = [job.start_agent(f"n{rank}", *place, "--node-rank", str(rank)) for rank in (1, 0)]
    places = job.wait_for_world(2)
    check_consistent_world(places)
    assert [place["node"] for place in places] == ["n0", "n1"]
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_the_node_at_the_endpoint_hosts_the_store_by_address(job: Job, host: str) -> None:
    flags = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{free_port()}")
    nodes = [job.start_agent(name, *flags) for name in "ab"]
    check_consistent_world(job.wait_for_world(2))
    hosting = [node.name for node in nodes if "this node hosts the store" in node.text]
    assert len(hosting) == 1
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def test_two_jobs_on_one_port_are_told_apart_by_name(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first = job.start_agent("a", "--nnodes", "1", "--rdzv-id", "red", "--rdzv-endpoint", endpoint)
    job.wait_for_world(1)
    other = job.start_agent("b", "--nnodes", "1", "--rdzv-id", "blue", "--rdzv-endpoint", endpoint)
    assert other.exit_code() == 1
    assert re.search(r"'red'.*'blue'", other.text)
    job.finish()
    assert first.exit_code() == 0


def test_a_node_that_comes_after_the_job_is_told_why_there_is_no_store(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    job.finish()
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    assert job.start_agent("a", *flags).exit_code() == 0
    # As on another machine, which cannot serve at that address.
    late = job.start_agent("late", *flags, "--rdzv-conf", "is_host=false,join_timeout=3")
    assert late.exit_code() == 1
    assert "the job is already over" in late.text
    assert "this node fails after 3 s" in late.text
    assert "the store was never reached: if the job is already over" in late.text


def test_a_folder_that_cannot_be_made_ends_the_launch_with_what_to_do(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    flags = ("--rdzv-id", "job", "--rdzv-backend", "file", "--rdzv-endpoint")
    launched = job.start_agent("a", "--nnodes", "1:2", *flags, str(tmp_path / "file" / "meeting"))
    assert launched.exit_code() == 1
    assert f"store folder {tmp_path}/file/meeting cannot be used" in launched.text
    assert "choose a folder" in launched.text


def test_other_settings_than_the_jobs_are_refused_by_name(job: Job) -> None:
    endpoint = job.start_store()
    first = job.start_agent("a", "--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    job.wait_for_world(1)
    other = job.start_agent("b", "--nnodes", "1:3", "--rdzv-endpoint", endpoint)
    assert other.exit_code() == 1
    assert re.search(r"max_nodes\b.*\b3\b.*\b2\b", other.text)
    job.finish()
    assert first.exit_code() == 0


def test_the_host_of_the_store_serves_until_the_others_have_ended(job: Job) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint)
    host = job.start_agent("host", *flags)
    wait_until("the store", lambda: "hosts the store" in host.text)
    guest = job.start_agent("guest", *flags)
    job.wait_for_world(2)
    (job.folder / "fail.host").touch()
    alone = job.wait_for_world(1, after=1)
    assert alone[0]["node"] == "guest"
    wait_until(
        "the host to say what it waits for", lambda: "serves the store until 1 node" in host.text
    )
    job.finish()
    assert guest.exit_code() == 0
    assert host.exit_code() == 1


@needs_etcd
def test_nodes_meet_in_an_etcd_and_leave_only_records_there(job: Job, tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        dead = f"127.0.0.1:{free_port()}"
        flags = ("--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-id", "job")
        place = ("--rdzv-endpoint", f"{dead},{etcd.endpoint}")
        nodes = [job.start_agent(name, *flags, *place) for name in "ab"]
        check_consistent_world(job.wait_for_world(2))
        job.finish()
        assert [node.exit_code() for node in nodes] == [0, 0]
        with EtcdStore(etcd.endpoint) as store:
            assert store.list("").entries
        assert not etcd.post("lease/leases").get("leases")


@needs_etcd
def test_a_killed_node_is_missed_in_an_etcd_after_its_lease(job: Job, tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        place = ("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", etcd.endpoint)
        flags = ("--nnodes", "1:2", "--rdzv-id", "job", *place)
        conf = ("--rdzv-conf", "keep_alive_interval=0.5,keep_alive_max_attempt=4,etcd_prefix=/jobs")
        nodes = {name: job.start_agent(name, *flags, *conf) for name in "ab"}
        job.wait_for_world(2)
        nodes["a"].kill()
        (alone,) = job.wait_for_world(1, after=1)
        assert alone["node"] == "b"
        job.finish()
        assert nodes["b"].exit_code() == 0


def test_a_number_that_cannot_be_is_refused_by_an_optimised_python_too(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text("raise SystemExit('it was started')")
    command = (sys.executable, "-O", "-m", "elasticlib.launch", "--max-restarts=-1", str(script))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "elasticrun: error: " in done.stderr
    assert "it was started" not in done.stderr


def test_a_thread_that_is_inside_torch_at_the_end_does_not_abort_the_command() -> None:
    ends = "import sys; from agent_inside_torch import main; sys.exit(main())"
    job = ("--standalone", "--start-method=spawn", "--no-python", "true")
    # Of five that end as interpreters do, one or more are nearly always aborted.
    commands = [
        subprocess.Popen([sys.executable, "-c", ends, *job], cwd=PROGRAMS, stderr=subprocess.PIPE)
        for _ in range(5)
    ]
    ended = [(process.communicate(timeout=100)[1], process.returncode) for process in commands]
    assert [code for _, code in ended] == [0] * 5, ended
