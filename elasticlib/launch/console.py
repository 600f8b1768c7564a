"""Console output of the launcher, which a stopped terminal or a blocked pipe never holds up.

Lines that stderr does not accept in time are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import select
import sys

from ..errors import ConfigError
from ..sanitize import escape_control_chars

CHUNK_BYTES = 512  # a pipe or terminal that is ready accepts this much without blocking
WRITE_TIMEOUT_S = 1.0


def write_with_timeout(descriptor: int, data: bytes, timeout_s: float) -> bool:
    """Write data to a descriptor.

    Returns:
        True if all data was written. False if the descriptor accepted none for `timeout_s` seconds;
        a part of the data may have been written before.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data:
        if not poll.poll(timeout_s * 1000):
            return False
        data = data[os.write(descriptor, data[:CHUNK_BYTES]) :]
    return True


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs to stderr, and drops a line that stderr does not accept within WRITE_TIMEOUT_S.

    After a drop, each line that stderr does not accept at once is dropped, until one is accepted.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            descriptor = self.stream.fileno()
        except (AttributeError, OSError, ValueError):
            super().emit(record)  # a stream without a descriptor, as in tests and notebooks
            return
        try:
            line = f"{self.format(record)}\n"
            if self._num_dropped:
                line = (
                    f"[{self._num_dropped} log lines were dropped because stderr was blocked]\n"
                    f"{line}"
                )
            timeout_s = 0.0 if self._num_dropped else WRITE_TIMEOUT_S
            data = line.encode(errors="backslashreplace")
            was_written = write_with_timeout(descriptor, data, timeout_s)
            self._num_dropped = 0 if was_written else self._num_dropped + 1
        except OSError:
            self.handleError(record)


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters, because messages contain text of workers and other nodes."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(super().format(record))


def start_logging(level: int, line_format: str) -> None:
    """Send elasticlib's log messages to stderr in this format."""
    handler = ConsoleHandler()
    handler.setFormatter(_EscapingFormatter(line_format, "%H:%M:%S"))
    logger = logging.getLogger("elasticlib")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def log_level(name: str) -> int:
    """Return the level of this name.

    Raises:
        ConfigError: there is no such level.
    """
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ConfigError(f"LOGLEVEL must be DEBUG, INFO, WARNING or ERROR, got {name!r}")
    return level
