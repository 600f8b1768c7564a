"""Command line, environment and scheduler variables, resolved into a `LaunchConfig`.

The origin of each setting is kept for --dry-run and for error messages. A setting that has no
meaning next to the others is rejected, or ignored with a warning.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from ..agent.hang_detector import HangLimits
from ..agent.options import DRAIN_SIGNALS, NOTICE_SIGNALS, STOP_SIGNALS, AgentOptions
from ..compat.torch_launch import TorchrunOptions, read_torchrun_variables
from ..errors import ConfigError
from ..signals import read_signals, signal_name
from ..workers.node_resources import count_usable_cpus
from ..workers.output_plan import parse_ranks, parse_streams
from ..workers.spec import Command, Entrypoint, Module, Script
from .command_line import parse_command_line
from .endpoints import (
    drop_unusable_scheduler_settings,
    node_range,
    rendezvous_fields,
    resolve_rendezvous_settings,
)
from .flags import FLAGS, SettingError, flag_message
from .launch_config import (
    LaunchConfig,
    SupervisionOptions,
    check_seconds,
)
from .rendezvous_options import MAX_SECONDS, read_pairs
from .run_id import with_run_id
from .schedulers import detect_scheduler
from .settings import Settings, Source, read_flags, read_scheduler_settings, read_variables


@attrs.frozen
class LaunchRequest:
    """A launch that a command line and its environment request."""

    config: LaunchConfig
    entrypoint: Entrypoint
    settings: Settings
    scheduler: str  # the scheduler whose variables were read, or "none"


def parse(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[LaunchConfig, Entrypoint]:
    """Return the configuration and the entry point that a command line requests.

    Args:
        argv: the command line without the name of the command.
        environment: variables for the options that are not given. None for no variables.

    Raises:
        ConfigError: the settings cannot work.
        SystemExit: the command line requests help, or has a usage error.
    """
    request = parse_launch(argv, environment or {})
    return request.config, request.entrypoint


def parse_launch(argv: Sequence[str], environment: Mapping[str, str]) -> LaunchRequest:
    """Return what `parse` returns, with the origins of all settings."""
    return resolve_launch(parse_command_line(argv), environment)


def resolve_launch(args: argparse.Namespace, environment: Mapping[str, str]) -> LaunchRequest:
    """Return the launch of a command line that argparse has parsed.

    Raises:
        ConfigError: the settings cannot work.
    """
    variables, warnings = read_variables(environment)
    layers = [read_flags(args), variables]
    settings = Settings.merge(layers, warnings)
    try:
        scheduler, found = detect_scheduler(settings["scheduler"], environment)
        settings = Settings.merge([*layers, read_scheduler_settings(found)], warnings)
        settings = drop_unusable_scheduler_settings(resolve_rendezvous_settings(settings))
        if settings["run_path"] and settings["no_python"]:
            reason = f"{settings.origins('run_path')} takes precedence"
            settings = settings.drop("no_python", reason=reason)
        config, settings = _make_config(settings, environment)
        entrypoint = _entrypoint(settings, args.training_script, tuple(args.training_script_args))
        return LaunchRequest(with_run_id(config, entrypoint), entrypoint, settings, scheduler)
    except ConfigError as error:
        raise _with_origins(error, settings) from error.__cause__


def _with_origins(error: ConfigError, settings: Settings) -> ConfigError:
    """Return the error with the variables that have set the settings in its message, if any."""
    names = error.names if isinstance(error, SettingError) else ()
    given = [(name, settings.settings[name]) for name in dict.fromkeys(names)]
    origins = [
        f"{FLAGS[name].name} is set by {setting.origin}"
        for name, setting in given
        if setting.source in (Source.ENVIRONMENT, Source.SCHEDULER)
    ]
    suffix = f" ({', '.join(origins)})" if origins else ""
    return ConfigError(f"{flag_message(error)}{suffix}")


def _make_config(
    settings: Settings, environment: Mapping[str, str]
) -> tuple[LaunchConfig, Settings]:
    """Return the configuration, and the settings with warnings about settings without effect."""
    min_nodes, max_nodes = node_range(settings["nnodes"])
    is_python = not (settings["no_python"] or settings["run_path"])
    torchrun, warnings = read_torchrun_variables(environment, python=is_python)
    same_name = {
        name: _CONVERTERS[name](settings[name]) if name in _CONVERTERS else settings[name]
        for name in attrs.fields_dict(LaunchConfig)
        if name in FLAGS
    }
    config = LaunchConfig(
        **{
            **same_name,
            **rendezvous_fields(settings, max_nodes),
            "min_nodes": min_nodes,
            "max_nodes": max_nodes,
            "rdzv_configs": read_pairs(",".join(filter(str.strip, settings["rdzv_conf"]))),
            "start_method": _start_method(settings),
            "supervision": _supervision(settings),
            "signals_to_handle": None,  # part of `supervision`
            "torchrun": TorchrunOptions(**torchrun),
        }
    )
    conf = config.rdzv_configs
    if {"timeout", "join_timeout"} <= set(conf):
        warnings = (
            *warnings,
            f"ignoring --rdzv-conf timeout={conf['timeout']}: "
            f"join_timeout={conf['join_timeout']} takes precedence",
        )
    return config, settings.with_warnings(*warnings)


def _start_method(settings: Settings) -> str:
    name = settings["start_method"]
    if settings["no_python"] and name not in (None, "spawn"):
        raise SettingError("{start_method} {0} requires Python: remove {no_python}", name)
    return name or "forkserver"


def _entrypoint(settings: Settings, program: str, args: tuple[str, ...]) -> Entrypoint:
    if not program:
        raise ConfigError("the name of the training script must not be empty")
    if settings["module"] and settings["no_python"]:
        raise ConfigError("-m and --no-python are mutually exclusive")
    if settings["module"] and settings["run_path"]:
        raise ConfigError("-m and --run-path are mutually exclusive")
    if settings["module"]:
        return Module(program, args)
    if settings["no_python"]:
        return Command(program, args)
    script = Script(program, args)  # rejects what each worker could not read
    _check_script(program)
    return script


def _check_script(path: str) -> None:
    if any(map(os.path.isfile, (path, os.path.join(path, "__main__.py")))):
        return
    remedy = "use -m to run a module or --no-python to run another program"
    if os.path.exists(path):
        raise ConfigError(
            f"a script must be a regular file or a directory with a __main__.py, got {path!r}; "
            f"{remedy}"
        )
    hint = f" (did you mean {path}.py?)" if os.path.isfile(f"{path}.py") else ""
    raise ConfigError(f"script {path!r} not found in {os.getcwd()}{hint}; {remedy}")


def _supervision(settings: Settings) -> SupervisionOptions:
    check_seconds("checkpoint_grace", settings["checkpoint_grace"])
    replicas = settings["snapshot_replicas"]
    if replicas < 0:
        raise SettingError("{snapshot_replicas} must be at least 0, got {0}", replicas)
    agent = attrs.evolve(
        _signal_options(settings),
        checkpoint_grace=settings["checkpoint_grace"],
        hang_limits=_hang_limits(settings["hang_timeout"]),
        snapshot_replicas=replicas,
    )
    names = set(attrs.fields_dict(SupervisionOptions)) & set(FLAGS)
    return SupervisionOptions(agent=agent, **{name: settings[name] for name in names})


def _hang_limits(text: str | None) -> HangLimits | None:
    if text is None:
        return None
    if text == "auto":
        return HangLimits()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise SettingError(
            "{hang_timeout} must be auto or seconds above 0 and up to {0:g}, got {1!r}",
            MAX_SECONDS,
            text,
        )
    return HangLimits(timeout=seconds)


def _signal_options(settings: Settings) -> AgentOptions:
    """Return the signals that stop the run, and those that drain the node.

    A signal that is given for one purpose is removed from the defaults of the other.
    """
    stop = read_signals(settings["signals_to_handle"], "--signals-to-handle")
    drain = read_signals(settings["drain_signals"], "--drain-signals")
    default_drain: tuple[int, ...] = DRAIN_SIGNALS
    if settings.settings["drain_signals"].source is Source.SCHEDULER:
        # The scheduler's signals replace elasticlib's defaults, because the user gave none.
        drain, default_drain = None, drain or ()
    both = sorted({*(stop or ())} & {*(drain or ())})
    if both:
        raise SettingError(
            "{0} is in both {signals_to_handle} (stop) and {drain_signals} (drain): remove it from "
            "one of them",
            signal_name(both[0]),
        )
    # torchrun's jobs name SIGUSR2 among the signals that end the run.
    default_drain = tuple(n for n in default_drain if n not in (stop or ()))
    return AgentOptions(
        stop_signals=tuple(n for n in STOP_SIGNALS if n not in (drain or ()))
        if stop is None
        else stop,
        drain_signals=default_drain if drain is None else drain,
        notice_signals=NOTICE_SIGNALS if drain is None else (),
    )


def split_at_commas(text: str) -> tuple[str, ...]:
    """Split text at single commas; a double comma means one comma of the text."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _local_ranks(text: str) -> frozenset[int] | None:
    try:
        return parse_ranks(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"--local-ranks-filter: {error}") from None


