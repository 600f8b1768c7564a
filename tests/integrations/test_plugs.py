"""Our backends under stock torchrun, and torch's handlers under our agent: real jobs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import BINARY, EtcdServer
from jobs import Job
from torchruns import need_our_entry_points, place_flags, torchrun, world

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


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("backend", "endpoint"), [(b, b) for b in BACKENDS], indirect=["endpoint"])
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
