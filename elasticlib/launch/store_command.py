"""The command `elasticlib store`: serves a store, or deletes the keys of ended jobs from one."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
from functools import partial

from ..clock import format_utc, wall
from ..endpoint import STORE_PORT, join_endpoint, split_endpoint
from ..errors import ConfigError, ElasticError
from .cli_output import argument_type, print_error
from .target import add_target_arguments, find_target, open_store

SERVER_POLL_INTERVAL_S = 1.0
DEFAULT_MIN_AGE_HOURS = 24.0
CLEAN_TIMEOUT_S = 10.0


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib store`."""
    parser.description = (
        "Serve a store for the nodes of a job until SIGTERM or SIGINT; or, with `clean`, delete "
        "the keys of ended jobs from etcd or a shared directory."
    )
    add_clean(parser.add_subparsers(metavar="clean").add_parser("clean", help=CLEAN_HELP))
    parser.add_argument(
        "--bind",
        type=argument_type(lambda text: split_endpoint(text, STORE_PORT)),
        metavar="HOST[:PORT]",
        help=f"address to serve on; IPv6 in brackets; default port {STORE_PORT}, 0 for a free port",
    )
    parser.add_argument("--job", default="", help="accept only clients of this job id")
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="require clients to prove the secret in this file (or set ELASTICLIB_SECRET)",
    )
    parser.set_defaults(run=partial(_serve_store, parser))


def _serve_store(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from ..signal_inbox import SignalInbox
    from ..stores.tcp_server import TcpStoreServer
    from .launcher_process import raise_open_file_limit
    from .secret import read_secret

    if args.bind is None:
        parser.error("--bind is required to serve a store")
    host, port = args.bind
    try:
        secret = read_secret(os.environ, args.secret_file, "--secret-file")
    except ConfigError as error:
        return print_error("store: error", error, 2)
    raise_open_file_limit(None)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    inbox = SignalInbox()
    inbox.forward_to(signals.put)
    with inbox.captured((signal.SIGTERM, signal.SIGINT)):
        try:
            server = TcpStoreServer(host, port, job=args.job, secret=secret).start()
        except OSError as error:
            where = join_endpoint(host, port)
            return print_error("store", f"cannot serve on {where}: {error.strerror}", 1)
        with server:
            job = f"job {args.job!r}" if args.job else "any job"
            print(f"serving on {server.address} for {job}", flush=True)
            while server.is_serving:
                with contextlib.suppress(queue.Empty):
                    signals.get(timeout=SERVER_POLL_INTERVAL_S)
                    return 0
    return print_error("store", "the store server failed; see the error above", 1)


CLEAN_HELP = "delete the keys of jobs that have ended"


def add_clean(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib store clean`."""
    parser.description = (
        "Delete the keys of jobs that have ended, from a store that outlives its jobs. A job that "
        "has not ended, or that has a live node, is never touched, nor is one that another version "
        "of elasticlib has written."
    )
    add_target_arguments(parser, CLEAN_TIMEOUT_S, is_run_required=True)
    parser.add_argument(
        "--min-age",
        type=argument_type(_parse_hours),
        default=DEFAULT_MIN_AGE_HOURS,
        metavar="HOURS",
        help="delete only jobs that ended at least so long ago "
        f"(default: {DEFAULT_MIN_AGE_HOURS:g})",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    parser.set_defaults(run=_clean)


def _parse_hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < float("inf"):
        raise ConfigError(f"must be a number of hours from 0, got {text!r}")
    return hours


def _clean(args: argparse.Namespace) -> int:
    from ..rendezvous.ended_jobs import delete_job, find_ended_jobs

    try:
        target = find_target(args)
        with contextlib.closing(open_store(target, args)) as store:
            ended_by = wall() - args.min_age * 3600
            for job in find_ended_jobs(store.list("")):
                if job.finished_at_s > ended_by or target.run_id not in ("", job.run_id):
                    continue
                is_gone = args.dry_run or delete_job(store, job)
                what = "would delete" if args.dry_run else "deleted" if is_gone else "in use again:"
                ended_at = format_utc(job.finished_at_s)
                print(f"{what} {job.run_id} ({job.phase.value} at {ended_at})")
    except ConfigError as error:
        return print_error("store clean", error, 2)
    except ElasticError as error:
        return print_error("store clean", error, 1)
    return 0
