"""The `elasticlib` command: one subcommand for each thing that a person does beside training.

A subcommand returns its exit status: 0 when done, or stopped by a signal where it goes on until
then; 1 with a sentence when it cannot be done, 2 for a command line that makes no sense. Only the
module of the one that is called is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import queue
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError, ElasticError
from .command_line import Parser
from .command_tools import complain, typed

LOOK_SECONDS = 1.0
STDOUT = "-"
_ODD = re.compile(r"[^\w.-]+")

COMMANDS = {
    "store": ("commands", "serve a store until SIGTERM or SIGINT"),
    "checkpoints": ("checkpoints", "list the checkpoints in a folder, or verify them"),
    "report": ("commands", "write a page on a run: timeline, recoveries, failures"),
    "status": ("live_commands", "what a run is doing: its state, nodes, ranks, steps"),
    "stacks": ("live_commands", "the Python stacks of a run's workers, now"),
    "doctor": ("checks", "look for what would keep a job from running here"),
}
"""Of each the module that adds its arguments, by a function `add_NAME(parser)`, and its help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` unless given); the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    chosen = _parser(given[0] if given else "").parse_args(given)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Reasons and names come from workers: half of a surrogate pair is written out.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = chosen.run(chosen)
        print(end="", flush=True)
    except BrokenPipeError:
        # Whoever read it has read enough; the interpreter is not to try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser(called: str | None = None) -> argparse.ArgumentParser:
    """called: the one subcommand whose arguments are known; None for all."""
    parser = Parser(prog="elasticlib", description="Tools for elastic training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, says) in COMMANDS.items():
        inner = commands.add_parser(name, help=says)
        if called in (None, name):
            getattr(import_module(f".{module}", __package__), f"add_{name}")(inner)
    return parser


# -- store -----------------------------------------------------------------------------------------


def add_store(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve a store for the nodes of a job, until SIGTERM or SIGINT."
    parser.add_argument(
        "--bind",
        type=typed(lambda text: split_endpoint(text, STORE_PORT)),
        required=True,
        metavar="HOST[:PORT]",
        help=f"the address to serve on; IPv6 in brackets, port {STORE_PORT} by default, "
        "0 for any free one",
    )
    parser.add_argument("--job", default="", help="serve this job only, refuse others by name")
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="serve only those who know the secret in this file; or give it as "
        "ELASTICLIB_SECRET in the environment",
    )
    parser.set_defaults(run=_serve_store)


def _serve_store(chosen: argparse.Namespace) -> int:
    from ..agent.options import SignalObserver
    from ..stores.tcp_server import TcpStoreServer
    from .endpoints import read_secret
    from .process import allow_descriptors

    host, port = chosen.bind
    try:
        secret = read_secret(os.environ, chosen.secret_file, "--secret-file")
    except ConfigError as error:
        return complain("store: error", error, 2)
    allow_descriptors(None)
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalObserver((signal.SIGTERM, signal.SIGINT), heard.put):
        try:
            server = TcpStoreServer(host, port, job=chosen.job, secret=secret).start()
        except OSError as error:
            where = join_endpoint(host, port)
            return complain("store", f"cannot serve on {where}: {error.strerror}", 1)
        with server:
            job = f"job {chosen.job!r}" if chosen.job else "any job"
            print(f"serving on {server.address} for {job}", flush=True)
            while server.is_serving:
                with contextlib.suppress(queue.Empty):
                    heard.get(timeout=LOOK_SECONDS)
                    return 0
    return complain("store", "the server broke, see above", 1)


# -- report ----------------------------------------------------------------------------------------


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write one self-contained HTML page on a run, while it goes on or afterwards."
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="the run's id, the folder of its logs, or a file of its events; several files of one "
        "run's nodes make one page; by default the newest running job here, "
        "else the newest",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file to write, - for the standard output (default: RUN.html in the current folder); "
        "its full path is printed",
    )
    parser.set_defaults(run=_write_report)


def _write_report(chosen: argparse.Namespace) -> int:
    from ..observe.report import report

    try:
        made = report(chosen.runs or "")
        if chosen.output == STDOUT:
            sys.stdout.buffer.write(made.html().encode())
            sys.stdout.buffer.flush()
        else:
            # Named after the run, in the current folder.
            name = _ODD.sub("_", made.history.run).lstrip(".")[:100]
            print(made.save(chosen.output or f"{name or 'run'}.html"))
    except ElasticError as error:
        return complain("report", error, 1)
    except OSError as error:
        where = chosen.output or error.filename
        return complain("report", f"cannot write {where}: {error.strerror}", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
