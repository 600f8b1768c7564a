"""How a worker ended, in words that name the cause.

A signal is told apart from an exit code, and what the worker itself wrote about its failure
(torch's error.json) comes before what can be guessed from outside.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

# Linux numbers, as a table: a pure module does not import signal.
SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
}


@attrs.frozen
class WorkerExit:
    """How one worker ended. returncode is negative for a signal, as in subprocess.

    unreadable: why the value that a function returned cannot be had here; empty if it can.
    """

    local_rank: int
    rank: int
    pid: int
    returncode: int
    message: str = ""
    traceback: str = ""
    value: Any = None
    unreadable: str = ""

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and not self.unreadable

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or an empty string."""
        if self.returncode >= 0:
            return ""
        return SIGNALS.get(-self.returncode, f"signal {-self.returncode}")

    def describe(self) -> str:
        """One sentence: who, how, and why if known."""
        how = f"exited with code {self.returncode}"
        if self.signal:
            how = f"was killed by {self.signal}"
        elif self.unreadable:
            how = f"returned a value that cannot be read here: {self.unreadable}"
        why = f": {self.message}" if self.message else ""
        return f"worker of rank {self.rank} (local {self.local_rank}, pid {self.pid}) {how}{why}"


def failure_record(kind: str, text: str, traceback: str, timestamp: int) -> bytes:
    """error.json in torch's shape; timestamp in whole seconds since 1970."""
    extra = {"py_callstack": traceback, "timestamp": str(timestamp)}
    record = {"message": {"message": f"{kind}: {text}", "extraInfo": extra}}
    return json.dumps(record).encode()


def read_failure(data: bytes) -> tuple[str, str]:
    """Message and traceback of an error.json of torch's shape; empty where it has none."""
    try:
        message = json.loads(data)["message"]
    except (ValueError, KeyError, TypeError):
        return "", ""
    if isinstance(message, str):
        return message, ""
    if not isinstance(message, dict):
        return "", ""
    extra = message.get("extraInfo")
    trace = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return str(message.get("message", "")), str(trace)
