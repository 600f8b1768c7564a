"""The flags of how a job is supervised: signals, drains, resizes and the budget of restarts.

They are read into one value that the `LaunchConfig` carries; what concerns the agent alone has its
defaults in `agent/options.py`, and the rest here.
"""

from __future__ import annotations

import argparse
from typing import Any

import attrs

from ..agent.hang import HangLimits
from ..agent.options import DRAIN_SIGNALS, SAVE_SIGNALS, SIGNALS, AgentOptions
from ..errors import ConfigError
from ..flag_values import DRAIN_EXIT_CODE
from ..signals import read_signals, signal_name
from .command_line import REQUEUES, SECONDS
from .settings import Source

LONGEST = 1e6


@attrs.frozen(kw_only=True)
class SupervisionOptions:
    """agent: what this node's agent does by itself. drain_exit_code: of a node that was drained.
    requeue: who puts the job back into a queue once all of its nodes were drained: none or slurm.
    The others are the same on all nodes, in seconds. restart_window: after it restarts count no
    more. restart_backoff: the longest pause before one. min_resize_interval: from the beginning
    of a generation to its end for newcomers.
    """

    agent: AgentOptions = attrs.field(factory=AgentOptions)
    drain_exit_code: int = DRAIN_EXIT_CODE
    requeue: str = "none"
    restart_window: float = 0.0
    restart_backoff: float = 10.0
    min_resize_interval: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name in _JOBS:
            _check_seconds(name, getattr(self, name))
        if not 0 <= self.drain_exit_code <= 255:
            raise ConfigError(
                f"--drain-exit-code is a number from 0 to 255, got {self.drain_exit_code}"
            )
        if self.requeue not in REQUEUES:
            raise ConfigError(f"--requeue is {' or '.join(REQUEUES)}, got {self.requeue!r}")


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value <= LONGEST:
        raise ConfigError(
            f"--{name.replace('_', '-')} is seconds from 0 to {LONGEST:g}, got {value}"
        )


def check_replicas(replicas: int, nodes: int) -> None:
    """Raises ConfigError for more of them than a job of at most so many nodes has others."""
    if not 0 <= replicas < nodes:
        raise ConfigError(
            f"--snapshot-replicas is how many other nodes keep a snapshot: from 0 to {nodes - 1} "
            f"in a job of up to {nodes}, got {replicas}"
        )


_JOBS = ("restart_window", "restart_backoff", "min_resize_interval")


def read_supervision(
    given: argparse.Namespace, drain_signals: Source = Source.FLAG
) -> SupervisionOptions:
    """drain_signals: who names them. Raises ConfigError for what cannot work."""
    seconds = {n: getattr(given, n) for n in SECONDS if getattr(given, n) is not None}
    for name, value in seconds.items():
        _check_seconds(name, value)
    if "resize_grace" in seconds:
        seconds.setdefault("drain_grace", seconds["resize_grace"])
    ours: dict[str, Any] = {n: seconds.pop(n) for n in tuple(seconds) if n in _JOBS}
    if given.drain_exit_code is not None:
        ours["drain_exit_code"] = given.drain_exit_code
    if given.requeue is not None:
        ours["requeue"] = given.requeue
    agent = attrs.evolve(_heeded(given, drain_signals), **seconds)
    if given.hang_timeout is not None:
        agent = attrs.evolve(agent, hang=_hang_limits(given.hang_timeout))
    if given.snapshot_replicas is not None:
        if given.snapshot_replicas < 0:
            raise ConfigError(
                f"--snapshot-replicas is a number from 0, got {given.snapshot_replicas}"
            )
        agent = attrs.evolve(agent, snapshot_replicas=given.snapshot_replicas)
    if given.resize is not None:
        agent = attrs.evolve(agent, resize=given.resize)
    return SupervisionOptions(agent=agent, **ours)


def _hang_limits(text: str) -> HangLimits:
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


def _heeded(given: argparse.Namespace, named_by: Source) -> AgentOptions:
    """Which signals end the run and which drain: what is said goes before what is assumed."""
    ends = read_signals(given.signals_to_handle, "--signals-to-handle")
    drains = read_signals(given.drain_signals, "--drain-signals")
    usual: tuple[int, ...] = DRAIN_SIGNALS
    if named_by is Source.CLUSTER:
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
