"""The command `elasticrun`: torchrun's command line, carried out by elasticlib.

Exit codes: 0 success, 1 failure, 2 a command line that cannot work (nothing was started), 75 or
what --drain-exit-code says after a drain, 128 + n after signal n.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import attrs

from ..errors import ConfigError
from ..workers.spec import WorkerState
from .arguments import parse
from .first_process import stand_in


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    _open_streams()
    try:
        config, entrypoint = parse(sys.argv[1:] if argv is None else argv)
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        config = attrs.evolve(config, log_line_prefix_template=template)
        reaped = stand_in()
        if reaped is not None:
            return reaped
        # After the command line was read, so that --help and mistakes are answered at once.
        from ..workers.record import pass_on
        from .elastic_launch import failed, run_node
        from .report import told

        _start_logging(os.environ.get("LOGLEVEL", "INFO"))
        result = run_node(config, entrypoint)
    except ConfigError as error:
        print(f"elasticrun: error: {error}", file=sys.stderr)
        return 2
    if result.state is WorkerState.FAILED:
        # To whoever runs this as a worker of its own, as torchrun does.
        pass_on(failed("elasticrun", result))
    _show(told(result))
    if result.state is WorkerState.DRAINED:
        return config.supervision.drain_exit_code
    return result.exit_code


def _open_streams() -> None:
    """Where the shell has closed one, the next file that is opened would pass for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _show(text: str) -> None:
    """How the run ended is in the exit code as well, which a full disk must not change."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)


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


if __name__ == "__main__":
    sys.exit(main())
