"""The command `elasticrun`: torchrun's command line, carried out by elasticlib.

Exit codes: those that --help lists; 0 for --dry-run.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..clock import wall
from ..errors import ConfigError
from ..visible import visible
from .command_line import parse_command_line
from .console import log_level, show, start_logging
from .flags import flag_message
from .process import HELD, stand_in

if TYPE_CHECKING:
    from ..agent.interface import RunResult
    from ..workers.interface import Workers
    from .arguments import LaunchRequest

log = logging.getLogger("elasticlib.launch")

SHOW_SECONDS = 10.0
"""For the last lines to be read, by whoever reads stderr."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run it, as the `main` of `torch.distributed.run` does; it returns after success alone.

    Raises:
        ChildFailedError: the job failed. SignalException: a signal stopped this node, or had it
        save and leave. ConfigError: the command line cannot work. SystemExit: argparse's usage
        errors and --help.
    """
    ended = _carry_out(sys.argv[1:] if argv is None else argv)
    if ended.result is not None:
        from .elastic_launch import values_of

        values_of(ended.name, ended.result)
    elif ended.code:
        raise SystemExit(ended.code)


def command(argv: Sequence[str] | None = None) -> int:
    """The command itself: `main`, with its ends as exit codes."""
    try:
        return _carry_out(sys.argv[1:] if argv is None else argv).code
    except ConfigError as error:
        print(f"elasticrun: error: {visible(flag_message(error))}", file=sys.stderr)
        return 2


class _Ended(NamedTuple):
    """The exit code; and the result, where a job was run in this process, and its name."""

    code: int
    result: RunResult | None = None
    name: str = ""


def _carry_out(argv: Sequence[str]) -> _Ended:
    _open_streams()
    try:
        return _run(argv)
    except Exception as error:
        # As torchrun's own main function does, under torch's `record`.
        from ..workers.error_file import make_error_record

        trace = "" if isinstance(error, ConfigError) else traceback.format_exc()
        leave_error(make_error_record(type(error).__name__, str(error), trace, int(wall())))
        raise


def _run(argv: Sequence[str]) -> _Ended:
    # This forks in a container's process 1, so it comes before anything can import torch, whose
    # threads would not survive the fork: reading `--nproc-per-node auto` does.
    reaped = stand_in()
    if reaped is not None:
        return _Ended(reaped)
    line = parse_command_line(argv)
    # What is imported from here on --help and usage errors have not waited for.
    from .arguments import resolve_launch

    launch = resolve_launch(line, os.environ)
    config = launch.config
    if HELD.active:
        HELD.keep(config.supervision.agent.drain_signals)
    if launch.settings["dry_run"]:
        # Imported here, because it takes as long again as reading the command line.
        from .dry_run import show_plan

        show_plan(launch, os.environ)
        return _Ended(0)
    level = log_level(os.environ.get("LOGLEVEL", "INFO"))
    start_logging(level, "%(asctime)s elasticrun: %(message)s")
    for warning in launch.settings.warnings:
        log.warning("%s", warning)
    from .own_workers import begun

    with begun(config, launch.entrypoint, os.environ) as workers:
        return _run_node(launch, workers)


def _run_node(launch: LaunchRequest, workers: Workers) -> _Ended:
    # Imported while the process that workers are forked from imports torch.
    from ..workers.spec import WorkerState, entrypoint_name
    from .elastic_launch import run_node
    from .exit_report import error_file, result_text

    config = launch.config
    lines: list[str] = []
    result = run_node(config, launch.entrypoint, workers, summed=lines.append)
    # The reason stays what is read last.
    _show("".join(lines) + result_text(result))
    if result.state in (WorkerState.FAILED, WorkerState.STOPPED):
        leave_error(error_file(result, wall()))
    drained = result.state is WorkerState.DRAINED
    code = config.supervision.drain_exit_code if drained else result.exit_code
    return _Ended(code, result, entrypoint_name(launch.entrypoint))


def leave_error(record: bytes) -> None:
    """Leave the error where whoever started this launcher looks for it, as torchx does.

    Written into the file and not put in its place: on Kubernetes it is /dev/termination-log.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        with open(path, "wb") as file:
            file.write(record)
    except OSError as error:
        log.warning("TORCHELASTIC_ERROR_FILE=%s cannot be written: %s", path, error.strerror)


def _open_streams() -> None:
    """If the shell has closed one of the three, the next file opened would take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _show(text: str) -> None:
    """The exit code says how the run ended, too, and a full disk must not change it."""
    try:
        sys.stderr.flush()
        said = visible(text).encode(errors="backslashreplace")
        show(sys.stderr.fileno(), said, SHOW_SECONDS)
    except (OSError, ValueError, AttributeError):
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)


if __name__ == "__main__":
    sys.exit(command())
