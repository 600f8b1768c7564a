"""Memory of bad nodes: decide which hosts a job excludes because their workers keep failing.

The membership has a history of the hosts whose workers failed first, one for each generation whose
failure names a host (`blame.py`). `reconcile` acts on the decisions. This module does no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs


@attrs.frozen
class FirstFailure:
    """The host whose workers were the first to fail in a generation."""

    generation: int
    host: str


@attrs.frozen
class ExcludedHost:
    """A host on which no node takes part in the job any more."""

    host: str
    reason: str


def add_failure(
    history: Iterable[FirstFailure], generation: int, host: str, *, window: int
) -> tuple[FirstFailure, ...]:
    """Return the history with one more failure.

    Args:
        history: the earlier failures, oldest first.
        generation: the last generation. A failure that the history has for it is replaced.
        host: the host whose workers failed first.
        window: the number of last generations that are kept.
    """
    kept = (failure for failure in history if generation - window < failure.generation < generation)
    return (*kept, FirstFailure(generation, host))


def bad_hosts(history: Sequence[FirstFailure], *, limit: int, window: int) -> dict[str, int]:
    """Return the hosts whose workers failed first too often, with the number of failures.

    Args:
        history: the failures, oldest first. The newest one is of the last generation.
        limit: the number of failures from which a host is bad; 0 if no host ever is.
        window: the number of last generations that count.

    Returns:
        The bad hosts, the one with most failures first.
    """
    if not history or limit == 0:
        return {}
    last = history[-1].generation
    counts = Counter(item.host for item in history if item.generation > last - window)
    return {host: count for host, count in counts.most_common() if count >= limit}


def excluded_hosts(
    bad: Iterable[str], candidates: Iterable[str], *, min_nodes: int
) -> tuple[str, ...]:
    """Return the bad hosts that the job can do without.

    At least `min_nodes` candidates remain on other hosts, and would not if another bad host were
    excluded. So a job of one node, or on one host, excludes none.

    Args:
        bad: the bad hosts, the worst first, as `bad_hosts` returns them.
        candidates: the host of each node that may take part in the next generation.
        min_nodes: the number of nodes that must remain.
    """
    excluded: list[str] = []
    remaining = list(candidates)
    for host in bad:
        others = [other for other in remaining if other != host]
        if len(others) >= min_nodes:
            excluded.append(host)
            remaining = others
    return tuple(excluded)


def describe_failures(count: int, window: int) -> str:
    """Return why a host is bad, for messages."""
    return (
        f"its workers failed first in {count} of the last {window} generations "
        "(bad_node_failures, --rdzv-conf)"
    )
