"""The one tree of errors that elasticlib raises.

Classes differ where callers act differently: an unreachable store is tried again, a lost lease
is taken anew, a closed rendezvous ends the node. Each message names the thing, the value and
the rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

Present = TypeVar("Present")


class ElasticError(Exception):
    """The base class of all errors of elasticlib."""


class ConfigError(ElasticError, ValueError):
    """A setting that cannot work; nothing has been started."""


class StoreError(ElasticError):
    """A store could not do what it was asked."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, or the connection broke before its answer: try again later."""


class StoreTimeoutError(StoreError, TimeoutError):
    """The store did not answer within the timeout that the message names."""


class StoreRejectedError(StoreError):
    """The store refused: it is another job's, the frame is invalid, or a limit is exceeded."""


class LeaseLostError(StoreError):
    """The leased key is no longer this client's: it expired, was deleted or was replaced."""


class RendezvousError(ElasticError):
    """The nodes could not be brought together."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """No generation settled within the join timeout. lost: as a node was lost that was in the one
    before, whatever workers failed of meanwhile."""

    lost: bool = False


class RendezvousClosedError(RendezvousError):
    """The job is over, goes on without this node, or this node has left it."""


class RendezvousConfigError(RendezvousError):
    """This node was started with settings that contradict the job's."""


class InvalidTransitionError(ElasticError):
    """The supervision policy has no entry for this event in this state: a bug of ours."""


class WorkerStartError(ElasticError):
    """A worker process could not be started at all."""


class NoFailureError(ElasticError, LookupError):
    """A job failed, and no failure of a worker is known."""


class CheckpointError(ElasticError):
    """A checkpoint could not be written."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is truncated, changed, or was not written by elasticlib."""


class CheckpointUnreadableError(CheckpointError):
    """A checkpoint could not be read, or not by this program; it may be intact."""


class CheckpointFencedError(CheckpointError):
    """A newer generation or launch writes checkpoints there: this process must end."""


class RunNotFoundError(ElasticError, LookupError):
    """No run of that name has left events on this machine."""


class StateMismatchError(ElasticError, ValueError):
    """A saved state does not fit: another length, seed, shape or format."""


class NotReproducibleError(ElasticError):
    """This step would give other weights at another world size, so it was not finished."""


def present(value: Present | None, what: str) -> Present:
    """The value, which is not None as the code around it sees to. Raises TypeError if it is."""
    if value is None:
        raise TypeError(f"{what} should exist by now: this is a bug in elasticlib")
    return value


def describe(error: BaseException) -> str:
    """An error in one sentence: its own where it is one of ours, else with its class."""
    return str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"


def wrapper_hint(names: Collection[object], saved: object) -> str:
    """Return what to do where only the prefix of a wrapper (DistributedDataParallel, torch.compile)
    distinguishes a model's parameters from the saved ones, or ''."""
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


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The name that is most like a word that is none of them, in brackets; or ''."""
    # Imported here, as nothing else needs it.
    from difflib import get_close_matches

    known = [*names]
    begun = [name for name in known if name.startswith(word)]
    near = begun or get_close_matches(word, known, 1, 0.7)
    return f" (did you mean {near[0]}?)" if near else ""
