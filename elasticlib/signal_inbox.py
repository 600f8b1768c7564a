"""The inbox for the signals of a process: it keeps, counts and forwards them in their order.

Only the standard library is imported, so that a command can install the inbox in its first line.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from .constants import GIVE_UP_COUNT


class SignalInbox:
    """Keeps signals until there is a receiver, forwards them, and counts the SIGINTs among them.

    Signals that were ignored when they were captured stay ignored. Python delivers signals only to
    the main thread; in another thread nothing is captured, and `put` is the only source.
    """

    def __init__(self) -> None:
        self.is_active = False  # this inbox was asked to capture signals
        self.num_interrupts = 0  # SIGINTs so far
        self._num_announced = 0  # of those, how many `reason_to_give_up` has seen
        self._previous_handlers: dict[int, Any] = {}  # of the captured signals
        self._pending: deque[int] = deque()  # signals that no receiver has got
        self._receiver: Callable[[int], object] | None = None
        self._ending: frozenset[int] = frozenset()  # end the process while there is no receiver

    def capture(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Handle these signals from now on, in addition to those of earlier calls.

        Returns:
            The signals that were not captured before.
        """
        self.is_active = True
        if threading.current_thread() is not threading.main_thread():
            return ()
        new = tuple(
            number
            for number in dict.fromkeys(numbers)
            if number not in self._previous_handlers
            and signal.getsignal(number) is not signal.SIG_IGN
        )
        for number in new:
            self._previous_handlers[number] = signal.signal(number, self._handle)
        return new

    def release(self, numbers: Iterable[int]) -> None:
        """Give these signals the handlers that they had before they were captured.

        A handler that a C library has installed is unknown to Python, and cannot be installed
        again. Such a signal gets its default action.
        """
        for number in numbers:
            if number in self._previous_handlers:
                previous = self._previous_handlers.pop(number)
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    @contextmanager
    def captured(self, numbers: Iterable[int]) -> Iterator[SignalInbox]:
        """Capture these signals inside a `with` block. Those that are captured already stay so."""
        new = self.capture(numbers)
        try:
            yield self
        finally:
            self.release(new)

    def restrict_to(self, numbers: Collection[int]) -> None:
        """Capture only these signals, and give all others their previous handlers.

        Signals of the others that are kept already are sent to this process again.
        """
        wanted = frozenset(numbers)
        self.release(tuple(self._previous_handlers.keys() - wanted))
        self.capture(wanted)
        for number in [number for number in self._pending if number not in wanted]:
            self._pending.remove(number)
            os.kill(os.getpid(), number)

    def end_process_on(self, numbers: Iterable[int]) -> None:
        """Make these signals end the process with exit code 128 + n while there is no receiver.

        A signal of them that is kept already ends the process now.
        """
        self._ending = frozenset(numbers)
        for number in self._pending:
            if number in self._ending:
                _end_process(number)

    def forward_to(self, receiver: Callable[[int], object]) -> None:
        """Call `receiver` with each kept signal now, and with each later one as it arrives."""
        self._receiver = receiver
        self._forward()

    def put(self, number: int) -> None:
        """Act as if the process had received this signal. Thread-safe."""
        if number == signal.SIGINT:
            self.num_interrupts += 1
        if self._receiver is None and number in self._ending:
            _end_process(number)
        self._pending.append(number)
        self._forward()

    def reason_to_give_up(self, work: str, warn: Callable[[str], object]) -> str:
        """Return why this work must end now, or an empty string.

        SIGTERM and the drain signals are no reason, because batch systems repeat them.

        Args:
            work: what is in progress, such as "the final write of snapshots".
            warn: receives a message about each SIGINT that is not the last one yet.
        """
        count = self.num_interrupts
        if count >= GIVE_UP_COUNT:
            return f"{work} was given up at SIGINT number {count}"
        if count > self._num_announced:
            warn(f"received SIGINT: {work} continues; {GIVE_UP_COUNT - count} more will end it")
        self._num_announced = count
        return ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.put(number)

    def _forward(self) -> None:
        # A handler may interrupt this loop at any point and run it to its end.
        while self._receiver is not None and self._pending:
            try:
                number = self._pending.popleft()
            except IndexError:
                return
            self._receiver(number)


PROCESS_SIGNALS = SignalInbox()  # the inbox of the command `elasticrun`


def _end_process(number: int) -> NoReturn:
    """End this process at once. Helper processes end when they notice that it has gone."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    try:
        os.write(2, f"elasticrun: {name} ended the command before the job began\n".encode())
    finally:
        os._exit(128 + number)
