"""What a launcher says on stderr, where nobody may read it: a terminal that was stopped by Ctrl-S,
or a pipe whose reader stands still, loses lines and holds up nobody.
"""

from __future__ import annotations

import logging
import os
import select
import sys

from ..errors import ConfigError
from ..visible import visible

PIECE = 512
"""Bytes of one write, which a pipe or a terminal that takes any takes at once."""
PATIENCE = 1.0


def show(number: int, text: bytes, seconds: float) -> bool:
    """Write it to this descriptor; False once nothing of it was taken for so many seconds."""
    ready = select.poll()
    ready.register(number, select.POLLOUT)
    while text:
        if not ready.poll(seconds * 1000):
            return False
        text = text[os.write(number, text[:PIECE]) :]
    return True


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """To stderr. Once a line was not taken in time, the others are not waited for until one is."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._missed = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            number = self.stream.fileno()
        except (AttributeError, OSError, ValueError):
            super().emit(record)  # no descriptor behind it, as in tests and notebooks
            return
        try:
            line = f"{self.format(record)}\n"
            if self._missed:
                line = f"[{self._missed} lines are missing here: nobody took them]\n{line}"
            patience = 0.0 if self._missed else PATIENCE
            taken = show(number, line.encode(errors="backslashreplace"), patience)
            self._missed = 0 if taken else self._missed + 1
        except OSError:
            self.handleError(record)


class _Visible(logging.Formatter):
    """Workers and peers have their say in what is logged, and none in what the terminal does."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def start_logging(level: int, form: str) -> None:
    """What elasticlib has to say goes to stderr, each line in this form."""
    handler = ConsoleHandler()
    handler.setFormatter(_Visible(form, "%H:%M:%S"))
    logger = logging.getLogger("elasticlib")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def log_level(name: str) -> int:
    """Of the agent's own lines. Raises ConfigError for one that there is not."""
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ConfigError(f"LOGLEVEL is DEBUG, INFO, WARNING or ERROR, got {name!r}")
    return level
