"""Large files read and summed by several threads at once, and memory to read them into.

A CRC-32 takes longer than a copy, and neither needs Python's lock: each thread reads a segment,
sums each piece of it while that is still in its core's cache, and goes on to the next segment. The
sums of the segments make that of the file.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import zlib
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from ..threads import helper

T = TypeVar("T")

SEGMENT = 8 << 20
"""Bytes that one thread reads and sums before it takes the next ones."""
READERS = min(8, len(os.sched_getaffinity(0)))
"""At most so many threads read at once: they keep up with any disk, and with memory."""
BESIDE = 2
"""So many threads sum what is being written, which takes longer than to read it."""

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30
"""Polynomials as a CRC-32 has them: the coefficient of x^0 is the highest bit."""

Fill: TypeAlias = Callable[[int, memoryview, Callable[[memoryview], None]], int]
"""Reads from a byte on into a buffer, and shows each piece as soon as it is there; how many bytes,
none only at the end. See `Place.read_into`."""


def no_news(_chunk: memoryview) -> None:
    """Nobody wants to see the bytes as they come."""


def new_memory(size: int) -> mmap.mmap:
    """So many bytes, all zero, that go when nobody refers to them any more."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Touched for the first time, memory costs less in pages of 2 MiB than in those of 4 KiB.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_summed(
    fill: Fill,
    size: int,
    into: memoryview | None = None,
    *,
    threads: int = 1,
    seen: Callable[[memoryview], None] = no_news,
) -> tuple[int, int]:
    """Read `size` bytes: how many there were before the end, and their CRC-32.

    Args:
        fill: called by several threads at once, by each with a segment of its own.
        into: where the bytes go; without it they are read to be summed alone.
        seen: called with each piece that was read, by one thread at a time, in any order.
    """
    lock, own = threading.Lock(), threading.local()

    def spare() -> memoryview:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(new_memory(min(size, SEGMENT)))
        return own.buffer  # type: ignore[no-any-return]

    def segment(number: int) -> tuple[int, int]:
        start, done, summed = number * SEGMENT, 0, 0
        length = min(SEGMENT, size - start)
        target = spare()[:length] if into is None else into[start : start + length]

        def piece(data: memoryview) -> None:
            nonlocal summed
            summed = zlib.crc32(data, summed)
            with lock:
                seen(data)

        while done < length and (count := fill(start + done, target[done:], piece)):
            done += count
        return done, summed

    found = in_threads(segment, -(-size // SEGMENT), threads)
    whole = sum(1 for count, _ in found if count == SEGMENT)
    return _joined(found[: whole + 1])


def crc32_beside(data: memoryview, act: Callable[[], object]) -> int:
    """The CRC-32 of `data`, which must not change, summed by other threads while `act` runs."""

    def do(number: int) -> tuple[int, int]:
        if number == 0:
            act()
            return 0, 0
        part = data[(number - 1) * SEGMENT : number * SEGMENT]
        return len(part), zlib.crc32(part)

    return _joined(in_threads(do, 1 + -(-len(data) // SEGMENT), 1 + BESIDE))[1]


def in_threads(act: Callable[[int], T], count: int, threads: int) -> list[T]:
    """What `act` gives for 0 to `count` - 1, in that order, called by this thread and others.

    Raises the first error of them all, once none is at it any more.
    """
    numbers = iter(range(count))
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for number in numbers:
                if errors:
                    return
                found[number] = act(number)
        except BaseException as error:
            errors.append(error)

    others = [helper(work, "elasticlib-sum") for _ in range(min(threads, count) - 1)]
    for thread in others:
        with contextlib.suppress(RuntimeError):  # there may be no more threads
            thread.start()
    work()
    for thread in others:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(count)]


def crc32_combine(first: int, second: int, size: int) -> int:
    """The CRC-32 of two runs of bytes, one behind the other, by the sum of each.

    A CRC is a remainder of polynomials over GF(2): `size` bytes behind the first run multiply its
    remainder by x^(8 size). So does zlib's crc32_combine, by Mark Adler.

    Args:
        size: bytes of the second run.
    """
    return _product(first, _power(8 * size)) ^ second


def _joined(found: list[tuple[int, int]]) -> tuple[int, int]:
    """The bytes and the sum of runs, one behind the other."""
    size, summed = 0, 0
    for count, one in found:
        size, summed = size + count, crc32_combine(summed, one, count)
    return size, summed


@functools.lru_cache(256)
def _power(exponent: int) -> int:
    """x^exponent modulo the CRC's polynomial."""
    if exponent < 2:
        return (_ONE, _X)[exponent]
    half = _power(exponent // 2)
    square = _product(half, half)
    return _product(square, _X) if exponent & 1 else square


def _product(one: int, other: int) -> int:
    """Of two polynomials, modulo the CRC's."""
    found = 0
    for place in range(31, -1, -1):
        if one >> place & 1:
            found ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)  # times x
    return found
