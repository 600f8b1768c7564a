"""What the membership should become next, decided from one snapshot; and what it means to one node.

No clock, store, thread or log stands here. For the node that leads, all that counts comes in as a
`View`, and what goes out is a `Decision`, whose sentence is the log line. The `Intent` of each node
says what should stand in the store for it, and what has become of the generation that it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ..errors import present
from .document import (
    Change,
    ChangeKind,
    Document,
    Ending,
    Failure,
    Leader,
    Limits,
    Node,
    Phase,
    State,
    Why,
    end,
    expel,
    of_members,
    reopen,
    resize,
    settle,
    turn_away,
)
from .ranks import Seat, in_rank_order

QUORUM = (
    "without a quorum the job might continue twice; quorum=False, or --rdzv-conf quorum=any, "
    "allows that"
)
QUICK_FAILURE_S = 10.0  # a generation that fails sooner than this is a quick failure
FREE_RESTARTS = 2  # quick failures in a row without a delay: the first restart mends most causes
RESTART_DELAY_S = 5.0  # delay of each restart after more quick failures in a row than these


@attrs.frozen
class View:
    """What the node that leads has read of its job.

    live: those whose lease stands, in the order in which they last spoke. finished: ids of members
    that finished the document's generation; departed: of those that have said that they leave it,
    which they say where a quorum counts. memory: what a node that was in it says of a job
    that the store has forgotten. quiet: seconds, on the reader's own clock, since it last saw a
    node arrive. patience: seconds for which others may still be missing because the store was
    away. stands: seconds, likewise, since it first saw the document in this phase of this
    generation. nonce: a name that nobody has used. came_after: as in this node's
    record. today: the date and time, for people to read.
    """

    me: str
    limits: Limits
    document: Document | None
    live: tuple[Node, ...]
    finished: frozenset[str] = frozenset()
    departed: frozenset[str] = frozenset()
    memory: State | None = None
    quiet: float = 0.0
    patience: float = 0.0
    stands: float = 0.0
    nonce: str = ""
    came_after: str = ""
    today: str = ""


@attrs.frozen
class Decision:
    """Why, what to write if anything, and in how many seconds time alone could change it.

    stuck: there are too few here to go on, and the job may have gone on elsewhere.
    """

    reason: str
    write: Document | None = None
    again: float | None = None
    stuck: bool = False


def decide(view: View) -> Decision:
    """The next step of the job's membership, which is for the node that leads to take."""
    document = view.document
    recalled = _recall(view)
    if recalled is not None:
        return recalled
    nothing = document is None or not (document.membership or document.phase.terminal)
    if view.patience > 0 and nothing:
        # Those who were in the job may be on their way back, and it is for them to say.
        return Decision("the store was unreachable, and has lost the job", again=view.patience)
    if document is None:
        begun = Document(view.limits, view.nonce)
        return Decision("the job's first node writes its limits", write=begun)
    if not has_live_node(document, (view, *view.live)):
        return _start_new_run(view, document)
    if document.phase.terminal:
        return Decision(f"the job has {document.phase.value}: {document.cause}")
    if document.phase is Phase.SETTLED:
        return _watch(view, document)
    return _gather(view, document)


def waiting(view: View) -> int:
    """How many nodes wait for the members to end their generation, and find room in the next one.

    Newcomers, and once it is over, members that have stopped their workers as well. Spares beyond
    max_nodes are not counted: for them nobody need start anew.
    """
    document = view.document
    if document is None or not document.membership or document.phase.terminal:
        return 0
    members, over = document.member_ids, document.phase is Phase.OPEN
    here = [n for n in _candidates(view, document) if n.slots and not n.draining]
    back = [n for n in here if over and n.id in members and n.stopped == document.membership]
    newcomers = [n for n in here if n.id not in members and not n.runs]
    staying = sum(n.id in members for n in here) if over else len(members)
    return min(len(back) + len(newcomers), document.limits.max_nodes - (staying - len(back)))


