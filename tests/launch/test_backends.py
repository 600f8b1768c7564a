"""Rendezvous backends of users: package.module:function, imported when a launch opens it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from jobs import Job, check_consistent_world
from modules import extend_pythonpath, write_module

from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse
from elasticlib.launch.cli import main
from elasticlib.launch.flags import BUILTIN_BACKENDS
from elasticlib.launch.launch_config import LaunchConfig
from elasticlib.launch.rendezvous_setup import open_rendezvous

CODE = """
from elasticlib import DynamicRendezvousHandler, FileStore
from elasticlib.errors import ConfigError

requests = []

def open_store(request):
    requests.append(request)
    unknown = set(request.options) - {"colour", "user"}
    if unknown:
        raise ConfigError(f"user_backends has no option {unknown.pop()}")
    return FileStore(request.endpoint, timeout=request.timeout)

def open_handler(request):
    store = FileStore(request.endpoint, timeout=request.timeout)
    return DynamicRendezvousHandler(
        store,
        request.run_id,
        request.node,
        request.settings,
        timeouts=request.timeouts,
        backend="complete",
    )

def open_nothing(request):
    return request.endpoint

def open_badly(request):
    return request.no_such_thing
"""
RENDEZVOUS = ("--rdzv-endpoint", "somewhere", "--rdzv-id", "job")


@pytest.fixture
def site_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the import path of this process, with a module of several backends."""
    folder = write_module(tmp_path / "site", "user_backends", CODE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "user_backends", raising=False)
    return folder


def make_config(backend: str, directory: Path, **conf: object) -> LaunchConfig:
    return LaunchConfig(
        run_id="job",
        rdzv_backend=backend,
        rdzv_endpoint=str(directory / "rendezvous"),
        rdzv_configs=conf,
        nproc_per_node=3,
    )


def test_backend_of_a_user_is_not_imported_before_it_is_opened(
    site_dir: Path,
) -> None:
    parsed, _ = parse(
        ["--rdzv-backend", "user_backends:open_store", *RENDEZVOUS, "--no-python", "true"]
    )
    assert parsed.rdzv_backend == "user_backends:open_store"
    environment = {"PET_RDZV_BACKEND": "pack.shelf:Shelf.open"}
    from_variable, _ = parse([*RENDEZVOUS, "--no-python", "true"], environment)
    assert from_variable.rdzv_backend == "pack.shelf:Shelf.open"
    for name in (
        "zk",
        "user_backends:",
        ":open",
        "a..b:open",
        "user_backends:open store",
        "1a:open",
    ):
        with pytest.raises(
            ConfigError, match=f"one of {', '.join(BUILTIN_BACKENDS)}, or package.mod"
        ):
            make_config(name, site_dir)
    assert "user_backends" not in sys.modules


def test_backend_receives_the_parameters_of_the_launch(site_dir: Path) -> None:
    options = {"join_timeout": "7", "keep_alive_interval": 0.5, "colour": "red", "user": 5}
    setup = open_rendezvous(make_config("user_backends:open_store", site_dir, **options))
    (request,) = sys.modules["user_backends"].requests
    setup.close()
    assert (request.endpoint, request.run_id) == (str(site_dir / "rendezvous"), "job")
    assert request.options == {"colour": "red", "user": "5"}
    assert (
        request.timeouts.join_timeout,
        request.timeouts.keep_alive_interval,
        request.timeout,
    ) == (7.0, 0.5, 5.0)
    assert (request.settings.min_nodes, request.node.slots) == (1, 3)
    assert request.node.address
    assert setup.handler.get_backend() == "user_backends:open_store"


def test_backend_may_return_a_rendezvous_handler(site_dir: Path) -> None:
    setup = open_rendezvous(make_config("user_backends:open_handler", site_dir))
    assert setup.store is None
    assert setup.handler.get_backend() == "complete"
    assert setup.handler.shutdown()
    setup.close()


@pytest.mark.parametrize(
    ("backend", "code", "message"),
    [
        ("user_backends:open_store", 4, "holds no job 'job'"),
        (
            "user_backends:open_handler",
            4,
            "user_backends:open_handler has no store that can be read",
        ),
        ("zk", 2, "--rdzv-backend must be one of tcp,"),
    ],
)
def test_status_accepts_the_backend_of_a_user(
    site_dir: Path, capsys: pytest.CaptureFixture[str], backend: str, code: int, message: str
) -> None:
    assert main(["status", f"{backend}://{site_dir}/rendezvous/job"]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("user_backends:open_nothing", "must return a Store or a RendezvousHandler, got str"),
        ("user_backends:open_badly", "failed: AttributeError: .*no_such_thing"),
        ("user_backends:no_such_name", "cannot be imported: AttributeError: .*no_such_name"),
        ("no_such_module:open", "cannot be imported: ModuleNotFoundError: .*to PYTHONPATH"),
    ],
)
def test_backend_that_fails_is_named_in_the_error(
    site_dir: Path, backend: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"rdzv_backend {backend} {message}"):
        open_rendezvous(make_config(backend, site_dir))


def test_error_of_a_backend_is_passed_on_unchanged(site_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^user_backends has no option size$"):
        open_rendezvous(make_config("user_backends:open_store", site_dir, size="7"))


INVALID: list[tuple[Callable[[LaunchConfig], LaunchConfig], str]] = [
    (
        lambda c: attrs.evolve(c, rdzv_endpoint=""),
        "user_backends:open_store requires rdzv_endpoint",
    ),
    (
        lambda c: attrs.evolve(c, run_id="none"),
        "user_backends:open_store backend can be shared .* unique run_id",
    ),
    (
        lambda c: attrs.evolve(c, rdzv_configs={"is_host": "1"}),
        "is_host applies only to the TCP store",
    ),
    (
        lambda c: attrs.evolve(c, rdzv_configs={"join_timeout": "x"}),
        "join_timeout must be a positive",
    ),
    (
        lambda c: attrs.evolve(c, rdzv_configs={"last_call_timeout": "-1"}),
        "last_call_timeout must be a number of seconds from 0 up to",
    ),
    (
        lambda c: attrs.evolve(c, rdzv_backend="file", rdzv_configs={"colour": "red"}),
        "unknown rdzv_configs key 'col",
    ),
]


@pytest.mark.parametrize(("change", "message"), INVALID, ids=[s for _, s in INVALID])
def test_invalid_config_is_rejected_with_the_backend_of_a_user(
    site_dir: Path, change: Callable[[LaunchConfig], LaunchConfig], message: str
) -> None:
    valid = make_config("user_backends:open_store", site_dir)
    with pytest.raises(ConfigError, match=message):
        change(valid)


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["user_backends:open_store", "user_backends:open_handler"])
def test_two_nodes_run_a_job_with_the_backend_of_a_user(
    job: Job, tmp_path: Path, backend: str
) -> None:
    site = write_module(tmp_path / "site", "user_backends", CODE)
    rendezvous = ("--rdzv-backend", backend, "--rdzv-endpoint", str(tmp_path / "rendezvous"))
    flags = ("--nnodes", "2", "--rdzv-id", "job", *rendezvous)
    nodes = [job.start_agent(name, *flags, PYTHONPATH=extend_pythonpath(site)) for name in "ab"]
    check_consistent_world(job.wait_for_world(2))
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert list((tmp_path / "rendezvous").iterdir())
