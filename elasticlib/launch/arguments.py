"""torchrun's command line, read into a `LaunchConfig` and an entry point.

The grammar is torchrun's, dash and underscore spellings alike; PET_* variables and a scheduler's
stand in for flags that are not given. What has no meaning beside the rest is refused or passed
over by name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from .._version import __version__
from ..errors import ConfigError
from ..workers.spec import Command, Entrypoint, Module, Script
from .backends import BACKENDS
from .cluster import CLUSTERS, read_cluster
from .config import MASTER_PORT, LaunchConfig, read_pairs
from .devices import worker_count
from .flags import FlagTable
from .observe_flags import add_observe_flags
from .output_flags import add_output_flags, read_output_flags
from .place_flags import read_place, settle_cluster, settle_place
from .settings import Settings, Source
from .supervision_flags import add_supervision_flags, read_supervision
from .torchrun_options import EVENT_LOG_HANDLERS, TorchrunOptions, read_torchrun_variables

_EPILOG = """\
examples:
  elasticrun --standalone --nproc-per-node 2 train.py --epochs 3
  elasticrun --nnodes 1:4 --nproc-per-node 8 --rdzv-id job7 --rdzv-endpoint node0:29400 train.py

exit codes:
  0 success, 1 failure, 2 a command line that cannot work, 75 after a drain (--drain-exit-code),
  128 + n after signal n
"""


@attrs.frozen
class Launch:
    """What a command line and its environment ask for.

    cluster: the scheduler whose variables were read, or none.
    """

    config: LaunchConfig
    entrypoint: Entrypoint
    settings: Settings
    cluster: str


class _PrintCompletion(argparse.Action):
    """As torchrun has it: shtab, which nothing else needs, is imported when it is asked for."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, shell: Any, flag: str | None = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(1, f"elasticrun: {flag} needs the package shtab: pip install shtab\n")
        if shell not in shtab.SUPPORTED_SHELLS:
            shells = ", ".join(shtab.SUPPORTED_SHELLS)
            parser.error(f"{flag} is one of {shells}, got {shell!r}")
        print(shtab.complete(parser, shell=shell))
        parser.exit()