def gives_way(state: State | None, incarnation: str) -> bool:
    """Whether nothing has come yet of what the store holds, so that a job which it has forgotten
    may take its place. (One that was begun in place of that very job was begun knowingly.)"""
    if state is None:
        return True
    nothing = state.generation == 0 and not state.phase.terminal
    return nothing and incarnation not in (state.incarnation, state.supersedes)


def _recall(view: View) -> Decision | None:
    """The last generation as those remember who were in it, where the store has forgotten it."""
    memory = view.memory
    if memory is None or not gives_way(view.document, memory.incarnation):
        return None
    here = sorted((n for n in view.live if n.membership == memory.membership), key=lambda n: n.rank)
    if not here:
        return None
    job, count = of_members(memory, here), f"{len(here)} of {memory.nodes}"
    forgot = f"the store has lost generation {memory.generation}"
    if len(here) == memory.nodes:
        return Decision(f"{forgot}, and all of its nodes remember it", write=job)
    if memory.limits.quorum and len(here) * 2 <= memory.nodes:
        return Decision(
            f"{forgot}: {count} of its nodes are here, and more than half must be ({QUORUM})",
            stuck=True,
        )
    if view.patience > 0:
        return Decision(f"{forgot}: {count} of its nodes are here", again=view.patience)
    if memory.phase is not Phase.SETTLED:
        return Decision(f"{forgot}: {count} of its nodes remember it", write=job)
    lost = memory.nodes - len(here)
    verb = "was" if lost == 1 else "were"
    cause = f"{lost} of {memory.nodes} nodes {verb} lost with the store"
    return Decision(cause, write=reopen(job, cause))


def has_live_node(state: State, nodes: Iterable[Node | Leader | View]) -> bool:
    """Return whether one of these live nodes is part of this run of the job.

    Every live node is, except those that started when no node of the run was alive. While the run
    has a live node, a node that starts joins it or, if the run has ended, gets its result. When it
    has none, the nodes that start begin a new run.
    """
    return any(not n.came_after or n.came_after != state.incarnation for n in nodes)


def _start_new_run(view: View, document: Document) -> Decision:
    if document.phase.terminal:
        number, ended = 0, f"the previous run has {document.phase.value} ({document.cause})"
    else:
        # A node of the run may only have lost its lease. If it rejoins, it must not see the
        # generation number decrease.
        number, ended = document.generation, "the previous run did not end"
    begun = Document(view.limits, view.nonce, generation=number, supersedes=document.incarnation)
    return Decision(f"{ended} and none of its nodes is alive: a new run starts", write=begun)


def _watch(view: View, document: Document) -> Decision:
    if view.stands >= QUICK_FAILURE_S:
        # A generation that lasts ends the row of quick failures, whatever it is ended by itself.
        document = attrs.evolve(document, quick=0)
    members = document.member_ids
    if members <= view.finished:
        cause = f"{len(members)} node{'s' * (len(members) > 1)} done"
        return Decision("all are done", write=_over(view, document, Phase.SUCCEEDED, cause))
    live = {node.id for node in view.live}
    lost = [m for m in document.members if m.id not in live and m.id not in view.finished]
    if lost and view.patience > 0:
        reason = f"the store was unreachable, waiting for {_names(lost, view)}"
        return Decision(reason, again=view.patience)
    if lost and (minority := _minority(view, document, lost)) is not None:
        return minority
    if lost:
        cause = _missing(lost, view)
        # What the others failed of is that these had gone.
        claim = _claim(document, view.live)
        return Decision(cause, write=reopen(document, cause, claim, why=Why.LOSS))
    failure = _claim(document, view.live)
    if failure is not None:
        cause = f"{_name_of(failure.node, view)}: {failure.reason}"
        quick = quick_failures(document, failure, view.stands)
        return Decision(cause, write=attrs.evolve(reopen(document, cause, failure), quick=quick))
    draining = [
        n for n in view.live if n.id in members and n.draining and n.id not in view.finished
    ]
    if draining:
        verb = "drains" if len(draining) == 1 else "drain"
        cause = f"{_names(draining, view)} {verb} ({draining[0].draining})"
        return Decision(cause, write=resize(document, cause))
    again = [n for n in view.live if n.id in members and n.stopped == document.membership]
    if again:
        cause = f"{_names(again, view)} asked for a new generation"
        return Decision(cause, write=reopen(document, cause))
    if view.finished:
        return Decision(f"{len(view.finished)} of {len(members)} nodes are done")
    return _stand(view, document)


