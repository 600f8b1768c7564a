"""Who works on what: ranks on logical workers, logical workers on the samples of a global batch.

Shares are neighbours, cover everything, and differ by at most one; the first ones are larger.
A logical worker's samples follow from the batch and the number of logical workers, never from
the world.
"""

from __future__ import annotations

from ..errors import ConfigError


def share(total: int, parts: int, index: int) -> range:
    """Part `index` of 0, 1, ..., total - 1 dealt into `parts` runs; empty where total is small.

    The first `total % parts` runs have one more than the others.

    Raises:
        ConfigError: `total` is negative, or there is no such part.
    """
    if total < 0 or not 0 <= index < parts:
        raise ConfigError(f"need total >= 0 and 0 <= index < parts, got {total}, {index}, {parts}")
    size, more = divmod(total, parts)
    start = index * size + min(index, more)
    return range(start, start + size + (index < more))


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
    return share(count, world_size, rank)
