"""Names and numbers of signals, including real-time signals, which Python has no names for."""

from __future__ import annotations

import signal

UNCATCHABLE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSTOP})
# Signals that no flag may give another meaning: the kernel delivers them for faults of the process
# and for events of its children, or no process can catch them.
RESERVED_SIGNALS = frozenset(
    {
        *("SIGKILL", "SIGSTOP"),
        *("SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGPIPE"),
    }
)


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGTERM`, `SIGRTMIN+3` or, if it is unknown, `signal 4711`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"


def as_signal(number: int) -> signal.Signals | int:
    """Return the member of `signal.Signals` with this number, or the number if there is none."""
    try:
        return signal.Signals(number)
    except ValueError:
        return number


def signal_number(name: str) -> int | None:
    """Return the number of the signal for which `signal_name` returns this name, or None."""
    try:
        return int(signal.Signals[name])
    except KeyError:
        pass
    known = {signal_name(number): int(number) for number in signal.valid_signals()}
    return known.get(name)


def signal_numbers(*names: str) -> tuple[int, ...]:
    """Return the numbers of known signals."""
    return tuple(int(signal.Signals[name]) for name in names)


def is_catchable(number: int) -> bool:
    """Return whether a process can handle or ignore this signal."""
    return number in signal.valid_signals() and number not in UNCATCHABLE_SIGNALS


def read_signals(text: str) -> tuple[int, ...]:
    """Return the numbers of the signals in a text, each once.

    Args:
        text: Names with commas between them, or `none`.

    Raises:
        ValueError: A name is unknown, or its signal is reserved. The message is a rule.
    """
    if text == "none":
        return ()
    return tuple(dict.fromkeys(_parse_signal(name.strip()) for name in text.split(",")))


def _parse_signal(name: str) -> int:
    if name in RESERVED_SIGNALS:
        raise ValueError(f"cannot contain {name}, because a process cannot handle this signal")
    number = signal_number(name)
    if number is None:
        raise ValueError("must be signal names with commas between them, as SIGTERM,SIGUSR1")
    return number
