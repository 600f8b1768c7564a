"""The command `elasticrun`: torchrun's command line, run by elasticlib."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..clock import wall
from ..errors import ConfigError
from ..sanitize import escape_control_chars
from ..signal_inbox import PROCESS_SIGNALS
from .command_line import parse_command_line
from .console import log_level, start_logging, write_with_timeout
from .launcher_process import run_as_init
from .layers import with_flags

if TYPE_CHECKING:
    from ..agent.interface import RunResult
    from ..workers.interface import Workers
    from .arguments import Launch

log = logging.getLogger("elasticlib.launch")

FINAL_WRITE_TIMEOUT_S = 10.0  # for the exit summary, if stderr is blocked


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, as the `main` of `torch.distributed.run` does.

    The installed command calls `command` instead, which returns an exit code.

    Args:
        argv: the command line without the name of the command; by default that of this process.

    Raises:
        ChildFailedError: the job failed.
        SignalException: a signal stopped or drained this node.
        ConfigError: the settings cannot work.
        SystemExit: the command line requests help, or has a usage error. In process 1 of a
            container, the job failed or was stopped in the child that runs it.
    """
    result = _run_command(sys.argv[1:] if argv is None else argv)
    if result.run_result is not None:
        from .elastic_launch import values_of

        values_of(result.entrypoint, result.run_result)
    elif result.exit_code:
        raise SystemExit(result.exit_code)


def command(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    try:
        return _run_command(sys.argv[1:] if argv is None else argv).exit_code
    except ConfigError as error:
        print(
            f"elasticrun: error: {escape_control_chars(str(with_flags(error, {})))}",
            file=sys.stderr,
        )
        return 2


class _CommandResult(NamedTuple):
    """The result of a command line. `run_result` is None if no job was run in this process."""

    exit_code: int
    run_result: RunResult | None = None
    entrypoint: str = ""


def _run_command(argv: Sequence[str]) -> _CommandResult:
    _open_standard_streams()
    try:
        return _run(argv)
    except Exception as error:
        # torchrun's main function does the same by torch's `record`.
        from ..workers.error_file import make_error_record

        trace = "" if isinstance(error, ConfigError) else traceback.format_exc()
        message = str(with_flags(error, {}) if isinstance(error, ConfigError) else error)
        write_error_file(make_error_record(type(error).__name__, message, trace, int(wall())))
        raise


def _run(argv: Sequence[str]) -> _CommandResult:
    # In process 1 of a container this forks. That must precede the import of torch, which
    # `--nproc-per-node auto` does, because torch's threads would not survive the fork.
    exit_code = run_as_init()
    if exit_code is not None:
        return _CommandResult(exit_code)
    args = parse_command_line(argv)
    # --help and usage errors do not wait for the imports below.
    from .arguments import resolve_launch

    launch = resolve_launch(args, os.environ)
    agent = launch.options.agent
    if PROCESS_SIGNALS.is_active:
        # Until the agent exists, nothing can be lost, and drain signals are kept for it.
        PROCESS_SIGNALS.restrict_to(agent.handled_signals)
        PROCESS_SIGNALS.end_process_on(agent.stop_signals)
    if launch.is_dry_run:
        # Imported here, because it takes as long as reading the command line.
        from .dry_run import print_plan

        print_plan(launch, os.environ)
        return _CommandResult(0)
    level = log_level(os.environ.get("LOGLEVEL", "INFO"))
    start_logging(level, "%(asctime)s elasticrun: %(message)s")
    for warning in launch.warnings:
        log.warning("%s", warning)
    from .worker_setup import prepared_local_workers

    with prepared_local_workers(launch.options, launch.entrypoint, os.environ) as workers:
        return _run_node(launch, workers)


def _run_node(launch: Launch, workers: Workers) -> _CommandResult:
    # These imports run while the fork server imports torch.
    from ..workers.spec import WorkerState, entrypoint_name
    from .elastic_launch import run_node
    from .exit_summary import encode_error_file, format_result

    summary: list[str] = []
    result = run_node(launch.options, launch.entrypoint, workers, on_summary=summary.append)
    # The reason is last, where users look first.
    _print_to_stderr("".join(summary) + format_result(result))
    if result.state in (WorkerState.FAILED, WorkerState.STOPPED):
        write_error_file(encode_error_file(result, wall()))
    is_drained = result.state is WorkerState.DRAINED
    exit_code = launch.options.agent.drain_exit_code if is_drained else result.exit_code
    return _CommandResult(exit_code, result, entrypoint_name(launch.entrypoint))


def write_error_file(record: bytes) -> None:
    """Write an error.json for the program that started elasticrun, such as torchx.

    Nothing is written if that program has not set TORCHELASTIC_ERROR_FILE.

    The file is not replaced by a rename, because on Kubernetes it is /dev/termination-log.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        with open(path, "wb") as file:
            file.write(record)
    except OSError as error:
        log.warning("cannot write TORCHELASTIC_ERROR_FILE=%s: %s", path, error.strerror)


def _open_standard_streams() -> None:
    """Open standard streams that the shell has closed, before another file gets their number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _print_to_stderr(text: str) -> None:
    """Print the exit summary. A failure, such as a full disk, does not change the exit code."""
    try:
        sys.stderr.flush()
        data = escape_control_chars(text).encode(errors="backslashreplace")
        write_with_timeout(sys.stderr.fileno(), data, FINAL_WRITE_TIMEOUT_S)
    except (OSError, ValueError, AttributeError):
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 2)


if __name__ == "__main__":
    sys.exit(command())
