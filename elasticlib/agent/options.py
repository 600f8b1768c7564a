"""Options of an agent: its signals, how long workers may save, and the check of its node.

Each default is defined here only.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

import attrs

from ..defaults import DEFAULT_CHECKPOINT_GRACE_S
from ..errors import ConfigError
from ..signals import is_catchable, signal_name
from .hang_detector import HangLimits

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
DRAIN_SIGNALS = (signal.SIGUSR2,)
NOTICE_SIGNALS = (signal.SIGTERM,)
DEFAULT_REGROUP_GRACE_S = 10.0

# Python runs a signal handler only after the main thread returns from its wait. The signal does not
# interrupt the wait if it arrives just before it, or if another thread receives it. So waits of the
# main thread are not longer than this.
SIGNAL_POLL_INTERVAL_S = 0.2


# A function that checks this node, such as `NodeCheck`. The agent calls it in a thread, with a
# function that returns True once the check must end. The result is why workers must not run on this
# node, or an empty text.
CheckNode = Callable[[Callable[[], bool]], str]


def _to_ints(signals: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(number) for number in signals)


@attrs.frozen
class StopTimeouts:
    """Time limits of a stop, in seconds.

    Raises:
        ConfigError: a limit is negative.
    """

    shutdown_timeout: float = 30.0  # between SIGTERM and SIGKILL
    kill_timeout: float = 10.0  # how long a worker may exist after SIGKILL

    def __attrs_post_init__(self) -> None:
        if min(self.shutdown_timeout, self.kill_timeout) < 0:
            raise ConfigError(
                f"stop timeouts must be seconds >= 0, got shutdown_timeout="
                f"{self.shutdown_timeout} and kill_timeout={self.kill_timeout}"
            )


@attrs.frozen(kw_only=True)
class AgentOptions:
    """Options of an agent. Signals that are ignored when the agent starts stay ignored."""

    # Signals that end the run.
    stop_signals: tuple[int, ...] = attrs.field(default=STOP_SIGNALS, converter=_to_ints)
    # Signals on which the workers save and the node leaves the job.
    drain_signals: tuple[int, ...] = attrs.field(default=DRAIN_SIGNALS, converter=_to_ints)
    # Stop signals that are drain signals if the workers can receive a stop notice.
    notice_signals: tuple[int, ...] = attrs.field(default=NOTICE_SIGNALS, converter=_to_ints)
    # Seconds that notified workers have to save and exit on a resize, a drain or a preemption.
    checkpoint_grace: float = DEFAULT_CHECKPOINT_GRACE_S
    # When an inactive worker counts as hanging. None disables hang detection.
    hang_limits: HangLimits | None = None
    # Seconds that workers have to leave a group that has ended, if they can regroup.
    regroup_grace: float = DEFAULT_REGROUP_GRACE_S
    # Number of other nodes that store the snapshots of this node's workers too.
    snapshot_replicas: int = 0
    # Called before this node first joins, and before it rejoins after its own workers failed. If
    # the node does not pass, it takes part in no further generation.
    check_node: CheckNode | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("stop_signals", "drain_signals", "notice_signals"):
            for number in getattr(self, name):
                if not is_catchable(number):
                    raise ConfigError(
                        f"{name}: a process cannot handle {signal_name(number)} ({number}): "
                        "choose other signals"
                    )
        for name in ("checkpoint_grace", "regroup_grace"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be a finite number of seconds from 0, got {getattr(self, name)}"
                )
        if self.snapshot_replicas < 0:
            raise ConfigError(f"snapshot_replicas must be at least 0, got {self.snapshot_replicas}")

    @property
    def handled_signals(self) -> tuple[int, ...]:
        """All signals that the agent handles."""
        return tuple(dict.fromkeys((*self.stop_signals, *self.drain_signals)))

    @property
    def agent_only_signals(self) -> tuple[int, ...]:
        """Signals that workers ignore from their start, because only the agent reacts to them.

        Slurm sends a signal to every process of a step. By default the signal would kill the
        workers, and their DataLoader workers, before anything is saved. Signals that stop workers,
        such as SIGTERM, are not among them.
        """
        return tuple(number for number in self.drain_signals if number not in STOP_SIGNALS)
