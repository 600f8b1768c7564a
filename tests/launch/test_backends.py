"""Backends of other distributions: found by metadata, loaded when asked for, and told apart."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from distributions import install, path_with
from jobs import Job, check_one_world

from elasticlib.errors import ConfigError
from elasticlib.launch.arguments import parse
from elasticlib.launch.backend_names import OUR_BACKENDS
from elasticlib.launch.commands import main
from elasticlib.launch.config import LaunchConfig
from elasticlib.launch.rendezvous_setup import open_meeting

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
        store, request.run_id, request.node, request.limits, timing=request.timing, backend="whole"
    )

def open_nothing(request):
    return request.endpoint

def open_badly(request):
    return request.no_such_thing
"""
PLACE = ("--rdzv-endpoint", "somewhere", "--rdzv-id", "job")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this process's path, with a distribution of several backends."""
    folder = install(
        tmp_path / "site",
        "shelf",
        CODE,
        shelf="shelf:open_store",
        whole="shelf:open_handler",
        nothing="shelf:open_nothing",
        badly="shelf:open_badly",
        missing="shelf:no_such_name",
        gone="no_such_module:open",
        tcp="shelf:open_store",
    )
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


def test_a_registered_name_is_taken_and_its_code_is_not_imported_before(shelf: Path) -> None:
    parsed, _ = parse(["--rdzv-backend", "shelf", *PLACE, "--no-python", "true"])
    assert parsed.rdzv_backend == "shelf"
    assert "shelf" not in sys.modules
    with pytest.raises(ConfigError, match=f"one of {', '.join(OUR_BACKENDS)}, badly, .*got 'zk'"):
        config("zk", shelf)
    assert "shelf" not in sys.modules


def test_a_backend_is_told_all_that_it_may_need(shelf: Path) -> None:
    given = {"join_timeout": "7", "keep_alive_interval": 0.5, "colour": "red", "user": 5}
    meeting = open_meeting(config("shelf", shelf, **given))
    (request,) = sys.modules["shelf"].asked
    meeting.close()
    assert (request.endpoint, request.run_id) == (str(shelf / "meeting"), "job")
    assert request.options == {"colour": "red", "user": "5"}
    assert (request.timing.join, request.timing.refresh, request.timeout) == (7.0, 0.5, 5.0)
    assert (request.limits.min_nodes, request.node.slots) == (1, 3)
    assert request.node.address
    assert meeting.handler.get_backend() == "shelf"


def test_a_whole_handler_is_used_as_it_is(shelf: Path) -> None:
    meeting = open_meeting(config("whole", shelf))
    assert meeting.store is None
    assert meeting.handler.get_backend() == "whole"
    assert meeting.handler.shutdown()
    meeting.close()


@pytest.mark.parametrize(
    ("backend", "code", "sentence"),
    [
        ("shelf", 4, "no job 'job' is there (yet)"),
        ("whole", 4, "--rdzv-backend whole keeps its store to itself"),
        ("torch-c10d", 4, "--rdzv-backend torch-c10d keeps its store to itself"),
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
        ("nothing", r"nothing = shelf:open_nothing \(shelf\) must return a Store or .*, got str"),
        ("badly", r"badly = shelf:open_badly \(shelf\) failed: AttributeError: .*no_such_thing"),
        ("missing", r"missing = shelf:no_such_name \(shelf\) failed: AttributeError"),
        ("gone", r"gone = no_such_module:open \(shelf\) failed: ModuleNotFoundError"),
    ],
)
def test_a_backend_that_breaks_is_named(shelf: Path, backend: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_meeting(config(backend, shelf))


def test_what_a_backend_refuses_is_refused_in_its_words(shelf: Path) -> None:
    with pytest.raises(ConfigError, match=r"^shelf has no option size$"):
        open_meeting(config("shelf", shelf, size="7"))


def test_a_name_that_two_distributions_register_is_refused(shelf: Path) -> None:
    install(shelf, "other", CODE, shelf="other:open_store")
    with pytest.raises(ConfigError, match=r"there are: shelf = \w+:open_store \(\w+\), shelf = "):
        open_meeting(config("shelf", shelf))


@pytest.mark.usefixtures("shelf")
def test_our_own_name_stays_ours_and_the_other_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        meeting = open_meeting(LaunchConfig(run_id="job"))
    meeting.close()
    assert meeting.server is not None
    assert "shelf" not in sys.modules
    assert caplog.messages == [
        "tcp = shelf:open_store (shelf) is ignored: elasticlib has a backend of that name"
    ]


REFUSED: list[tuple[Callable[[LaunchConfig], LaunchConfig], str]] = [
    (lambda c: attrs.evolve(c, rdzv_endpoint=""), "shelf needs an rdzv_endpoint"),
    (lambda c: attrs.evolve(c, run_id="none"), "shelf backend may hold .* own run_id"),
    (lambda c: attrs.evolve(c, rdzv_configs={"is_host": "1"}), "is_host means the store at a tcp"),
    (lambda c: attrs.evolve(c, rdzv_configs={"join_timeout": "x"}), "join_timeout is a positive"),
    (lambda c: attrs.evolve(c, rdzv_backend="file", rdzv_configs={"colour": "red"}), "no key 'col"),
]


@pytest.mark.parametrize(("spoil", "sentence"), REFUSED, ids=[s for _, s in REFUSED])
def test_what_cannot_work_is_refused_beside_another_backend_too(
    shelf: Path, spoil: Callable[[LaunchConfig], LaunchConfig], sentence: str
) -> None:
    good = config("shelf", shelf)
    with pytest.raises(ConfigError, match=sentence):
        spoil(good)


@pytest.mark.faults
def test_the_help_lists_it_and_a_mistake_does_too(shelf: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": path_with(shelf)}

    def told(*flags: str) -> tuple[int, str]:
        command = [sys.executable, "-X", "importtime", "-m", "elasticlib.launch", *flags]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        loaded = [line for line in done.stderr.splitlines() if line.endswith("| shelf")]
        assert not loaded
        return done.returncode, done.stdout + done.stderr

    code, text = told("--help")
    assert code == 0
    assert "badly, gone, missing, nothing, shelf, whole" in " ".join(text.split())
    code, text = told("--rdzv-backend", "zk", "--no-python", "true")
    assert code == 2
    assert "shelf" in text.rpartition("invalid choice")[2]


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["shelf", "whole"])
def test_two_nodes_run_a_job_through_it(job: Job, tmp_path: Path, backend: str) -> None:
    site = install(
        tmp_path / "site", "shelf", CODE, shelf="shelf:open_store", whole="shelf:open_handler"
    )
    place = ("--rdzv-backend", backend, "--rdzv-endpoint", str(tmp_path / "meeting"))
    flags = ("--nnodes", "2", "--rdzv-id", "job", *place)
    nodes = [job.run(name, *flags, PYTHONPATH=path_with(site)) for name in "ab"]
    check_one_world(job.settled(2))
    job.finish()
    assert [node.exit_code() for node in nodes] == [0, 0]
    assert list((tmp_path / "meeting").iterdir())
