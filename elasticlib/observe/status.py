"""What a job is doing, put together from what its store holds and what its nodes say of themselves.

Nobody's clock is compared with another's: all ages are as the node that tells them measured them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..rendezvous.document import Document, Node, Note, Phase
from .history import JobState
from .question import Answer, Stacks
from .story import NodeStatus, put_out


@attrs.frozen
class JobView:
    """What was read and heard of a job. answers, stacks: by node id."""

    run: str
    document: Document | None
    live: tuple[Node, ...]
    note: Note
    answers: Mapping[str, Answer]
    stacks: Mapping[str, Stacks] = attrs.field(factory=dict)


@attrs.frozen
class NodeEntry:
    """rank: among the members, None for one that waits or has left. lives: whether its lease
    stands. answer: what it says of itself; None if it does not answer."""

    node: str
    host: str
    rank: int | None
    slots: int
    lives: bool
    draining: str = ""
    answer: Answer | None = None

    @property
    def status(self) -> NodeStatus | None:
        return None if self.answer is None else self.answer.status

    def told(self, name: str) -> list[Any]:
        """What its workers told of their step or per_second; if none did, what its events tell."""
        if self.status is None:
            return []
        found = [getattr(worker, name) for worker in self.status.workers]
        found = [value for value in found if value is not None] or [getattr(self.status, name)]
        return [value for value in found if value is not None]

    @property
    def state(self) -> str:
        """A word for it."""
        if self.status is None:
            return "no answer" if self.lives else "gone"
        # What it told last may be older than its end, where it had no time to tell of that.
        told = self.status.state
        return told.value if self.lives or told.over else "gone"


@attrs.frozen
class JobStatus:
    """state: None where nobody can tell any more. age: seconds since the newest of this was true,
    where it was read from files; None where nodes told it just now. minimum, maximum: how many
    nodes there may be. since: seconds for which the state has lasted."""

    run: str
    state: JobState | None
    reason: str = ""
    age: float | None = None
    generation: int = 0
    minimum: int | None = None
    maximum: int | None = None
    world: int = 0
    restarts: int = 0
    max_restarts: int | None = None
    since: float | None = None
    nodes: tuple[NodeEntry, ...] = ()

    @property
    def members(self) -> tuple[NodeEntry, ...]:
        return tuple(node for node in self.nodes if node.rank is not None)

    @property
    def spares(self) -> tuple[NodeEntry, ...]:
        """Those that live and wait to be let in."""
        return tuple(node for node in self.nodes if node.rank is None and node.lives)

    @property
    def silent(self) -> tuple[NodeEntry, ...]:
        """Those that live, and do not answer."""
        return tuple(node for node in self.nodes if node.lives and node.answer is None)

    @property
    def starting(self) -> bool:
        """Whether its events alone tell of it: its agent lives, and no generation stood so far."""
        on = self.state is not None and not self.state.over
        return self.age is not None and on and not self.generation

    @property
    def unanswered(self) -> bool:
        """Whether there are nodes, and none of them answered."""
        return bool(self.nodes) and not any(node.answer for node in self.nodes)

    @property
    def step(self) -> int | None:
        """The smallest that any worker told of last."""
        return min(self._slowest("step"), default=None)

    @property
    def per_second(self) -> float | None:
        """Steps of the slowest worker."""
        return min(self._slowest("per_second"), default=None)

    @property
    def saved(self) -> int | None:
        """The step of the last checkpoint that any node told of."""
        own = [s.saved for s in self._statuses() if s.saved is not None]
        return max([*own, *self._told("saved")], default=None)

    @property
    def snapshot(self) -> int | None:
        """The newest step that all nodes which keep snapshots have whole in their memory."""
        return min((s.snapshot for s in self._statuses() if s.snapshot is not None), default=None)

    def _slowest(self, name: str) -> list[Any]:
        """What the workers told, and of nodes whose workers did not, the nodes' events."""
        return [value for node in self.nodes for value in node.told(name)]

    def _told(self, name: str) -> list[int]:
        found = (getattr(w, name) for s in self._statuses() for w in s.workers)
        return [value for value in found if value is not None]

    def _statuses(self) -> Iterable[NodeStatus]:
        return (node.status for node in self.nodes if node.status is not None)


def status_of(view: JobView) -> JobStatus | None:
    """None where there is no such job."""
    document = view.document
    if document is None and not view.live:
        return None
    nodes = _nodes(view)
    statuses = [node.status for node in nodes if node.rank is not None and node.status]
    state, reason = _state(view, statuses)
    ages = [
        node.answer.state_seconds
        for node in nodes
        if node.rank is not None and node.answer and node.answer.status.state is state
    ]
    if document is None:
        return JobStatus(view.run, state, reason, nodes=nodes)
    return JobStatus(
        view.run,
        state,
        reason,
        generation=document.generation,
        minimum=document.limits.min_nodes,
        maximum=document.limits.max_nodes,
        world=sum(node.slots for node in document.members),
        restarts=document.restarts,
        max_restarts=document.limits.max_restarts,
        since=min(ages, default=None),
        nodes=nodes,
    )