NPROC_VALUES = "a number, cpu, gpu, xpu, auto, or the name of a registered torch backend"


def worker_count(text: str) -> int:
    """Return the number of workers that --nproc-per-node means on this machine.

    `auto` is the number of accelerators of the kind that torch prefers, or of CPU cores if torch
    finds no accelerator.

    Raises:
        ConfigError: this machine has no such device, or the text has no meaning.
    """
    try:
        return int(text)
    except ValueError:
        pass
    if text == "cpu":
        return count_usable_cpus()
    invalid = SettingError("{nproc_per_node} must be {0}, got {1!r}", NPROC_VALUES, text)
    if not text.isidentifier():
        raise invalid
    import torch

    if text == "auto":
        return _count_accelerators(torch) or count_usable_cpus()
    registered = torch._C._get_privateuse1_backend_name()
    kind = "cuda" if text == "gpu" else text
    counts = {name: _count_devices(torch, name) for name in ("cuda", "xpu", registered)}
    if kind not in counts:
        raise invalid
    if counts[kind]:
        return counts[kind]
    found = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    raise SettingError(
        "{nproc_per_node} {0}: torch {1} finds no {2} on this machine (found: {3}, {4} CPU cores; "
        "use cpu)",
        text,
        torch.__version__,
        text.upper(),
        found or "no accelerator",
        count_usable_cpus(),
    )


def _count_accelerators(torch: Any) -> int:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # torch older than 2.6
        return _count_devices(torch, "cuda")
    return int(accelerator.device_count()) if accelerator.is_available() else 0


def _count_devices(torch: Any, kind: str) -> int:
    devices = getattr(torch, kind, None)
    return int(devices.device_count()) if devices is not None and devices.is_available() else 0


# Converts the text of a flag into the value of the field of the same name, where they differ.
_CONVERTERS: Mapping[str, Callable[[str], Any]] = {
    "nproc_per_node": worker_count,
    "preload": lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
    "redirects": partial(parse_streams, option="--redirects"),
    "tee": partial(parse_streams, option="--tee"),
    "local_ranks_filter": _local_ranks,
    "duplicate_stdout_filters": split_at_commas,
    "duplicate_stderr_filters": split_at_commas,
    "log_line_prefix_template": lambda text: text or None,
}
