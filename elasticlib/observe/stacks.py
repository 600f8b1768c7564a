"""Python stacks of a job's workers: what a node sends on request, and the text for an operator.

What is read here was written by other machines: it is checked strictly, and bounded in size.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import attrs

from ..sanitize import escape_to_one_line
from ..untrusted import decompress
from .event import read_versioned_object
from .formatting import format_ranges, format_ranks, group_stacks
from .requests import MAX_BODY_BYTES, RequestResult

VERSION = 2
MAX_STACK_LENGTH = 64 * 1024  # of one rank
MAX_UNCOMPRESSED_BYTES = 64 * 1024 * 1024


@attrs.frozen
class NodeStacks:
    """Stacks of one node's workers."""

    texts: Mapping[int, str]  # by rank
    unresponsive_ranks: tuple[int, ...] = ()  # returned no stack in time
    unsupported: Mapping[int, str] = attrs.field(factory=dict)  # process names by rank

    def of(self, ranks: frozenset[int] | None) -> NodeStacks:
        """Return those of some ranks; None for all."""
        if ranks is None:
            return self
        return NodeStacks(
            {rank: text for rank, text in self.texts.items() if rank in ranks},
            tuple(rank for rank in self.unresponsive_ranks if rank in ranks),
            {rank: name for rank, name in self.unsupported.items() if rank in ranks},
        )


def encode_stacks(stacks: NodeStacks) -> bytes:
    """Return stacks as compressed JSON, with texts cut so that it has up to MAX_BODY_BYTES."""
    limit = MAX_STACK_LENGTH
    unsupported = {str(rank): name for rank, name in stacks.unsupported.items()}
    while True:
        texts = {
            str(rank): text if len(text) <= limit else f"{text[:limit]}...\n"
            for rank, text in stacks.texts.items()
        }
        fields = {"texts": texts, "unresponsive_ranks": list(stacks.unresponsive_ranks)}
        document = {"version": VERSION, **fields, "unsupported": unsupported}
        packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode())
        if len(packed) <= MAX_BODY_BYTES or limit == 0:
            return packed
        limit //= 2


def decode_stacks(data: bytes) -> NodeStacks:
    """Decode the stacks of a node.

    Raises:
        ValueError: `encode_stacks` cannot have returned the data; the error names the problem.
    """
    if len(data) > MAX_BODY_BYTES:
        raise ValueError(f"stacks must have at most {MAX_BODY_BYTES} bytes, got {len(data)}")
    try:
        text = decompress(data, MAX_UNCOMPRESSED_BYTES)
    except ValueError as error:
        raise ValueError(f"stacks must be compressed by zlib: {error}") from error
    fields = read_versioned_object(text, "stacks", VERSION)
    unresponsive = fields.get("unresponsive_ranks")
    if not isinstance(unresponsive, list) or not all(
        type(rank) is int and rank >= 0 for rank in unresponsive
    ):
        raise ValueError(f"unresponsive_ranks must be integers >= 0, got {unresponsive!r:.60}")
    texts, unsupported = (_read_texts(fields, name) for name in ("texts", "unsupported"))
    return NodeStacks(texts, tuple(unresponsive), unsupported)


def _read_texts(fields: Mapping[str, Any], name: str) -> dict[int, str]:
    value = fields.get(name)
    if not isinstance(value, dict) or not all(
        key.isascii() and key.isdigit() and len(key) < 10 and isinstance(text, str)
        for key, text in value.items()
    ):
        raise ValueError(f"{name} of stacks must be texts by rank, got {value!r:.60}")
    return {int(key): text for key, text in value.items()}


# -- text ------------------------------------------------------------------------------------------


def stack_lines(
    result: RequestResult, stacks: Mapping[str, NodeStacks], ranks: frozenset[int] | None
) -> list[str]:
    """Return the stacks as text, equal stacks once, then the ranks and nodes without a stack.

    Args:
        result: the answers of the nodes.
        stacks: the stacks that they have sent, by node id.
        ranks: the ranks that were requested.
    """
    texts = {rank: text for node in stacks.values() for rank, text in node.texts.items()}
    lines: list[str] = []
    for group in group_stacks(texts):
        lines += [f"{format_ranks(group.ranks)}:"]
        lines += [f"  {line}" if line else "" for line in group.text.splitlines()] + [""]
    lines += _missing_lines(result, stacks)
    without = {rank for n in stacks.values() for rank in (*n.unresponsive_ranks, *n.unsupported)}
    if ranks is not None and (unknown := ranks - texts.keys() - without):
        lines.append(f"no node that answered has a worker of rank {format_ranges(unknown)}")
    return [escape_to_one_line(line) for line in lines]


def _missing_lines(result: RequestResult, stacks: Mapping[str, NodeStacks]) -> list[str]:
    lines = []
    hosts = {node.id: node.host for node in result.nodes}
    for id, node in stacks.items():
        host = hosts.get(id, id)
        if node.unresponsive_ranks:
            lines.append(
                f"{host}: {format_ranks(node.unresponsive_ranks)} returned no stack within 1 s: "
                "the process is stopped, blocks or handles the signal, or gets no CPU time"
            )
        if node.unsupported:
            names = ", ".join(node.unsupported.values())
            lines.append(
                f"{host}: {format_ranks(node.unsupported)} ({names}) is not a Python process "
                "started by elasticlib, so no stack is available; try "
                f'"py-spy dump --pid PID" on {host}'
            )
    for id, host in hosts.items():
        if id not in stacks:
            answer = result.answers.get(id)
            lines.append(f"{host}: {'no response' if answer is None else answer.text}")
    return lines
