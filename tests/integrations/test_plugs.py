"""Our backends under stock torchrun, and torch's handlers under our agent: real jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from distributions import install, path_with
from etcd_server import BINARY, EtcdServer
from jobs import Job, Node, until
from pages import blocks_of
from ports import free_port
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torchruns import ALLREDUCE, need_our_entry_points, place_flags, torchrun, world

import elasticlib
from elasticlib.compat.from_torch import HandlerFromTorch, open_from_torch
from elasticlib.errors import RendezvousClosed
from elasticlib.rendezvous.bootstrap import open_threaded_torch_store
from elasticlib.rendezvous.interface import ChangeKind

BACKENDS = ("el-tcp", "el-file", "el-etcd")


@pytest.fixture(autouse=True)
def _entry_points() -> None:
    need_our_entry_points()


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, job: Job, tmp_path: Path) -> Iterator[str]:
    """Where nodes of the backend meet, which no node of the job takes with it."""
    backend = request.param
    if backend == "el-tcp":
        yield job.store()
    elif backend == "el-file":
        yield str(tmp_path / "meeting")
    elif BINARY is None:
        pytest.skip("no etcd here: install etcd-server")
    else:
        with EtcdServer(tmp_path / "etcd") as server:
            yield server.endpoint


@pytest.fixture
def port() -> int:
    return free_port()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [
        # The other stores pass the same contract, and this story before a release.
        pytest.param(name, name, marks=() if name == "el-tcp" else pytest.mark.release)
        for name in BACKENDS
    ],
    indirect=["endpoint"],
)
def test_under_torchrun_a_job_survives_its_workers_and_nodes_and_grows_again(
    job: Job, backend: str, endpoint: str
) -> None:
    flags = (*place_flags(backend, endpoint, "1:2"), "--max-restarts", "3")
    a, b = (torchrun(job, name, *flags) for name in "ab")
    first = world(job, 2)
    kill(first[0])
    second = world(job, 2, but=first.values())
    assert not set(first.values()) & set(second.values())
    b.kill()
    alone = world(job, 1, but=(*first.values(), *second.values()))
    assert a.process.poll() is None
    c = torchrun(job, "c", *flags)
    last = world(job, 2, but=alone.values())
    assert not set(last.values()) & set(second.values())
    job.finish()
    assert [node.exit_code() for node in (a, c)] == [0, 0]


def test_a_job_that_cannot_go_on_without_it_ends_for_all_with_the_reason(
    job: Job, tmp_path: Path
) -> None:
    flags = place_flags("el-file", tmp_path / "meeting", "2")
    a = torchrun(job, "a", *flags, "--max-restarts", "3")
    script = "import os, sys; sys.exit(3)"
    b = torchrun(job, "b", *flags, "--no-python", worker=(sys.executable, "-c", script))
    assert [b.exit_code(), a.exit_code()] == [1, 1]
    a.says(r"RendezvousClosedError: failed: .*exit code 3, its node's last restart")


def test_who_fails_for_good_leaves_and_serves_the_store_until_the_others_are_done(
    job: Job, port: int
) -> None:
    flags = (*place_flags("el-tcp", f"127.0.0.1:{port}", "1:2"), "--max-restarts", "3")
    host = torchrun(job, "host", *flags[:-1], "0")
    first = world(job, 1)
    other = torchrun(job, "other", *flags)
    both = world(job, 2, but=first.values())
    kill(both[0])
    alone = world(job, 1, but=both.values())
    assert host.process.poll() is None
    kill(alone[0])
    world(job, 1, but=alone.values())
    job.finish()
    assert [other.exit_code(), host.exit_code()] == [0, 1]


def elasticrun(job: Job, name: str, *flags: str, **extra: str) -> Node:
    return job.start(name, *job.agent("--max-restarts", "3", *flags, program=ALLREDUCE), **extra)


def test_under_elasticrun_torchs_own_rendezvous_lets_a_latecomer_in_and_recovers(
    job: Job, port: int
) -> None:
    place = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "--nnodes", "1:2")
    flags = ("--rdzv-backend", "torch-c10d", *place, "--rdzv-conf", "last_call_timeout=1")
    a = elasticrun(job, "a", *flags)
    first = world(job, 1)
    b = elasticrun(job, "b", *flags)
    second = world(job, 2, but=first.values())
    kill(second[0])
    third = world(job, 2, but=(*first.values(), *second.values()))
    said = [json.loads(f.read_text()) for f in job.folder.glob("place.*.json")]
    generations = {s["pid"]: int(s["ELASTICLIB_GENERATION"]) for s in said}
    assert generations[first[0]] == 1
    assert {generations[pid] for pid in second.values()} == {2}
    (now,) = {generations[pid] for pid in third.values()}
    assert now > 2
    job.finish()
    assert [node.exit_code() for node in (a, b)] == [0, 0]


@pytest.mark.parametrize("launcher", [elasticrun, torchrun])
def test_a_handler_that_is_registered_for_torchrun_is_used_by_its_name(
    job: Job, tmp_path: Path, launcher: Callable[..., Node]
) -> None:
    (code,) = [code for language, code in blocks_of("plugs.md")[1] if language == "python"]
    site = install(
        tmp_path / "site",
        "mycorp_rendezvous",
        code,
        "torchrun.handlers",
        mycorp="mycorp_rendezvous:get_handler",
    )
    place = ("--rdzv-endpoint", str(tmp_path / "file"), "--rdzv-id", "job", "--nnodes", "2")
    flags = ("--rdzv-backend", "mycorp", *place)
    nodes = [launcher(job, name, *flags, PYTHONPATH=path_with(site)) for name in "ab"]
    world(job, 2)
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]


def opened(
    port: int, slots: int, role: str, nodes: tuple[int, int], use_libuv: bool = True
) -> HandlerFromTorch:
    node = elasticlib.Node("id", "host", "127.0.0.1", slots, role)
    request = elasticlib.BackendRequest(
        endpoint=f"127.0.0.1:{port}",
        run_id="job",
        options={"last_call_timeout": "1"},
        timeout=5.0,
        node=node,
        limits=elasticlib.Limits(*nodes),
        timing=elasticlib.Timing(),
        use_libuv=use_libuv,
    )
    return open_from_torch("torch-c10d", request)


def test_torchs_older_server_is_what_use_libuv_asks_for(port: int) -> None:
    handler = opened(port, 1, "reader", (1, 1), use_libuv=False)
    assert handler._open_bootstrap is open_threaded_torch_store
    handler.shutdown()


def test_what_torch_leaves_to_agents_the_nodes_of_ours_tell_one_another(port: int) -> None:
    with ThreadPoolExecutor() as threads:
        a = opened(port, 2, "trainer", (1, 2))
        first = a.next_rendezvous()
        assert (first.generation, first.seat.world_size, first.max_restarts) == (1, 2, None)
        assert a.wait_for_change(0.0) is None
        b = opened(port, 1, "reader", (1, 2))
        joining = threads.submit(b.next_rendezvous)
        change = until("the newcomer to be seen", lambda: a.wait_for_change(0.0))
        assert change.kind is ChangeKind.RESIZE
        infos = sorted([a.next_rendezvous(), joining.result(60.0)], key=lambda info: info.rank)
    assert [info.generation for info in infos] == [2, 2]
    assert {info.incarnation for info in infos} == {first.incarnation}
    assert {info.bootstrap_store_info for info in infos} != {first.bootstrap_store_info}
    assert sorted(info.seat.slots for info in infos) == [1, 2]
    assert infos[1].seat.first_rank == infos[0].seat.slots
    assert [info.seat.first_role_rank for info in infos] == [0, 0]
    assert a.report_done()
    assert a.wait_for_change(0.0) is None
    assert b.report_done()
    for handler in (a, b):
        # torch's store answers no set: another connection may be served before it.
        change = until("the end of all", lambda handler=handler: handler.wait_for_change(0.0))
        assert change.kind is ChangeKind.SUCCEEDED
    # A node that is done ends the rendezvous for all, as torchrun does.
    assert b.shutdown()
    until("the end to be seen, which torch's handler reads once a second", a.is_closed)
    assert a.shutdown()


def test_a_node_that_is_told_to_go_leaves_torchs_rendezvous_open(port: int) -> None:
    with ThreadPoolExecutor() as threads:
        a, b = (opened(port, 1, "trainer", (2, 2)) for _ in range(2))
        joining = [threads.submit(handler.next_rendezvous) for handler in (a, b)]
        assert [future.result(60.0).world_size for future in joining] == [2, 2]
        assert b.shutdown()
        # One that has read nothing yet.
        assert not opened(port, 1, "trainer", (2, 2)).is_closed()
        waiting = threads.submit(a.next_rendezvous)
        assert a.shutdown()
        with pytest.raises(RendezvousClosed, match="this node has left"):
            waiting.result(60.0)


LEAVING = """
import sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

conf = {"keep_alive_interval": "60"}
params = RendezvousParameters("el-file", sys.argv[1], "job", 2, 2, "127.0.0.1", **conf)
get_rendezvous_handler(params).next_rendezvous()
sys.exit(1)
"""


def test_an_agent_that_torch_ends_without_a_word_still_leaves_at_once(tmp_path: Path) -> None:
    # As after a signal, when torchrun does not shut handlers down; the lease is of 5 minutes.
    conf = {"keep_alive_interval": "60"}
    place = ("el-file", str(tmp_path / "meeting"), "job", 2, 2, "127.0.0.1")
    handler = get_rendezvous_handler(RendezvousParameters(*place, **conf))
    command = [sys.executable, "-c", LEAVING, str(tmp_path / "meeting")]
    with subprocess.Popen(command) as process:
        assert handler.next_rendezvous().world_size == 2
        assert process.wait(60.0) == 1
    assert until("the other to be missed", handler.num_nodes_waiting) > 0
    handler._leave()  # type: ignore[attr-defined]