def build_flags() -> FlagTable:
    """elasticrun's flags, and the parser of its command line."""
    parser = argparse.ArgumentParser(
        prog="elasticrun",
        description="Run a training script on each worker of an elastic job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"elasticlib {__version__}")
    parser.add_argument(
        "--print-completion",
        "--print_completion",
        action=_PrintCompletion,
        metavar="SHELL",
        help="print what makes a shell complete elasticrun's flags (bash, zsh, tcsh), which takes "
        "the package shtab, and exit",
    )
    flags = FlagTable(parser)
    _add_job_flags(flags)
    _add_rendezvous_flags(flags)
    _add_worker_flags(flags)
    add_output_flags(flags.add)
    add_supervision_flags(flags.add)
    add_observe_flags(flags.add)
    parser.add_argument("training_script", help="a script, module (-m) or program (--no-python)")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return flags


def _add_job_flags(flags: FlagTable) -> None:
    flags.add("--nnodes", default="1:1", help="N, or MIN:MAX (default 1)")
    flags.add(
        "--nproc-per-node",
        default="1",
        help="workers a node: a number, cpu, gpu, xpu, auto (accelerators, or else processors), or "
        "the name of a backend that torch was given (default 1)",
    )
    flags.add(
        "--max-restarts",
        type=int,
        default=0,
        help="restarts after a failure, over the whole job (default 0)",
    )
    flags.add(
        "--spares",
        type=int,
        help="how many nodes beyond MAX may wait to take a lost one's place (default any)",
    )
    flags.add("--role", default="default", help="the workers' role, a name")
    flags.add(
        "--standalone",
        action="store_true",
        help="one node by itself, with a store of its own on a free port",
    )
    flags.add(
        "--dry-run",
        action="store_true",
        help="show each setting and where it is from, what workers would be told, and what checks "
        "find, and start nothing; exit code 1 if a check fails",
    )
    flags.add(
        "--from-env",
        choices=CLUSTERS,
        metavar="NAME",
        default="none",
        help="take what is not given from a scheduler's variables: %(choices)s (default none)",
    )


def _add_rendezvous_flags(flags: FlagTable) -> None:
    flags.add(
        "--rdzv-backend",
        choices=BACKENDS,
        # Without it argparse reads through the choices, and so all metadata, on every start.
        metavar="NAME",
        help="where nodes meet: %(choices)s (c10d is another name for tcp, and etcd-v2 for etcd, "
        "which speaks its version 3); static with --master-addr",
    )
    flags.add(
        "--rdzv-endpoint",
        default="",
        help="HOST[:29400], a folder (file), HOST[:2379],HOST... (etcd), or what else NAME takes",
    )
    flags.add("--rdzv-id", default="none", help="the job's name, the same on all nodes")
    flags.add(
        "--rdzv-conf",
        action="append",
        default=[],
        help="k=v,k=v: join_timeout, last_call_timeout, ...; may be given again",
    )
    flags.add("--node-rank", type=int, help="this node's rank (static), or a wish (others)")
    flags.add(
        "--topology",
        default="",
        help="where this node is, such as its rack: those with the same get adjacent ranks",
    )
    flags.add(
        "--store-grace",
        type=float,
        default=300.0,
        help="seconds for which workers go on while the store is away (default 300)",
    )
    flags.add("--master-addr", help="static: where node 0 is (default 127.0.0.1)")
    flags.add("--master-port", type=int, help=f"static: its port (default {MASTER_PORT})")
    flags.add("--local-addr", help="the address at which others reach this node")


def _add_worker_flags(flags: FlagTable) -> None:
    flags.add(
        "--monitor-interval",
        type=float,
        default=0.1,
        help="seconds between looks at a rendezvous that cannot tell of changes itself",
    )
    flags.add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds between SIGTERM and SIGKILL when workers are stopped (default 30)",
    )
    flags.add("--module", "-m", action="store_true", help="run a module, as python -m")
    flags.add("--no-python", action="store_true", help="run a program, not a Python script")
    flags.add(
        "--run-path",
        action="store_true",
        help="run a script by its path with elasticrun's own interpreter, whatever PYTHON_EXEC and "
        "--no-python say",
    )
    flags.add(
        "--start-method",
        metavar="NAME",
        help="warm: fork Python workers from a process that has torch imported (default; fork and "
        "forkserver are other names for it); spawn: start an interpreter for each",
    )
    flags.add(
        "--event-log-handler",
        metavar="NAME",
        default="null",
        help=f"{' or '.join(EVENT_LOG_HANDLERS)}: write torchrun's events to stderr, a line of "
        "JSON each (default null)",
    )
    flags.add(
        "--preload",
        default="",
        help="modules that the warm process imports besides torch: a,b.c",
    )


