"""`elasticlib.record`: torch's decorator, for scripts that are to be told from their launcher.

The exception of the decorated function is written to the error file that the launcher names, and
raised again; where it is that of a launch, the first failure's own record is written there
instead. In elasticlib's own workers it adds nothing else: they are watched without it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast

from ..errors import NoFailure
from . import hooks
from .error_file import NO_RECORD, read_record

VARIABLE = "TORCHELASTIC_ERROR_FILE"
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class ErrorHandler(Protocol):
    """What torch's `ErrorHandler` is to its `record`; its own fits."""

    def initialize(self) -> None:
        """Called before the function."""

    def record_exception(self, e: BaseException) -> None:
        """Called with what the function raised, before that goes on."""

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Called instead where the exception is a launch's and the worker that failed first has
        left an error file; error_code is its exit code, negative for a signal."""


class _ErrorFile:
    """Writes torch's error.json; what raises is shown by whoever catches it."""

    def initialize(self) -> None:
        hooks.install("")

    def record_exception(self, e: BaseException) -> None:
        error_file = os.environ.get(VARIABLE)
        if error_file:
            hooks.write_failure(error_file, e, hooks.formatted(e))

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        error_file = os.environ.get(VARIABLE)
        if not error_file:
            return
        with open(rootcause_error_file, "rb") as file:
            data = file.read()
        record = read_record(data)
        message = record.get("message")
        if error_code and isinstance(message, dict):
            # A worker cannot know by which code, or signal, it ended in the end.
            message["errorCode"] = error_code
            data = json.dumps(record).encode()
        with contextlib.suppress(OSError):
            hooks.replace(error_file, data)


def record(fn: Decorated, error_handler: ErrorHandler | None = None) -> Decorated:
    """Decorates a process's main function, once; `error_handler` may be torch's or like it.

    What the function raises goes on, but for an exit with code 0, after which None is returned.
    """
    handler = error_handler or _ErrorFile()

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as end:
            if end.code != 0:
                raise
            return None
        except Exception as error:
            pass_on(error, handler)
            raise

    return cast(Decorated, wrapper)


def pass_on(error: Exception, handler: ErrorHandler | None = None) -> None:
    """Have a handler (the one that writes error.json) record an exception, or the worker's that
    it tells of."""
    handler = handler or _ErrorFile()
    # By its name: torch's ChildFailedError is another class, of which this holds as well.
    ask = getattr(error, "get_first_failure", None)
    if ask is not None:
        with contextlib.suppress(NoFailure):
            _, failure = ask()
            with _record_of(failure) as path:
                if path is not None:
                    handler.dump_error_file(path, failure.exitcode)
                    return
    handler.record_exception(error)


@contextlib.contextmanager
def _record_of(failure: Any) -> Iterator[str | None]:
    """The file in which a worker has left its failure, for as long as this lasts; None if none."""
    data: Mapping[str, Any] = failure.error_file_data
    if os.path.isfile(failure.error_file):
        yield failure.error_file
    elif data.get("message") not in (None, NO_RECORD["message"]):
        # The file went with the run, or is another node's.
        with tempfile.NamedTemporaryFile("w", prefix="elasticlib_error_", suffix=".json") as file:
            json.dump(data, file)
            file.flush()
            yield file.name
    else:
        yield None