def _missing(lost: Sequence[Node], view: View) -> str:
    left = [node for node in lost if node.id in view.departed]
    gone = [node for node in lost if node.id not in view.departed]
    said = [f"{_names(left, view)} left"] if left else []
    if gone:
        was = "was" if len(gone) == 1 else "were"
        said.append(f"{_names(gone, view)} {was} lost (killed, or cut off)")
    return "; ".join(said)


def _stand(view: View, document: Document) -> Decision:
    """All is well: what is left is to let newcomers in, nodes and workers, and to forgive."""
    wait = forgiven_in(document, view.stands)
    if wait == 0:
        window = document.limits.restart_window
        stood = f"{window:g} s (restart_window, --restart-window)"
        reason = f"generation {document.generation} ran for {stood}"
        count = f"the count of restarts, {document.restarts}, is reset"
        return Decision(f"{reason}: {count}", write=attrs.evolve(document, restarts=0, quick=0))
    seated = {member.id: member.slots for member in document.members}
    ready = [n for n in view.live if n.slots != seated.get(n.id, n.slots)]
    if ready:
        first, count = ready[0], f"{ready[0].slots} worker{'s' * (ready[0].slots > 1)}"
        cause = f"{_name_of(first.id, view)} has {count} ready"
        return Decision(cause, write=resize(document, cause))
    decision = _admit(view, document)
    again = min((s for s in (decision.again, wait) if s is not None), default=None)
    return decision if decision.write is not None else attrs.evolve(decision, again=again)


def _minority(view: View, document: Document, lost: Sequence[Node]) -> Decision | None:
    """To wait, where those of the last generation who are here could be the lesser part of it.

    Half is enough where the store is: whoever has gone elsewhere needs more than half.
    """
    here = {*(n.id for n in view.live), *view.finished, *view.departed, *document.expelled}
    members = document.member_ids
    if not document.limits.quorum or len(members & here) * 2 >= len(members):
        return None
    return Decision(
        f"{_names(lost, view)} of the {len(document.members)} nodes of generation "
        f"{document.generation} cannot be reached, and half must be here ({QUORUM})",
        stuck=True,
    )


def _admit(view: View, document: Document) -> Decision:
    """Newcomers wait out the last call while the members go on training."""
    limits, members = document.limits, document.member_ids
    stay = [n for n in _candidates(view, document) if not n.draining]
    newcomers = [n for n in stay if n.id not in members]
    room = limits.max_nodes - len(document.members)
    surplus = [] if limits.spares is None else newcomers[room + limits.spares :]
    if surplus:
        there = [n.id for n in view.live if n.id in document.surplus]
        write = turn_away(document, (*there, *(n.id for n in surplus)))
        return Decision(f"{_names(surplus, view)} are not needed as spares", write=write)
    ready = [n for n in newcomers if n.slots and not n.runs]
    if not ready or not room:
        spare = f", {len(newcomers)} spare" if newcomers else ""
        return Decision(f"generation {document.generation} stands{spare}")
    if len(ready) < room and view.quiet < limits.last_call:
        return _last_call(view.quiet, limits)
    cause = f"{_names(ready[:room], view)} joined"
    return Decision(cause, write=resize(document, cause))


