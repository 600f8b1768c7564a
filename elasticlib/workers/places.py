"""The files of one worker: where its streams go, what of them is shown, where its failure goes.

They follow from an `OutputPlan` and a folder, as torchrun lays them out, or from what an object
with torch's `LogsSpecs` interface has said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..errors import ConfigError
from .output_plan import OutputPlan
from .streams import Streams

NAMES: Mapping[Streams, str] = {Streams.OUT: "stdout", Streams.ERR: "stderr"}
NOWHERE = "/dev/null"
ERROR_FILE = "error.json"


@attrs.frozen
class Places:
    """files: a path for each stream that has one. tee: those of them that are shown as well, line
    by line. shown: whether the streams without a file are. filtered: the files for the shown lines
    that were asked for. error_file: where the worker writes of its failure.
    """

    error_file: str
    files: Mapping[Streams, str] = attrs.field(factory=dict)
    tee: Streams = Streams.NONE
    shown: Streams = Streams.ALL
    filtered: Mapping[Streams, str] = attrs.field(factory=dict)


def planned(plan: OutputPlan, local_rank: int, folder: str) -> Places:
    """torchrun's tree: a folder for each attempt, and one in it for each worker, which this is."""
    kept, shown = plan.kept(local_rank), plan.shows(local_rank)
    tee = plan.tee.of(local_rank) if shown else Streams.NONE
    attempt = folder.rpartition("/")[0]
    return Places(
        error_file=f"{folder}/{ERROR_FILE}",
        files={s: f"{folder}/{name}.log" for s, name in NAMES.items() if s & kept},
        tee=tee,
        shown=Streams.ALL if shown else Streams.NONE,
        filtered={
            s: f"{attempt}/filtered_{name}.log"
            for s, name in NAMES.items()
            if s & tee and plan.needles(s)
        },
    )


def reified(said: Any, local_rank: int, error_file: str, plan: OutputPlan) -> Places:
    """What torch's `LogsDest` says of one worker.

    error_file: where that worker has been told to write.

    Raises:
        ConfigError: it says nothing of it, or what makes no sense.
    """
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
                f"is written to {path or 'the console'!r}: both are to be the same file"
            )
        tee |= stream
        target = str(getattr(said, f"filtered_{name}", "") or "")
        if target and plan.needles(stream):
            filtered[stream] = target
    return Places(error_file=error_file, files=files, tee=tee, shown=shown, filtered=filtered)
