"""Signals that whoever is started here is to live through until it can say what becomes of them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def held_back(signals: Iterable[int]) -> Iterator[None]:
    """What is started here has these blocked, and so lives to ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
