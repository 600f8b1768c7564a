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

from ..compat.launching import TorchrunOptions, read_torchrun_variables
from ..errors import ConfigError
from ..workers.spec import Command, Entrypoint, Module, Script
from .cluster import read_cluster
from .command_line import CommandLine, read
from .command_line import build_flags as build_flags
from .config import LaunchConfig, read_pairs
from .devices import worker_count
from .flags import read_cluster_settings, read_flags, read_variables
from .output_flags import read_output_flags
from .place_flags import read_place, settle_cluster, settle_place
from .settings import Settings, Source
from .supervision_flags import read_supervision


@attrs.frozen
class Launch:
    """What a command line and its environment ask for.

    cluster: the scheduler whose variables were read, or none.
    """

    config: LaunchConfig
    entrypoint: Entrypoint
    settings: Settings
    cluster: str


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
    return launch_of(read(argv), environment)


def launch_of(line: CommandLine, environment: Mapping[str, str]) -> Launch:
    """The same, of a command line that argparse has read."""
    flags = line.flags
    variables, notes = read_variables(flags, environment)
    layers = [read_flags(line), variables]
    where = Settings.layered(layers, flags.defaults)["from_env"]
    cluster, said = read_cluster(where, environment)
    from_cluster = read_cluster_settings(flags, said)
    settings = Settings.layered([*layers, from_cluster], flags.defaults, notes)
    try:
        settings = _settle_program(settle_cluster(settle_place(settings), from_cluster))
        options = {name: settings[name] for name in flags.options}
        given = argparse.Namespace(**options, **_script(line.given))
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
