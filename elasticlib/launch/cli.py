"""The `elasticlib` command and its subcommands `store` and `report`.

A subcommand returns its exit status: 0 for success, 1 with an error message for a failure, 2 for an
invalid command line. Only the module of the subcommand that is called is imported.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import ElasticError
from .cli_output import print_error
from .command_line import Parser

SERVER_POLL_INTERVAL_S = 1.0
STDOUT = "-"
_UNSAFE_IN_FILE_NAMES = re.compile(r"[^\w.-]+")

# In the order of their use: the module of each subcommand, which defines `add_NAME(parser)`, and
# the help text.
COMMANDS = {
    "doctor": ("checks", "check this machine for problems that would prevent a job from running"),
    "store": ("store_command", "serve a store, or delete ended jobs from one"),
    "status": ("status_command", "show the state, nodes, ranks and steps of a run"),
    "events": ("events_command", "print the events of a run, and follow them"),
    "stacks": ("request_command", "print the current Python stacks of a run's workers"),
    "drain": ("request_command", "let one node of a run save and leave"),
    "restart": ("request_command", "restart all workers of a run after they have saved"),
    "stop": ("request_command", "let all nodes of a run save, and end the run"),
    "report": ("cli", "write an HTML report of a run (timeline, recoveries, failures)"),
    "checkpoints": ("checkpoints_command", "list or verify the checkpoints in a directory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(argv[0] if argv else "").parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and reasons originate from workers, and may contain half of a surrogate pair.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = args.run(args)
        print(end="", flush=True)
    except BrokenPipeError:
        # The reader has closed the pipe. The interpreter must not write to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser(called: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of one subcommand, or of all if `called` is None."""
    parser = Parser(prog="elasticlib", description="Tools for elastic training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, help_text) in COMMANDS.items():
        inner = commands.add_parser(name, help=help_text)
        if called in (None, name):
            getattr(import_module(f".{module}", __package__), f"add_{name}")(inner)
    return parser


# -- report ----------------------------------------------------------------------------------------


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib report`."""
    parser.description = (
        "Write one self-contained HTML page about a run that is running or has finished."
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="id of the run, its log directory, or a file of its events; the files of several "
        "nodes make one page (default: the newest running job on this machine, or the newest)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file to write, - for standard output (default: RUN.html in this directory); the path "
        "is printed",
    )
    parser.set_defaults(run=_write_report)


def _write_report(args: argparse.Namespace) -> int:
    from ..observe.report import build_report

    try:
        page = build_report(args.runs or "")
        if args.output == STDOUT:
            sys.stdout.buffer.write(page.html().encode())
            sys.stdout.buffer.flush()
        else:
            name = _UNSAFE_IN_FILE_NAMES.sub("_", page.history.run).lstrip(".")[:100]
            print(page.save(args.output or f"{name or 'run'}.html"))
    except ElasticError as error:
        return print_error("report", error, 1)
    except OSError as error:
        where = args.output or error.filename
        return print_error("report", f"cannot write {where}: {error.strerror}", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