def _gather(view: View, document: Document) -> Decision:
    limits = document.limits
    candidates = _candidates(view, document)
    members = document.member_ids
    busy = [n for n in candidates if n.id in members and n.stopped != document.membership]
    if busy:
        names, number = _names(busy, view), document.generation
        return Decision(f"waiting for {names} to stop the workers of generation {number}")
    # Who drains was waited for until it had stopped: what it saves is what the others go on from.
    candidates = [n for n in candidates if not n.draining and (n.id in members or not n.runs)]
    here = {n.id for n in candidates}
    if view.patience > 0 and not members <= here:
        return Decision("the store was unreachable, waiting for nodes", again=view.patience)
    away = [m for m in document.members if m.id not in here]
    first = _minority(view, document, away) or _loss_behind_a_failure(view, document)
    if first is not None:
        return first
    charged = document.failure is not None and members <= here
    if charged and document.restarts >= limits.max_restarts:
        return _spent(view, document, candidates)
    if charged and document.quick > FREE_RESTARTS and view.stands < RESTART_DELAY_S:
        return Decision(
            f"the last {document.quick} generations failed within {QUICK_FAILURE_S:g} s each: the "
            f"restart is delayed by {RESTART_DELAY_S:g} s",
            again=RESTART_DELAY_S - view.stands,
        )
    back = [n for n in candidates if n.id in members]
    starting = [n for n in back if not n.slots]
    if starting and not any(n.kept for n in back):
        # Nobody is kept from work, and what they hold of the last generation's state counts, too.
        return Decision(f"waiting for the workers of {_names(starting, view)} to start")
    ordered = in_rank_order(document, [n for n in candidates if n.slots])
    if len(ordered) < limits.min_nodes:
        return _too_few(ordered, document)
    return _settle(view, document, ordered, charged=charged)


def _settle(
    view: View, document: Document, ordered: tuple[Node, ...], *, charged: bool
) -> Decision:
    limits = document.limits
    if limits.quorum and not document.membership and len(ordered) * 2 <= limits.max_nodes:
        return Decision(
            f"{len(ordered)} of up to {limits.max_nodes} nodes are here, and a job that may be "
            f"going on elsewhere begins with more than half ({QUORUM})",
            stuck=True,
        )
    newcomers = {n.id for n in ordered} - document.member_ids
    if newcomers and len(ordered) < limits.max_nodes and view.quiet < limits.last_call:
        return _last_call(view.quiet, limits)
    reason = f"generation {document.generation + 1} of {len(ordered)} nodes: {document.cause}"
    return Decision(reason, write=settle(document, ordered, charged=charged, nonce=view.nonce))


def _loss_behind_a_failure(view: View, document: Document) -> Decision | None:
    """Where the generation is said to have ended by a failure on a node that is here, and members
    are gone: what that failed of is that these had gone, which their leases told later."""
    live, failure = {n.id for n in view.live}, document.failure
    lost = [m for m in document.members if m.id not in live]
    if failure is None or document.why is not Why.FAILURE or failure.node not in live or not lost:
        return None
    cause = _missing(lost, view)
    return Decision(cause, write=reopen(document, cause, failure, why=Why.LOSS))


def _too_few(here: Sequence[Node], document: Document) -> Decision:
    limits = document.limits
    said = f"{len(here)} of at least {limits.min_nodes} nodes are here"
    if limits.fixed_ranks:
        missing = sorted(set(range(limits.max_nodes)) - {node.hint for node in here})
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        said += f"; missing: node ranks {', '.join(map(str, missing[:8]))}{more}"
    return Decision(f"{said}; {document.cause}" if document.why is Why.LOSS else said)


def _spent(view: View, document: Document, candidates: list[Node]) -> Decision:
    """The restart budget is used up: the failed node leaves, or the job ends if it needs it."""
    failure = present(document.failure, "the failure")
    limits = document.limits
    failed = [n for n in candidates if n.id == failure.node]
    budget = f"{document.restarts} of {limits.max_restarts} restarts used"
    out = [n.id for n in failed]
    if len(candidates) - len(out) >= limits.min_nodes:
        write = expel(document, out, {n.id for n in view.live})
        return Decision(f"{_names(failed, view)} must leave: {budget}", write=write)
    cause = f"{_name_of(failure.node, view)}: {failure.reason} ({budget})"
    return Decision(cause, write=_over(view, document, Phase.FAILED, cause, failure))


def _over(
    view: View, document: Document, phase: Phase, cause: str, failure: Failure | None = None
) -> Document:
    ending = Ending(_name_of(view.me, view), view.today)
    return end(document, phase, cause, ending=ending, failure=failure)


