"""The commands `elasticlib drain`, `stop`, `restart` and `stacks`: requests of an operator."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..errors import ConfigError, ElasticError
from ..observe.formatting import format_ranges
from ..observe.job_status import EXIT_UNKNOWN
from ..observe.requests import (
    Request,
    RequestClient,
    RequestKind,
    RequestResult,
    TargetJob,
    find_node,
    new_request_id,
    read_target_job,
    result_document,
    result_lines,
)
from ..observe.stacks import NodeStacks, decode_stacks, stack_lines
from ..workers.output_plan import parse_ranks
from .cli_output import argument_type, print_error
from .target import MAX_TIMEOUT_S, add_target_arguments, find_target, open_running_target

STACKS_TIMEOUT_S = 5.0  # longer than a node waits for a worker that writes no stack
EXIT_CODES = (
    "exit status: 0 all addressed nodes answered or have left, 1 some did not or refused, 2 "
    "invalid command line or unknown node, 4 the run is not running or its store is unreachable, "
    "130 interrupted"
)

Value = TypeVar("Value")


def add_drain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib drain`."""
    parser.description = (
        "Let the workers of one node save, and the node leave the job. The other nodes continue "
        "without using a restart, and a spare takes over."
    )
    _add_arguments(parser, RequestKind.DRAIN)


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib stop`."""
    parser.description = (
        "Let all workers of a run save, and end the run. Each elasticrun ends with exit code 76, "
        "so that no scheduler starts it again as after a drain (75)."
    )
    _add_arguments(parser, RequestKind.STOP)


def add_restart(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib restart`."""
    parser.description = (
        "Let all workers of a run save, and start them again, for example to load changed code. "
        "This uses no restart of --max-restarts."
    )
    _add_arguments(parser, RequestKind.RESTART)


def _add_arguments(parser: argparse.ArgumentParser, kind: RequestKind) -> None:
    parser.epilog = EXIT_CODES
    add_target_arguments(parser, MAX_TIMEOUT_S, is_run_required=True)
    if kind is RequestKind.DRAIN:
        parser.add_argument(
            "node", metavar="NODE", help="id, host or rank of a node, as elasticlib status shows it"
        )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    parser.set_defaults(run=partial(_control, kind))


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib stacks`."""
    parser.description = (
        "Print the current Python stacks of all ranks. Identical stacks are printed once, the "
        "rarest first."
    )
    parser.epilog = (
        "exit status: 0 all live nodes responded, 1 some did not or refused, 2 invalid command "
        "line, 4 no such run or no node responded, 130 interrupted"
    )
    add_target_arguments(parser, STACKS_TIMEOUT_S)
    parser.add_argument(
        "-r",
        "--ranks",
        type=argument_type(parse_ranks),
        metavar="RANKS",
        help="only these ranks, for example 0,3-5",
    )
    parser.set_defaults(run=_stacks)


def _control(kind: RequestKind, args: argparse.Namespace) -> int:
    def run() -> int:
        result = _send(kind, args)[0]
        if args.json:
            print(json.dumps(result_document(result)))
        else:
            print("\n".join(result_lines(result)))
        return _exit_status(result, args)

    return _with_exit_codes(kind, run)


def _stacks(args: argparse.Namespace) -> int:
    def run() -> int:
        result, stacks = _send(RequestKind.STACKS, args)
        print("\n".join(stack_lines(result, stacks, args.ranks)))
        return _exit_status(result, args) if stacks else EXIT_UNKNOWN

    return _with_exit_codes(RequestKind.STACKS, run)


def _with_exit_codes(kind: RequestKind, run: Callable[[], int]) -> int:
    try:
        return run()
    except ConfigError as error:
        return print_error(kind.value, error, 2)
    except ElasticError as error:
        return print_error(kind.value, error, EXIT_UNKNOWN)
    except KeyboardInterrupt:
        return 130


def _exit_status(result: RequestResult, args: argparse.Namespace) -> int:
    """Return the exit status, and print which nodes have not answered or have refused."""
    problems = {
        f"no response within {args.timeout:g} s from": result.missing,
        "the request was refused by": result.refused,
    }
    for problem, nodes in problems.items():
        if nodes:
            message = f"{problem} {', '.join(node.label for node in nodes)}"
            print_error(result.request.kind.value, message, 1)
    return int(any(problems.values()))


def _send(
    kind: RequestKind, args: argparse.Namespace
) -> tuple[RequestResult, dict[str, NodeStacks]]:
    """Send the request to the nodes. Return the answers, and the stacks by node id.

    Raises:
        ConfigError: no node, or several, have the name of the command line.
        RunNotFoundError: no node of the run is alive.
        StoreError: the store cannot be reached.
    """
    is_for_stacks = kind is RequestKind.STACKS
    consequence = "has no running workers" if is_for_stacks else "cannot be controlled"
    with (
        open_running_target(find_target(args), args, consequence) as run,
        RequestClient(run.store, run.run_id, run.secret) as client,
    ):
        job = read_target_job(run.store, run.run_id)
        nodes = job.nodes
        if kind is RequestKind.DRAIN:
            nodes = (find_node(args.node, nodes),)
        target = nodes[0].id if kind is RequestKind.DRAIN else ""
        ranks = format_ranges(args.ranks or ()).replace(" ", "") if is_for_stacks else ""
        result = client.send(make_request(kind, job, target, args.timeout, ranks), nodes)
        return result, _read_stacks(client, result) if is_for_stacks else {}


def make_request(
    kind: RequestKind, job: TargetJob, target: str, limit_s: float, payload: str = ""
) -> Request:
    """Return a request of the user of this process.

    Raises:
        ConfigError: the payload is too long.
    """
    try:
        return Request(
            id=new_request_id(),
            kind=kind,
            target=target,
            run=job.run,
            incarnation=job.incarnation,
            generation=job.generation,
            by=operator(),
            limit_s=limit_s,
            payload=payload,
        )
    except ValueError as error:
        raise ConfigError(f"the request is not valid: {error}") from error


def _read_stacks(client: RequestClient, result: RequestResult) -> dict[str, NodeStacks]:
    stacks = {}
    for id, answer in result.answers.items():
        body = client.read_body(result.request, id) if answer.size else None
        if body is not None:
            stacks[id] = _decoded(body)
    return stacks


def _decoded(body: bytes) -> NodeStacks:
    try:
        return decode_stacks(body)
    except ValueError:
        return NodeStacks({})


def operator() -> str:
    """Return the user and the host of this process, as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no entry for the user
        user = str(os.getuid())
    name = f"{user}@{socket.gethostname()}"
    return "".join(char if char.isprintable() else "?" for char in name)[:200]
