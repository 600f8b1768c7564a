"""The one tree of errors that elasticlib raises.

Classes differ where callers act differently: an unreachable store is tried again, a lost lease
is taken anew, a closed rendezvous ends the node. Each message names the thing, the value and
the rule.
"""

from __future__ import annotations

from typing import TypeVar

Present = TypeVar("Present")


class ElasticError(Exception):
    """Anything that elasticlib raises on purpose."""


class ConfigError(ElasticError, ValueError):
    """A setting that cannot work; nothing has been started."""


class StoreError(ElasticError):
    """A store could not do what it was asked."""


class StoreUnavailable(StoreError, ConnectionError):
    """The store cannot be reached, or went away with the answer unknown: look again later."""


class StoreTimeout(StoreError, TimeoutError):
    """The store did not answer within the timeout that the message names."""


class StoreRefused(StoreError):
    """The store answered and said no: another job's store, a bad frame, a limit exceeded."""


class LeaseLost(StoreError):
    """The leased key is no longer this client's: it expired, was deleted or was replaced."""


class RendezvousError(ElasticError):
    """The nodes could not be brought together."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """No generation settled within the join timeout."""


class RendezvousClosed(RendezvousError):
    """The job is over, or goes on without this node, or this node has left it: there will be no
    further generation for it."""


class RendezvousMismatch(RendezvousError):
    """This node was started with settings that contradict the job's."""


class IllegalTransition(ElasticError):
    """The supervision policy has no entry for this event in this state: a bug of ours."""


class WorkerStartError(ElasticError):
    """A worker process could not be started at all."""


class NoFailure(ElasticError, LookupError):
    """A job failed without a worker having failed, as far as is known here."""


class CheckpointError(ElasticError):
    """A checkpoint could not be written."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint is not whole: cut short, changed, or not one of ours."""


class Unreadable(CheckpointError):
    """What is there may be a whole checkpoint: it could not be read, or not by this program."""


class CheckpointRefused(CheckpointError):
    """Somebody newer writes checkpoints there: this process is of the past, and must end."""


class NoSuchRun(ElasticError, LookupError):
    """No run of that name has left its events here."""


class StateMismatch(ElasticError, ValueError):
    """A saved state belongs to something else: another length, seed or format."""


class NotReproducible(ElasticError):
    """Training at another world size would give other weights, so this step was not finished."""


def present(value: Present | None, what: str) -> Present:
    """The value, which is not None as the code around it sees to. Raises TypeError if it is."""
    if value is None:
        raise TypeError(f"{what} is to be there by now: this is a fault of elasticlib's")
    return value


def describe(error: BaseException) -> str:
    """An error in one sentence: its own where it is one of ours, else with its class."""
    return str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"
