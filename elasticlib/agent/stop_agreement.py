"""The call of `should_stop` at which all workers of a job stop: proposals and their sum. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..errors import RendezvousConfigError
from ..rendezvous import store_layout
from ..workers.interface import DRAIN, PREEMPTED, RESIZE, RESTART, STOP_REASONS

_URGENCY = (PREEMPTED, DRAIN, RESTART, RESIZE)  # most urgent first


@attrs.frozen
class StopProposal:
    """The call of `should_stop` at which to stop: one node's proposal, or what all agreed on."""

    call: int | None  # None: the workers of the node cannot stop at a call
    reason: str = RESIZE  # one of STOP_REASONS
    grace_s: float = 0.0  # time that is left to save


# Published if workers are stopped without a notice, or if a node has stopped waiting for a common
# call, so that no other node waits for its proposal.
NO_CALL = StopProposal(None)
# Published if all workers of the node have succeeded, and any call is acceptable.
ANY_CALL = StopProposal(1, RESIZE, 1e6)


def agree(proposals: Mapping[int, StopProposal], num_nodes: int) -> StopProposal | None:
    """Combine the proposals of all nodes.

    Args:
        proposals: the known proposals by node rank.
        num_nodes: the number of nodes of the generation.

    Returns:
        The largest call, the most urgent reason and the shortest time. NO_CALL if a node cannot
        stop at a call. None while proposals are missing.
    """
    calls = [proposal.call for proposal in proposals.values() if proposal.call is not None]
    if len(calls) < len(proposals):
        return NO_CALL
    if len(proposals) < num_nodes:
        return None
    return StopProposal(
        max(calls),
        most_urgent(*(proposal.reason for proposal in proposals.values())),
        min(proposal.grace_s for proposal in proposals.values()),
    )


def most_urgent(*reasons: str) -> str:
    """Return the most urgent of these stop reasons."""
    return min(reasons, key=_URGENCY.index)


def encode_proposal(proposal: StopProposal) -> bytes:
    """Encode a proposal for the other nodes."""
    return store_layout.encode(proposal)


def decode_proposal(data: bytes) -> StopProposal:
    """Decode a published proposal. Invalid data counts as NO_CALL."""
    try:
        proposal = store_layout.decode(StopProposal, data, "a published value")
    except RendezvousConfigError:
        return NO_CALL
    if proposal.reason not in STOP_REASONS or (proposal.call is not None and proposal.call < 1):
        return NO_CALL
    return attrs.evolve(proposal, grace_s=max(0.0, proposal.grace_s))
