"""Options of the whole suite, and how its tests share two cores."""

from __future__ import annotations

import pytest

pytest_plugins = ["jobs", "hosts"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=300, help="how many seeds the rendezvous simulator plays"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fault tests run one at a time, as each of them starts processes enough for both cores; but
    those on hosts of their own, which mostly wait for leases to end, beside the others."""
    for item in items:
        if item.get_closest_marker("faults") and not item.get_closest_marker("xdist_group"):
            on_hosts = "cluster" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("hosts" if on_hosts else "faults"))
