"""Options of the whole suite, and how its tests share two cores."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["jobs", "hosts"]

# A shell's `&` has SIGINT and SIGQUIT ignored, nohup SIGHUP, which processes inherit; many here are
# to be ended by them.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        usual = signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, usual)

# An example that takes its time on a busy machine is no fault; a test as a whole has its bound.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


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


LONG = (
    "test_kept_steps.py",
    "test_readme.py",
    "test_store_loss.py",
    "test_membership.py",
    "test_elasticrun.py",
    "test_warm_and_cold.py",
    "test_plugs.py",
    "test_frameworks.py",
    "test_kubernetes.py",
    "test_ray.py",
    "test_slurm.py",
)
"""Files that take the longest; each file is one process's, and what begins last should be short."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Hosts of their own take a second a test to set up, and leases of several to lose.
        if {"cluster", "job"} <= set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.long)
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))
