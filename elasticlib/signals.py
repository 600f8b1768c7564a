"""Signals by their names, those too that Python's own list has no name for: the real-time ones."""

from __future__ import annotations

import signal

from .errors import ConfigError

NOT_TO_BE_HEARD = frozenset({signal.SIGKILL, signal.SIGSTOP})
NEVER = frozenset(
    {
        *("SIGKILL", "SIGSTOP"),
        *("SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGPIPE"),
    }
)
"""Those that nobody can catch, and those that tell a process of its own affairs."""


def signal_name(number: int) -> str:
    """As `SIGTERM` or `SIGRTMIN+3`; `signal 4711` for one that this system does not have."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"


def as_signal(number: int) -> signal.Signals | int:
    """Python's own value where it has one."""
    try:
        return signal.Signals(number)
    except ValueError:
        return number


def signal_number(name: str) -> int | None:
    """The signal of this name, as `signal_name` gives it; None if there is none."""
    try:
        return int(signal.Signals[name])
    except KeyError:
        pass
    known = {signal_name(number): int(number) for number in signal.valid_signals()}
    return known.get(name)


def can_be_heard(number: int) -> bool:
    """Whether a process may decide what this signal does to it."""
    return number in signal.valid_signals() and number not in NOT_TO_BE_HEARD


def read_signals(text: str | None, flag: str) -> tuple[int, ...] | None:
    """The signals that a flag names, each once; None if it was not given.

    Raises:
        ConfigError: it names no signal, or one that cannot be heard or means something else.
    """
    if text is None:
        return None
    if text == "none":
        return ()
    return tuple(dict.fromkeys(_number(name.strip(), flag) for name in text.split(",")))


def _number(name: str, flag: str) -> int:
    if name in NEVER:
        raise ConfigError(f"{flag}: {name} cannot mean that")
    number = signal_number(name)
    if number is None:
        raise ConfigError(
            f"{flag} is names of signals with commas between, as SIGTERM,SIGUSR1, got {name!r}"
        )
    return number
