"""A function's way to the workers of a Ray cluster and back, where nobody else reads it.

The driver's own `__main__` is not theirs, so a function goes as Ray's cloudpickle has it. The
agents hand both on as bytes: only a worker calls it, and only the driver reads what it returned.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError, ElasticError, describe
from ...workers.spec import Function


def sent(cloudpickle: Any, target: Callable[..., Any], args: tuple[Any, ...]) -> Function:
    """The worker's function that calls this one.

    Raises:
        ConfigError: it, or an argument, cannot be sent.
    """
    try:
        work = bytes(cloudpickle.dumps((target, args)))
    except Exception as error:
        # Whatever an argument's own __reduce__ raises, the cause is the same to the caller.
        raise ConfigError(f"cannot send {target!r} to a worker: {describe(error)}") from error
    return Function(call, (work,))


def call(work: bytes) -> tuple[int, bytes]:
    """In the worker: how many workers there are, and the value that the function returned."""
    target, args = pickle.loads(work)
    value = target(*args)
    return int(os.environ["WORLD_SIZE"]), _pickled(value)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:
        # Importing Ray takes a second, and what the driver's own script defines needs it.
        from importlib import import_module

        return bytes(import_module("ray.cloudpickle").dumps(value))


def read_values(returned: Mapping[int, Any]) -> dict[int, Any]:
    """What `call` returned on each rank, as the values of the whole job.

    Raises:
        ElasticError: some of them were lost on their way, or cannot be read here.
    """
    world = max((size for size, _ in returned.values()), default=1)
    lost = sorted(set(range(world)) - set(returned))
    if lost:
        ranks = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
        raise ElasticError(
            f"the job succeeded, and the values of {len(lost)} of {world} workers were lost with "
            f"their nodes before they got here: rank {ranks}"
        )
    values = {}
    for rank, (_, value) in sorted(returned.items()):
        try:
            values[rank] = pickle.loads(value)
        except Exception as error:
            raise ElasticError(
                f"the value that rank {rank} returned cannot be read here: {describe(error)}"
            ) from error
    return values
