"""What a worker writes of its failure, with no decorator in its script; and how its agent finds it.

The hooks show nothing and change nothing that the script does: what its own hooks do, they still
do, and what torch's `record` has written stays. Taking a process down takes its time, in which its
peers notice and may end first: so what it wrote (its error.json, and a small file beside that)
is looked at before it has ended. Every worker imports this.
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
from ..foreign import opened, read_object
from ..visible import shorten

EXIT = ".exit"
"""Suffix of the file beside error.json in which a process that fails writes when it does and with
which exit code (0 for an exception). The time is the worker's own: modification times come from
the clock of a file server where the directory is shared."""
_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "compat", ""))


def install_exception_hooks(error_file: str) -> None:
    """Call it once, just before the user's code runs; an empty name records nothing."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        # There may be no stderr to write to. One that the user has enabled is the user's.
        if not faulthandler.is_enabled():
            faulthandler.enable()
    if error_file:
        ErrorFileWriter(error_file).hook()


def write_error_file(error_file: str, error: BaseException, trace: str, thread: str = "") -> bytes:
    """Leave an error.json; returns what it holds. A disk that is full loses the record only."""
    kind, now = type(error).__name__, int(wall())
    record = make_error_record(kind, _text(error), trace, now, thread=thread)
    with contextlib.suppress(OSError):
        replace_file(error_file, record)
    return record


def replace_file(path: str, record: bytes) -> None:
    """Raises OSError; what stood there then still does."""
    aside = f"{path}.part"
    with open(aside, "wb") as file:
        file.write(record)
    os.replace(aside, path)


def record_exception(error: BaseException) -> None:
    """Write down an exception that is about to end this process, exit("text") included.

    For the code that runs the user's: neither an exit nor what a script's own excepthook keeps to
    itself reaches the hooks.
    """
    recorder = ErrorFileWriter.installed
    if recorder is not None:
        recorder.main_thread(error)


def strip_internal_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback that begins where the user's code does, as Python's own would."""
    rest = trace
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(_OURS):
            rest = trace.tb_next
        elif "runpy" not in name:
            break
        trace = trace.tb_next
    return rest


class ErrorFileWriter:
    """Writes the error.json of this process, and of none that it forks."""

    installed: ErrorFileWriter | None = None

    def __init__(self, error_file: str) -> None:
        self._file = error_file
        self._pid = os.getpid()
        self._written = b""
        self._recorded: BaseException | None = None
        self._failed_at = 0.0
        self._threads = ""
        self._excepthook = sys.excepthook
        self._thread_hook = threading.excepthook

    def hook(self) -> None:
        ErrorFileWriter.installed = self
        self._excepthook, sys.excepthook = sys.excepthook, self._hear
        self._thread_hook, threading.excepthook = threading.excepthook, self._hear_thread
        atexit.register(self._look_back)

    def main_thread(self, error: BaseException) -> None:
        """An exception that ends the process: it outranks those of other threads."""
        if error is self._recorded:
            return
        if _is_silent(error):
            self._leave(error)
            return
        self._recorded = error
        self._note_exit(0)
        self._write(error, format_exception(error) + self._threads)

    def _leave(self, error: BaseException) -> None:
        code = getattr(error, "code", None)
        if isinstance(code, int) and code & 0xFF:
            self._note_exit(code & 0xFF)

    def _note_exit(self, code: int) -> None:
        if os.getpid() != self._pid:
            return
        self._failed_at = self._failed_at or wall()
        with contextlib.suppress(OSError):
            replace_file(self._file + EXIT, f"{code} {self._failed_at:.6f}".encode())

    def _hear(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Python shows what the exception holds, rather than what the hook is given.
        shown = strip_internal_frames(trace)
        self.main_thread(error.with_traceback(shown))
        self._excepthook(kind, error, shown)

    def _hear_thread(self, args: threading.ExceptHookArgs) -> None:
        error, thread = args.exc_value, args.thread
        if error is not None and not isinstance(error, SystemExit) and self._recorded is None:
            name = "?" if thread is None else thread.name
            # It ends its thread alone, and is read only if the process then fails.
            self._threads += f"\nEarlier, in thread {name!r}:\n{format_exception(error)}"
            self._write(error, self._threads.lstrip(), name)
        self._thread_hook(args)

    def _look_back(self) -> None:
        """At the end: the interpreter keeps what it gave to an excepthook that replaced ours."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.main_thread(error)

    def _write(self, error: BaseException, trace: str, thread: str = "") -> None:
        if os.getpid() != self._pid:
            return
        try:
            with open(self._file, "rb") as file:
                stands = file.read()
        except OSError:
            stands = self._written
        # Of somebody else's making: torch's record, or ours, which saw it closer to its cause.
        if stands == self._written:
            self._written = write_error_file(self._file, error, trace, thread)


