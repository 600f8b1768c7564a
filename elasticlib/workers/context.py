"""What a training script can ask its agent, and tell it: `elasticlib.context()`.

It costs a step less than a microsecond. In a script that no agent of ours started, and in the
processes that a worker starts, it asks nobody and tells nobody. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import attrs

from ..clock import monotonic
from .channel import VARIABLE, Channel
from .interface import REASONS, SOURCES, TakenUp
from .stacks import write_on_demand

LOOK_SECONDS = 2e-4
"""Between two looks, while the ranks agree: a call of the store, in all."""


@attrs.frozen
class Stop:
    """Save, and end. reason: `preempted`, `resize` or `drain`; see `elasticlib.Notice`.
    deadline: until when, on this machine's monotonic clock; then the agent ends this worker."""

    reason: str
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Until the deadline; 0 when it has passed."""
        return max(0.0, self.deadline - monotonic())


class Context:
    """One worker's, from the agent that started it.

    All ranks make the same calls of `should_stop`, at most one a step, in the same order; that is
    what the agents count to name a call at which all of them stop.
    """

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._calls = 0
        self._stop: Stop | None = None
        self._pause = threading.Event()
        self._before_stop: list[Callable[[], object]] = []

    @property
    def attached(self) -> bool:
        """Whether there is an agent that listens."""
        return self._channel is not None

    def should_stop(self) -> Stop | None:
        """Whether to save and end now: None, or why and until when.

        To be called between two steps, by every rank alike. All get the same answer at the same
        call, and once it is to stop it stays so. When an agent asks, this waits until the agents
        have agreed, which takes a few milliseconds; else it returns at once.
        """
        channel = self._channel
        if channel is None or self._stop is not None:
            return self._stop
        self._calls = call = self._calls + 1
        if channel.enter(call, monotonic()):
            self._stop = self._agreed(channel, call)
            if self._stop is not None:
                self._run_before_stop()
        return self._stop

    def on_stop(self, act: Callable[[], object]) -> Callable[[], None]:
        """Have `act()` called once a stop is agreed, before `should_stop` answers with it.

        For what goes on behind the training step and must end before it does. Those that were
        named first are called first; one that raises does not keep the others from being called,
        and its error comes out of `should_stop`, which says to stop at the next call then.

        Returns:
            What takes it back; calling that twice is harmless.
        """
        self._before_stop.append(act)

        def take_back() -> None:
            with contextlib.suppress(ValueError):
                self._before_stop.remove(act)

        return take_back

    def _run_before_stop(self) -> None:
        with contextlib.ExitStack() as stack:
            # An ExitStack calls the last first, and all of them whatever they raise.
            for act in reversed(self._before_stop):
                stack.callback(act)

    def starting(self) -> None:
        """Say that the first step is about to be made, so that a stop which is asked for by then
        waits for it, and for the first call of `should_stop` behind it."""
        if self._channel is not None:
            self._channel.tell_starting(monotonic())

    def step(self, step: int, *, loss: float | None = None, samples: float | None = None) -> None:
        """Say that this step is done: a sign of life, and of progress.

        Args:
            loss: of this step, for people to look at; any number. One that is on a GPU is waited
                for, as by its `item()`.
            samples: how many this worker has trained on in this step, or tokens, or whatever its
                throughput is to be counted in; all workers the same.
        """
        if self._channel is not None:
            if loss is not None:
                loss = float(loss)  # before the time is looked at: it may be waited for
            self._channel.tell_step(step, monotonic(), loss, samples)

    def saved(self, step: int) -> None:
        """Say that a checkpoint of this step is safe."""
        if self._channel is not None:
            self._channel.tell_saved(step, monotonic())

    def kept(self, step: int) -> None:
        """Say that a snapshot of this step is kept, in memory that outlives this process."""
        if self._channel is not None:
            self._channel.tell_snapshot(step, monotonic())

    def restored(self, step: int, *, source: str = "disk", seconds: float = 0.0) -> None:
        """Say that the state after this step was taken up, and is what training goes on from.

        `CheckpointManager.restore` says so itself.

        Args:
            source: `memory` (this node's), `peer` (another node's) or `disk`.
            seconds: that it took, until now.

        Raises:
            ValueError: there is no such source, or it took less than no time.
        """
        if source not in SOURCES or not seconds >= 0:
            raise ValueError(
                f"a state comes from {', '.join(SOURCES)} in 0 seconds or more, got {source!r} "
                f"in {seconds}"
            )
        if self._channel is not None:
            now = monotonic()
            self._channel.tell_restored(TakenUp(step, source, now - seconds, now))

    def detach(self) -> None:
        """Ask nobody and tell nobody from now on."""
        self._channel = None

    def _agreed(self, channel: Channel, call: int) -> Stop | None:
        channel.hold(call)
        while not (stop_at := channel.stop_at):
            # The agent that asked ends us when the time is over, if it lives.
            if monotonic() > channel.deadline:
                break
            self._pause.wait(LOOK_SECONDS)
        if not stop_at or call < stop_at:
            channel.go_on(call)
            return None
        return Stop(REASONS[channel.reason], channel.deadline)


_context: Context | None = None


def context() -> Context:
    """This process's context; the same one each time."""
    global _context
    if _context is None:
        _context = Context(_reached(os.environ.get(VARIABLE, "")))
    return _context


def _reached(path: str) -> Channel | None:
    if not path:
        return None
    with contextlib.suppress(OSError):  # of an agent that is gone, or of another version
        channel = Channel(path)
        if channel.own(os.getpid()):
            write_on_demand(channel)
            return channel
        channel.close()
    return None


def _forget() -> None:
    """A forked child is no worker: its calls must not be counted as its parent's."""
    if _context is not None:
        _context.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
