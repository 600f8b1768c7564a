"""Signals that come before there is an agent to heed them, kept for it from the first moment on.

Nothing but the standard library is imported: what comes while the rest is imported is to be kept.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

EARLY = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
"""By which schedulers may ask a node to save and leave. What they mean to this launch is known
once its command line has been read; by default each of them would end the process."""


class HeldSignals:
    """Keeps what comes, from `hold` or `with` on, and hands it to an agent, from `give` on.

    What was ignored on entry stays ignored. Python lets only the main thread hear signals; in
    another, nothing is held.
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers = tuple(numbers)
        self._before: dict[int, Any] = {}
        self._came: list[int] = []
        self._heed: Callable[[int], object] = self._came.append
        self.active = False

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep these from now on, as well."""
        self.active = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            if number not in self._before and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)

    def keep(self, numbers: Iterable[int]) -> None:
        """These and no others; those of the others that came have the effect that they had."""
        wanted = frozenset(numbers)
        for number in self._before.keys() - wanted:
            signal.signal(number, self._before.pop(number))
        self.hold(wanted)
        for number in [number for number in self._came if number not in wanted]:
            self._came.remove(number)
            os.kill(os.getpid(), number)

    def give(self, heed: Callable[[int], object]) -> None:
        """Whoever heeds them is there: it hears what came, and what comes."""
        self._heed = heed
        for number in self._came:
            heed(number)

    def __enter__(self) -> HeldSignals:
        self.hold(self._numbers)
        return self

    def __exit__(self, *error: object) -> None:
        before, self._before, self.active = self._before, {}, False
        for number, handler in before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._heed(number)


HELD = HeldSignals()
"""Those of this process, where it is the command itself."""
