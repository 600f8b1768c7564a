"""Failures of a launch in torch's shapes, and torch's `record`.

A failure is a view of a `WorkerExit` of this node. If no worker of this node failed, it is a view
of the `RootCause` that another node reported. The message of an error ends with the root cause,
which is the line that users read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import attrs

from ..clock import format_local_time, wall
from ..errors import ElasticError, NoFailureError
from ..sanitize import escape_control_chars
from ..untrusted import read_file, read_object
from ..workers.error_file import (
    EMPTY_ERROR_RECORD,
    MAX_ERROR_FILE_BYTES,
    enable_faulthandler,
    format_exception,
    message_and_traceback,
    parse_error_record,
    replace_file,
    write_error_file,
)
from ..workers.exits import SIGNAL_NAMES, WorkerExit, find_error_line

if TYPE_CHECKING:
    from ..agent.interface import RootCause, RunResult

NOT_AVAILABLE = "<N/A>"


@attrs.frozen
class ProcessFailure:
    """The failure of one worker.

    If `error_file_data`, `message` or `timestamp` is not given, it is read from the error file, as
    torch does.

    Raises:
        OSError: the error file cannot be read.
        ValueError: the error file is invalid.
        KeyError: the error file lacks a field.
    """

    local_rank: int
    pid: int
    exitcode: int  #: negative for a signal
    #: The worker's error.json, or `<N/A>` if there is none or if it was removed with the run.
    error_file: str
    #: The content of the error file. If the worker wrote none, its only key is `message`.
    error_file_data: dict[str, Any] = attrs.field(kw_only=True)
    #: The message of the error file: text, or a dict with `message` and `extraInfo`. Without an
    #: error file, a description of the exit.
    message: Any = attrs.field(kw_only=True)
    #: Time of the failure in seconds since the epoch, by the clock of the worker's machine.
    timestamp: int = attrs.field(kw_only=True)
    tail: str = attrs.field(default="", kw_only=True)  #: the last lines of stderr
    host: str = attrs.field(default="", kw_only=True)  #: the host, if it is another node

    @error_file_data.default
    def _read_error_file(self) -> dict[str, Any]:
        path = Path(self.error_file)
        return (
            read_object(read_file(path, MAX_ERROR_FILE_BYTES))
            if path.is_file()
            else dict(EMPTY_ERROR_RECORD)
        )

    @message.default
    def _default_message(self) -> Any:
        if self.error_file_data != EMPTY_ERROR_RECORD:
            return self.error_file_data["message"]
        if self.exitcode < 0:
            return f"was killed by {self.signal_name()}"
        return f"exited with code {self.exitcode} and wrote no error file"

    @timestamp.default
    def _default_timestamp(self) -> int:
        if self.error_file_data == EMPTY_ERROR_RECORD:
            return int(wall())
        message = self.error_file_data["message"]
        if isinstance(message, dict):
            return int(message["extraInfo"]["timestamp"])
        return int(self.error_file_data.get("timestamp", 0))

    def signal_name(self) -> str:
        """Return the signal's name, such as `SIGKILL`, or `<N/A>` if there is none."""
        return SIGNAL_NAMES.get(-self.exitcode, NOT_AVAILABLE)

    def timestamp_isoformat(self) -> str:
        """Return the time as `2026-01-31_23:59:59` in this machine's time zone."""
        return format_local_time(self.timestamp)

    @property
    def text(self) -> str:
        """The message as text, without the traceback."""
        if isinstance(self.message, dict):
            return str(self.message.get("message", ""))
        return str(self.message)

    @property
    def traceback(self) -> str:
        """The traceback that the worker wrote, or an empty string."""
        return message_and_traceback(self.error_file_data)[1]


