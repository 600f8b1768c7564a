"""`elasticlib stacks`: what the threads of a run's workers are doing, now."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..errors import ConfigError, ElasticError, NoSuchRun, StoreError
from ..observe.stacks import Asker, JobStacks, stack_lines
from ..observe.status import NOBODY
from ..visible import visible
from .chosen_ranks import ranks_of
from .reach import Target, add_reach, find_target, reached, recorded

TIMEOUT = 5.0
"""Seconds: a worker that writes nothing is waited for on its node."""


def add_stacks(commands: Any) -> None:
    """Add the subcommand to those of `elasticlib`."""
    parser = commands.add_parser(
        "stacks",
        help="the Python stacks of a run's workers, now",
        description="The Python stacks of all ranks of all nodes, now; those that are the same "
        "are shown once, and those that the fewest share come first.",
        epilog="exit status: 0 if all nodes that live answered, 1 if some did not, 2 for a command "
        "line that makes no sense, 4 if there is no such run, or nobody answers or can be "
        "asked; 130 after Ctrl-C",
    )
    add_reach(parser, TIMEOUT)
    parser.set_defaults(run=_stacks)
    parser.add_argument(
        "-r", "--ranks", type=ranks_of, metavar="RANKS", help="those of these ranks, as in 0,3-5"
    )


def _stacks(chosen: argparse.Namespace) -> int:
    try:
        view = _asked(find_target(chosen), chosen)
        print("\n".join(stack_lines(view, chosen.ranks)))
    except ConfigError as error:
        return _fail(2, error)
    except ElasticError as error:
        return _fail(NOBODY, error)
    except KeyboardInterrupt:
        return 130
    if not view.stacks:
        return NOBODY
    return int(len(view.stacks) < len(view.live))


def _asked(target: Target, chosen: argparse.Namespace) -> JobStacks:
    """What the nodes show.

    Raises:
        NoSuchRun: none of them lives. StoreError: they could not be asked.
    """
    try:
        with reached(target, chosen) as (store, run_id), Asker(store, run_id) as asker:
            view = asker.ask(chosen.timeout, chosen.ranks)
    except StoreError as error:
        last = recorded(target)
        if last is None or last.state is None or not last.state.over:
            raise
        over = f"{target.run_id!r} is over ({last.state.value}): no worker of it is left"
        raise NoSuchRun(over) from error
    if not view.live:
        raise NoSuchRun(f"no node of {run_id!r} lives")
    return view


def _fail(code: int, error: Exception) -> int:
    print(f"elasticlib stacks: {visible(str(error))}", file=sys.stderr)
    return code
