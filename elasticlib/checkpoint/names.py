"""The names of checkpoint files: which is newer, and where one is written before it counts.

A file that is being written has a hidden name of its own beside its target. No such name is ever
taken for a checkpoint, and each tells which target it was meant for.
"""

from __future__ import annotations

import re

_ASIDE = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{8}\.partial", re.DOTALL)


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sorts names with numbers in them as people do: step-9 before step-10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], name


def aside_name(target: str, token: int) -> str:
    """Where `target` is written before it is whole; `token` tells apart those who write it."""
    return f".{target}.{token % 2**32:08x}.partial"


def target_of(name: str) -> str | None:
    """The name that the file `name` was being written for; None if it is no such file."""
    match = _ASIDE.fullmatch(name)
    return match["target"] if match else None
