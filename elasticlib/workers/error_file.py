"""Error file of a worker: how a worker records its failure, and how its agent reads it.

The record is torch's error.json. It needs no decorator in the user's script: `run_program` records
the exception that ends the program, and a hook records those that end other threads. The hook
changes no output, and a record that torch's `record` has written stays. The time and the exit code
of the failure are reported to the agent at once, in the page that the worker shares with it,
because a process may take long to exit after it failed: its peers may notice the failure and exit
first. Every worker imports this module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from ..clock import wall
from ..errors import ConfigError
from ..sanitize import shorten
from ..untrusted import open_regular_file, read_object
from .worker_channel import CHANNEL_ENV, WorkerChannel

EMPTY_ERROR_RECORD = {"message": "<NONE>"}  # torch's record of a worker without an error.json
MAX_ERROR_FILE_BYTES = 1 << 20  # the user's code may write any file under this name
MAX_TEXT_CHARS = 1 << 16  # of a message or traceback
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_INTERNAL_PATHS = (_PACKAGE + os.sep, os.path.join(os.path.dirname(_PACKAGE), "compat", ""))


# -- the worker's end ------------------------------------------------------------------------------


def enable_faulthandler() -> None:
    """Let this process write its Python stack when it crashes."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        # There may be no stderr. A faulthandler that the user has enabled stays.
        if not faulthandler.is_enabled():
            faulthandler.enable()


def write_error_file(error_file: str, error: BaseException, trace: str, thread: str = "") -> bytes:
    """Write an error.json. Return its content, also if the file cannot be written."""
    name, now = type(error).__name__, int(wall())
    record = make_error_record(name, _message_of(error), trace, now, thread=thread)
    with contextlib.suppress(OSError):
        replace_file(error_file, record)
    return record


def replace_file(path: str, content: bytes) -> None:
    """Replace a file atomically.

    Raises:
        OSError: The file cannot be written; the old one is still there.
    """
    temporary = f"{path}.part"
    with open(temporary, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def strip_internal_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of elasticlib that started the user's code."""
    user_trace = trace
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(_INTERNAL_PATHS):
            user_trace = trace.tb_next
        elif "runpy" not in name:
            break
        trace = trace.tb_next
    return user_trace


def format_exception(error: BaseException) -> str:
    """Return the traceback of an exception without internal frames, as Python prints it."""
    trace = strip_internal_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace))


class FailureRecorder:
    """Records the failures of this process, but not those of processes that it forks.

    Args:
        error_file: The path of the error.json; empty to write none.
    """

    def __init__(self, error_file: str) -> None:
        self._file = error_file
        self._channel_path = os.environ.get(CHANNEL_ENV, "")  # empty without an agent
        self._pid = os.getpid()
        self._written = b""  # the last record of this writer
        self._recorded: BaseException | None = None  # the exception that ends the process
        self._thread_traces = ""  # tracebacks of failed threads
        self._thread_hook = threading.excepthook  # the hook before `install`

    def install(self) -> None:
        """Record the exceptions of threads from now on."""
        if self._file:
            threading.excepthook = self._on_thread_exception

    def record(self, error: BaseException) -> None:
        """Record an exception that ends the process; it replaces the exceptions of other threads.

        Of a SystemExit with an integer, only the exit code is recorded, unless the code is 0.
        """
        if self._recorded is not None:
            return
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            if error.code is not None and error.code & 0xFF:
                self.report_program_end(error.code & 0xFF)
            return
        self._recorded, failed_at = error, wall()
        self._write(error, format_exception(error) + self._thread_traces)
        # The agent may kill this process from now on.
        self.report_program_end(1, failed_at)

    def report_program_end(self, exit_code: int, at: float | None = None) -> None:
        """Report to the agent that the program of this process has finished.

        Args:
            exit_code: The exit code; not 0 if the program has raised.
            at: The time of the wall clock; None for the present time.
        """
        if not self._channel_path or os.getpid() != self._pid:
            return
        # The channel is not kept open, because the program is to have no other files than usual.
        with (
            contextlib.suppress(OSError, ConfigError),  # the agent has exited
            contextlib.closing(WorkerChannel(self._channel_path)) as channel,
        ):
            channel.report_program_end(exit_code, wall() if at is None else at)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        error, thread = args.exc_value, args.thread
        if error is not None and not isinstance(error, SystemExit) and self._recorded is None:
            name = "?" if thread is None else thread.name
            # It ends only its thread. The agent reads the record if the process fails later.
            self._thread_traces += f"\nEarlier, in thread {name!r}:\n{format_exception(error)}"
            self._write(error, self._thread_traces.lstrip(), name)
        self._thread_hook(args)

    def _write(self, error: BaseException, trace: str, thread: str = "") -> None:
        if not self._file or os.getpid() != self._pid:
            return
        try:
            with open(self._file, "rb") as file:
                current = file.read()
        except OSError:
            current = self._written
        # A record of another writer, such as torch's, was made closer to the cause.
        if current == self._written:
            self._written = write_error_file(self._file, error, trace, thread)