def _is_silent(error: BaseException) -> bool:
    """Whether it is an exit that says no more than its code."""
    return isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int))


def format_exception(error: BaseException) -> str:
    trace = strip_internal_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace))


def _text(error: BaseException) -> str:
    """Return the exception's message, or where it was raised if it has none."""
    try:
        return str(error) or _raised_in(error)
    except Exception as broken:
        # An exception's own code runs here, and may raise anything.
        return f"(its message cannot be shown: {type(broken).__name__})"


def _raised_in(error: BaseException) -> str:
    """Name the innermost function of the traceback, its file and its line."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        place = f"raised in {code.co_name} ({os.path.basename(code.co_filename)}:{line})"
    return place


# -- error.json: torch's shape, and its bounds -----------------------------------------------------

EMPTY_ERROR_RECORD = {"message": "<NONE>"}
"""torch's word for the content of an error.json that there is not."""
MAX_ERROR_FILE_BYTES = 1 << 20
"""Bytes of an error.json that are looked at: it may be anything that the user's code writes."""
MAX_TEXT_CHARS = 1 << 16
"""Characters of a traceback, or of a message, that are kept."""


def make_error_record(
    kind: str, text: str, traceback: str, timestamp: int, *, thread: str = ""
) -> bytes:
    """The file's content; timestamp in whole seconds since 1970.

    thread: the name of the one that alone has ended so, and not yet the process.
    """
    extra = {"py_callstack": shorten(traceback, MAX_TEXT_CHARS), "timestamp": str(timestamp)}
    if thread:
        extra["thread"] = thread
    record = {
        "message": {"message": shorten(f"{kind}: {text}", MAX_TEXT_CHARS), "extraInfo": extra}
    }
    return json.dumps(record).encode()


def parse_error_record(data: bytes) -> dict[str, Any]:
    """All that an error.json holds; nothing where it is none."""
    try:
        record = read_object(data)
    except ValueError:
        return {}
    return record if "message" in record else {}


def message_and_traceback(record: Mapping[str, Any]) -> tuple[str, str]:
    """Message and traceback of what `parse_error_record` found; empty where it has none."""
    message = record.get("message")
    if isinstance(message, str):
        return message, ""
    if not isinstance(message, dict):
        return "", ""
    extra = message.get("extraInfo")
    trace = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return str(message.get("message", "")), str(trace)


def ends_process(record: Mapping[str, Any]) -> bool:
    """Whether this error.json tells of an exception that ends its process."""
    try:
        return "thread" not in record["message"]["extraInfo"]
    except (KeyError, TypeError):
        return False


# -- the agent's end ------------------------------------------------------------------------------

NEVER = float("inf")
LONGEST_NOTE = 64


@attrs.frozen
class FailureReport:
    """What a worker said of its failure. record: its error.json, empty without one. at: when it
    failed, as the worker wrote it by this machine's clock; infinity if it wrote no time. code: by
    which it is about to exit, 0 where it has not said. wrote: whether there is an error.json,
    readable or not."""

    record: Mapping[str, Any]
    at: float
    code: int
    wrote: bool

    @property
    def ends_process(self) -> bool:
        """Whether its process ends of what it said."""
        return self.code != 0 or ends_process(self.record)

    @property
    def texts(self) -> tuple[str, str]:
        """Message and traceback."""
        return message_and_traceback(self.record)


def read_failure_report(error_file: Path) -> FailureReport:
    """Of the worker with this error file."""
    data = _read(error_file, MAX_ERROR_FILE_BYTES)
    record = parse_error_record(data)
    try:
        code, at = _read(_exit_file(error_file), LONGEST_NOTE).decode("ascii").split()
        return FailureReport(record, float(at), int(code), bool(data))
    except ValueError:
        return FailureReport(record, _timestamp(record), 0, bool(data))


def remove_exit_file(error_file: Path) -> None:
    """The worker has ended, and how is known by now."""
    with contextlib.suppress(OSError):  # it left none, or something that is none
        _exit_file(error_file).unlink()


def _exit_file(error_file: Path) -> Path:
    return error_file.with_name(error_file.name + EXIT)


def _timestamp(record: Mapping[str, Any]) -> float:
    """Return the whole seconds in torch's form of a record, which a program may write without these
    hooks; infinity if there are none."""
    try:
        return float(int(record["message"]["extraInfo"]["timestamp"])) or NEVER
    except (KeyError, TypeError, ValueError, OverflowError):
        return NEVER


def _read(path: Path, most: int) -> bytes:
    try:
        with opened(path) as handle:
            return os.read(handle, most)
    except OSError:
        return b""
