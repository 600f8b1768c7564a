"""The names of runs that commands take."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib.errors import ConfigError, RunNotFoundError
from elasticlib.launch.target import RunTarget, find_target, open_target, parse_name, run_name
from elasticlib.rendezvous.membership import Leader
from elasticlib.rendezvous.store_layout import StoreKeys, encode
from elasticlib.stores.file_store import FileStore


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("tcp://node0:29400/job7", ("job7", "tcp", "node0:29400")),
        ("tcp://[::1]:29400,b:1/job7", ("job7", "tcp", "[::1]:29400,b:1")),
        ("tcp://node0:29400", ("", "tcp", "node0:29400")),
        ("tcp://node0:29400/", ("", "tcp", "node0:29400")),
        ("c10d://node0:29400/a%20job", ("a job", "c10d", "node0:29400")),
        ("file:/shared/dir/job7", ("job7", "file", "/shared/dir")),
        ("file:///shared/dir/with%2Fslash", ("with/slash", "file", "/shared/dir")),
        ("file:/shared/dir/", ("", "file", "/shared/dir")),
        ("file:/job7", ("job7", "file", "/")),
        ("file:dir/job7", ("job7", "file", "dir")),
        ("etcd://h1,h2:2379/job7", ("job7", "etcd", "h1,h2:2379")),
        (
            "my.stores:open_it://cache:6379/0/job7",
            ("job7", "my.stores:open_it", "cache:6379/0"),
        ),
    ],
)
def test_a_name_says_the_backend_the_endpoint_and_the_job(
    text: str, target: tuple[str, str, str]
) -> None:
    found = parse_name(text)
    assert found is not None
    assert (found.run_id, found.backend, found.endpoint) == target


@pytest.mark.parametrize("text", ["", "job7", "node0:29400", "/logs/job7", "[::1]:29400", "a:b/c"])
def test_other_texts_are_no_such_names(text: str) -> None:
    assert parse_name(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tcp:///job7",
            "a run is named tcp://HOST:PORT/JOB, file:/DIR/JOB or etcd://HOST,HOST/JOB",
        ),
        ("tcp://", "got 'tcp://'"),
        ("http://node0/job7", r"must be one of tcp, .*got 'http'"),
    ],
)
def test_a_name_without_an_endpoint_or_a_known_backend_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_name(text)


@pytest.mark.parametrize("backend", ["tcp", "file", "etcd"])
@pytest.mark.parametrize("run_id", ["job7", "a job", "with/slash", "?", "%", "jobs"])
def test_the_name_of_a_run_is_read_back(backend: str, run_id: str) -> None:
    assert parse_name(run_name(backend, "/dir", run_id)) == RunTarget(run_id, backend, "/dir")


@contextlib.contextmanager
def jobs_in_a_directory(tmp_path: Path, *names: str, alive: str = "") -> Iterator[None]:
    """Create a store with these jobs, of which one may have a leader."""
    with FileStore(tmp_path) as store:
        for name in names:
            store.set(StoreKeys(name).job_name, b"")
        if alive:
            store.set(StoreKeys(alive).leader, encode(Leader("id0", "host0")), ttl=60.0)
        yield


def opened_job(name: str) -> str:
    """Return the job that a command would show."""
    args = argparse.Namespace(named=name, rdzv_conf="", secret_file=None, timeout=1.0)
    with open_target(find_target(args), args) as run:
        return run.run_id


def test_the_only_job_of_a_store_needs_no_name(tmp_path: Path) -> None:
    with jobs_in_a_directory(tmp_path, "jobs"):
        assert opened_job(f"file:{tmp_path}/") == "jobs"


def test_of_several_jobs_the_only_live_one_needs_no_name(tmp_path: Path) -> None:
    with jobs_in_a_directory(tmp_path, "ended", "with/slash", alive="with/slash"):
        assert opened_job(f"file:{tmp_path}/") == "with/slash"
        with (
            jobs_in_a_directory(tmp_path, "third", alive="third"),
            pytest.raises(RunNotFoundError) as error,
        ):
            opened_job(f"file:{tmp_path}/")
    assert str(error.value) == (
        f"the store at {tmp_path} holds several jobs: third, with/slash; name one, such as "
        f"file:{tmp_path}/third"
    )


def test_a_store_without_a_job_is_named(tmp_path: Path) -> None:
    with (
        jobs_in_a_directory(tmp_path),
        pytest.raises(RunNotFoundError, match=f"the store at {tmp_path} holds no job"),
    ):
        opened_job(f"file:{tmp_path}/")