def _message_of(error: BaseException) -> str:
    """Return the exception's message, or where it was raised if it has none."""
    try:
        return str(error) or _raised_in(error)
    except Exception as broken:
        # An exception's own code runs here, and may raise anything.
        return f"(its message cannot be shown: {type(broken).__name__})"


def _raised_in(error: BaseException) -> str:
    """Return the innermost function of the traceback with its file and line; empty without one."""
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        location = f"raised in {code.co_name} ({os.path.basename(code.co_filename)}:{line})"
    return location


# -- error.json in torch's format ------------------------------------------------------------------


def make_error_record(
    kind: str, text: str, traceback: str, timestamp: int, *, thread: str = ""
) -> bytes:
    """Return the content of an error.json.

    Args:
        kind: The name of the exception's class.
        text: The exception's message.
        traceback: The traceback, as Python prints it.
        timestamp: Seconds since 1970.
        thread: The name of the thread, if only that thread has exited.
    """
    extra = {"py_callstack": shorten(traceback, MAX_TEXT_CHARS), "timestamp": str(timestamp)}
    if thread:
        extra["thread"] = thread
    message = shorten(f"{kind}: {text}", MAX_TEXT_CHARS)
    return json.dumps({"message": {"message": message, "extraInfo": extra}}).encode()


def parse_error_record(data: bytes) -> dict[str, Any]:
    """Return the record in an error.json, or an empty dict if it has another format."""
    try:
        record = read_object(data)
    except ValueError:
        return {}
    return record if "message" in record else {}


def message_and_traceback(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return message and traceback of a record; empty texts if it has none."""
    message = record.get("message")
    if isinstance(message, str):
        return message, ""
    if not isinstance(message, dict):
        return "", ""
    trace = (_extra_info(record) or {}).get("py_callstack", "")
    return str(message.get("message", "")), str(trace)


def _extra_info(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    message = record.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) else None


# -- the agent's end -------------------------------------------------------------------------------


@attrs.frozen
class FailureReport:
    """The failure of a worker, as the worker has reported and recorded it."""

    failed_at: float = float("inf")  # wall-clock time of this machine; infinity if it is unknown
    exit_code: int = 0  # with which the worker exits or has exited; 0 if it has not reported one
    record: Mapping[str, Any] = attrs.field(factory=dict)  # its error.json; empty without one
    has_error_file: bool = False  # also true for one that cannot be read

    @property
    def ends_process(self) -> bool:
        """Return whether the process exits because of this failure."""
        extra = _extra_info(self.record)
        return self.exit_code != 0 or (extra is not None and "thread" not in extra)


def read_error_file(error_file: Path, reported: FailureReport) -> FailureReport:
    """Return the report of a worker's failure with the record in its error file."""
    try:
        with open_regular_file(error_file) as fd:
            data = os.read(fd, MAX_ERROR_FILE_BYTES)
    except OSError:
        data = b""
    record = parse_error_record(data)
    # A record has whole seconds only.
    failed_at = reported.failed_at if reported.exit_code else _timestamp(record)
    return attrs.evolve(reported, record=record, failed_at=failed_at, has_error_file=bool(data))


def _timestamp(record: Mapping[str, Any]) -> float:
    """Return the time in an error.json, or infinity if it has none.

    It is needed for a program that writes torch's record and reports no failure.
    """
    try:
        return float(int((_extra_info(record) or {})["timestamp"])) or float("inf")
    except (KeyError, TypeError, ValueError, OverflowError):
        return float("inf")
