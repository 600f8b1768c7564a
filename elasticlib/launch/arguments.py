"""torchrun's command line, `PET_*` variables, a scheduler's and the defaults, read in this order
into a `LaunchConfig` and an entry point.

Who said what is known to the end, for --dry-run and for the sentence that refuses it. What has no
meaning beside the rest is refused, or ignored with a warning.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from ..agent.hang import HangLimits
from ..agent.options import DRAIN_SIGNALS, SAVE_SIGNALS, SIGNALS, AgentOptions
from ..compat.launching import TorchrunOptions, read_torchrun_variables
from ..errors import ConfigError
from ..signals import read_signals, signal_name
from ..workers.node_resources import count_usable_cpus
from ..workers.output_plan import parse_ranks, parse_streams
from ..workers.spec import Command, Entrypoint, Module, Script
from .config import (
    LONGEST,
    LaunchConfig,
    SupervisionOptions,
    check_seconds,
    in_flags,
    read_pairs,
)
from .endpoints import node_range, read_place, settle_cluster, settle_place
from .flags import FLAGS, Settings, Source, read, read_flags, read_job, read_variables
from .schedulers import read_cluster


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
    """The same, and where each setting is from."""
    return launch_of(read(argv), environment)


def launch_of(line: argparse.Namespace, environment: Mapping[str, str]) -> Launch:
    """The same, of a command line that argparse has read."""
    variables, notes = read_variables(environment)
    layers = [read_flags(line), variables]
    cluster, job = read_cluster(Settings.layered(layers)["from_env"], environment)
    from_job = read_job(job)
    settings = Settings.layered([*layers, from_job], notes)
    try:
        settings = settle_cluster(settle_place(settings))
        if settings["run_path"] and settings["no_python"]:
            because = f"{settings.origins('run_path')} goes before it"
            settings = settings.without("no_python", because=because)
        config, settings = _config(settings, environment)
        entrypoint = _entrypoint(settings, line.training_script, tuple(line.training_script_args))
        return Launch(config, entrypoint, settings, cluster)
    except ConfigError as error:
        raise _with_origins(error, settings) from error.__cause__


def _with_origins(error: ConfigError, settings: Settings) -> ConfigError:
    """The error speaks of flags; what its user has set may be a variable."""
    sentence = in_flags(error)
    from_elsewhere = [
        f"{FLAGS[name].flag} is from {setting.origin}"
        for name, setting in settings.found.items()
        if setting.source in (Source.VARIABLE, Source.CLUSTER) and FLAGS[name].flag in sentence
    ]
    said = f" ({', '.join(from_elsewhere)})" if from_elsewhere else ""
    return ConfigError(f"{sentence}{said}")


def _config(settings: Settings, environment: Mapping[str, str]) -> tuple[LaunchConfig, Settings]:
    """And the settings with a note of each variable or key that has no effect."""
    least, most = node_range(settings["nnodes"])
    python = not (settings["no_python"] or settings["run_path"])
    torchrun, notes = read_torchrun_variables(environment, python=python)
    same_name = {
        name: _MEANINGS[name](settings[name]) if name in _MEANINGS else settings[name]
        for name in attrs.fields_dict(LaunchConfig)
        if name in FLAGS
    }
    config = LaunchConfig(
        **{
            **same_name,
            **read_place(settings, most),
            "min_nodes": least,
            "max_nodes": most,
            "rdzv_configs": read_pairs(",".join(settings["rdzv_conf"])),
            "start_method": _start_method(settings),
            "supervision": _supervision(settings),
            "signals_to_handle": None,  # supervision says it
            "torchrun": TorchrunOptions(**torchrun),
        }
    )
    conf = config.rdzv_configs
    if {"timeout", "join_timeout"} <= set(conf):
        said = f"--rdzv-conf timeout={conf['timeout']} is ignored"
        notes = (*notes, f"{said}: join_timeout={conf['join_timeout']} goes before it")
    return config, settings.noted(*notes)


def _start_method(settings: Settings) -> str:
    name = settings["start_method"]
    if settings["no_python"] and name not in (None, "spawn"):
        raise ConfigError(
            f"--start-method {name} is for Python, and --no-python runs another program"
        )
    return name or "forkserver"


def _entrypoint(settings: Settings, program: str, args: tuple[str, ...]) -> Entrypoint:
    if not program:
        raise ConfigError("the program to run has an empty name")
    if settings["module"] and settings["no_python"]:
        raise ConfigError("-m runs a Python module and --no-python a program: give one of them")
    if settings["module"] and settings["run_path"]:
        raise ConfigError(
            "-m runs a module by its name and --run-path a script by its path: give one of them"
        )
    if settings["module"]:
        return Module(program, args)
    if settings["no_python"]:
        return Command(program, args)
    entrypoint = Script(program, args)
    if not any(map(os.path.isfile, (program, os.path.join(program, "__main__.py")))):
        if os.path.exists(program):
            raise ConfigError(
                f"a script must be a regular file or contain a __main__.py, got {program!r}; "
                "a module needs -m, another program --no-python"
            )
        script = f"{program}.py"
        meant = f"did you mean {script}? A" if os.path.isfile(script) else "a"
        raise ConfigError(
            f"there is no script {program!r} here (in {os.getcwd()}); "
            f"{meant} module needs -m, another program --no-python"
        )
    return entrypoint


def _supervision(settings: Settings) -> SupervisionOptions:
    check_seconds("--checkpoint-grace", settings["checkpoint_grace"])
    replicas = settings["snapshot_replicas"]
    if replicas < 0:
        raise ConfigError(f"--snapshot-replicas is a number from 0, got {replicas}")
    agent = attrs.evolve(
        _heeded(settings),
        checkpoint_grace=settings["checkpoint_grace"],
        hang=_hang_limits(settings["hang_timeout"]),
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
    if not 0 < seconds <= LONGEST:
        raise ConfigError(
            f"--hang-timeout is auto or seconds above 0 and up to {LONGEST:g}, got {text!r}"
        )
    return HangLimits(seconds=seconds)


def _heeded(settings: Settings) -> AgentOptions:
    """Which signals end the run and which drain: what is said goes before what is assumed."""
    ends = read_signals(settings["signals_to_handle"], "--signals-to-handle")
    drains = read_signals(settings["drain_signals"], "--drain-signals")
    usual: tuple[int, ...] = DRAIN_SIGNALS
    if settings.found["drain_signals"].source is Source.CLUSTER:
        # A scheduler names its own as we name ours: nobody has asked for these and no others.
        drains, usual = None, drains or ()
    both = sorted({*(ends or ())} & {*(drains or ())})
    if both:
        raise ConfigError(
            f"{signal_name(both[0])} is in --signals-to-handle, which end the run, and "
            "in --drain-signals, which save first: name it in one of them"
        )
    # torchrun's jobs name SIGUSR2 among those that end the run.
    assumed = tuple(n for n in usual if n not in (ends or ()))
    return AgentOptions(
        signals=tuple(n for n in SIGNALS if n not in (drains or ())) if ends is None else ends,
        drain_signals=assumed if drains is None else drains,
        save_signals=SAVE_SIGNALS if drains is None else (),
    )


def split_at_commas(text: str) -> tuple[str, ...]:
    """The texts between single commas; a double one is a comma of the text."""
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _local_ranks(text: str) -> frozenset[int] | None:
    try:
        return parse_ranks(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"--local-ranks-filter: {error}") from None


KINDS = "a number, cpu, gpu, xpu, auto, or the name of a backend that torch was given"


def worker_count(text: str) -> int:
    """`auto` is all accelerators of the kind that torch sees, and processors where it sees none.

    Raises:
        ConfigError: there are none of these here, or it is no such word.
    """
    try:
        return int(text)
    except ValueError:
        pass
    if text == "cpu":
        return count_usable_cpus()
    if not text.isidentifier():
        raise ConfigError(f"--nproc-per-node is {KINDS}, got {text!r}")
    import torch

    if text == "auto":
        return _accelerators(torch) or count_usable_cpus()
    own = torch._C._get_privateuse1_backend_name()
    kind = "cuda" if text == "gpu" else text
    counts = {name: _count(torch, name) for name in ("cuda", "xpu", own)}
    if kind not in counts:
        raise ConfigError(f"--nproc-per-node is {KINDS}, got {text!r}")
    if counts[kind]:
        return counts[kind]
    here = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    raise ConfigError(
        f"--nproc-per-node {text}: torch {torch.__version__} sees no {text.upper()} on this "
        f"machine; it sees {here or 'no accelerator'} and {count_usable_cpus()} processors (cpu)"
    )


def _accelerators(torch: Any) -> int:
    """Those of the kind that this torch prefers."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # older than 2.6
        return _count(torch, "cuda")
    return int(accelerator.device_count()) if accelerator.is_available() else 0


def _count(torch: Any, kind: str) -> int:
    devices = getattr(torch, kind, None)
    return int(devices.device_count()) if devices is not None and devices.is_available() else 0


_MEANINGS: Mapping[str, Callable[[str], Any]] = {
    "nproc_per_node": worker_count,
    "preload": lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
    "redirects": partial(parse_streams, option="--redirects"),
    "tee": partial(parse_streams, option="--tee"),
    "local_ranks_filter": _local_ranks,
    "duplicate_stdout_filters": split_at_commas,
    "duplicate_stderr_filters": split_at_commas,
    "log_line_prefix_template": lambda text: text or None,
}
"""What the text of a flag means to the field of its name, where it is not that value itself."""
