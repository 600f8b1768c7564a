"""The one order in which the values of the logical workers are added, whatever the ranks.

It is a binary tree over 0, 1, ..., count - 1. Its nodes are the runs [k * 2^l, (k + 1) * 2^l), cut
off at `count`, and a node's value is that of its left half plus that of its right half. A rank
adds up the nodes that lie within its own share; what is left over are the sums that ranks must
exchange. So each addition has the same two operands for every world size, and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .shares import workers_of

T = TypeVar("T")


def are_siblings(left: range, right: range, count: int) -> bool:
    """Whether two nodes that lie side by side are the two halves of a node of the tree."""
    size = len(left)
    # Only the last node of a row may be short, and only one that has its sibling on its right
    # begins at a multiple of twice its size.
    whole = len(right) == size or (right.stop == count and len(right) < size)
    return whole and size & (size - 1) == 0 and left.start % (2 * size) == 0


class TreeSum(Generic[T]):
    """Adds values that come in from left to right, each as soon as its sibling is there.

    Args:
        count: the number of logical workers, which is all that the tree depends on.
        add: left, right -> their sum; it may reuse the left one.
        keep: what to do with a value that has to wait for its sibling; by default nothing.
    """

    def __init__(
        self, count: int, add: Callable[[T, T], T], keep: Callable[[T], T] = lambda value: value
    ) -> None:
        self.count = count
        self.waiting: list[tuple[range, T]] = []
        self._add, self._keep = add, keep

    def push(self, node: range, value: T) -> None:
        """The value of the next node to the right of those that are waiting."""
        added = False
        while self.waiting and are_siblings(self.waiting[-1][0], node, self.count):
            left, total = self.waiting.pop()
            node, value, added = range(left.start, node.stop), self._add(total, value), True
        self.waiting.append((node, value if added else self._keep(value)))

    @property
    def nodes(self) -> list[range]:
        """Those that wait, from left to right."""
        return [node for node, _ in self.waiting]


def _added_up(workers: range, count: int) -> tuple[list[range], int]:
    """The nodes that are left of a share, and how many were waiting at once at most."""
    total, most = TreeSum[None](count, lambda _left, _right: None), 0
    for worker in workers:
        total.push(range(worker, worker + 1), None)
        most = max(most, len(total.waiting))
    return total.nodes, most


def pieces(count: int, world_size: int, rank: int) -> list[range]:
    """The sums that a rank has to send: the largest nodes of the tree within its share.

    One where the share is a node itself, as where count and world size are powers of two; at most
    2 * log2(count) otherwise.
    """
    return _added_up(workers_of(count, world_size, rank), count)[0]


def buffers(count: int, world_size: int, rank: int) -> int:
    """How many gradients a rank holds at once at most, its last sums included."""
    return _added_up(workers_of(count, world_size, rank), count)[1]


def gradients_sent(count: int, world_size: int, rank: int) -> float:
    """What a rank sends in a step, in units of one whole gradient.

    Each rank adds up one slice of the gradient: it needs that slice of everyone's pieces, and
    gives everyone the result. With one piece a rank that is as much as in a ring all-reduce.
    """
    others = (world_size - 1) / world_size
    return (len(pieces(count, world_size, rank)) + 1) * others
