"""Options of the whole suite, and how its tests share two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["jobs", "hosts"]


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/integrations needs an environment of its own, so it runs where it is named."""
    named = any("integrations" in arg for arg in config.args)
    return True if collection_path.name == "integrations" and not named else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fault tests run one at a time, as each of them starts processes enough for both cores; but
    those on hosts of their own, which mostly wait for leases to end, beside the others."""
    for item in items:
        if item.get_closest_marker("faults") and not item.get_closest_marker("xdist_group"):
            on_hosts = "cluster" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("hosts" if on_hosts else "faults"))
