"""`elasticlib.record`: torch's decorator, for scripts that are to be told from their launcher.

The exception of the decorated function is written to the error file that the launcher names, and
raised again. In elasticlib's own workers it adds nothing: they are watched without it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from . import hooks

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class ErrorHandler(Protocol):
    """What torch's `ErrorHandler` is to its `record`; its own fits."""

    def initialize(self) -> None:
        """Called before the function."""

    def record_exception(self, e: BaseException) -> None:
        """Called with what the function raised, before that goes on."""


class _ErrorFile:
    """Writes torch's error.json; what raises is shown by whoever catches it."""

    def initialize(self) -> None:
        hooks.install("")

    def record_exception(self, e: BaseException) -> None:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file:
            hooks.write_failure(error_file, e, hooks.formatted(e))


def record(fn: Decorated, error_handler: ErrorHandler | None = None) -> Decorated:
    """Decorates a process's main function, once; `error_handler` may be torch's or like it."""
    handler = error_handler or _ErrorFile()

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            handler.record_exception(error)
            raise

    return cast(Decorated, wrapper)
