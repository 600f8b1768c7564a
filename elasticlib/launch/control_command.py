"""The commands `elasticlib drain`, `stop` and `restart`: requests of an operator to a job."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import secrets
import socket
from functools import partial

from ..errors import ConfigError, ElasticError
from ..observe.control import (
    ControlAction,
    ControlClient,
    ControlRequest,
    ControlResult,
    TargetJob,
    find_node,
    read_target_job,
    result_document,
    result_lines,
)
from ..observe.job_status import EXIT_UNKNOWN
from .cli_output import print_error
from .run_target import (
    MAX_TIMEOUT_S,
    RunTarget,
    add_target_arguments,
    find_target,
    open_running_target,
)

EXIT_CODES = (
    "exit status: 0 all addressed nodes responded, 1 some did not, 2 invalid command line or "
    "unknown node, 4 the run is not running or its store is unreachable, 130 interrupted"
)


def add_drain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib drain`."""
    parser.description = (
        "Let the workers of one node save, and the node leave the job. The other nodes continue "
        "without using a restart, and a spare takes over."
    )
    _add_arguments(parser, ControlAction.DRAIN)


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib stop`."""
    parser.description = (
        "Let all workers of a run save, and end the run. Each elasticrun ends with exit code 76, "
        "so that no scheduler starts it again as after a drain (75)."
    )
    _add_arguments(parser, ControlAction.STOP)


def add_restart(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `elasticlib restart`."""
    parser.description = (
        "Let all workers of a run save, and start them again, for example to load changed code. "
        "This uses no restart of --max-restarts."
    )
    _add_arguments(parser, ControlAction.RESTART)


def _add_arguments(parser: argparse.ArgumentParser, action: ControlAction) -> None:
    parser.epilog = EXIT_CODES
    add_target_arguments(parser, MAX_TIMEOUT_S, is_run_required=True)
    if action is ControlAction.DRAIN:
        parser.add_argument(
            "node", metavar="NODE", help="id, host or rank of a node, as elasticlib status shows it"
        )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    parser.set_defaults(run=partial(_control, action))


def _control(action: ControlAction, args: argparse.Namespace) -> int:
    try:
        job, result = _send(action, find_target(args), args)
    except ConfigError as error:
        return print_error(action.value, error, 2)
    except ElasticError as error:
        return print_error(action.value, error, EXIT_UNKNOWN)
    except KeyboardInterrupt:
        return 130
    if args.json:
        print(json.dumps(result_document(job.run_id, result)))
    else:
        print("\n".join(result_lines(result)))
    if result.missing:
        hosts = ", ".join(node.label for node in result.missing)
        message = f"no response within {args.timeout:g} s from {hosts}"
        return print_error(action.value, message, 1)
    return 0


def _send(
    action: ControlAction, target: RunTarget, args: argparse.Namespace
) -> tuple[TargetJob, ControlResult]:
    """Send the request to the nodes, and return the job and the answers.

    Raises:
        ConfigError: no node, or several, have the name of the command line.
        RunNotFoundError: no node of the run is alive.
        StoreError: the store cannot be reached.
    """
    with (
        open_running_target(target, args, "cannot be controlled") as (store, run_id),
        ControlClient(store, run_id) as client,
    ):
        job = read_target_job(store, run_id)
        nodes, node_id = job.nodes, ""
        if action is ControlAction.DRAIN:
            node = find_node(args.node, nodes)
            nodes, node_id = (node,), node.id
        request = ControlRequest(
            id=secrets.token_hex(8),
            action=action,
            by=operator(),
            incarnation=job.incarnation,
            generation=job.generation,
            time_limit_s=args.timeout,
            node_id=node_id,
        )
        return job, client.send(request, nodes)


def operator() -> str:
    """Return the user and the host of this process, as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no entry for the user
        user = str(os.getuid())
    name = f"{user}@{socket.gethostname()}"
    return "".join(char if char.isprintable() else "?" for char in name)[:200]
