"""Options of the whole suite, and how its tests share two cores."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["jobs", "hosts", "ranks"]

# A shell's `&` has SIGINT and SIGQUIT ignored, nohup SIGHUP, which processes inherit; many here are
# to be ended by them.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        usual = signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, usual)

# An example that takes its time on a busy machine is no fault; a test as a whole has its bound.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("day", max_examples=40, **PATIENT)
settings.register_profile("many", max_examples=400, **PATIENT)  # make test-long
settings.load_profile("day")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=300, help="how many seeds the rendezvous simulator plays"
    )
    parser.addoption(
        "--kills", type=int, default=20, help="how many workers of a job are killed in turn"
    )
    parser.addoption(
        "--save-seconds",
        type=float,
        default=0.5,
        help="how long workers save that are drained or resized (give --timeout as well)",
    )


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--kills"))


@pytest.fixture
def save_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--save-seconds"))


@pytest.fixture(scope="session", autouse=True)
def _temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A job leaves its events where temporary files go: for the tests, a folder that goes, too."""
    tmp_path_factory.getbasetemp()  # pytest's own stays, to be looked at
    # Short, as the paths of sockets begin with it.
    folder = tempfile.TemporaryDirectory(prefix="el", ignore_cleanup_errors=True)
    with folder as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", path)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    """A launch in this process may set variables, and logs to the stderr of its test, which are
    not for the tests that follow."""
    before, log = dict(os.environ), logging.getLogger("elasticlib")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


ELSEWHERE = ("integrations", "gpu", "test_notebooks.py")
"""Run where they are named: they need an environment of its own, a GPU, and a minute."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    named = any(name in arg for arg in config.args)
    return True if name in ELSEWHERE and not named else None


REAL = (
    *("test_commit_faults.py", "test_etcd_faults.py", "test_etcd_store.py"),
    *("test_supported_states.py", "test_bitwise_reproducibility_page.py", "test_train_text.py"),
    *("test_warm_and_cold.py", "test_writing_a_backend.py", "test_writing_an_agent.py"),
)
"""Files of `make test-processes`, as is each test that is marked `faults` or uses a `job`: others'
programs, and what starts an interpreter, which imports torch, more than once."""
LONG = ("contract_finds_faults.py",)
"""Files of `make test-long`, as is each test on hosts of their own: that a suite is a good one."""

FIRST = (
    "test_training_under_faults.py",
    "test_recovery_of_jobs.py",
    "test_kills.py",
    "test_readme.py",
    "test_store_loss.py",
    "test_membership.py",
    "test_hostile_workers.py",
    "test_elasticrun.py",
    "test_init_method.py",
    "test_processes.py",
    "test_warm_and_cold.py",
    "test_moving_store.py",
    "test_rendezvous_contract.py",
    "test_store_contract.py",
    "test_logical_workers.py",
    "test_shuffle.py",
    "test_kubernetes.py",
    "test_frameworks.py",
    "test_ray.py",
    "test_slurm.py",
    "test_imagenet.py",
    "test_quickstart_page.py",
    "test_examples_page.py",
)
"""Files that take the longest; each file is one process's, and what begins last should be short."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        target = target_of(item)
        if target is not None:
            item.add_marker(target)
    if not config.option.markexpr and not any("::" in arg for arg in config.args):
        # Of a folder or file that is named, what takes minutes is run only if it is asked for.
        late = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if not item.get_closest_marker("release")]
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(FIRST)))


def pytest_collection_finish() -> None:
    """Tests share few cores: threads of torch's that wait for one another take long there."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def target_of(item: pytest.Item) -> str | None:
    """The target of the Makefile that runs it, by its mark; None for `make test`, and for what says
    so itself."""
    marks = {mark.name for mark in item.iter_markers()}
    fixtures = set(getattr(item, "fixturenames", ()))
    if marks & {"long", "release"}:
        return None
    # Hosts of their own take a second a test to set up, and leases of several to lose.
    if {"cluster", "job"} <= fixtures or item.path.name.endswith(LONG):
        return "long"
    if "faults" in marks or "job" in fixtures or item.path.name in REAL:
        return "processes"
    return None
