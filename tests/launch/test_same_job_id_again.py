"""The same command is started again after the run of its job id has finished.

A node that starts while no node of the finished run is alive starts a new run. A node that was part
of the finished run, or that starts while a node of it is still alive, gets the result of that run.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from etcd_server import EtcdServer, needs_etcd
from jobs import Job, Node

from elasticlib.endpoint import split_endpoint
from elasticlib.rendezvous.store_layout import StoreKeys
from elasticlib.stores.etcd_store import EtcdStore
from elasticlib.stores.file_store import FileStore
from elasticlib.stores.interface import Store
from elasticlib.stores.tcp_client import TcpStore
from elasticlib.testing.waiting import wait_until

# Appends one line for each worker that runs, and fails while the file `broken` exists.
WORKER = """
echo "$ELASTICLIB_INCARNATION $ELASTICLIB_GENERATION $TORCHELASTIC_RESTART_COUNT" >> ran
test ! -e broken
"""
RUN_ID = "same"


@attrs.frozen
class PersistentStore:
    """A store that outlives the runs of a job: the flags that select it, and its clients."""

    flags: tuple[str, ...]
    open: Callable[[], Store]


@pytest.fixture(params=["file", "tcp", pytest.param("etcd", marks=needs_etcd)])
def store(request: pytest.FixtureRequest, job: Job, tmp_path: Path) -> Iterator[PersistentStore]:
    if request.param == "file":
        directory = str(tmp_path / "store")
        flags = ("--rdzv-backend", "file", "--rdzv-endpoint", directory)
        yield PersistentStore(flags, lambda: FileStore(directory))
    elif request.param == "tcp":
        endpoint = job.start_store()
        yield PersistentStore(
            ("--rdzv-endpoint", endpoint), lambda: TcpStore(*split_endpoint(endpoint))
        )
    else:
        with EtcdServer(tmp_path / "etcd") as etcd:
            flags = ("--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoint)
            yield PersistentStore(flags, lambda: EtcdStore(etcd.endpoint))


def read_workers(job: Job) -> dict[str, list[tuple[str, str]]]:
    """Return the generation and restart count of each worker, by the incarnation of its run."""
    workers: dict[str, list[tuple[str, str]]] = {}
    for line in (job.folder / "ran").read_text().splitlines():
        incarnation, generation, restarts = line.split()
        workers.setdefault(incarnation, []).append((generation, restarts))
    return workers


def test_same_command_trains_again_after_success_and_after_failure(
    job: Job, store: PersistentStore
) -> None:
    flags = (*store.flags, "--rdzv-id", RUN_ID, "--nnodes", "1:2", "--max-restarts", "1")
    command = (sys.executable, "-m", "elasticlib.launch", *flags, "--no-python", "sh", "-c")

    def start(name: str) -> Node:
        return job.start(name, *command, f"cd '{job.folder}'; {WORKER}")

    codes = [start("first").exit_code(), start("second").exit_code()]
    (job.folder / "broken").touch()
    codes += [start("third").exit_code(), start("fourth").exit_code()]
    (job.folder / "broken").unlink()
    codes.append(start("fifth").exit_code())

    assert codes == [0, 0, 1, 1, 0], job.logs
    # Each run has an incarnation, generations and a budget of one restart of its own.
    once, twice = [("1", "0")], [("1", "0"), ("2", "1")]
    assert list(read_workers(job).values()) == [once, once, twice, twice, once]
    assert "no workers ran" not in job.logs
    # `job.events` reads the events of the newest run only.
    (events,) = job.events(RUN_ID)
    assert [e.data["state"] for e in events if e.kind == "run.finished"] == ["succeeded"]


def test_same_command_trains_again_after_all_nodes_were_killed(
    job: Job, store: PersistentStore
) -> None:
    # A scheduler may kill all nodes of a job at once and start the job again.
    flags = (*store.flags, "--rdzv-id", RUN_ID, "--nnodes", "1:2")
    fast = ("--rdzv-conf", "keep_alive_interval=0.2")
    killed = [job.start_agent(name, *flags, *fast) for name in "ab"]
    job.wait_for_world(2)
    for node in killed:
        node.kill()
    started = [job.start_agent(name, *flags, *fast) for name in "cd"]
    reports = job.wait_for_world(2, after=1)
    assert sorted(report["node"] for report in reports) == ["c", "d"]
    job.finish()
    assert [node.exit_code() for node in started] == [0, 0]


def test_node_that_starts_while_a_node_of_the_finished_run_is_alive_gets_its_result(
    job: Job, store: PersistentStore
) -> None:
    # The lease outlasts the test, so that the stopped spare counts as alive.
    lease = ("--rdzv-conf", "keep_alive_interval=0.5,keep_alive_max_attempt=1000")
    flags = (*store.flags, "--rdzv-id", RUN_ID, "--nnodes", "1", *lease)
    member = job.start_agent("member", *flags)
    workers = job.wait_for_world(1)
    spare = job.start_agent("spare", *flags)
    nodes = StoreKeys(RUN_ID).node()
    with store.open() as client:
        wait_until("the spare to be announced", lambda: len(client.list(nodes).entries) == 2)
    spare.signal(signal.SIGSTOP)
    job.finish()
    assert member.exit_code() == 0

    late = job.start_agent("late", *flags)
    assert late.exit_code() == 0
    late.wait_for_log("SUCCEEDED: .*no workers ran on this node")
    spare.signal(signal.SIGCONT)
    assert spare.exit_code() == 0
    spare.wait_for_log("SUCCEEDED: .*no workers ran on this node")
    assert job.reports(1) == workers
    assert not job.reports(2)
