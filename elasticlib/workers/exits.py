"""How a worker ended: the one value of a failure, and its words.

A signal is told apart from an exit code, and what the worker itself wrote about its failure
(torch's error.json) comes before what can be guessed from outside. torch's shapes of a failure
are views of this value: see `compat/failures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..visible import shorten, visible

SIGNAL_NAMES = {
    **{1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS"},
    **{8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE"},
    **{14: "SIGALRM", 15: "SIGTERM"},
}
"""Linux numbers, as a table: a pure module does not import signal."""
_OF_ITS_OWN = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})
"""Not SIGABRT, by which libraries end a process that has lost its peers."""
_FROM_OUTSIDE = frozenset({"SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGTERM"})
"""A program's own faults end it by other signals: SIGSEGV, SIGABRT, SIGBUS and the like."""

UNKNOWN_RETURNCODE = 1
"""In place of a returncode that cannot be had: no success."""
FATAL = ("Fatal Python error:", "terminate called", "  what():")
LONGEST_WORDS = 300  # characters of one sentence in a log line; the traceback has the rest


@attrs.frozen
class WorkerExit:
    """How one worker ended. returncode is negative for a signal, as in subprocess.

    message and traceback: what it wrote of its failure itself. tail: the last lines of its
    stderr. log: the folder of its files, empty if that goes with the run. unreadable: why the
    value that a function returned cannot be had here; empty if it can. stopped: it ended after
    this agent had told it to. signalled: this agent sent the signal that ended it, although others
    may have sent it, too. out_of_memory: while it ran, the kernel killed for lack of memory in its
    cgroup. at: the time on this machine's wall clock at which it wrote of its failure, or
    at which its end was seen; to compare with other workers of this machine alone. error_file:
    where its error.json is, empty if that goes with the run; error_data: what that holds.
    code_known: else something else in the agent's process has taken the exit code, and this one
    stands in its place.
    """

    local_rank: int
    rank: int
    pid: int
    returncode: int
    message: str = ""
    traceback: str = ""
    value: Any = None
    value_error: str = ""
    stderr_tail: str = ""
    log_dir: str = ""
    stop_was_requested: bool = False
    signal_sent_by_agent: bool = False
    out_of_memory: bool = False
    failed_at: float = 0.0
    is_still_exiting: bool = False
    preceding_failure: WorkerExit | None = None
    error_file: str = ""
    error_data: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    is_returncode_known: bool = True

    @property
    def succeeded(self) -> bool:
        """Whether it succeeded: exit code 0, and its answer could be read."""
        return self.returncode == 0 and not self.value_error

    @property
    def has_failed(self) -> bool:
        """Whether it ended by a failure of its own; a worker that ends of a stop has not failed."""
        return not self.succeeded and (not self.stop_was_requested or bool(self.message))

    @property
    def root_failure(self) -> WorkerExit:
        """The first failure that this one tells of."""
        return self.preceding_failure or self

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or an empty string."""
        if self.returncode >= 0:
            return ""
        return SIGNAL_NAMES.get(-self.returncode, f"signal {-self.returncode}")

    @property
    def failed_independently(self) -> bool:
        """Whether it was killed or crashed by itself: no other worker's failure ends one so."""
        return self.signal in _OF_ITS_OWN and not self.stop_was_requested

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it that usually comes from outside, such as SIGKILL."""
        return self.signal in _FROM_OUTSIDE

    @property
    def exit_description(self) -> str:
        """The kind of end: a code, a signal and whose, want of memory."""
        if self.is_still_exiting:
            failed = "failed" if self.message else f"exits with code {self.returncode}"
            return f"{failed} and is still exiting"
        if not self.is_returncode_known:
            return (
                "ended, but other code in the agent's process took its exit code (a handler of "
                "SIGCHLD, or os.wait): that code must reap only its own children"
            )
        if self.value_error:
            return f"returned a value that cannot be read here: {self.value_error}"
        if not self.signal:
            kills = "; meanwhile the kernel killed for lack of memory in its cgroup"
            return f"exited with code {self.returncode}{kills if self.out_of_memory else ''}"
        if self.signal == "SIGKILL" and self.out_of_memory and not self.stop_was_requested:
            return "was killed by SIGKILL, likely out of memory"
        sender = "" if self.signal_sent_by_agent else "not "
        return f"was killed by {self.signal} ({sender}sent by this agent)"

    def describe(self) -> str:
        """One sentence: which worker, how, and why if known; of the first where it followed one."""
        if self.preceding_failure is not None:
            return f"{self.preceding_failure.describe()}; rank {self.rank} failed after it"
        words = self.message or find_error_line(self.stderr_tail, self.returncode)
        why = visible(shorten(words, LONGEST_WORDS))
        said = f": {why}" if why else ""
        who = f"worker of rank {self.rank} (local {self.local_rank}, pid {self.pid})"
        return f"{who} {self.exit_description}{said}"


def find_error_line(tail: str, returncode: int) -> str:
    """The line of stderr that is most likely to name the cause, or an empty string."""
    lines = [line for line in tail.splitlines() if line.strip()]
    fatal = [line.strip() for line in lines if line.startswith(FATAL)]
    if fatal:
        return ": ".join(fatal[-2:])
    # What is killed is cut off in the middle: its last line tells of something else.
    return lines[-1].strip() if lines and returncode > 0 else ""
