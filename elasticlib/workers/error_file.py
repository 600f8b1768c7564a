"""Error file of a worker: how a worker records its failure, and how its agent reads it.

The record is torch's error.json. It needs no decorator in the user's script: hooks for uncaught
exceptions write it, and then call the hooks that were installed before. The hooks change no
output, and a record that torch's `record` has written stays. A second small file holds the time
and the exit code of the failure as soon as they are known, because a process may take long to exit
after it failed: its peers may notice the failure and exit first. Every worker imports this module.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from ..clock import wall
from ..sanitize import shorten
from ..untrusted import open_regular_file, read_object

EXIT_FILE_SUFFIX = ".exit"  # of the file with the exit code, 0 for an exception, and the time
EMPTY_ERROR_RECORD = {"message": "<NONE>"}  # torch's record of a worker without an error.json
MAX_ERROR_FILE_BYTES = 1 << 20  # the user's code may write any file under this name
MAX_EXIT_FILE_BYTES = 64
MAX_TEXT_CHARS = 1 << 16  # of a message or traceback
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_INTERNAL_PATHS = (_PACKAGE + os.sep, os.path.join(os.path.dirname(_PACKAGE), "compat", ""))


# -- the worker's end ------------------------------------------------------------------------------


def install_exception_hooks(error_file: str) -> None:
    """Install hooks that record the failures of this process, and enable faulthandler.

    Args:
        error_file: The path of the record; empty to write none.
    """
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        # There may be no stderr. A faulthandler that the user has enabled stays.
        if not faulthandler.is_enabled():
            faulthandler.enable()
    if error_file:
        ErrorFileWriter(error_file).install()


def record_exception(error: BaseException) -> None:
    """Record an exception that ends this process, if the hooks are installed.

    The function that runs the user's program calls this, because the hooks see neither an exit nor
    an exception that the excepthook of the script suppresses.
    """
    writer = ErrorFileWriter.installed
    if writer is not None:
        writer.record_main_thread(error)


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


class ErrorFileWriter:
    """Writes the error.json of this process, but not of processes that it forks."""

    installed: ErrorFileWriter | None = None  # of this process

    def __init__(self, error_file: str) -> None:
        self._file = error_file
        self._pid = os.getpid()
        self._written = b""  # the last record of this writer
        self._recorded: BaseException | None = None  # the exception that ends the process
        self._failed_at = 0.0  # wall-clock time of the first failure; 0 before
        self._thread_traces = ""  # tracebacks of failed threads
        self._excepthook = sys.excepthook  # the hooks that were installed before
        self._thread_hook = threading.excepthook

    def install(self) -> None:
        ErrorFileWriter.installed = self
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        self._thread_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        atexit.register(self._on_exit)

    def record_main_thread(self, error: BaseException) -> None:
        """Record an exception that ends the process; it replaces the exceptions of other threads.

        Only the exit code of a SystemExit with an integer is recorded, unless the code is 0.
        """
        if error is self._recorded:
            return
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            if error.code is not None and error.code & 0xFF:
                self._write_exit_file(error.code & 0xFF)
            return
        self._recorded = error
        self._write_exit_file(0)
        self._write(error, format_exception(error) + self._thread_traces)

    def _write_exit_file(self, code: int) -> None:
        if os.getpid() != self._pid:
            return
        self._failed_at = self._failed_at or wall()
        with contextlib.suppress(OSError):
            replace_file(self._file + EXIT_FILE_SUFFIX, f"{code} {self._failed_at:.6f}".encode())

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Python prints the traceback of the exception, not the one that the hook gets.
        user_trace = strip_internal_frames(trace)
        self.record_main_thread(error.with_traceback(user_trace))
        self._excepthook(kind, error, user_trace)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        error, thread = args.exc_value, args.thread
        if error is not None and not isinstance(error, SystemExit) and self._recorded is None:
            name = "?" if thread is None else thread.name
            # It ends only its thread. The agent reads the record if the process fails later.
            self._thread_traces += f"\nEarlier, in thread {name!r}:\n{format_exception(error)}"
            self._write(error, self._thread_traces.lstrip(), name)
        self._thread_hook(args)

    def _on_exit(self) -> None:
        """Record the uncaught exception if the script has replaced our excepthook."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.record_main_thread(error)

    def _write(self, error: BaseException, trace: str, thread: str = "") -> None:
        if os.getpid() != self._pid:
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
    """The failure of a worker, as the worker has recorded it."""

    record: Mapping[str, Any]  # the content of its error.json; empty without one
    failed_at: float  # wall-clock time of this machine; infinity if it is unknown
    exit_code: int  # of the exit in progress; 0 for an exception, or if it is unknown
    has_error_file: bool  # also true for one that cannot be read

    @property
    def ends_process(self) -> bool:
        """Return whether the process exits because of this failure."""
        extra = _extra_info(self.record)
        return self.exit_code != 0 or (extra is not None and "thread" not in extra)

    @property
    def message_and_traceback(self) -> tuple[str, str]:
        """Return message and traceback; empty texts without a record."""
        return message_and_traceback(self.record)


def read_failure_report(error_file: Path) -> FailureReport:
    """Read the failure that a worker has recorded in its error file and in its exit file."""
    data = _read(error_file, MAX_ERROR_FILE_BYTES)
    record = parse_error_record(data)
    try:
        note = _read(_exit_file(error_file), MAX_EXIT_FILE_BYTES).decode("ascii")
        code, failed_at = note.split()
        return FailureReport(record, float(failed_at), int(code), bool(data))
    except ValueError:
        return FailureReport(record, _timestamp(record), 0, bool(data))


def remove_exit_file(error_file: Path) -> None:
    """Remove the exit file of a worker that has exited; its error file stays."""
    with contextlib.suppress(OSError):  # there may be none
        _exit_file(error_file).unlink()


def _exit_file(error_file: Path) -> Path:
    return error_file.with_name(error_file.name + EXIT_FILE_SUFFIX)


def _timestamp(record: Mapping[str, Any]) -> float:
    """Return the time in an error.json, or infinity if it has none.

    It is needed for a program that writes torch's record and no exit file.
    """
    try:
        return float(int((_extra_info(record) or {})["timestamp"])) or float("inf")
    except (KeyError, TypeError, ValueError, OverflowError):
        return float("inf")


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with open_regular_file(path) as fd:
            return os.read(fd, max_bytes)
    except OSError:
        return b""
