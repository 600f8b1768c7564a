"""What the membership should become next, decided from one snapshot.

No clock, store, thread or log stands here: all that counts comes in as a `View`, and what goes
out is a `Decision`, whose sentence is the log line.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .document import (
    Document,
    Failure,
    Limits,
    Node,
    Phase,
    end,
    expel,
    in_rank_order,
    reopen,
    settle,
)


@attrs.frozen
class View:
    """One node's snapshot of its job.

    live: those whose lease stands, in the order in which they last spoke. done: ids of members
    that finished the document's generation. quiet: seconds, on the reader's own clock, since it
    last saw a node arrive. fresh: the incarnation of a document that this node would begin.
    """

    me: str
    limits: Limits
    document: Document | None
    live: tuple[Node, ...]
    done: frozenset[str] = frozenset()
    quiet: float = 0.0
    fresh: str = ""


@attrs.frozen
class Decision:
    """Why, what to write if anything, and in how many seconds time alone could change it."""

    reason: str
    write: Document | None = None
    again: float | None = None


def coordinator(document: Document, live: Iterable[Node]) -> str | None:
    """The first live member; without any, the first of those who came."""
    candidates = [node for node in live if node.id not in document.expelled]
    ordered = in_rank_order(attrs.evolve(document, limits=_unfixed(document.limits)), candidates)
    return ordered[0].id if ordered else None


def _unfixed(limits: Limits) -> Limits:
    return attrs.evolve(limits, fixed_ranks=False)


def decide(view: View) -> Decision:
    """The next step of the job's membership, if it is mine to take."""
    document = Document(view.limits, view.fresh) if view.document is None else view.document
    if document.phase.terminal:
        return Decision(f"the job has {document.phase.value}: {document.cause}")
    first = coordinator(document, view.live)
    if first != view.me:
        return Decision(f"{_name_of(first or 'nobody', view)} decides, and this node waits")
    if view.document is None:
        return Decision("the job's first node writes its limits", write=document)
    if document.phase is Phase.SETTLED:
        return _watch(view, document)
    return _gather(view, document)


def _watch(view: View, document: Document) -> Decision:
    members = document.member_ids
    if members <= view.done:
        count = len(members)
        return Decision("all are done", write=end(document, Phase.SUCCEEDED, f"{count} nodes done"))
    live = {node.id: node for node in view.live}
    lost = [m for m in document.members if m.id not in live and m.id not in view.done]
    if lost:
        cause = f"{_names(lost, view)} left"
        return Decision(cause, write=reopen(document, cause, _claim(document, view.live)))
    failure = _claim(document, view.live)
    if failure is not None:
        cause = f"{_name_of(failure.node, view)}: {failure.reason}"
        return Decision(cause, write=reopen(document, cause, failure))
    again = [n for n in view.live if n.id in members and n.after >= document.generation]
    if again:
        cause = f"{_names(again, view)} asked for a new generation"
        return Decision(cause, write=reopen(document, cause))
    if view.done:
        return Decision(f"{len(view.done)} of {len(members)} nodes are done")
    return _admit(view, document)


def _admit(view: View, document: Document) -> Decision:
    """Newcomers wait out the last call while the members go on training."""
    limits = document.limits
    newcomers = [n for n in _candidates(view, document) if n.id not in document.member_ids]
    room = limits.max_nodes - len(document.members)
    ready = [n for n in newcomers if n.idle]
    if not ready or not room:
        spare = f", {len(newcomers)} spare" if newcomers else ""
        return Decision(f"generation {document.generation} stands{spare}")
    if len(ready) < room and view.quiet < limits.last_call:
        return _last_call(view.quiet, limits)
    cause = f"{_names(ready[:room], view)} joined"
    return Decision(cause, write=reopen(document, cause))


def _gather(view: View, document: Document) -> Decision:
    limits = document.limits
    candidates = _candidates(view, document)
    members = document.member_ids
    busy = [n for n in candidates if n.id in members and n.after < document.generation]
    if busy:
        names = _names(busy, view)
        return Decision(f"{names} to stop the workers of generation {document.generation}")
    candidates = [n for n in candidates if n.id in members or n.idle]
    here = {n.id for n in candidates}
    charged = document.failure is not None and members <= here
    if charged and document.restarts >= limits.max_restarts:
        return _spent(view, document, candidates)
    ordered = in_rank_order(document, candidates)
    if len(ordered) < limits.min_nodes:
        return Decision(f"{len(ordered)} of at least {limits.min_nodes} nodes are here")
    newcomers = here - members
    if newcomers and len(ordered) < limits.max_nodes and view.quiet < limits.last_call:
        return _last_call(view.quiet, limits)
    chosen = ordered[: limits.max_nodes]
    reason = f"generation {document.generation + 1} of {len(chosen)} nodes: {document.cause}"
    return Decision(reason, write=settle(document, chosen, charged=charged))


def _spent(view: View, document: Document, candidates: list[Node]) -> Decision:
    """The budget is used up: who failed leaves, and the job ends if it cannot go on without."""
    failure = document.failure
    assert failure is not None
    limits = document.limits
    name = _name_of(failure.node, view)
    others = [n for n in candidates if n.id != failure.node]
    budget = f"{document.restarts} of {limits.max_restarts} restarts used"
    if len(others) >= limits.min_nodes:
        return Decision(f"{name} must leave: {budget}", write=expel(document, failure.node))
    cause = f"{name}: {failure.reason} ({budget})"
    return Decision(cause, write=end(document, Phase.FAILED, cause, failure))


def _candidates(view: View, document: Document) -> list[Node]:
    return [n for n in view.live if n.id not in document.expelled]


def _claim(document: Document, live: Iterable[Node]) -> Failure | None:
    """The earliest failure that a member claims for this generation."""
    for node in live:
        member = node.id in document.member_ids
        if member and node.claim is not None and node.claim_generation == document.generation:
            return Failure(node.id, node.claim)
    return None


def _last_call(quiet: float, limits: Limits) -> Decision:
    return Decision(
        f"last call: newcomers are let in after {limits.last_call:g} s without another arrival",
        again=limits.last_call - quiet,
    )


def _names(nodes: Iterable[Node], view: View) -> str:
    names = [_name_of(node.id, view) for node in nodes]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _name_of(node_id: str, view: View) -> str:
    """A node's host, which people know it by; its id where several nodes share that host."""
    members = () if view.document is None else view.document.members
    hosts = {node.id: node.host for node in (*members, *view.live)}
    host = hosts.get(node_id, node_id)
    return node_id if sum(other == host for other in hosts.values()) > 1 else host
