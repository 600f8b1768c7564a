"""Integrations with other programs: Lightning, transformers and Ray.

No other package of elasticlib imports this one. Each module raises an error that names the missing
program and how to install it.
"""

from __future__ import annotations


def __dir__() -> list[str]:
    return ["lightning", "ray", "transformers"]
