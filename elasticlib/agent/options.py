"""Which signals an agent heeds and how, how it hears them, and how long it lets its workers save.

Each default of these stands here and nowhere else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import attrs

from ..errors import ConfigError
from ..flag_values import CHECKPOINT_GRACE
from ..signals import can_be_heard, signal_name
from ..workers.interface import DRAIN, PREEMPTED, RESIZE, StopNotice
from .hang_detector import HangLimits

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
DRAIN_SIGNALS = (signal.SIGUSR2,)
NOTICE_SIGNALS = (signal.SIGTERM,)
RESIZE_MODES = IMMEDIATE, AT_STEP = ("immediate", "at-step")
DEFAULT_REGROUP_GRACE_S = 10.0
SIGNAL_POLL_INTERVAL_S = 0.2
"""Whoever hears signals waits no longer than this without a look.

Python runs a handler when the main thread comes back from what it waits in, and a signal does not
end that wait if it comes just before it, or if the kernel gives it to another thread.
"""


def _numbers(signals: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(number) for number in signals)


@attrs.frozen(kw_only=True)
class AgentOptions:
    """How an agent behaves beside its workers.

    signals: which end the run. drain_signals: which have this node save and leave. save_signals:
    those of `signals` that do the same where the workers listen to notices. Of all of them, those
    ignored on entry stay ignored. checkpoint_grace: seconds that listening workers have to
    save and end when the job changes its size, or this node leaves. resize: how they stop for the
    former: `at-step` (with a notice) or `immediate` (without one). hang: what silence of workers
    that tell of their steps is a hang; None: they are not watched. regroup_grace: seconds for
    workers that go on in another group to leave one that is over. snapshot_replicas: how many other
    nodes keep the snapshots of this node's workers as well.
    """

    stop_signals: tuple[int, ...] = attrs.field(default=STOP_SIGNALS, converter=_numbers)
    drain_signals: tuple[int, ...] = attrs.field(default=DRAIN_SIGNALS, converter=_numbers)
    notice_signals: tuple[int, ...] = attrs.field(default=NOTICE_SIGNALS, converter=_numbers)
    checkpoint_grace: float = CHECKPOINT_GRACE
    resize_mode: str = AT_STEP
    hang_limits: HangLimits | None = None
    regroup_grace: float = DEFAULT_REGROUP_GRACE_S
    snapshot_replicas: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("stop_signals", "drain_signals", "notice_signals"):
            for number in getattr(self, name):
                if not can_be_heard(number):
                    raise ConfigError(
                        f"{name}: a process cannot handle {signal_name(number)} ({number}): "
                        "choose other signals"
                    )
        for name in ("checkpoint_grace", "regroup_grace"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"need 0 <= {name} seconds, got {getattr(self, name)}")
        if self.snapshot_replicas < 0:
            raise ConfigError(f"need 0 <= snapshot_replicas, got {self.snapshot_replicas}")
        if self.resize_mode not in RESIZE_MODES:
            raise ConfigError(
                f"resize is one of {', '.join(RESIZE_MODES)}, got {self.resize_mode!r}"
            )

    @property
    def handled_signals(self) -> tuple[int, ...]:
        """All signals that mean something to the agent."""
        return tuple(dict.fromkeys((*self.stop_signals, *self.drain_signals)))

    @property
    def agent_only_signals(self) -> tuple[int, ...]:
        """Those that workers ignore from the start: they ask an agent to have its workers save.

        Slurm sends a signal to every process of a step, and one that ends a process by default
        would end the workers, and the DataLoader workers of those who listen, before anything is
        saved. Not SIGTERM and its like, by which workers are stopped.
        """
        return tuple(n for n in self.drain_signals if n not in STOP_SIGNALS)

    def make_notice(self, reason: str) -> StopNotice | None:
        """What workers are told that are to save and end for this reason; None if they are not."""
        if reason == RESIZE and self.resize_mode == IMMEDIATE:
            return None
        return StopNotice(reason, self.checkpoint_grace)

    def drain_reason(self, number: int) -> str:
        """The notice's reason when this signal has a node save and leave."""
        return PREEMPTED if number in NOTICE_SIGNALS else DRAIN


class SignalObserver:
    """Turns signals into events, and leaves alone those that were ignored on entry."""

    def __init__(self, numbers: Iterable[int], arrived: Callable[[int], None]) -> None:
        self._numbers = tuple(numbers)
        self._arrived = arrived
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalObserver:
        # Python lets only the main thread hear signals; elsewhere they are the program's own.
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._arrived(number)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
