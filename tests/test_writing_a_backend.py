"""docs/writing_a_backend.md: its backend works, its test suite passes, and its commands run."""

from __future__ import annotations

import ast
import configparser
import contextlib
import importlib.util
import inspect
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from jobs import Job, check_consistent_world
from modules import extend_pythonpath, write_module
from pages import check_suite_passes, name_blocks, read_page
from redis_server import RedisServer, needs_redis

from elasticlib import LaunchConfig, Store
from elasticlib.errors import ConfigError, StoreConnectionError, StoreTimeoutError
from elasticlib.launch.cli import main
from elasticlib.launch.rendezvous_setup import open_rendezvous
from elasticlib.testing.waiting import wait_until

TEXT, BLOCKS = read_page("writing_a_backend.md")
FILES = name_blocks([code for kind, code in BLOCKS if kind != "sh"])
MODULE, SUITE = "elasticlib_redis", "test_elasticlib_redis.py"
TRY, COMMAND, TRIAL, STATUS, STATUS_WITH_PASSWORD = (
    code.strip() for kind, code in BLOCKS if kind == "sh"
)

Connect = Callable[..., Store]
pytestmark = [needs_redis, pytest.mark.faults]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server
    assert list(folder.iterdir()) == [server.log]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a directory with the module of the page."""
    return write_module(tmp_path / "site", MODULE, FILES[f"{MODULE}.py"])


@pytest.fixture
def module(site: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module of the page."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return importlib.import_module(MODULE)


@pytest.fixture
def connect(module: Any, server: RedisServer) -> Iterator[Connect]:
    stores: list[Store] = []

    def connect(**settings: Any) -> Store:
        stores.append(module.RedisStore(server.url, "job", **settings))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def test_each_block_of_the_page_has_a_test() -> None:
    assert set(FILES) == {f"{MODULE}.py", SUITE}
    assert len(BLOCKS) == len(FILES) + 5


def test_the_commands_that_try_the_page_name_existing_files_and_extras() -> None:
    install, server, suite, stop = map(shlex.split, TRY.splitlines())
    project = configparser.ConfigParser()
    project.read(Path(__file__).parent.parent / "setup.cfg")
    (extra,) = re.findall(r"^elasticlib\[(\w+)\]$", install[2])
    assert extra in project["options.extras_require"]
    # Another test runs the suite, with a server of its own.
    variable, url = suite[0].split("=")
    assert [server[2], stop[2]] == [url.rpartition(":")[2]] * 2
    assert f'os.environ["{variable}"]' in FILES[SUITE]
    assert suite[1:] == ["python", "-m", "pytest", SUITE]


def test_the_commands_for_one_machine_differ_from_those_above_only_in_the_address() -> None:
    server, launch = TRIAL.splitlines()
    assert server == TRY.splitlines()[1]
    here = f"localhost:{shlex.split(server)[2]}"
    assert launch == COMMAND.replace("cache:6379", here) + " 400"
    args = shlex.split(STATUS_WITH_PASSWORD)
    at = args.index("--rdzv-conf")
    assert args[:at] + args[at + 2 :] == shlex.split(STATUS)
    assert f'options.pop("{args[at + 1].partition("=")[0]}", None)' in FILES[f"{MODULE}.py"]


def test_the_page_implements_each_method_of_a_store() -> None:
    documented = dict(re.findall(r"^\| `(\w+)\((.*?)\)`", TEXT, re.MULTILINE))
    assert documented.keys() == Store.__abstractmethods__
    for name, arguments in documented.items():
        parameters = inspect.signature(getattr(Store, name)).parameters.values()
        bare = [one.replace(annotation=one.empty) for one in parameters]
        assert str(inspect.Signature(bare)) == f"(self, {arguments})"


def test_the_page_gives_the_correct_number_of_lines() -> None:
    tree = ast.parse(FILES[f"{MODULE}.py"])
    (body,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    (script,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    )
    lines = FILES[f"{MODULE}.py"].splitlines()[body.lineno - 1 : body.end_lineno]
    counts = [len([line for line in part if line]) for part in (lines, script.splitlines())]
    match = re.search(r"The class has (\d+) lines, and the Lua script (\d+)", TEXT)
    assert match is not None
    assert [int(number) for number in match.groups()] == counts


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_test_suite_of_the_page_passes(site: Path, server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / SUITE).write_text(FILES[SUITE])
    environment = {**os.environ, "PYTHONPATH": extend_pythonpath(site), "REDIS_URL": server.url}
    check_suite_passes(tmp_path, SUITE, 250.0, environment)


def test_the_commands_of_the_page_run_a_job_and_show_its_status(
    job: Job,
    site: Path,
    server: RedisServer,
    module: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del module
    args = shlex.split(COMMAND)
    assert (args[0], args[-1]) == ("elasticrun", "train.py")
    flags = [server.endpoint if arg == "cache:6379" else arg for arg in args[1:-1]]
    assert flags != args[1:-1]
    nodes = [job.start_agent(name, *flags, PYTHONPATH=extend_pythonpath(site)) for name in "ab"]
    check_consistent_world(job.wait_for_world(2))
    program, *status_args = shlex.split(STATUS)
    assert program == "elasticlib"
    assert main([arg.replace("cache:6379", server.endpoint) for arg in status_args]) == 0
    assert "job7: RUNNING" in capsys.readouterr().out
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    with redis.Redis.from_url(server.url) as client:
        assert not client.exists("elasticlib:{job7}:leases")


def test_the_backend_of_the_page_rejects_unknown_settings(module: Any, tmp_path: Path) -> None:
    del module
    secret = tmp_path / "secret"
    secret.write_text("word\n")
    settings = {"run_id": "job", "rdzv_backend": f"{MODULE}:open_redis", "rdzv_endpoint": "h:1"}
    good = LaunchConfig(**settings, rdzv_configs={"password_file": str(secret)}).options()
    open_rendezvous(good).close()
    with pytest.raises(ConfigError, match="takes password_file, not database"):
        open_rendezvous(LaunchConfig(**settings, rdzv_configs={"database": "1"}).options())


# Failures that the page describes and the contract suite does not cover


def test_a_lease_survives_a_pause_of_redis(connect: Connect, server: RedisServer) -> None:
    store = connect()
    lease = store.set("lease", b"", ttl=0.5)
    server.signal(signal.SIGSTOP)
    threading.Event().wait(1.0)
    server.signal(signal.SIGCONT)
    assert store.get("lease") == lease
    store.refresh("lease", lease.version)


@pytest.mark.parametrize("jump", [-3_600_000, 3_600_000])
def test_a_lease_does_not_depend_on_the_wall_clock(
    connect: Connect, server: RedisServer, jump: int
) -> None:
    store = connect()
    lease = store.set("lease", b"", ttl=0.5)
    with redis.Redis.from_url(server.url) as client:
        # This has the effect of setting the clock by an hour after the script has last read it.
        client.hincrby("elasticlib:{job}:meta", "real", jump)
    assert store.get("lease") == lease
    store.refresh("lease", lease.version)
    assert store.wait("lease", after=lease.version, timeout=10.0)
    assert store.get("lease") is None


def test_a_write_without_an_answer_fails_and_is_not_repeated(
    connect: Connect, server: RedisServer
) -> None:
    store, other = connect(timeout=0.3), connect()
    before = other.set("key", b"old").version

    def is_connected() -> bool:
        with contextlib.suppress(StoreTimeoutError):  # the timeout is short for a busy machine
            return store.get("key") is not None
        return False

    def count_connections() -> int:
        return int(client.info("stats")["total_connections_received"])

    wait_until("a connection", is_connected)
    with redis.Redis.from_url(server.url) as client:
        num_connections = count_connections()
        server.signal(signal.SIGSTOP)
        with pytest.raises(StoreTimeoutError, match=r"set 'key' in Redis, timeout=0\.3 s"):
            store.compare_set("key", b"new", expected=before)
        server.signal(signal.SIGCONT)
        assert other.wait("key", after=before, timeout=10.0)
        assert other.list("").version == before + 1
        # A second attempt would have opened another connection.
        assert count_connections() == num_connections


def test_a_lost_redis_raises_a_connection_error(connect: Connect, server: RedisServer) -> None:
    store = connect()
    store.set("key", b"")
    server.kill()
    with pytest.raises(StoreConnectionError, match="get 'key' in Redis"):
        store.get("key")


def test_a_waiting_client_detects_that_redis_was_emptied(
    connect: Connect, server: RedisServer
) -> None:
    store = connect()
    version = [store.set("key", b"%d" % number).version for number in range(5)][-1]
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    assert store.wait("key", after=version, timeout=0.0) is True
