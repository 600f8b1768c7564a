"""The `elasticlib` command: one subcommand for each thing that a person does beside training.

A subcommand returns its exit status: 0 when done, or stopped by a signal where it goes on until
then; 1 with a sentence when it cannot be done, 2 for a command line that makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import queue
import signal
import sys
from collections.abc import Sequence

from ..agent.options import SignalObserver
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError
from ..stores.secret import VARIABLE
from ..stores.tcp_server import TcpStoreServer
from .checkpoints import add_checkpoints
from .doctor_command import add_doctor
from .endpoints import read_secret
from .logs_command import add_logs
from .process import allow_descriptors
from .report_command import add_report
from .stacks_command import add_stacks
from .status_command import add_status

LOOK_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` unless given); the exit status."""
    chosen = _parser().parse_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elasticlib", description="Tools for elastic training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    store = commands.add_parser(
        "store",
        help="serve a store until SIGTERM or SIGINT",
        description="Serve a store for the nodes of a job, until SIGTERM or SIGINT.",
    )
    store.add_argument(
        "--bind",
        type=_endpoint,
        required=True,
        metavar="HOST[:PORT]",
        help=f"the address to serve on; IPv6 in brackets, port {STORE_PORT} by default, "
        "0 for any free one",
    )
    store.add_argument("--job", default="", help="serve this job only, refuse others by name")
    store.add_argument(
        "--secret-file",
        metavar="PATH",
        help="serve only those who know the secret in this file; or give it as "
        f"{VARIABLE} in the environment",
    )
    store.set_defaults(run=_serve_store)
    add_checkpoints(commands)
    add_report(commands)
    add_status(commands)
    add_stacks(commands)
    add_logs(commands)
    add_doctor(commands)
    return parser


def _endpoint(text: str) -> tuple[str, int]:
    try:
        return split_endpoint(text, STORE_PORT)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _serve_store(chosen: argparse.Namespace) -> int:
    host, port = chosen.bind
    try:
        secret = read_secret(os.environ, chosen.secret_file, "--secret-file")
    except ConfigError as error:
        print(f"elasticlib store: error: {error}", file=sys.stderr)
        return 2
    allow_descriptors(None)
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalObserver((signal.SIGTERM, signal.SIGINT), heard.put):
        try:
            server = TcpStoreServer(host, port, job=chosen.job, secret=secret).start()
        except OSError as error:
            where = join_endpoint(host, port)
            print(f"elasticlib store: cannot serve on {where}: {error.strerror}", file=sys.stderr)
            return 1
        with server:
            job = f"job {chosen.job!r}" if chosen.job else "any job"
            print(f"serving on {server.address} for {job}", flush=True)
            while server.serving:
                with contextlib.suppress(queue.Empty):
                    heard.get(timeout=LOOK_SECONDS)
                    return 0
    print("elasticlib store: the server broke, see above", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
