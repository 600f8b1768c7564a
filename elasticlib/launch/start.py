"""How the command `elasticrun` begins: before all else is imported, which takes a while, it holds
the signals that would end it and that may mean a drain.
"""

from __future__ import annotations

import sys

from .process import EARLY, HELD


def elasticrun() -> int:
    """The exit code of the command, which after a job ends the process by itself: at the end of an
    interpreter, torch aborts a process of which any thread is still inside torch."""
    HELD.hold(EARLY)
    from .elasticrun import command

    code = command()
    if "torch" in sys.modules:
        from ..workers.run_program import exit_process

        exit_process(code)
    return code
