"""Which elasticlib, torch and Python a launch is of, without importing torch."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from .._version import __version__


def versions() -> dict[str, str]:
    """By name; empty for what is not installed."""
    return {
        "elasticlib": __version__,
        "torch": _version("torch"),
        "python": platform.python_version(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
