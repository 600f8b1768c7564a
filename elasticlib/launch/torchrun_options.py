"""What torchrun takes from variables that stand for no flag, as one value.

Each of them works, or is named in a sentence that says why it does not; none is read and forgotten.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from typing import Any

import attrs

from ..errors import ConfigError

EVENT_LOG_HANDLERS = ("null", "console")
WITHOUT_EFFECT: Mapping[str, str] = {
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "workers in the kernel's uninterruptible sleep "
    "are not looked for; --hang-timeout finds those that make no steps",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "workers never share a store with the rendezvous, and "
    "theirs is served by their agent",
}
"""Variables that torchrun heeds and elasticrun does not, and why; none of them is an error."""


@attrs.frozen(kw_only=True)
class TorchrunOptions:
    """python: the interpreter of scripts and modules, None for the agent's own. use_libuv: which of
    torch's two servers the workers' store is. timer_file: where the agent listens to the timers
    that its workers set, empty for a file of its own, None where it does not.
    """

    python: str | None = None
    use_libuv: bool = True
    timer_file: str | None = None


def check_event_log_handler(name: str) -> None:
    """Raises ConfigError for one that there is not."""
    if name not in EVENT_LOG_HANDLERS:
        raise ConfigError(f"--event-log-handler is {' or '.join(EVENT_LOG_HANDLERS)}, got {name!r}")


def log_level(name: str) -> int:
    """Of the agent's own lines. Raises ConfigError for one that there is not."""
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ConfigError(f"LOGLEVEL is DEBUG, INFO, WARNING or ERROR, got {name!r}")
    return level


def read_torchrun_variables(
    environment: Mapping[str, str], *, python: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of a `TorchrunOptions`, and a sentence for each variable that has no effect.

    python: whether the workers are started by an interpreter, and so might be by another one.

    Raises:
        ConfigError: one of them cannot work.
    """
    found: dict[str, Any] = {}
    notes = [
        f"{name}={environment[name]} has no effect: {why}"
        for name, why in WITHOUT_EFFECT.items()
        if environment.get(name, "") not in ("", "0")
    ]
    if environment.get("PYTHON_EXEC") and python:
        found["python"] = _interpreter(environment["PYTHON_EXEC"])
    found["use_libuv"] = wants_libuv(environment)
    pipe = environment.get("TORCHELASTIC_TIMER_FILE", "")
    if environment.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        found["timer_file"] = pipe
    elif pipe:
        notes.append(
            f"TORCHELASTIC_TIMER_FILE={pipe} has no effect, and workers do not see it: nobody "
            "listens there without TORCHELASTIC_ENABLE_FILE_TIMER=1"
        )
    return found, tuple(notes)


def wants_libuv(environment: Mapping[str, str]) -> bool:
    """As torch reads it: whatever is not 1 asks for the other server."""
    return environment.get("USE_LIBUV", "1") == "1"


def _interpreter(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConfigError(
            f"PYTHON_EXEC is the interpreter of the workers, and {name!r} is no program here"
        )
    return path