def to_process_failure(exit_: WorkerExit) -> ProcessFailure:
    """Return the exit of a worker of this node in torch's shape."""
    data = dict(exit_.error_data) or dict(EMPTY_ERROR_RECORD)
    description = exit_.exit_description
    error_line = find_error_line(exit_.stderr_tail, exit_.returncode)
    if error_line:
        description = f"{description}: {error_line}"
    return ProcessFailure(
        exit_.local_rank,
        exit_.pid,
        exit_.returncode,
        exit_.error_file or NOT_AVAILABLE,
        error_file_data=data,
        message=data["message"] if exit_.error_data else description,
        timestamp=int(exit_.failed_at),
        tail=exit_.stderr_tail,
    )


def to_process_failures(exits: Mapping[int, WorkerExit]) -> dict[int, ProcessFailure]:
    """Return the failures by global rank, the first failure first.

    Args:
        exits: the failed exits by global rank, in the order in which the workers exited.
    """
    ordered = dict(exits)
    root = next(iter(exits.values())).root_failure if exits else None
    if root is not None:
        # The root failure comes first, although its process may exit later than others.
        ordered = {root.rank: ordered.get(root.rank, root), **ordered}
    return {rank: to_process_failure(exit_) for rank, exit_ in ordered.items()}


def remote_failure(cause: RootCause) -> ProcessFailure:
    """Return a failure that another node reported. Pid and local rank are of that node."""
    data: dict[str, Any] = dict(EMPTY_ERROR_RECORD)
    if cause.message or cause.traceback:
        trace = {"py_callstack": cause.traceback}
        data = {"message": {"message": cause.message, "extraInfo": trace}}
    return ProcessFailure(
        cause.local_rank,
        cause.pid,
        cause.returncode,
        NOT_AVAILABLE,
        error_file_data=data,
        message=cause.summary if data == EMPTY_ERROR_RECORD else data["message"],
        timestamp=0,
        tail=cause.stderr_tail,
        host=cause.host,
    )


class ChildFailedError(ElasticError):
    """The job failed.

    Args:
        name: the name of the entry point.
        failures: the failed workers of this node by global rank, the first failure first. Empty if
            only workers of other nodes failed, or if the job failed without a worker's failure.
        result: the result of this node's run, or None. Its root cause is the attribute `cause`.
    """

    def __init__(
        self,
        name: str,
        failures: Mapping[int, ProcessFailure],
        result: RunResult | None = None,
    ) -> None:
        self.name = name
        self.failures = dict(failures)
        self.result = result
        self.cause = None if result is None else result.root_cause
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures, self.result)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the global rank and the failure of the worker that failed first.

        If no worker of this node failed, this is the failure that another node reported.

        Raises:
            NoFailureError: no failure of a worker is known. The message has the job's reason.
        """
        if self.failures:
            # A caller may have merged the failures of several jobs, so the times are compared.
            return min(self.failures.items(), key=lambda item: item[1].timestamp)
        if self.cause is not None and self.cause.rank >= 0:
            return self.cause.rank, remote_failure(self.cause)
        raise NoFailureError(f"{self.name}: no failure of a worker is known: {self._reason}")

    @property
    def _reason(self) -> str:
        return "workers failed" if self.result is None else self.result.reason

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the message: the reason, other failures, and the root cause with its traceback.

        Args:
            boarder_delim: the character of the line below the reason; the name is torch's.
            section_delim: the character of the line between the sections.
        """
        lines = [f"{self.name}: {self._reason}"]
        try:
            rank, first = self.get_first_failure()
        except NoFailureError:
            return lines[0]
        lines.append(boarder_delim * 60)
        others = {r: f for r, f in self.failures.items() if r != rank}
        if others:
            lines.append("Other failures:")
            lines += [f"  {_headline(rank, failure)}" for rank, failure in others.items()]
            lines.append(section_delim * 60)
        lines.append("Root cause (first failure):")
        lines += [f"  {line}" for line in _describe(rank, first)]
        return escape_control_chars("\n".join(lines))


def _headline(rank: int, failure: ProcessFailure) -> str:
    worker = f"rank {rank} (local rank {failure.local_rank}, pid {failure.pid})"
    end = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        end = f"signal {-failure.exitcode} ({failure.signal_name()})"
    return f"{worker}, {end}: {failure.text.strip().partition(chr(10))[0]}"


