"""Exit of a worker: its return code or signal, and what is known about the cause. Pure.

What the worker itself wrote about its failure (torch's error.json) has priority over what the agent
infers. `compat/failures.py` converts a `WorkerExit` into torch's shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from ..rendezvous.blame import FailureKind
from ..sanitize import escape_control_chars, shorten
from .heartbeat import Heartbeat

# Linux numbers. The module is pure, so it does not import signal.
SIGNAL_NAMES = {
    **{1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS"},
    **{8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE"},
    **{14: "SIGALRM", 15: "SIGTERM"},
}
_EXTERNAL_SIGNALS = frozenset({"SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGTERM"})

# Errors of collectives and of connections to peers or to the store. Those of gloo begin with the
# place in its source, and those of NCCL and of torch's store have the class of the exception.
_FAILED_COLLECTIVE = re.compile(
    r"\bDist(Backend|Network|Store)?Error\b|\bgloo/[\w/.]+:\d+\]|\bmonitoredBarrier\b"
    r"|\bNCCL error\b|\bGroupEndedError\b|\bStore(Connection|Timeout)Error\b"
    # Errors that all ranks raise because of one rank
    r"|\bCheckpointException ranks\b|\banother rank was lost\b"
)
# What a process writes that torch or gloo aborts because it has waited too long, or lost a peer.
_ABORT_FOR_PEERS = re.compile(rf"{_FAILED_COLLECTIVE.pattern}|watchdog|\bgloo::", re.IGNORECASE)
_OTHER_THREADS = "\nEarlier, in thread "  # precedes the tracebacks of threads that failed before

FATAL_PREFIXES = ("Fatal Python error:", "terminate called", "  what():")
ADVICE_PREFIXES = ("Set the environment variable HYDRA_FULL_ERROR=1",)
TRACEBACK_HEAD = "Traceback (most recent call last):"
MAX_LINES_AFTER_TRACEBACK = 3  # a program that continued after its traceback writes more
MAX_SUMMARY_CHARS = 300  # one line of the log; the traceback has the rest


@attrs.frozen
class WorkerExit:
    """The exit of one worker."""

    local_rank: int
    rank: int
    pid: int  #: 0 if its process could not be started
    returncode: int  #: negative for a signal, as in subprocess; any but 0 if it did not begin
    message: str = ""  #: error message that the worker wrote
    traceback: str = ""  #: traceback that the worker wrote
    value: Any = None  #: return value of the worker's function
    value_error: str = ""  #: why `value` cannot be read here
    stderr_tail: str = ""  #: last lines of stderr
    #: what the agent knows of the cause: why there is no process, or who killed it
    reason: str = ""
    heartbeat: Heartbeat | None = None  #: the last one, if the worker reports its progress
    log_dir: str = ""  #: directory of the worker's files, empty if it is deleted with the run
    stop_was_requested: bool = False  #: the agent had requested the stop
    failed_before_stop: bool = False  #: it is known that no stop was requested before the failure
    signal_sent_by_agent: bool = False  #: the agent sent this signal; others may have sent it too
    #: the kernel killed a process of the worker's cgroup during the run
    out_of_memory: bool = False
    failed_at: float = 0.0  #: wall clock; comparable only with other workers of this machine
    is_still_exiting: bool = False  #: the worker's program has finished, and its process exists
    #: the exit code with which the worker was exiting, if it recorded one
    code_in_progress: int = 0
    preceding_failure: WorkerExit | None = None  #: failure of another worker that caused this one
    ranks_left_before: tuple[int, ...] = ()  #: ranks that had exited with success before
    error_file: str = ""  #: path of error.json, empty if it is deleted with the run
    error_data: Mapping[str, Any] = attrs.field(factory=dict, hash=False)  #: content of error.json

    @property
    def succeeded(self) -> bool:
        """True if the exit code is 0 and the return value is readable."""
        return self.returncode == 0 and not self.value_error

    @property
    def has_failed(self) -> bool:
        """True if the worker failed by itself.

        A worker whose stop was requested has failed only if it recorded an error message.
        """
        return not self.succeeded and (not self.stop_was_requested or bool(self.message))

    @property
    def root_failure(self) -> WorkerExit:
        """The preceding failure of another worker if one is known, otherwise this exit."""
        return self.preceding_failure or self

    @property
    def signal(self) -> str:
        """The name of the signal that killed the worker, or an empty string."""
        if self.returncode >= 0:
            return ""
        return SIGNAL_NAMES.get(-self.returncode, f"signal {-self.returncode}")

    @property
    def failure_kind(self) -> FailureKind:
        """The kind of this failure. Only a kind whose `names_host` is true counts against a host.

        What the worker itself recorded has priority over the way in which its process ended.
        """
        if self.stop_was_requested:
            return FailureKind.STOPPED
        if self.message and not self._is_of_thread:
            text = f"{self.message}\n{self.traceback.partition(_OTHER_THREADS)[0]}"
            is_collective = _FAILED_COLLECTIVE.search(text)
            return FailureKind.COLLECTIVE if is_collective else FailureKind.RAISED
        if self.signal == "SIGABRT" and _ABORT_FOR_PEERS.search(self.stderr_tail):
            return FailureKind.COLLECTIVE
        if self.signal and not self.signal_sent_by_agent:
            return FailureKind.KILLED if self.was_killed else FailureKind.CRASHED
        is_collective = _FAILED_COLLECTIVE.search(f"{self.message}\n{self.stderr_tail}")
        return FailureKind.COLLECTIVE if is_collective else FailureKind.RAISED

    @property
    def _is_of_thread(self) -> bool:
        """True if the recorded exception has terminated only its thread, not the process."""
        message = self.error_data.get("message")
        extra = message.get("extraInfo") if isinstance(message, Mapping) else None
        return isinstance(extra, Mapping) and "thread" in extra

    @property
    def was_killed(self) -> bool:
        """True if a signal killed the worker that other processes usually send, such as SIGKILL."""
        return self.signal in _EXTERNAL_SIGNALS

    @property
    def exit_description(self) -> str:
        """The kind of exit, without the worker's name and the cause."""
        if not self.pid:
            stopped = "was stopped before it began"
            return f"could not be started: {self.reason}" if self.reason else stopped
        if self.is_still_exiting and self.returncode == 0:
            return "has succeeded and is still exiting"
        if self.is_still_exiting:
            failed = "failed" if self.message else f"exits with code {self.returncode}"
            return f"{failed} and is still exiting"
        if self.signal and self.signal_sent_by_agent and self.failed_before_stop:
            code = self.code_in_progress
            what = f"exits with code {code}" if code and not self.message else "failed"
            return f"{what} and did not end, so this agent ended it by {self.signal}"
        if self.value_error:
            return f"returned a value that cannot be read here: {self.value_error}"
        if not self.signal:
            oom = "; a process in its cgroup was killed because memory ran out"
            return f"exited with code {self.returncode}{oom if self.out_of_memory else ''}"
        if self.signal == "SIGKILL" and self.out_of_memory and not self.stop_was_requested:
            return "was killed by SIGKILL, likely out of memory"
        if self.reason:
            return f"was killed by {self.signal}, because {self.reason}"
        sender = "" if self.signal_sent_by_agent else "not "
        return f"was killed by {self.signal} ({sender}sent by this agent)"

    def describe(self) -> str:
        """Return one line: which worker, how it exited, and the cause if it is known."""
        if self.preceding_failure is not None:
            return f"{self.preceding_failure.describe()}; rank {self.rank} failed after it"
        text = self.message or find_error_line(self.stderr_tail, self.returncode)
        cause = escape_control_chars(shorten(text, MAX_SUMMARY_CHARS))
        worker = f"worker of rank {self.rank} (local {self.local_rank}, pid {self.pid})"
        return f"{worker} {self.exit_description}{f': {cause}' if cause else ''}{self._who_left}"

    @property
    def _who_left(self) -> str:
        """Name the ranks that had left before this one failed in a collective."""
        if not self.ranks_left_before or self.failure_kind is not FailureKind.COLLECTIVE:
            return ""
        ranks = ", ".join(map(str, self.ranks_left_before))
        ranks = f"ranks {ranks}" if len(self.ranks_left_before) > 1 else f"rank {ranks}"
        return f"; {ranks} had exited with code 0 before"


def find_error_line(stderr_tail: str, returncode: int) -> str:
    """Return the line of stderr that most likely names the cause, or an empty string."""
    lines = [line for line in stderr_tail.splitlines() if line.strip()]
    fatal = [line.strip() for line in lines if line.startswith(FATAL_PREFIXES)]
    if fatal:
        return ": ".join(fatal[-2:])
    if returncode <= 0:
        return ""  # the last line of a killed process is unrelated to the kill
    # Hydra prints the exception of a job, exits with code 1, and ends with an advice.
    lines = [line for line in lines if not line.startswith(ADVICE_PREFIXES)]
    return _find_exception(lines) or (lines[-1].strip() if lines else "")


def _find_exception(lines: list[str]) -> str:
    """Return the line with the exception of a traceback at the end of stderr, or an empty text."""
    heads = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK_HEAD)]
    after = lines[heads[-1] + 1 :] if heads else []
    while after and after[0].startswith(" "):
        after = after[1:]
    return after[0].strip() if 0 < len(after) <= MAX_LINES_AFTER_TRACEBACK else ""