def parse(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[LaunchConfig, Entrypoint]:
    """The launch that a command line asks for, with variables in place of flags if they are given.

    Raises:
        ConfigError: it asks for what cannot work. SystemExit: argparse's own usage errors.
    """
    launch = read_launch(argv, environment or {})
    return launch.config, launch.entrypoint


def read_launch(argv: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The same, and where each setting is from.

    Raises:
        ConfigError: it asks for what cannot work. SystemExit: argparse's own usage errors.
    """
    flags = build_flags()
    told, rest = flags.read_flags(argv)
    variables, notes = flags.read_variables(environment)
    layers = [told, variables]
    where = Settings.layered(layers, flags.defaults)["from_env"]
    cluster, said = read_cluster(where, environment)
    from_cluster = flags.read_cluster(said)
    settings = Settings.layered([*layers, from_cluster], flags.defaults, notes)
    try:
        settings = _settle_program(settle_cluster(settle_place(settings), from_cluster))
        options = {name: settings[name] for name in flags.options}
        given = argparse.Namespace(**options, **_script(rest))
        python = not (given.no_python or given.run_path)
        said, unheard = read_torchrun_variables(environment, python=python)
        settings = attrs.evolve(settings, notes=(*settings.notes, *unheard))
        config = _config(given, settings, said)
        settings = attrs.evolve(settings, notes=(*settings.notes, *_timeouts(config)))
        return Launch(config, _entrypoint(given), settings, cluster)
    except ConfigError as error:
        raise _with_origins(error, settings) from error.__cause__


def _script(rest: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(rest, name) for name in ("training_script", "training_script_args")}


def _with_origins(error: ConfigError, settings: Settings) -> ConfigError:
    """The error speaks of flags; what its user has set may be a variable."""
    sentence = str(error)
    from_elsewhere = [
        f"--{name.replace('_', '-')} is from {setting.origin}"
        for name, setting in settings.found.items()
        if setting.source in (Source.VARIABLE, Source.CLUSTER)
        and f"--{name.replace('_', '-')}" in sentence
    ]
    return ConfigError(f"{sentence} ({', '.join(from_elsewhere)})") if from_elsewhere else error


def _settle_program(settings: Settings) -> Settings:
    """Which of the flags that say what a program is goes before another, as in torchrun."""
    if settings["run_path"] and settings["no_python"]:
        because = f"{settings.origins('run_path')} goes before it"
        return settings.without("no_python", because=because)
    return settings


def _config(given: argparse.Namespace, settings: Settings, said: Mapping[str, Any]) -> LaunchConfig:
    low, high = _node_range(given.nnodes)
    return LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=worker_count(given.nproc_per_node),
        role=given.role,
        max_restarts=given.max_restarts,
        spares=given.spares,
        topology=given.topology,
        store_grace=given.store_grace,
        monitor_interval=given.monitor_interval,
        shutdown_timeout=given.shutdown_timeout,
        supervision=read_supervision(given, settings.found["drain_signals"].source),
        local_addr=given.local_addr,
        start_method=_start_method(given),
        preload=tuple(name.strip() for name in given.preload.split(",") if name.strip()),
        rdzv_configs=read_pairs(",".join(given.rdzv_conf)),
        logs_specs=given.logs_specs,
        event_log_handler=given.event_log_handler,
        torchrun=TorchrunOptions(**said),
        observe_port=given.observe_port,
        **read_output_flags(given),
        **read_place(settings, high),
    )


def _timeouts(config: LaunchConfig) -> Iterator[str]:
    conf = config.rdzv_configs
    if {"timeout", "join_timeout"} <= set(conf) and not config.of_torch:
        yield (
            f"--rdzv-conf timeout={conf['timeout']} is passed over: "
            f"join_timeout={conf['join_timeout']} goes before it"
        )


def _start_method(given: argparse.Namespace) -> str:
    if given.no_python and given.start_method not in (None, "spawn"):
        raise ConfigError(
            f"--start-method {given.start_method} is for Python, and --no-python runs another "
            "program"
        )
    return given.start_method or "warm"


def _entrypoint(given: argparse.Namespace) -> Entrypoint:
    args = tuple(given.training_script_args)
    if not given.training_script:
        raise ConfigError("what is to be run has an empty name")
    if given.module and given.no_python:
        raise ConfigError("-m runs a Python module and --no-python a program: give one of them")
    if given.module and given.run_path:
        raise ConfigError(
            "-m runs a module by its name and --run-path a script by its path: give one of them"
        )
    if given.module:
        return Module(given.training_script, args)
    if given.no_python:
        return Command(given.training_script, args)
    program = given.training_script
    if not any(map(os.path.isfile, (program, os.path.join(program, "__main__.py")))):
        raise ConfigError(
            f"there is no script {given.training_script!r} here (in {os.getcwd()}); "
            "a module needs -m, another program --no-python"
        )
    return Script(given.training_script, args)


def _node_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise ConfigError(f"--nnodes is N or MIN:MAX, got {text!r}") from None
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes needs 1 <= MIN <= MAX, got {text!r}")
    return least, most