def _candidates(view: View, document: Document) -> list[Node]:
    turned_away = {*document.expelled, *document.surplus}
    return [n for n in view.live if n.id not in turned_away]


def _claim(document: Document, live: Iterable[Node]) -> Failure | None:
    """The earliest failure that a member claims for this generation."""
    members = document.member_ids
    for node in live:
        is_of_this = node.id in members and node.claim_membership == document.membership
        if is_of_this and node.claim is not None:
            return Failure(node.id, node.claim, node.claim_killed)
    return None


def _last_call(quiet: float, limits: Limits) -> Decision:
    return Decision(
        f"last call: newcomers are let in after {limits.last_call:g} s without another arrival",
        again=limits.last_call - quiet,
    )


def _names(nodes: Sequence[Node], view: View) -> str:
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return ", ".join(_name_of(node.id, view) for node in nodes[:3]) + more


def _name_of(node_id: str, view: View) -> str:
    """A node's host, which people know it by; its id where several nodes share that host."""
    members = () if view.document is None else view.document.members
    hosts = {node.id: node.host for node in (*members, *view.live)}
    host = hosts.get(node_id, node_id)
    return node_id if sum(other == host for other in hosts.values()) > 1 else host


# -- what failures cost a job ------------------------------------------------------------------
# All seconds are of the deciding node's own clock, since it first saw the document as it stands.


def quick_failures(document: Document, failure: Failure, stood: float) -> int:
    """Return the number of quick failures in a row, including this one after `stood` seconds.

    A worker that was killed from outside is not counted: an immediate restart makes it no more
    likely that the next one is killed as well.
    """
    if stood >= QUICK_FAILURE_S:
        return 0
    return document.quick + (not failure.killed)


def forgiven_in(document: Document, stood: float) -> float | None:
    """Seconds until the generation that stands has earned the restarts back; None for never."""
    window = document.limits.restart_window
    if window <= 0 or not (document.restarts or document.quick):
        return None
    return max(0.0, window - stood)


# -- what a node wants, and what the job means to it: pure -----------------------------------------


