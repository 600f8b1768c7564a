"""A launch's failure in torch's shapes, and torch's `record` for both kinds of launch errors.

Failures of this node's workers come first; another node's is shown only where none of these failed.
The text of an error ends with the first cause, as people read that line. All are views of
`WorkerExit`, and of the `RootCause` that another node reported.
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

from ..clock import local_date_of, wall
from ..errors import ElasticError, NoFailureError
from ..foreign import read_file, read_object
from ..visible import visible
from ..workers.error_file import (
    EMPTY_ERROR_RECORD,
    MAX_ERROR_FILE_BYTES,
    format_exception,
    install_exception_hooks,
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
    """One worker that failed.

    exitcode: negative for a signal. error_file: its error.json, or `<N/A>` if it left none, or one
    that went with the run (see `log_dir`). error_file_data: what that held, in either case;
    `{"message": "<NONE>"}` if there was none. message: what stands there under that name, which
    is a dict with `message` and `extraInfo` or a text; else a sentence on how it ended.
    timestamp: when it failed, in whole seconds since 1970 by its own machine's clock. tail: the
    last lines of its stderr. host: where, if that was another node.

    What is left out besides the first four is read from the error file, as torch does.

    Raises:
        OSError, ValueError, KeyError: it is left out, and the error file cannot be read.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = attrs.field(kw_only=True)
    message: Any = attrs.field(kw_only=True)
    timestamp: int = attrs.field(kw_only=True)
    tail: str = attrs.field(default="", kw_only=True)
    host: str = attrs.field(default="", kw_only=True)

    @error_file_data.default
    def _read(self) -> dict[str, Any]:
        path = Path(self.error_file)
        return (
            read_object(read_file(path, MAX_ERROR_FILE_BYTES))
            if path.is_file()
            else dict(EMPTY_ERROR_RECORD)
        )

    @message.default
    def _said(self) -> Any:
        if self.error_file_data != EMPTY_ERROR_RECORD:
            return self.error_file_data["message"]
        if self.exitcode < 0:
            return f"was killed by {self.signal_name()}"
        return f"exited with code {self.exitcode}, and left no error file"

    @timestamp.default
    def _when(self) -> int:
        if self.error_file_data == EMPTY_ERROR_RECORD:
            return int(wall())
        message = self.error_file_data["message"]
        if isinstance(message, dict):
            return int(message["extraInfo"]["timestamp"])
        return int(self.error_file_data.get("timestamp", 0))

    def signal_name(self) -> str:
        """As `SIGKILL`; `<N/A>` if no signal ended it, or one without a name."""
        return SIGNAL_NAMES.get(-self.exitcode, NOT_AVAILABLE)

    def timestamp_isoformat(self) -> str:
        """As `2026-01-31_23:59:59`, in this machine's time zone."""
        return local_date_of(self.timestamp)

    @property
    def text(self) -> str:
        """The message in one text, without its traceback."""
        if isinstance(self.message, dict):
            return str(self.message.get("message", ""))
        return str(self.message)

    @property
    def traceback(self) -> str:
        """As the worker wrote it, or an empty text."""
        return message_and_traceback(self.error_file_data)[1]


def failure_of(exit_: WorkerExit) -> ProcessFailure:
    """The end of a worker of this node in torch's shape."""
    data = dict(exit_.error_data) or dict(EMPTY_ERROR_RECORD)
    why = find_error_line(exit_.stderr_tail, exit_.returncode)
    how = f"{exit_.exit_description}: {why}" if why else exit_.exit_description
    return ProcessFailure(
        exit_.local_rank,
        exit_.pid,
        exit_.returncode,
        exit_.error_file or NOT_AVAILABLE,
        error_file_data=data,
        message=data["message"] if exit_.error_data else how,
        timestamp=int(exit_.failed_at),
        tail=exit_.stderr_tail,
    )


def failures_of(exits: Mapping[int, WorkerExit]) -> dict[int, ProcessFailure]:
    """By global rank, the first one first; exits: those that failed, in the order of their ends."""
    found = dict(exits)
    root = next(iter(exits.values())).root_failure if exits else None
    if root is not None:
        # It had failed before, and ended later, if it has.
        found = {root.rank: found.get(root.rank, root), **found}
    return {rank: failure_of(exit_) for rank, exit_ in found.items()}


