"""Entry point of the command `elasticrun`.

It captures all signals before everything else is imported, which takes a while.
"""

from __future__ import annotations

import signal
from typing import NoReturn

from ..signal_inbox import PROCESS_SIGNALS
from .launcher_process import EARLY_SIGNALS


def main() -> NoReturn:
    """Run elasticrun with the arguments of this process, and exit with its exit code.

    The inbox handles signals until the process has exited, so that none changes the exit code: an
    interpreter that ends would restore their default handlers. And torch aborts such a process if
    one of its threads is still inside torch.
    """
    PROCESS_SIGNALS.capture(EARLY_SIGNALS)
    # The meaning of the other signals is known after the command line has been read.
    PROCESS_SIGNALS.end_process_on([signal.SIGINT])
    # The program that started this command may have blocked them, which is inherited.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EARLY_SIGNALS)
    from .elasticrun import command

    code = command()
    from ..workers.run_program import exit_process

    exit_process(code)
