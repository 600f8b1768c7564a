"""Options of the whole test suite, and the selection and order of its tests."""

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

# A shell's `&` ignores SIGINT and SIGQUIT, and nohup ignores SIGHUP. Processes inherit this, but
# many processes of the tests have to be stopped by these signals.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        handler = signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, handler)

# A slow example on a busy machine is not a failure; the time limit of the whole test applies.
NO_DEADLINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("day", max_examples=40, **NO_DEADLINE)
settings.register_profile("many", max_examples=400, **NO_DEADLINE)  # make test-long
settings.load_profile("day")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=300, help="number of seeds of the rendezvous simulator"
    )
    parser.addoption(
        "--rewrite-traces", action="store_true", help="write what the agent's machine answers"
    )
    parser.addoption(
        "--kills",
        type=int,
        default=20,
        help="number of workers of a job that are killed one after the other",
    )
    parser.addoption(
        "--save-seconds",
        type=float,
        default=0.5,
        help="seconds that workers take to save in a drain or resize (raise --timeout as well)",
    )


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--kills"))


@pytest.fixture
def save_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--save-seconds"))


@pytest.fixture(scope="session", autouse=True)
def _temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the temporary files of jobs, such as their events, into a directory that is removed."""
    tmp_path_factory.getbasetemp()  # pytest's own directory stays, so that a user can inspect it
    # The prefix is short, because the paths of sockets must be short.
    folder = tempfile.TemporaryDirectory(prefix="el", ignore_cleanup_errors=True)
    with folder as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", path)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """Restore the environment and the logger after a test that launched a job in this process."""
    before, log = dict(os.environ), logging.getLogger("elasticlib")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


# These are collected only if the command line names them: they need other packages, a GPU, or a
# minute.
ONLY_IF_NAMED = ("integrations", "gpu", "test_notebooks.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    is_named = any(name in arg for arg in config.args)
    return True if name in ONLY_IF_NAMED and not is_named else None


# Files of `make test-processes`, like each test with the mark `faults` or the fixture `job`. They
# run other programs, or start several interpreters that import torch.
PROCESS_TESTS = (
    *("test_commit_faults.py", "test_etcd_faults.py", "test_etcd_store.py"),
    *("test_supported_states.py", "test_bitwise_reproducibility_page.py", "test_train_text.py"),
    *("test_start_methods.py", "test_writing_a_backend.py", "test_writing_an_agent.py"),
)
# Files of `make test-long`, like each test with network namespaces. They check that a contract
# suite detects faults.
LONG_TESTS = ("contract_finds_faults.py",)

# The files that take longest, which run first. One process runs a whole file, so that the last
# files should be short.
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
    "test_start_methods.py",
    "test_failover_store.py",
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


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        target = make_target(item)
        if target is not None:
            item.add_marker(target)
    if not config.option.markexpr and not any("::" in arg for arg in config.args):
        # Tests that take minutes run only if the command line selects them by a mark or by name.
        release = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=release)
        items[:] = [item for item in items if not item.get_closest_marker("release")]
    order = {name: position for position, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(FIRST)))


def pytest_collection_finish() -> None:
    """Use one thread of torch in each process, because several processes share few cores."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def make_target(item: pytest.Item) -> str | None:
    """Return the mark of the target in the Makefile that runs a test.

    The result is None for `make test`, and for tests that have the mark `long` or `release`.
    """
    marks = {mark.name for mark in item.iter_markers()}
    fixtures = set(getattr(item, "fixturenames", ()))
    if marks & {"long", "release"}:
        return None
    # The hosts of a cluster take a second to set up, and several seconds until their leases expire.
    if {"cluster", "job"} <= fixtures or item.path.name.endswith(LONG_TESTS):
        return "long"
    if "faults" in marks or "job" in fixtures or item.path.name in PROCESS_TESTS:
        return "processes"
    return None
