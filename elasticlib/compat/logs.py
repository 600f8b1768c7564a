"""Where the output of a generation's workers goes, when that is for torch's `LogsSpecs` to say.

Whatever has its `reify` is taken. Another distribution registers `name = package.module:Class` in
`torchrun.logs_specs`, a subclass of torch's; nothing of it, nor torch, is imported before a launch
that asks for that name is about to start.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, describe
from ..workers.output import NAMES, OutputPlan, Places, StreamChoice, Streams

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ..launch.config import LaunchConfig

VARIABLE = "TORCHELASTIC_ERROR_FILE"
NOWHERE = "/dev/null"
GROUP = "torchrun.logs_specs"
DEFAULT = "default"
"""The name that torch gives to its own, whose tree of files is elasticrun's."""


def ask(specs: Any, environments: dict[int, dict[str, str]], plan: OutputPlan) -> dict[int, Places]:
    """Where each worker's output goes, as `specs.reify` says of their environments, which it may
    change: there, or in its answer, stands where a worker writes of its failure; one of which it
    wants no such file keeps ours, which goes with the run.

    Raises:
        ConfigError: its code fails, or what it says makes no sense.
    """
    own = {local: environment[VARIABLE] for local, environment in environments.items()}
    try:
        said = specs.reify(environments)
        places = {}
        for local, environment in environments.items():
            theirs = environment.get(VARIABLE)
            if theirs == own[local]:
                theirs = str(said.error_files.get(local) or "")
            if not theirs or theirs == NOWHERE:
                theirs = own[local]
            # A worker may go to another folder before it writes there.
            environment[VARIABLE] = theirs = os.path.abspath(theirs)
            places[local] = _places(said, local, theirs, plan)
    except Exception as error:
        # Anything may be wrong in code that is not ours, and the user must learn in whose it is.
        raise ConfigError(f"--logs-specs {type(specs).__name__}: {describe(error)}") from error
    return places


def _places(said: Any, local_rank: int, error_file: str, plan: OutputPlan) -> Places:
    """What torch's `LogsDest` says of one worker, whose error file this is."""
    files: dict[Streams, str] = {}
    filtered: dict[Streams, str] = {}
    tee, shown = Streams.NONE, Streams.NONE
    for stream, name in NAMES.items():
        every, teed = getattr(said, f"{name}s"), getattr(said, f"tee_{name}s").get(local_rank)
        if local_rank not in every:
            raise ConfigError(f"its reify says nothing of the {name} of local rank {local_rank}")
        path = str(every[local_rank] or "")
        if not path:  # the console, in torch's words
            shown |= stream
        elif path != NOWHERE:
            files[stream] = path
        if teed is None or teed == NOWHERE:
            continue
        if str(teed) != path:
            raise ConfigError(
                f"its reify shows {str(teed)!r} for the {name} of local rank {local_rank}, which "
                f"is written to {path or 'the console'!r}: both must be the same file"
            )
        tee |= stream
        target = str(getattr(said, f"filtered_{name}", "") or "")
        if target and plan.needles(stream):
            filtered[stream] = target
    return Places(error_file=error_file, files=files, tee=tee, shown=shown, filtered=filtered)


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


def open_logs_specs(config: LaunchConfig) -> partial[dict[int, Places]] | None:
    """What says where the output of each generation goes; None where elasticrun does.

    Raises:
        ConfigError: it cannot be loaded, is not torch's `LogsSpecs`, or cannot be made.
    """
    chosen, ranks = config.logs_specs, config.local_ranks_filter
    if chosen is None or chosen == DEFAULT:
        return None
    if not isinstance(chosen, str):
        return partial(ask, chosen)
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
        raise ConfigError(f"{said} must be a subclass of torch's LogsSpecs, got {kind!r}")
    try:
        made = kind(
            log_dir=config.log_dir,
            redirects=streams(config.redirects),
            tee=streams(config.tee),
            local_ranks_filter=None if ranks is None else set(ranks),
        )
    except Exception as error:
        raise ConfigError(f"{said} failed: {describe(error)}") from error
    return partial(ask, made)
