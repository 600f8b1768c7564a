"""The ranks that a command line names, as in `0,3-5`; for argparse."""

from __future__ import annotations

import argparse

HIGHEST = 99_999
MOST = 10_000
"""So many fit into a question."""


def ranks_of(text: str) -> frozenset[int]:
    """Of `0,3` or `0-3,8`. Raises argparse.ArgumentTypeError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and len(end) < 8 for end in ends):
            raise argparse.ArgumentTypeError(f"ranks are numbers as in 0,3 or 0-7, got {text!r}")
        low, high = int(ends[0]), int(ends[1])
        if low > high:
            raise argparse.ArgumentTypeError(
                f"ranks go from the lower to the higher, as in {high}-{low}, got {part.strip()!r}"
            )
        if high > HIGHEST:
            raise argparse.ArgumentTypeError(f"a rank is at most {HIGHEST}, got {high}")
        found.update(range(low, high + 1))
    if len(found) > MOST:
        raise argparse.ArgumentTypeError(
            f"at most {MOST} ranks can be named, got {len(found)}: leave -r out for all"
        )
    return frozenset(found)
