"""Entry point of the command `elasticrun`.

It defers signals that may mean a drain before everything else is imported, which takes a while.
"""

from __future__ import annotations

import sys

from .launcher_process import DEFERRED_SIGNALS, SCHEDULER_SIGNALS


def main() -> int:
    """Run elasticrun with the arguments of this process, and return its exit code.

    If torch was imported, the process exits here: at the end of an interpreter, torch aborts a
    process of which a thread is still inside torch.
    """
    DEFERRED_SIGNALS.capture(SCHEDULER_SIGNALS)
    from .elasticrun import command

    code = command()
    if "torch" in sys.modules:
        from ..workers.run_program import exit_process

        exit_process(code)
    return code
