"""The stacks of many ranks, each that is the same said once, with the ranks that it is of.

Two are the same if they differ in nothing but addresses and the numbers in the names of threads;
which thread comes first counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from ..visible import visible_line
from .question import Stacks
from .status import JobView
from .status_words import spans

_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)
_NUMBER = re.compile(r"^((?:Current thread|Thread) \[.*?)-\d+(?= \(|\] )", re.MULTILINE)
"""Of a thread without a name of its own: how many threads there were before it."""
_OURS = re.compile(
    r"^ *File \".*/elasticlib/workers/(run_program|bootstrap|fork_server)\.py\".*\n?", re.MULTILINE
)
"""How elasticlib came to run the program."""


@attrs.frozen
class Shared:
    """One text, and the ranks whose stacks it is."""

    ranks: tuple[int, ...]
    text: str


def grouped(texts: Mapping[int, str]) -> list[Shared]:
    """Those that the fewest ranks share first: they are the ones to look at."""
    found: dict[str, list[int]] = {}
    first: dict[str, str] = {}
    for rank, text in sorted(texts.items()):
        plain = _ADDRESS.sub("0x...", _THREAD.sub(r"\1", _OURS.sub("", text))).strip()
        alike = _NUMBER.sub(r"\1", plain)
        first.setdefault(alike, plain)
        found.setdefault(alike, []).append(rank)
    groups = [Shared(tuple(ranks), first[alike]) for alike, ranks in found.items()]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))


def told(view: JobView, wanted: frozenset[int] | None) -> list[str]:
    """All that is to be said of a job's stacks, as lines."""
    texts = {rank: text for one in view.stacks.values() for rank, text in one.texts.items()}
    lines: list[str] = []
    for group in grouped(texts):
        lines += [f"rank{'s' * (len(group.ranks) > 1)} {spans(group.ranks)}:"]
        lines += [f"  {line}" if line else "" for line in group.text.splitlines()] + [""]
    lines += _missing(view)
    known = texts.keys() | {rank for one in view.stacks.values() for rank in _others(one)}
    if wanted is not None and wanted - known:
        lines.append(f"no node that answered has a worker of rank {spans(wanted - known)}")
    return [visible_line(line) for line in lines]


def _others(stacks: Stacks) -> Iterable[int]:
    return (*stacks.silent, *stacks.mute)


def _missing(view: JobView) -> list[str]:
    lines = []
    hosts = {node.id: node.host for node in view.live}
    for node, one in view.stacks.items():
        host = hosts.get(node, node)
        if one.silent:
            lines.append(
                f"{host}: rank {spans(one.silent)} wrote nothing within a second: it is stopped, "
                "blocks signals or handles these itself, or no processor has time for it"
            )
        if one.mute:
            names = ", ".join(one.mute.values())
            lines.append(
                f"{host}: rank {spans(one.mute)} ({names}) is no Python program that elasticlib "
                f"started, and cannot be asked; on {host}, py-spy dump --pid PID may show it"
            )
    for node_id, host in hosts.items():
        if node_id not in view.answers:
            lines.append(f"{host} does not answer")
    return lines
