"""Rendezvous backends of users: package.module:function, imported when a launch opens it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from jobs import Job, check_consistent_world
from modules import extend_pythonpath, write_module

from elasticlib import LaunchConfig, LaunchOptions, RendezvousOptions
from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse_options
from elasticlib.launch.cli import main
from elasticlib.launch.flags import BUILTIN_BACKENDS
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


def make_options(backend: str, directory: Path, **conf: object) -> LaunchOptions:
    config = LaunchConfig(
        run_id="job",
        rdzv_backend=backend,
        rdzv_endpoint=str(directory / "rendezvous"),
        rdzv_configs=conf,
        nproc_per_node=3,
    )
    return config.options()


def test_backend_of_a_user_is_not_imported_before_it_is_opened(
    site_dir: Path,
) -> None:
    parsed, _ = parse_options(
        ["--rdzv-backend", "user_backends:open_store", *RENDEZVOUS, "--no-python", "true"]
    )
    assert parsed.rendezvous.backend == "user_backends:open_store"
    environment = {"PET_RDZV_BACKEND": "pack.shelf:Shelf.open"}
    from_variable, _ = parse_options([*RENDEZVOUS, "--no-python", "true"], environment)
    assert from_variable.rendezvous.backend == "pack.shelf:Shelf.open"
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
            make_options(name, site_dir)
    assert "user_backends" not in sys.modules


def test_backend_receives_the_parameters_of_the_launch(site_dir: Path) -> None:
    options = {"join_timeout": "7", "keep_alive_interval": 0.5, "colour": "red", "user": 5}
    setup = open_rendezvous(make_options("user_backends:open_store", site_dir, **options))
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
    setup = open_rendezvous(make_options("user_backends:open_handler", site_dir))
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
        (
            "user_backends:open_nothing",
            "must return a Store or a RendezvousHandler, and not str",
        ),
        ("user_backends:open_badly", "must open .*AttributeError: .*no_such_thing"),
        ("user_backends:no_such_name", "must be .* imported .AttributeError: .*no_such_name"),
        ("no_such_module:open", "must be .* imported .ModuleNotFoundError: .*to PYTHONPATH"),
    ],
)
def test_backend_that_fails_is_named_in_the_error(
    site_dir: Path, backend: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"backend {message}.*, got '{backend}'"):
        open_rendezvous(make_options(backend, site_dir))


def test_error_of_a_backend_is_passed_on_unchanged(site_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^user_backends has no option size$"):
        open_rendezvous(make_options("user_backends:open_store", site_dir, size="7"))


Change = Callable[[RendezvousOptions], RendezvousOptions]
INVALID: list[tuple[Change, str]] = [
    (lambda o: attrs.evolve(o, endpoint=""), "endpoint must be given for the user_backends:open"),
    (lambda o: attrs.evolve(o, run_id="none"), "run_id must be given and unique, because several"),
    (lambda o: attrs.evolve(o, is_host=True), "is_host applies only to the TCP store, not to"),
    (
        lambda o: attrs.evolve(o, backend="file", conf={"colour": "red"}),
        "conf must have keys of the file backend only, got .'colour'.",
    ),
]


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"join_timeout": "x"}, "rdzv_configs join_timeout must be a number, got 'x'"),
        ({"last_call_timeout": "-1"}, "rdzv_configs last_call_timeout must be seconds from 0"),
    ],
)
def test_invalid_key_is_rejected_with_the_backend_of_a_user(
    site_dir: Path, conf: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_options("user_backends:open_store", site_dir, **conf)


@pytest.mark.parametrize(("change", "message"), INVALID, ids=[s for _, s in INVALID])
def test_invalid_option_is_rejected_with_the_backend_of_a_user(
    site_dir: Path, change: Change, message: str
) -> None:
    valid = make_options("user_backends:open_store", site_dir)
    with pytest.raises(ConfigError, match=message):
        change(valid.rendezvous)


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
