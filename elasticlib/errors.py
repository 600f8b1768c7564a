"""Hierarchy of the errors that elasticlib raises.

Classes differ where callers act differently. After StoreConnectionError a caller tries again, after
LeaseLostError it writes the lease again, and after RendezvousClosedError the node ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class ElasticError(Exception):
    """The base class of all errors of elasticlib."""


class ConfigError(ElasticError, ValueError):
    """A setting is invalid. Nothing was started."""


class OptionError(ConfigError):
    """A value of an option breaks a rule.

    The message names the field. The command line names the flag and the variable that set it
    instead, which it finds by the class and the field.

    Args:
        owner: The class of the option.
        field: The name of the field.
        rule: What the value must be, as the rest of a sentence that begins with the field.
        value: The value.
    """

    def __init__(self, owner: type, field: str, rule: str, value: object) -> None:
        super().__init__(owner, field, rule, value)
        self.owner = owner
        self.field = field
        self.rule = rule
        self.value = value

    def __str__(self) -> str:
        return self.message_for(self.field)

    def message_for(self, name: str) -> str:
        """Return the message with another name of the field, such as a flag."""
        return f"{name} {self.rule}, got {self.value!r}"


class StoreError(ElasticError):
    """The base class of the errors of stores."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, its reply was lost, or the client is closed.

    Try again later, unless the client is closed. A write may have happened.
    """


class StoreTimeoutError(StoreError, TimeoutError):
    """The store did not reply within the timeout that the message names."""


class StoreRejectedError(StoreError):
    """The store rejected a request: the store belongs to another job, or a limit is exceeded."""


class LeaseLostError(StoreError):
    """A lease has expired, was deleted or replaced, or belongs to another client."""


class RendezvousError(ElasticError):
    """The base class of the errors of the rendezvous."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """No generation was formed within the join timeout.

    Attributes:
        is_node_loss: True if a node of the previous generation was lost, which then also explains
            failures of the workers of that generation.
    """

    def __init__(self, *args: object, is_node_loss: bool = False) -> None:
        super().__init__(*args)
        self.is_node_loss = is_node_loss


class RendezvousClosedError(RendezvousError):
    """The job is in a terminal phase, continues without this node, or this node has left it.

    Args:
        message: The reason.
        change: The `elasticlib.interfaces.Change` with which the job has ended or continues. An
            agent that joins gets its result from it; without it, the run of that agent fails.
    """

    def __init__(self, message: str = "", change: object = None) -> None:
        super().__init__(message)
        self.change = change


class RendezvousConfigError(RendezvousError):
    """The settings of this node contradict those of the job."""


class WorkerStartError(ElasticError):
    """A worker process could not be started."""


class NoFailureError(ElasticError, LookupError):
    """The job failed without a known failure of a worker."""


class CheckpointError(ElasticError):
    """A checkpoint could not be written."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is truncated or modified, or was not written by elasticlib."""


class CheckpointUnreadableError(CheckpointError):
    """A checkpoint could not be read. It may be intact, and readable by another version."""


class CheckpointFencedError(CheckpointError):
    """Another generation, launch or process writes to the checkpoint directory."""


class RunNotFoundError(ElasticError, LookupError):
    """No run of that name has written events on this machine."""


class StateMismatchError(ElasticError, ValueError):
    """A saved state has another length, seed, shape or format than the object that loads it."""


class NotReproducibleError(ElasticError):
    """A step would give other weights at another world size, so it was not finished."""


def require_not_none(value: T | None, label: str) -> T:
    """Return a value that cannot be None at this point.

    Raises:
        TypeError: The value is None, which is a bug. `label` names the value in the message.
    """
    if value is None:
        raise TypeError(f"{label} should exist by now: this is a bug in elasticlib")
    return value


def format_error(error: BaseException) -> str:
    """Return the message of an error, with its class unless elasticlib raised it."""
    try:
        text = str(error)
    except Exception as cause:  # A class of the user's may have a faulty `__str__`.
        text = f"(its message cannot be shown: {type(cause).__name__})"
    return text if isinstance(error, ElasticError) else f"{type(error).__name__}: {text}"


def wrapper_hint(names: Collection[object], saved: object) -> str:
    """Return a hint for an error message if only the prefix of a wrapper makes names differ, or "".

    The wrappers are DistributedDataParallel and torch.compile.

    Args:
        names: The names in the state of this process.
        saved: The saved state. There is no hint unless it is a mapping.
    """
    if not names or not isinstance(saved, Mapping):
        return ""
    if hint := _compile_hint({*map(str, names)}, {*map(str, saved)}):
        return hint
    plain = {str(name).removeprefix("module.") for name in names}
    if plain.isdisjoint(names) and plain <= set(saved):
        return " (saved without DistributedDataParallel? Put model.module into the state)"
    if all(f"module.{name}" in saved for name in names):
        return " (saved with DistributedDataParallel? There put model.module into the state)"
    return ""


def _compile_hint(names: set[str], saved: set[str]) -> str:
    prefix = "_orig_mod."
    alike = {name.replace(prefix, "") for name in names} <= {
        name.replace(prefix, "") for name in saved
    }
    if not alike or names <= saved:
        return ""
    remedy = "put model._orig_mod into the state, or use model.compile(), which keeps the names)"
    if any(prefix in name for name in names):
        return f" (saved without torch.compile? Then {remedy}"
    return f" (saved with torch.compile? Restore into torch.compile(model); there, {remedy}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` with the known name that is most similar to `name`, or "".

    Known names that start with `name` take precedence.

    Args:
        name: The unknown name.
        names: The known names.
    """
    # difflib is imported here because the import is slow and only error messages need it.
    from difflib import get_close_matches

    known = [*names]
    longer = [other for other in known if other.startswith(name)]
    near = longer or get_close_matches(name, known, 1, 0.7)
    return f" (did you mean {near[0]}?)" if near else ""
