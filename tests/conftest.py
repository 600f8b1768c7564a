"""Options of the whole suite, and how its tests share two cores."""

from __future__ import annotations

import pytest

pytest_plugins = ["jobs", "hosts"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=1000, help="how many seeds the rendezvous simulator plays"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fault tests run one at a time: each of them starts processes enough for both cores."""
    for item in items:
        if item.get_closest_marker("faults") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("faults"))
