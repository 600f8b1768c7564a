"""Slurm's lists of nodes as names: `n[01-03,7],m2` is n01, n02, n03, n7 and m2.

Done by the text alone, as containers often lack `scontrol show hostnames`, which gives the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from ..errors import ConfigError

MOST = 65536
"""Names of one list; more than any Slurm has nodes."""
_RANGE = "[0-9]+(?:-[0-9]+)?"
_NAME = rf"(?:[^\s,\[\]]|\[{_RANGE}(?:,{_RANGE})*\])+"
_LIST = re.compile(rf"{_NAME}(?:,{_NAME})*")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def expand_nodelist(text: str) -> list[str]:
    """The names, in the list's order; of several brackets in one name the last one runs fastest.

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
        pieces = [_numbers(inside) if inside else [plain] for inside, plain in _split(entry)]
        count = len(names)
        for piece in pieces:
            count = (count or 1) * len(piece)
        if count > MOST:
            raise ConfigError(f"a list of nodes has at most {MOST} names, got {text!r}")
        names += map("".join, product(*pieces))
    return names


def _split(entry: str) -> Iterator[tuple[str, str]]:
    for found in _PIECE.finditer(entry):
        yield found.group(1) or "", found.group(2) or ""


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
