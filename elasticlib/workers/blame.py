"""What a worker's failure lets one expect of a restart, told from how it ended and when.

Only what failed before it was at work, in a way that would come again, is not worth a restart; and
nobody who was killed failed at anything.
"""

from __future__ import annotations

from ..rendezvous.document import FailureKind
from .exits import WorkerExit
from .spec import Entrypoint, Script

START_SECONDS = 60.0
"""A program that has come further than this has read its arguments and its imports."""
FROM_OUTSIDE = frozenset({"SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGTERM"})
"""A program's own faults end it by others: SIGSEGV, SIGABRT, SIGBUS and the like."""
USAGE, NOT_FOUND = 2, 127
"""Exit codes: of argparse, and of Python for a script that is not there; of a program that is
not there."""
UNMENDABLE = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
)


def failure_kind(
    exit_: WorkerExit, entrypoint: Entrypoint, *, uptime: float, first: bool, min_uptime: float
) -> FailureKind:
    """What kind of failure this is.

    uptime: seconds since the worker was started. first: whether it was of the first generation
    that this node ran workers of; in a later one, the same program has been at work before.
    min_uptime: seconds within which any end in the first generation is one at start.
    """
    if exit_.signal in FROM_OUTSIDE:
        return FailureKind.KILLED
    early = uptime < START_SECONDS and _would_come_again(exit_, entrypoint)
    if first and (early or uptime < min_uptime):
        return FailureKind.AT_START
    return FailureKind.ORDINARY


def _would_come_again(exit_: WorkerExit, entrypoint: Entrypoint) -> bool:
    kind = exit_.message.partition(":")[0]
    if kind == "FileNotFoundError" and isinstance(entrypoint, Script):
        return repr(entrypoint.path) in exit_.message
    return exit_.returncode in (USAGE, NOT_FOUND) or kind in UNMENDABLE