def _nodes(view: JobView) -> tuple[NodeEntry, ...]:
    """The members in their order, then who waits in the order in which they came."""
    members = () if view.document is None else view.document.members
    over = view.document is not None and view.document.phase is not Phase.SETTLED
    living = {node.id: node for node in view.live}
    ids = {node.id for node in members}
    here = [(rank, living.get(node.id, node)) for rank, node in enumerate(members)]
    here += [(None, node) for node in view.live if node.id not in ids]  # type: ignore[misc]
    answers = dict(view.answers)
    if members:
        answers |= {id: _put_out(answer) for id, answer in answers.items() if id not in ids}
    return tuple(
        NodeEntry(
            node=node.id,
            host=node.host,
            rank=rank,
            slots=node.slots,
            lives=node.id in living,
            draining=node.draining,
            answer=answers.get(node.id),
        )
        for rank, node in here
        # Of a generation that is over, those who have gone are none of the next one's.
        if node.id in living or not over
    )


def _put_out(answer: Answer) -> Answer:
    return attrs.evolve(answer, status=put_out(answer.status))


_PHASES = {
    Phase.SUCCEEDED: JobState.SUCCEEDED,
    Phase.FAILED: JobState.FAILED,
    Phase.ABORTED: JobState.STOPPED,
}
_FIRST = (JobState.DRAINING, JobState.RESTARTING, JobState.RESIZING, JobState.RENDEZVOUS)
"""What a job is doing if any of its nodes is, in this order."""


def _state(view: JobView, statuses: Iterable[NodeStatus]) -> tuple[JobState | None, str]:
    """The state, and a sentence of why."""
    document, live = view.document, view.live
    if document is None:
        return JobState.WAITING, view.note.reason
    if document.phase.terminal:
        ending = "" if document.ending is None else f" (said by {document.ending.by})"
        return _PHASES[document.phase], f"{document.cause}{ending}"
    if not live:
        return None, f"no node lives any more; the last words were: {document.cause}"
    if document.phase is Phase.OPEN:
        return _opening(document, live), document.cause or view.note.reason
    told = {status.state: status for status in statuses}
    for state in _FIRST:
        if state in told:
            return state, told[state].reason or document.cause
    ends = [state for state in told if state.over]
    if ends and len(ends) == len(told):
        # All who answer are through; the document says so as soon as the others are.
        worst = max(ends, key=lambda state: (state is JobState.FAILED, state.value))
        return worst, told[worst].reason
    return JobState.RUNNING, document.cause


def _opening(document: Document, live: tuple[Node, ...]) -> JobState:
    if len(live) < document.limits.min_nodes:
        return JobState.WAITING
    if document.failure is not None:
        return JobState.RESTARTING
    if any(node.draining for node in live):
        return JobState.DRAINING
    return JobState.RESIZING if document.planned else JobState.RENDEZVOUS


def status_of_records(run: str, nodes: Iterable[NodeEntry], age: float) -> JobStatus:
    """Of what files tell of some of a run's nodes, the newest of it so many seconds ago."""
    found = _placed(nodes)
    statuses = [node.status for node in found if node.status is not None]
    newest = max(statuses, key=lambda status: status.generation)
    # The members come first, and so their words.
    state = _recorded_state(found, newest.generation)
    same = [status for status in statuses if status.state is state]
    teller = min(same, key=lambda one: one.expelled, default=newest)
    return JobStatus(
        run,
        state,
        teller.reason,
        age=age,
        generation=newest.generation,
        world=newest.world,
        restarts=newest.restarts,
        max_restarts=newest.max_restarts,
        nodes=found,
    )


def _placed(nodes: Iterable[NodeEntry]) -> tuple[NodeEntry, ...]:
    """The members of the newest generation by their ranks, then who was in none or an older."""
    nodes = tuple(nodes)
    newest = max(node.status.generation for node in nodes if node.status is not None)
    found = []
    for node in nodes:
        if node.answer is not None and node.answer.status.generation < newest:
            node = attrs.evolve(node, rank=None, answer=_put_out(node.answer))
        found.append(node)
    return tuple(sorted(found, key=lambda node: (node.rank is None, node.rank or 0, node.host)))


def _recorded_state(nodes: Iterable[NodeEntry], newest: int) -> JobState | None:
    """None where agents are gone that did not say how it ended."""
    told = [(node.status, node.lives) for node in nodes if node.status is not None]
    members = [status for status, _ in told if status.generation == newest]
    states = {status.state for status in members}
    for final in (JobState.SUCCEEDED, JobState.FAILED):
        # Each ends the job for all, but for the node that is told to leave it.
        said = [one for one in members if one.state is final and not one.expelled]
        if said:
            return final
    running = [status.state for status, lives in told if lives]
    if running:
        return next((one for one in _FIRST if one in running), running[0])
    if not all(state.over for state in states):
        return None
    order = (JobState.FAILED, JobState.STOPPED, JobState.PREEMPTED)
    return next(one for one in order if one in states)
