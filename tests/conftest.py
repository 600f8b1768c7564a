"""Options of the whole suite."""

from __future__ import annotations

import pytest

pytest_plugins = ["jobs"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=1000, help="how many seeds the rendezvous simulator plays"
    )
