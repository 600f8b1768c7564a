"""Slurm's lists of nodes as names: `n[01-03,7],m2` is n01, n02, n03, n7 and m2.

Done by the text alone, as containers often lack `scontrol show hostnames`, which gives the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod

from ..errors import ConfigError

MOST = 65536
"""Names of one list; more than any Slurm has nodes."""
_RANGE = "[0-9]+(?:-[0-9]+)?"
_NAME = rf"(?:[^\s,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"
_LIST = re.compile(rf"{_NAME}(?:,{_NAME})*")
_PIECE = re.compile(r"\[[^\]]*\]|[^\[\]]+")


def expand_nodelist(text: str) -> list[str]:
    """The names, in the order of `scontrol show hostnames`.

    Numbers are as wide as the first of their range: `n[08-10]` is n08, n09, n10.

    Raises:
        ConfigError: it is no such list, or one of more than `MOST` names.
    """
    if _LIST.fullmatch(text) is None:
        raise ConfigError(
            f"a list of Slurm's nodes is names with numbers in brackets, as n[01-03,7],m2, "
            f"got {text!r}"
        )
    names: list[str] = []
    for entry in re.findall(_NAME, text):
        pieces = [
            _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            for piece in _PIECE.findall(entry)
        ]
        if len(names) + prod(map(len, pieces)) > MOST:
            raise ConfigError(f"a list of nodes has at most {MOST} names, got {text!r}")
        names += _names(pieces)
    return names


def _names(pieces: list[list[str]]) -> Iterator[str]:
    """The last bracket runs fastest, and before it the first one: Slurm reads from both ends."""
    *first, last = pieces
    if len(last) == 1 and first:
        *first, numbers = first
        last = [number + last[0] for number in numbers]
    for chosen in product(*reversed(first)):
        head = "".join(reversed(chosen))
        yield from (head + tail for tail in last)


def _numbers(text: str) -> list[str]:
    """What stands in one pair of brackets."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low > high or high - low >= MOST:
            raise ConfigError(
                f"a range of Slurm's nodes goes up, and over at most {MOST}, got [{text}]"
            )
        found += (str(number).zfill(len(first)) for number in range(low, high + 1))
    return found
