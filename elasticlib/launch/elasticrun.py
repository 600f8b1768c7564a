"""The command `elasticrun`: torchrun's command line, carried out by elasticlib.

Exit codes: 0 success, 1 failure, 2 a command line that cannot work (nothing was started), 75 or
what --drain-exit-code says after a drain, 128 + n after signal n.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..workers.spec import WorkerState
from .arguments import parse
from .first_process import stand_in

if TYPE_CHECKING:
    from ..agent.interface import RunResult


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    try:
        config, entrypoint = parse(sys.argv[1:] if argv is None else argv)
        reaped = stand_in()
        if reaped is not None:
            return reaped
        # After the command line was read, so that --help and mistakes are answered at once.
        from .elastic_launch import run_node

        _start_logging(os.environ.get("LOGLEVEL", "INFO"))
        result = run_node(config, entrypoint)
    except ConfigError as error:
        print(f"elasticrun: error: {error}", file=sys.stderr)
        return 2
    _tell(result)
    if result.state is WorkerState.DRAINED:
        return config.supervision.drain_exit_code
    return result.exit_code


def _start_logging(level: str) -> None:
    known = logging.getLevelName(level.upper())
    if not isinstance(known, int):
        raise ConfigError(f"LOGLEVEL is DEBUG, INFO, WARNING or ERROR, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s elasticrun: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("elasticlib")
    logger.handlers = [handler]
    logger.setLevel(known)
    logger.propagate = False


def _tell(result: RunResult) -> None:
    """The end, last on the screen: what happened, and the first cause with its traceback."""
    for failure in result.failures.values():
        if failure.traceback:
            print(f"{failure.traceback.rstrip()}", file=sys.stderr)
        break
    word = result.state.value.upper()
    print(f"elasticrun: {word}: {result.reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
