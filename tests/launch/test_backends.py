"""Backends of users, named as package.module:function: imported when they are opened."""

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

asked = []

def open_store(request):
    asked.append(request)
    strays = set(request.options) - {"colour", "user"}
    if strays:
        raise ConfigError(f"shelf has no option {strays.pop()}")
    return FileStore(request.endpoint, timeout=request.timeout)

def open_handler(request):
    store = FileStore(request.endpoint, timeout=request.timeout)
    return DynamicRendezvousHandler(
        store,
        request.run_id,
        request.node,
        request.settings,
        timeouts=request.timeouts,
        backend="whole",
    )

def open_nothing(request):
    return request.endpoint

def open_badly(request):
    return request.no_such_thing
"""
PLACE = ("--rdzv-endpoint", "somewhere", "--rdzv-id", "job")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on this process's import path with a module of several backends."""
    folder = write_module(tmp_path / "site", "shelf", CODE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "shelf", raising=False)
    return folder


def config(backend: str, folder: Path, **conf: object) -> LaunchConfig:
    return LaunchConfig(
        run_id="job",
        rdzv_backend=backend,
        rdzv_endpoint=str(folder / "meeting"),
        rdzv_configs=conf,
        nproc_per_node=3,
    )


def test_a_users_backend_is_named_by_its_function_and_not_imported_before_it_is_opened(
    shelf: Path,
) -> None:
    parsed, _ = parse(["--rdzv-backend", "shelf:open_store", *PLACE, "--no-python", "true"])
    assert parsed.rdzv_backend == "shelf:open_store"
    environment = {"PET_RDZV_BACKEND": "pack.shelf:Shelf.open"}
    from_variable, _ = parse([*PLACE, "--no-python", "true"], environment)
    assert from_variable.rdzv_backend == "pack.shelf:Shelf.open"
    for name in ("zk", "shelf:", ":open", "a..b:open", "shelf:open store", "1a:open"):
        with pytest.raises(
            ConfigError, match=f"one of {', '.join(BUILTIN_BACKENDS)}, or package.mod"
        ):
            config(name, shelf)
    assert "shelf" not in sys.modules


def test_a_backend_is_told_all_that_it_may_need(shelf: Path) -> None:
    given = {"join_timeout": "7", "keep_alive_interval": 0.5, "colour": "red", "user": 5}
    meeting = open_rendezvous(config("shelf:open_store", shelf, **given))
    (request,) = sys.modules["shelf"].asked
    meeting.close()
    assert (request.endpoint, request.run_id) == (str(shelf / "meeting"), "job")
    assert request.options == {"colour": "red", "user": "5"}
    assert (
        request.timeouts.join_timeout,
        request.timeouts.keep_alive_interval,
        request.timeout,
    ) == (7.0, 0.5, 5.0)
    assert (request.settings.min_nodes, request.node.slots) == (1, 3)
    assert request.node.address
    assert meeting.handler.get_backend() == "shelf:open_store"


def test_a_whole_handler_is_used_as_it_is(shelf: Path) -> None:
    meeting = open_rendezvous(config("shelf:open_handler", shelf))
    assert meeting.store is None
    assert meeting.handler.get_backend() == "whole"
    assert meeting.handler.shutdown()
    meeting.close()


@pytest.mark.parametrize(
    ("backend", "code", "sentence"),
    [
        ("shelf:open_store", 4, "the store holds no job 'job'"),
        (
            "shelf:open_handler",
            4,
            "shelf:open_handler has no store that can be read",
        ),
        ("zk", 2, "--rdzv-backend must be one of tcp,"),
    ],
)
def test_a_job_in_anothers_store_is_asked_by_the_same_name(
    shelf: Path, capsys: pytest.CaptureFixture[str], backend: str, code: int, sentence: str
) -> None:
    place = str(shelf / "meeting")
    assert main(["status", "--rdzv-backend", backend, "--rdzv-id", "job", place]) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("shelf:open_nothing", "must return a Store or a RendezvousHandler, got str"),
        ("shelf:open_badly", "failed: AttributeError: .*no_such_thing"),
        ("shelf:no_such_name", "cannot be imported: AttributeError: .*no_such_name"),
        ("no_such_module:open", "cannot be imported: ModuleNotFoundError: .*to PYTHONPATH"),
    ],
)
def test_a_backend_that_breaks_is_named(shelf: Path, backend: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"rdzv_backend {backend} {sentence}"):
        open_rendezvous(config(backend, shelf))


def test_what_a_backend_refuses_is_refused_in_its_words(shelf: Path) -> None:
    with pytest.raises(ConfigError, match=r"^shelf has no option size$"):
        open_rendezvous(config("shelf:open_store", shelf, size="7"))


REFUSED: list[tuple[Callable[[LaunchConfig], LaunchConfig], str]] = [
    (lambda c: attrs.evolve(c, rdzv_endpoint=""), "shelf:open_store requires rdzv_endpoint"),
    (
        lambda c: attrs.evolve(c, run_id="none"),
        "shelf:open_store backend can be shared .* unique run_id",
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
        lambda c: attrs.evolve(c, rdzv_backend="file", rdzv_configs={"colour": "red"}),
        "unknown rdzv_configs key 'col",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), REFUSED, ids=[s for _, s in REFUSED])
def test_what_cannot_work_is_refused_beside_another_backend_too(
    shelf: Path, spoil: Callable[[LaunchConfig], LaunchConfig], sentence: str
) -> None:
    good = config("shelf:open_store", shelf)
    with pytest.raises(ConfigError, match=sentence):
        spoil(good)


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["shelf:open_store", "shelf:open_handler"])
def test_two_nodes_run_a_job_through_it(job: Job, tmp_path: Path, backend: str) -> None:
    site = write_module(tmp_path / "site", "shelf", CODE)
    place = ("--rdzv-backend", backend, "--rdzv-endpoint", str(tmp_path / "meeting"))
    flags = ("--nnodes", "2", "--rdzv-id", "job", *place)
    nodes = [job.start_agent(name, *flags, PYTHONPATH=extend_pythonpath(site)) for name in "ab"]
    check_consistent_world(job.wait_for_world(2))
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert list((tmp_path / "meeting").iterdir())
