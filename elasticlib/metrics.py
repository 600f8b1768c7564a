"""torch.distributed.elastic's metrics by their names: numbers of a program, by group and name.

As there, a number goes nowhere until a handler is configured for its group or for all. The agent's
own are put into the group `torchelastic` by a launch in the same process. What Prometheus is to
scrape is elsewhere: `--observe-port`.
"""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .clock import wall

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

Call = TypeVar("Call", bound=Callable[..., Any])
OURS = "torchelastic"
"""The group of the agent's own."""


class MetricData(NamedTuple):
    """One number. timestamp: seconds since 1970."""

    timestamp: float
    group_name: str
    name: str
    value: int


class MetricsConfig:
    """Parameters for whoever sets handlers up; nothing here reads them."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(abc.ABC):
    """Takes numbers to where they are wanted."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one, in the thread that put it."""


class ConsoleMetricHandler(MetricHandler):
    """Prints a line for each."""

    def emit(self, metric_data: MetricData) -> None:
        at, group, name, value = metric_data
        print(f"[{at}][{group}]: {name}={value}")


class NullMetricHandler(MetricHandler):
    """Keeps nothing."""

    def emit(self, metric_data: MetricData) -> None:
        pass


class MetricStream:
    """A group, and who takes its numbers."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """One number, of now."""
        self.handler.emit(MetricData(wall(), self.group_name, metric_name, metric_value))


_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Have this handler take the numbers of a group, or of all groups without one of their own."""
    _handlers[group] = handler


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Nothing, as in torch: handlers are set by `configure`."""


def getStream(group: str) -> MetricStream:
    """The group as it is configured now."""
    return MetricStream(group, _handlers.get(group) or _handlers[None])


def is_taken(group: str = OURS) -> bool:
    """Whether a handler is configured that takes the group's numbers."""
    return not isinstance(getStream(group).handler, NullMetricHandler)


def put_metric(metric_name: str, metric_value: int, metric_group: str = OURS) -> None:
    """One number, of now, for the group's handler."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """The older name of `put_metric`, with another order."""
    _warn("publish_metric(group, name, value)", "put_metric(name, value, group)")
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Milliseconds since then, in seconds since 1970."""
    return int((wall() - start_time_in_seconds) * 1000)


def prof(fn: Call | None = None, group: str = OURS) -> Any:
    """A decorator: of each call, put NAME.success or NAME.failure, and NAME.duration.ms.

    NAME is `Class.method`, or `module.function` with the last part of the module's name.
    """

    def wrap(call: Call) -> Call:
        return _measured(call, _name_of(call), group)

    return wrap if fn is None else wrap(fn)


def profile(group: str | None = None) -> Callable[[Call], Call]:
    """The older name of `prof`, for which NAME is the function's alone."""
    _warn("profile(group)", "prof(group=group)")

    def wrap(call: Call) -> Call:
        return _measured(call, call.__name__, group)  # type: ignore[arg-type]

    return wrap


def _measured(call: Call, name: str, group: str) -> Call:
    @functools.wraps(call)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = wall()
        try:
            result = call(*args, **kwargs)
        except Exception:
            put_metric(f"{name}.failure", 1, group)
            raise
        else:
            put_metric(f"{name}.success", 1, group)
            return result
        finally:
            put_metric(f"{name}.duration.ms", get_elapsed_time_ms(began), group)

    return measured  # type: ignore[return-value]


def _name_of(call: Callable[..., Any]) -> str:
    name = call.__qualname__
    module = (call.__module__ or "").rpartition(".")[2]
    return name if "." in name or not module else f"{module}.{name}"


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated: use {new}", FutureWarning, stacklevel=3)
