"""From a command line and its environment to the options and the program of a launch.

The options hold values only. Where each setting comes from is kept beside them, for --dry-run and
for error messages.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..errors import ConfigError, OptionError
from ..options import (
    DRAIN_SIGNALS,
    STOP_SIGNALS,
    AgentOptions,
    LaunchOptions,
    build_options,
)
from ..signals import signal_name
from ..workers.spec import Entrypoint
from .backends import check_backend, conf_keys_of
from .command_line import parse_command_line
from .endpoint import decide
from .layers import (
    Layer,
    Source,
    is_on,
    merge,
    parse,
    read_conf,
    read_flags,
    read_pairs,
    read_scheduler_settings,
    read_values,
    read_variables,
    with_flags,
)
from .program import read_program
from .run_id import with_run_id
from .schedulers import detect_scheduler


@attrs.frozen
class Launch:
    """A launch that a command line and its environment request."""

    options: LaunchOptions
    entrypoint: Entrypoint
    settings: Layer  # the settings that have an effect, with their origins
    warnings: tuple[str, ...]  # about settings that are ignored
    scheduler: str  # the scheduler whose variables were read, or "none"

    @property
    def is_dry_run(self) -> bool:
        """Whether the launch only shows what it would do."""
        return is_on(self.settings, "dry_run")


def parse_options(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[LaunchOptions, Entrypoint]:
    """Return the options and the entry point that a command line requests.

    Args:
        argv: the command line without the name of the command.
        environment: variables for the flags that are not given. None for no variables.

    Raises:
        ConfigError: the settings cannot work.
        SystemExit: the command line requests help, or has a usage error.
    """
    launch = parse_launch(argv, environment or {})
    return launch.options, launch.entrypoint


def parse_launch(argv: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return what `parse_options` returns, with the origins of all settings."""
    return resolve_launch(parse_command_line(argv), environment)


def resolve_launch(args: argparse.Namespace, environment: Mapping[str, str]) -> Launch:
    """Return the launch of a command line that argparse has parsed.

    Raises:
        ConfigError: the settings cannot work.
    """
    variables, warnings = read_variables(environment)
    layers = [read_flags(args), variables]
    settings = merge(layers)
    name = parse("scheduler", settings.get("scheduler")) or "none"
    scheduler, found = detect_scheduler(name, environment)
    layers.append(read_scheduler_settings(found))
    place = decide(layers)
    script_args = tuple(args.training_script_args)
    program = read_program(place.settings, args.training_script, script_args)
    settings = program.settings
    conf, conf_warnings = _read_conf(settings, place.values["rendezvous.backend"])
    try:
        options = build_options(
            {
                **read_values(settings),
                **conf,
                **read_signal_options(settings),
                **place.values,
                **program.values,
            }
        )
        check_backend(options.rendezvous)
    except ConfigError as error:
        raise with_flags(error, settings) from error.__cause__
    return Launch(
        with_run_id(options, program.entrypoint),
        program.entrypoint,
        settings,
        (*warnings, *place.warnings, *program.warnings, *conf_warnings),
        scheduler,
    )


def _read_conf(settings: Layer, backend: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of --rdzv-conf, by the path of the field, and warnings."""
    given = settings.get("rdzv_conf")
    if given is None:
        return {}, ()
    pairs = read_pairs(given.text)
    warnings: tuple[str, ...] = ()
    if {"timeout", "join_timeout"} <= set(pairs):
        warnings = (
            f"ignoring --rdzv-conf timeout={pairs['timeout']}: "
            f"join_timeout={pairs['join_timeout']} takes precedence",
        )
    return read_conf(pairs, others=conf_keys_of(backend)), warnings


def read_signal_options(settings: Layer) -> dict[str, tuple[int, ...]]:
    """Return the signals that stop the run, and those that drain the node, by the path.

    A signal that is given for one purpose is removed from the defaults of the other.

    Raises:
        ConfigError: a signal is given for both, or a text names no signal.
    """
    stop: tuple[int, ...] | None
    drain: tuple[int, ...] | None
    stop, drain = (
        parse(dest, settings.get(dest)) for dest in ("signals_to_handle", "drain_signals")
    )
    default_drain = DRAIN_SIGNALS
    setting = settings.get("drain_signals")
    if setting is not None and setting.source is Source.SCHEDULER:
        # The scheduler's signals replace elasticlib's defaults, because the user gave none.
        default_drain, drain = drain or (), None
    both = sorted({*(stop or ())} & {*(drain or ())})
    if both:
        rule = "must not have a signal of --signals-to-handle, which stops the run"
        error = OptionError(AgentOptions, "drain_signals", rule, signal_name(both[0]))
        raise with_flags(error, settings)
    values: dict[str, tuple[int, ...]] = {
        # torchrun's jobs name SIGUSR2 among the signals that end the run.
        "agent.drain_signals": tuple(n for n in default_drain if n not in (stop or ())),
        "agent.stop_signals": tuple(n for n in STOP_SIGNALS if n not in (drain or ())),
    }
    if stop is not None:
        values["agent.stop_signals"] = stop
    if drain is not None:
        values |= {"agent.drain_signals": drain, "agent.notice_signals": ()}
    return values
