"""Who works on what, with which random numbers, and in which order what they find is added up.

Gradients are added along a binary tree over the logical workers 0, 1, ..., count - 1. Its nodes are
the runs [k * 2^l, (k + 1) * 2^l), cut off at `count`, and a node's value is that of its left half
plus that of its right half. A rank adds up the nodes that lie within its own share; what is left
over are the sums that ranks must exchange.

No rank, world size or history enters what a logical worker computes, nor how it is added: each
addition has the same two operands at every world size, and the same bits.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from ..data.position import share_of
from ..errors import ConfigError

V = TypeVar("V")
S = TypeVar("S")
Use = Literal["model", "data", "update"]
"""What is drawn: in the forward pass, for the samples, or after the gradients are reduced."""


def workers_of(count: int, world_size: int, rank: int) -> range:
    """Which of `count` logical workers `rank` computes, one after another; at least one.

    Raises:
        ConfigError: there are fewer logical workers than ranks, or no such rank.
    """
    if not 1 <= world_size <= count:
        raise ConfigError(
            f"need 1 <= world size <= logical workers, got {world_size} and {count}:"
            " a rank without a logical worker would have nothing to do"
        )
    return share_of(count, rank=rank, world_size=world_size)


def seed_of(seed: int, step: int, worker: int, use: Use) -> int:
    """A 63-bit seed: the first bytes of a BLAKE2b digest of the four.

    torch's generator on a CPU uses the lower 32 bits alone, so of 77,000 such streams two are
    alike with a chance of one in two. That does no harm; it is no source of secrets either way.

    Raises:
        ConfigError: `step` is negative.
    """
    if step < 0:
        raise ConfigError(f"need step >= 0, got {step}")
    text = f"{seed}/{step}/{worker}/{use}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class TreeSum(Generic[V, S]):
    """Adds values that come in from left to right, each as soon as its sibling is there.

    Args:
        count: the number of logical workers, which is all that the tree depends on.
        add: left, right -> their sum; it may reuse the left one, which is always a sum or kept.
        keep: makes of a value, which has to wait for its sibling, what may be added to.

    Attributes:
        waiting: the nodes that wait for their siblings, from left to right, with their sums.
    """

    def __init__(
        self,
        count: int,
        add: Callable[[S, V | S], S],
        keep: Callable[[Any], S] = lambda value: value,
    ) -> None:
        self.waiting: list[tuple[range, S]] = []
        self._count, self._add, self._keep = count, add, keep

    def push(self, node: range, value: V) -> None:
        """The value of the next node to the right of those that are waiting."""
        total: S | None = None
        while self.waiting and self._are_siblings(self.waiting[-1][0], node):
            left, before = self.waiting.pop()
            node = range(left.start, node.stop)
            total = self._add(before, value if total is None else total)
        self.waiting.append((node, self._keep(value) if total is None else total))

    def _are_siblings(self, left: range, right: range) -> bool:
        """Whether two nodes that lie side by side are the two halves of a node of the tree."""
        size = len(left)
        # Only the last node of a row may be short, and only one that has its sibling on its right
        # begins at a multiple of twice its size.
        whole = len(right) == size or (right.stop == self._count and len(right) < size)
        return whole and size & (size - 1) == 0 and left.start % (2 * size) == 0


def pieces(count: int, world_size: int, rank: int) -> list[range]:
    """The sums that a rank has to send: the largest nodes of the tree within its share.

    One where the share is a node itself, as where count and world size are powers of two; at most
    2 * log2(count) otherwise.
    """
    total = TreeSum[int, int](count, operator.add)
    for worker in workers_of(count, world_size, rank):
        total.push(range(worker, worker + 1), 1)
    return [node for node, _ in total.waiting]
