"""The command `elasticlib stacks`: print the Python stacks of a run's workers."""

from __future__ import annotations

import argparse

from ..errors import ConfigError, ElasticError, RunNotFoundError
from ..observe.formatting import NOT_JOINED_TEXT
from ..observe.job_status import EXIT_UNKNOWN
from ..observe.stack_query import JobStacks, StackClient, stack_lines
from ..workers.output_plan import parse_ranks
from .cli_output import argument_type, print_error
from .run_target import (
    RunTarget,
    add_target_arguments,
    find_target,
    open_running_target,
)

DEFAULT_TIMEOUT_S = 5.0  # longer than a node waits for a worker that writes no stack


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib stacks`."""
    parser.description = (
        "Print the current Python stacks of all ranks. Identical stacks are printed once, the "
        "rarest first."
    )
    parser.epilog = (
        "exit status: 0 all live nodes responded, 1 some did not, 2 invalid command line, 4 no "
        "such run or no node responded, 130 interrupted"
    )
    add_target_arguments(parser, DEFAULT_TIMEOUT_S)
    parser.add_argument(
        "-r",
        "--ranks",
        type=argument_type(parse_ranks),
        metavar="RANKS",
        help="only these ranks, for example 0,3-5",
    )
    parser.set_defaults(run=_stacks)


def _stacks(args: argparse.Namespace) -> int:
    try:
        stacks = _query(find_target(args), args)
        print("\n".join(stack_lines(stacks, args.ranks)))
    except ConfigError as error:
        return print_error("stacks", error, 2)
    except ElasticError as error:
        return print_error("stacks", error, EXIT_UNKNOWN)
    except KeyboardInterrupt:
        return 130
    if not stacks.stacks:
        return EXIT_UNKNOWN
    return int(len(stacks.stacks) < len(stacks.alive_nodes))


def _query(target: RunTarget, args: argparse.Namespace) -> JobStacks:
    """Return the stacks that the nodes send.

    Raises:
        RunNotFoundError: no node of the run is alive.
        StoreError: the store cannot be reached.
    """
    with (
        open_running_target(target, args, "has no running workers") as (store, run_id),
        StackClient(store, run_id) as client,
    ):
        stacks = client.query(args.timeout, args.ranks)
    if not stacks.alive_nodes:
        raise RunNotFoundError(f"no node of run {run_id!r} is alive: {NOT_JOINED_TEXT}")
    return stacks
