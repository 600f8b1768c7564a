"""Where workers' output goes as another distribution says: torchrun's group of entry points.

A distribution registers `name = package.module:Class` in `torchrun.logs_specs`, a subclass of
torch's `LogsSpecs`. Nothing of it, nor torch, is imported before a launch that asks for that name
is about to start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, describe
from ..workers.output import StreamChoice

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ..compat.logs import LogsSpecs

GROUP = "torchrun.logs_specs"
DEFAULT = "default"
"""The name that torch gives to its own, whose tree of files is elasticrun's."""


def check_name(name: str) -> None:
    """Raises ConfigError where no distribution registers this name."""
    if name != DEFAULT:
        _entry_point(name)


def _entry_point(name: str) -> EntryPoint:
    # Imported here: it costs as much as half of `elasticrun --help`.
    from importlib.metadata import entry_points

    registered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in registered:
        names = ", ".join(sorted({DEFAULT, *registered}))
        raise ConfigError(
            f"--logs-specs names an entry point of the group {GROUP}: {names}; got {name!r}"
        )
    return registered[name]


def open_logs_specs(
    chosen: Any,
    *,
    log_dir: str | None,
    redirects: StreamChoice,
    tee: StreamChoice,
    ranks: frozenset[int] | None,
) -> LogsSpecs | None:
    """What says where the output of each generation goes; None where elasticrun does.

    Raises:
        ConfigError: it cannot be loaded, is not torch's `LogsSpecs`, or cannot be made.
    """
    if chosen is None or chosen == DEFAULT:
        return None
    if not isinstance(chosen, str):
        specs: LogsSpecs = chosen
        return specs
    from torch.distributed.elastic.multiprocessing import LogsSpecs as TorchsLogsSpecs
    from torch.distributed.elastic.multiprocessing import Std

    def streams(choice: StreamChoice) -> Any:
        if choice.by_rank:
            return {rank: Std(int(which)) for rank, which in choice.by_rank.items()}
        return Std(int(choice.everywhere))

    point = _entry_point(chosen)
    said = f"--logs-specs {chosen} = {point.value}"
    try:
        kind = point.load()
    except Exception as error:
        # Anything may be wrong in code that is not ours, and the user must learn in whose it is.
        raise ConfigError(f"{said} cannot be loaded: {describe(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, TorchsLogsSpecs)):
        raise ConfigError(f"{said} is to be a subclass of torch's LogsSpecs, got {kind!r}")
    try:
        made: LogsSpecs = kind(
            log_dir=log_dir,
            redirects=streams(redirects),
            tee=streams(tee),
            local_ranks_filter=None if ranks is None else set(ranks),
        )
    except Exception as error:
        raise ConfigError(f"{said} failed: {describe(error)}") from error
    return made
