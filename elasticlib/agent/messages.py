"""Messages of the agent: what happens (events), and what the agent shall do (effects). Values.

`machine.handle` is the only function between them: each event goes in, and each effect comes out.
No class is both. An effect returns nothing; what comes of it arrives as a later event.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias

import attrs

from ..rendezvous.interface import Joined, MembershipChanged, PeerMessages, Publish, Report
from ..workers.exits import WorkerExit
from ..workers.interface import StopHow, StopNotice, WorkerView
from ..workers.spec import WorkerState

# -- values that messages carry --------------------------------------------------------------------


@attrs.frozen
class RunOutcome:
    """The outcome of an agent's run, and the reason."""

    state: WorkerState
    reason: str
    signal: int = 0  # the signal that stopped the node, or 0
    evicted: bool = False  # the job continues without this node
    is_unfit: bool = False  # the node failed its check, or the job has excluded its host
    ends_job: bool = False  # no other node continues the job

    @property
    def lets_workers_save(self) -> bool:
        """True if the run ends by a drain, or because an operator stops the job."""
        is_request = self.state is WorkerState.STOPPED and not self.signal
        return self.state is WorkerState.DRAINED or is_request


class Meaning(enum.Enum):
    """The meaning of a signal for the agent."""

    END = "end"  # stop the workers, and end the run
    DRAIN = "drain"  # let the workers save, and leave the job
    DRAIN_IF_NOTICED = "drain_if_noticed"  # DRAIN if the script takes notices, else END
    INTERRUPT = "interrupt"  # END; while the run ends, go on with the next step


class Action(enum.Enum):
    """A request to the agent."""

    DRAIN = "drain"  # this node leaves after its workers have saved
    STOP = "stop"  # the job ends after all workers have saved
    RESTART = "restart"  # all workers of a generation are restarted


# -- events ----------------------------------------------------------------------------------------


@attrs.frozen
class NodeReady:
    """This node can start workers without delay, or its check has found it unfit."""

    unfit: str = ""  # why workers must not run here; empty if they may
    peers_train: bool = False  # other nodes train with workers that can regroup
    takes_notices: bool = False  # a worker of another node has called `should_stop`


@attrs.frozen
class WorkersSeen:
    """The view of the running workers has changed."""

    view: Mapping[int, WorkerView]  # by local rank


@attrs.frozen
class WorkerExited:
    """A worker has exited. Each worker that StartWorkers names exits exactly once.

    This includes a worker that could not be started.
    """

    start: int  # the number of its StartWorkers
    exit: WorkerExit
    unfit: str = ""  # why this node cannot run such workers, so that a restart would fail as well


@attrs.frozen
class StacksCollected:
    """The workers have written their stacks."""

    attempt: int
    stacks: Mapping[int, str]  # by local rank


@attrs.frozen
class SignalReceived:
    """The agent has received a signal."""

    number: int
    name: str
    meaning: Meaning
    num_interrupts: int = 0  # SIGINTs so far


@attrs.frozen
class Requested:
    """A drain, a stop or a restart is requested."""

    action: Action
    source: str  # who requests it, for messages
    reason: str = "drain"  # what `should_stop()` returns to the workers
    deadline: float | None = None  # when this node must have left, on the agent's clock
    generation: int = 0  # whose workers are restarted
    id: str = ""  # of an operator's request, which is answered; empty: nobody waits for an answer
    by: str = ""  # the operator


@attrs.frozen
class ComponentFailed:
    """This node cannot continue, because a part of its agent has failed."""

    reason: str


@attrs.frozen
class Finished:
    """The work of `Finish` is done."""

    problem: str = ""  # what could not be written
    saved_step: int | None = None  # the step that was written


@attrs.frozen
class Tick:
    """The time at which something is due has come."""


# -- effects ---------------------------------------------------------------------------------------


@attrs.frozen
class Prepare:
    """Check this node if `check` is true, and import what its workers need."""

    check: bool


@attrs.frozen
class Join:
    """Join the next generation."""

    attempt: int


@attrs.frozen
class StartWorkers:
    """Start workers, or give running ones their places in the generation."""

    start: int  # the number of this start
    members: tuple[int, ...]  # local ranks in the group of the generation
    standby: tuple[int, ...] = ()  # local ranks in no group


@attrs.frozen
class Notify:
    """Ask the members to save and exit, or to leave their group."""

    notice: StopNotice
    call: int | None = None  # the call of `should_stop` at which all ranks stop; None: unknown yet


@attrs.frozen
class StopWorkers:
    """Stop workers, by one of the ways that are stronger than a notice."""

    local_ranks: tuple[int, ...]
    how: StopHow
    why: str = ""  # for the log


@attrs.frozen
class DumpStacks:
    """Make the members write their Python stacks."""


@attrs.frozen
class Finish:
    """Write what exists in memory only, and wait for what succeeded workers still upload.

    Another one replaces it: without `save`, what has not been written is given up.
    """

    save: bool
    uploads_until: float  # on the agent's clock


Event: TypeAlias = (
    NodeReady
    | Joined
    | MembershipChanged
    | PeerMessages
    | WorkersSeen
    | WorkerExited
    | StacksCollected
    | SignalReceived
    | Requested
    | ComponentFailed
    | Finished
    | Tick
)
"""Something that has happened."""

Effect: TypeAlias = (
    Prepare | Join | Report | Publish | StartWorkers | Notify | StopWorkers | DumpStacks | Finish
)
"""Something that the agent shall do."""
