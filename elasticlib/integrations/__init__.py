"""Adapters between elasticlib and other frameworks. No other package of elasticlib imports them.

Each module imports its framework when it is imported itself. If the framework is missing, the error
says how to install it.
"""

from __future__ import annotations


def __dir__() -> list[str]:
    return ["lightning", "ray", "transformers"]