@attrs.frozen
class Intent:
    """What an agent wants said of its node, and what its job's state means to that.

    A node asks for a generation only when no workers of an earlier one are left, and it falls
    silent rather than speak for workers that the others have gone on without.

    node: its record. silent: it has not asked for a generation yet. memory: the last state of which
    it was a member. finished: the generation (as its membership) whose workers have succeeded here.
    closing: why the job is to end for all, until that is written; empty if it need not be.
    late_for: the incarnation that had ended when this node started, and whose result it gets. Such
    a node is not announced, so that it does not keep the ended run alive for nodes that start after
    it.
    """

    node: Node
    silent: bool = True
    memory: State | None = None
    finished: str = ""
    closing: str = ""
    late_for: str = ""

    @property
    def joining(self) -> bool:
        """Whether it is in no generation, or seeks a later one than it was in."""
        return not self.node.runs

    @property
    def held(self) -> int:
        """The number of the last generation that it was in; 0 for none."""
        return 0 if self.memory is None else self.memory.generation

    @property
    def incarnation(self) -> str:
        """That of the last generation that it was in; empty for none."""
        return "" if self.memory is None else self.memory.incarnation

    def saying(self, **fields: Any) -> Intent:
        """The same, with other fields in the record."""
        return attrs.evolve(self, node=attrs.evolve(self.node, **fields))

    # What its agent wants

    def seek(self) -> Intent:
        """No workers of ours are left, and we want the generation after the one that we held."""
        stopped = self.saying(runs=False, stopped=self.node.membership)
        return attrs.evolve(stopped, silent=False, finished="")

    def receive_result(self) -> Intent:
        """Do not take part in a later run, unless the agent asks for a generation again."""
        return attrs.evolve(self, silent=self.silent or bool(self.late_for))

    def enter(self, state: State, seat: Seat) -> Intent:
        """We are a member of this generation and may run its workers."""
        member = self.saying(membership=state.membership, rank=seat.rank, runs=True, came_after="")
        return attrs.evolve(member, memory=state)

    def fail(self, reason: str, *, killed: bool = False) -> Intent:
        """Our workers of the held generation failed."""
        of = self.node.membership
        return self.saying(claim=reason, claim_membership=of, claim_killed=killed)

    def finish(self) -> Intent:
        """Our workers of the held generation succeeded."""
        return attrs.evolve(self, finished=self.node.membership)

    # What is read in the store

    def arrive(
        self, state: State | None, seat: Seat | None, nodes: Iterable[Node | Leader]
    ) -> Intent:
        """Decide at the first look at the store whether this node is part of the run found there.

        nodes: those that are alive, or the one of them that leads.
        """
        if state is None:
            return self
        if seat is not None:
            # Another had it before us, under our id, and what it ran is gone with it.
            of = state.membership
            return self.saying(membership=of, rank=seat.rank, stopped=of)
        return self.saying(came_after=state.incarnation).notice(state, nodes)

    def meet(self, state: State | None) -> Intent:
        """While joining, whatever was held in another incarnation counts for nothing."""
        if state is None:
            return self
        if state.membership and state.membership == self.node.membership:
            return attrs.evolve(self, memory=state)
        if not self.held or not self.joining or state.incarnation == self.incarnation:
            return self
        if gives_way(state, self.incarnation):
            return self
        return attrs.evolve(self.saying(membership="", rank=0, stopped=""), memory=None)

    def notice(self, state: State | None, nodes: Iterable[Node | Leader]) -> Intent:
        """Become part of the run after all if one of its nodes is back, such as a node whose lease
        had ended while it was stopped.

        nodes: those that are known to be alive.
        """
        if state is None or self.node.came_after != state.incarnation:
            return self
        if not has_live_node(state, nodes):
            return self
        late_for = state.incarnation if state.phase.terminal else ""
        return attrs.evolve(self.saying(came_after=""), late_for=late_for)

    def record(self, state: State | None) -> Node | None:
        """What should stand in the store for this node; None for nothing."""
        if self.silent or (state is not None and state.incarnation == self.late_for):
            return None
        if self.joining:
            if state is None or state.phase is not Phase.OPEN:
                return self.node
            if self.node.stopped == state.membership:
                return self.node
            # A generation that came and went while this node slept is one that it has no workers
            # of; unless it says so, the others wait for ever for it to stop them.
            return attrs.evolve(self.node, stopped=state.membership)
        goes_on = state is not None and state.membership == self.node.membership
        return self.node if goes_on or gives_way(state, self.incarnation) else None

    def final_change(self, state: State | None) -> Change | None:
        """Why this node has nothing left to wait for, if so."""
        if state is None:
            return None
        me = self.node.id
        if state.phase.terminal and self.node.came_after != state.incarnation:
            node = "" if state.failure is None else state.failure.node
            return Change(ChangeKind(state.phase.value), state.cause, node)
        if me in state.expelled:
            spent = f"{state.restarts} of {state.limits.max_restarts} restarts used"
            reason = f"this node's workers failed and the job goes on without it ({spent})"
            return Change(ChangeKind.EXPELLED, reason, me)
        if me in state.surplus:
            wanted = f"{state.limits.max_nodes} nodes and {state.limits.spares} spares (--spares)"
            return Change(ChangeKind.SURPLUS, f"the job has all the nodes it wants, {wanted}", me)
        return None

    def change(self, state: State | None) -> Change | None:
        """What has become of the generation that this node is in; None while it stands.

        A store that has forgotten it is no news: those who remember are going to say it again.
        """
        final = self.final_change(state)
        if final is not None or self.joining or state is None:
            return final
        if gives_way(state, self.incarnation):
            return None
        if state.incarnation != self.incarnation:
            new = "a new run of the job started while this node was not connected to the store"
            return Change(ChangeKind.REOPENED, new)
        if state.membership != self.node.membership:
            return Change(ChangeKind.REOPENED, state.cause)
        if state.phase is Phase.SETTLED:
            return None
        return Change(ChangeKind.RESIZE if state.planned else ChangeKind.REOPENED, state.cause)