def _describe(rank: int, failure: ProcessFailure) -> list[str]:
    lines = [_headline(rank, failure)]
    if failure.host:
        lines.append(f"host: {failure.host}")
    if failure.timestamp:
        lines.append(f"time: {failure.timestamp_isoformat()}")
    if failure.error_file != NOT_AVAILABLE:
        lines.append(f"error file: {failure.error_file}")
    evidence = failure.traceback
    if not evidence and failure.tail:
        evidence = f"the last lines of its stderr:\n{failure.tail}"
    return lines + evidence.rstrip().splitlines()


class SignalException(ElasticError):
    """A signal stopped or drained this node.

    Args:
        msg: the message.
        sigval: the signal; an integer if Python has no name for it.
        result: the result of the run, whose state is STOPPED or DRAINED, or None.
    """

    def __init__(
        self, msg: str, sigval: signal.Signals | int, result: RunResult | None = None
    ) -> None:
        super().__init__(msg)
        self.sigval = sigval
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.sigval, self.result)


# -- record ----------------------------------------------------------------------------------------

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class ErrorHandler(Protocol):
    """The methods of torch's `ErrorHandler` that `record` calls.

    `initialize` is called before the function. If the function raises a launch's error and the
    worker that failed first has written an error file, `dump_error_file` is called with that file
    and the worker's exit code, which is negative for a signal. Otherwise `record_exception` is
    called with the exception.
    """

    def initialize(self) -> None: ...
    def record_exception(self, e: BaseException) -> None: ...
    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None: ...


class _ErrorFile:
    """Writes torch's error.json, and prints nothing."""

    def initialize(self) -> None:
        enable_faulthandler()

    def record_exception(self, e: BaseException) -> None:
        error_file = os.environ.get(ERROR_FILE_ENV)
        if error_file:
            write_error_file(error_file, e, format_exception(e))

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        error_file = os.environ.get(ERROR_FILE_ENV)
        if not error_file:
            return
        with open(rootcause_error_file, "rb") as file:
            data = file.read()
        record = parse_error_record(data)
        message = record.get("message")
        if error_code and isinstance(message, dict):
            # A worker that writes its error file does not know its exit code yet.
            message["errorCode"] = error_code
            data = json.dumps(record).encode()
        with contextlib.suppress(OSError):
            replace_file(error_file, data)


def record(fn: Decorated, error_handler: ErrorHandler | None = None) -> Decorated:
    """Decorate the main function of a process to write its exception to the error file.

    Exceptions propagate, except for an exit with code 0, which returns None.

    Args:
        fn: the main function.
        error_handler: torch's `ErrorHandler` or an object with its methods; by default the error is
            written to the file that TORCHELASTIC_ERROR_FILE names.
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
            _record_error(error, handler)
            raise

    return cast(Decorated, wrapper)


def _record_error(error: Exception, handler: ErrorHandler) -> None:
    """Have the handler record the error file of the worker that failed, or the exception.

    The exception is recorded if no worker caused it, or if the worker wrote no error file.
    """
    # The method is looked up by name, because torch's ChildFailedError is another class.
    get_first_failure = getattr(error, "get_first_failure", None)
    if get_first_failure is not None:
        with contextlib.suppress(NoFailureError):
            _, failure = get_first_failure()
            with _error_file_of(failure) as path:
                if path is not None:
                    handler.dump_error_file(path, failure.exitcode)
                    return
    handler.record_exception(error)


@contextlib.contextmanager
def _error_file_of(failure: Any) -> Iterator[str | None]:
    """Yield the path of a worker's error file or of a temporary copy; None if it wrote none."""
    data: Mapping[str, Any] = failure.error_file_data
    if os.path.isfile(failure.error_file):
        yield failure.error_file
    elif data.get("message") not in (None, EMPTY_ERROR_RECORD["message"]):
        # The file was removed with the run, or is on another node.
        with tempfile.NamedTemporaryFile("w", prefix="elasticlib_error_", suffix=".json") as file:
            json.dump(data, file)
            file.flush()
            yield file.name
    else:
        yield None