def failure_elsewhere(cause: RootCause) -> ProcessFailure:
    """What another node reported of its worker; pid and local rank are that node's."""
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

    name: of what ran. failures: the workers of this node that failed, by global rank, the first
    one first; empty where another node's did, or where the job failed without one. result: how
    this node's run ended; cause: the first failure over all nodes. Both may be None.
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
        """Global rank and failure of the first worker of this node that failed; if none did, of the
        first of another node, as far as that node reported it.

        Raises:
            NoFailureError: no worker's failure is known; the message says why the job failed.
        """
        if self.failures:
            # By time, as a caller may have put them together; else the first one is the first.
            return min(self.failures.items(), key=lambda item: item[1].timestamp)
        if self.cause is not None and self.cause.rank >= 0:
            return self.cause.rank, failure_elsewhere(self.cause)
        raise NoFailureError(f"{self.name}: no worker is known to have failed: {self._reason}")

    @property
    def _reason(self) -> str:
        return "workers failed" if self.result is None else self.result.reason

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """What stands in the error: why, all that failed, and the first failure with its traceback
        at the end. The delimiters are those of torch's, and make up the lines between."""
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
        lines += [f"  {line}" for line in _explained(rank, first)]
        return visible("\n".join(lines))


def _headline(rank: int, failure: ProcessFailure) -> str:
    who = f"rank {rank} (local rank {failure.local_rank}, pid {failure.pid})"
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"signal {-failure.exitcode} ({failure.signal_name()})"
    return f"{who}, {how}: {failure.text.strip().partition(chr(10))[0]}"


def _explained(rank: int, failure: ProcessFailure) -> list[str]:
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
    """A signal ended this node's part: it was stopped, or it was drained and has saved.

    sigval: which; a number where Python has no name for it. result: how the run ended, with its
    state STOPPED or DRAINED; may be None.
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

VARIABLE = "TORCHELASTIC_ERROR_FILE"
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class ErrorHandler(Protocol):
    """What torch's `ErrorHandler` is to its `record`: its own fits, and whatever has its methods.

    `initialize` is called before the function; then `record_exception` with what the function
    raised or, where that is a launch's error and the worker that failed first has left an error
    file, `dump_error_file` with that and the worker's exit code, negative for a signal.
    """

    def initialize(self) -> None: ...
    def record_exception(self, e: BaseException) -> None: ...
    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None: ...


class _ErrorFile:
    """Writes torch's error.json; what it raised is shown by whatever catches that."""

    def initialize(self) -> None:
        install_exception_hooks("")

    def record_exception(self, e: BaseException) -> None:
        error_file = os.environ.get(VARIABLE)
        if error_file:
            write_error_file(error_file, e, format_exception(e))

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        error_file = os.environ.get(VARIABLE)
        if not error_file:
            return
        with open(rootcause_error_file, "rb") as file:
            data = file.read()
        record = parse_error_record(data)
        message = record.get("message")
        if error_code and isinstance(message, dict):
            # A worker cannot know by which code, or signal, it ended in the end.
            message["errorCode"] = error_code
            data = json.dumps(record).encode()
        with contextlib.suppress(OSError):
            replace_file(error_file, data)


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
            _pass_on(error, handler)
            raise

    return cast(Decorated, wrapper)


def _pass_on(error: Exception, handler: ErrorHandler) -> None:
    """Have the handler record an exception, or the failure of a worker that it tells of."""
    # By its name: torch's ChildFailedError is another class, of which this holds as well.
    ask = getattr(error, "get_first_failure", None)
    if ask is not None:
        with contextlib.suppress(NoFailureError):
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
    elif data.get("message") not in (None, EMPTY_ERROR_RECORD["message"]):
        # The file went with the run, or is another node's.
        with tempfile.NamedTemporaryFile("w", prefix="elasticlib_error_", suffix=".json") as file:
            json.dump(data, file)
            file.flush()
            yield file.name
    else:
        yield None
