"""The order in which the gradients of logical workers are added, which no world size affects.

Gradients are added along a binary tree over the logical workers 0, 1, ..., count - 1. The nodes of
the tree are the ranges [k * 2^l, (k + 1) * 2^l), truncated at `count`. The value of a node is the
value of its left half plus the value of its right half. A rank adds the nodes that are within its
own share. The remaining sums are exchanged between the ranks.

So each addition has the same two operands, and the same result bit for bit, at every world size.
Pure functions; this module does not import torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..data.position import even_share
from ..errors import ConfigError

V = TypeVar("V")
S = TypeVar("S")


def logical_workers_of_rank(count: int, world_size: int, rank: int) -> range:
    """Return which of the `count` logical workers `rank` computes; at least one.

    Raises:
        ConfigError: there are fewer logical workers than ranks, or `rank` is out of range.
    """
    if not 1 <= world_size <= count:
        raise ConfigError(
            f"need 1 <= world size <= logical workers, got {world_size} and {count}:"
            " a rank without a logical worker would have nothing to compute"
        )
    return even_share(count, rank=rank, world_size=world_size)


def local_subtrees(count: int, world_size: int, rank: int) -> list[range]:
    """Return the largest nodes of the tree within a rank's share, whose sums it has to send.

    There is one such node if the share itself is a node, as when count and world size are powers of
    two. Otherwise there are at most 2 * log2(count).
    """
    tree = TreeSum[int, int](count, operator.add)
    for worker in logical_workers_of_rank(count, world_size, rank):
        tree.push(range(worker, worker + 1), 1)
    return [node for node, _ in tree.pending]


class TreeSum(Generic[V, S]):
    """Adds values that are pushed from left to right, each as soon as its sibling is available.

    Args:
        count: number of logical workers, which determines the tree.
        add: returns the sum of a left and a right operand. It may reuse the memory of the left
            operand, which is always an earlier sum or a copy.
        copy: returns what is stored for a value that has to wait for its sibling.
    """

    def __init__(
        self,
        count: int,
        add: Callable[[S, V | S], S],
        copy: Callable[[Any], S] = lambda value: value,
    ) -> None:
        self.pending: list[tuple[range, S]] = []
        """The nodes that wait for their siblings, with their sums, from left to right."""
        self._count, self._add, self._copy = count, add, copy

    def push(self, node: range, value: V) -> None:
        """Add the value of `node`, which must follow the last pending node."""
        total: S | None = None
        while self.pending and self._are_siblings(self.pending[-1][0], node):
            left, left_sum = self.pending.pop()
            node = range(left.start, node.stop)
            total = self._add(left_sum, value if total is None else total)
        self.pending.append((node, self._copy(value) if total is None else total))

    def _are_siblings(self, left: range, right: range) -> bool:
        """Return True if two adjacent nodes are the two halves of a node of the tree."""
        size = len(left)
        # Only the last node of a level can be truncated. A left half starts at a multiple of twice
        # its size.
        is_complete = len(right) == size or (right.stop == self._count and len(right) < size)
        return is_complete and size & (size - 1) == 0 and left.start % (2 * size) == 0
