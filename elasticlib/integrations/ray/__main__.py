"""`python -m elasticlib.integrations.ray [ray's flags] [elasticrun's flags] script args`.

Exit codes are elasticrun's: 0 success, 1 failure, 2 a command line that cannot work, 75 or what
--drain-exit-code says after a drain, 128 + n after signal n.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

from ...errors import ConfigError, ElasticError
from ...launch.arguments import launch_of
from ...launch.config import in_flags
from ...launch.console import log_level, start_logging
from ...launch.elasticrun import leave_error_of
from ...launch.exit_report import result_text
from ...launch.flags import read, read_flags, read_variables
from ...workers.spec import WorkerState
from . import ENDPOINT, RayOptions, run_job

log = logging.getLogger("elasticlib.ray")

_NAME = "elasticlib.integrations.ray"
_HELP = {"-h", "--help"}
_OWN = {"--address", "--num-cpus", "--num-gpus", "--memory", "--resources", "--working-dir"}


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_NAME}",
        usage="%(prog)s [these flags first] [elasticrun's flags] training_script ...",
        description="Run a training script on the workers of an elastic job, whose agents are "
        "actors of a Ray cluster, one a node. What follows is as for elasticrun: see its --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--address", default="auto", help="of the cluster (default auto)")
    parser.add_argument("--num-cpus", type=float, help="of each agent (default: one a worker)")
    parser.add_argument("--num-gpus", type=float, default=0, help="of each agent (default 0)")
    parser.add_argument("--memory", type=float, help="bytes of each agent that Ray reserves")
    parser.add_argument("--resources", default="{}", help="custom ones of each agent, as JSON")
    parser.add_argument(
        "--working-dir",
        help="a folder that Ray brings to every node, and that the script is run in (default: the "
        "current one, which each node has at the same place)",
    )
    return parser


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ray's flags, which come first, and the command line of elasticrun."""
    rest, mine = list(argv), []
    while rest:
        name, equals, value = rest[0].partition("=")
        name = name.replace("_", "-")
        if name not in _OWN | _HELP:
            break
        rest.pop(0)
        mine.append(name + equals + value)
        if name in _OWN and not equals and rest:
            mine.append(rest.pop(0))
    return mine, rest


def _options(given: argparse.Namespace) -> RayOptions:
    try:
        resources = json.loads(given.resources)
    except ValueError:
        resources = None
    if not isinstance(resources, dict) or not all(
        isinstance(amount, (int, float)) for amount in resources.values()
    ):
        raise ConfigError(f'--resources is JSON as {{"name": 1}}, got {given.resources!r}')
    said = vars(given)
    folder = said.pop("working_dir")
    if folder is not None:
        try:
            os.chdir(folder)
        except OSError as error:
            raise ConfigError(f"--working-dir {folder!r}: {error.strerror}") from error
        said["runtime_env"] = {"working_dir": os.getcwd()}
    return RayOptions(**{**said, "resources": resources})


def _run(argv: Sequence[str]) -> int:
    mine, rest = split(argv)
    options = _options(_flags().parse_args(mine))
    # Theirs come later, and one that names another place is refused by that name.
    rest = ["--rdzv-endpoint", ENDPOINT, *rest]
    line = read(rest)
    said = {**read_variables(os.environ)[0], **read_flags(line)}
    count = said["nproc_per_node"].value if "nproc_per_node" in said else "1"
    if not str(count).isdigit():
        raise ConfigError(
            f"--nproc-per-node {count} would count what the driver's machine has, and Ray is asked "
            "for it beforehand: give a number"
        )
    launch = launch_of(line, os.environ)
    if launch.settings["dry_run"]:
        raise ConfigError(
            f"--dry-run looks at the machine that it is given on, and {_NAME} has Ray choose the "
            "machines: leave it out, or see `elasticrun --dry-run` on one of them"
        )
    start_logging(
        log_level(os.environ.get("LOGLEVEL", "INFO")), "%(asctime)s elasticlib: %(message)s"
    )
    for note in launch.settings.notes:
        log.warning("%s", note)
    result = run_job(launch.config, launch.entrypoint, options)
    sys.stderr.write(result_text(result))
    leave_error_of(result)
    if result.state is WorkerState.DRAINED:
        return launch.config.supervision.drain_exit_code
    return result.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        sys.stderr.write(f"{_NAME}: error: {in_flags(error)}\n")
        return 2
    except ElasticError as error:
        sys.stderr.write(f"{_NAME}: FAILED: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
