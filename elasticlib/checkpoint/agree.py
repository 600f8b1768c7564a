"""All ranks come to one state: the newest that is whole over all of them, whoever holds it.

Before each phase all say whether they are able to go on, so whatever fails on one rank fails on
all, or is handled by all alike; nobody is left waiting in a collective for one that raised.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import MutableMapping, Sequence
from typing import Any

import attrs
import torch.distributed as dist

from .choose import MEMORY, Plan
from .interface import Source
from .peers import CHUNK_BYTES, Peers, peers_of
from .search import Search

log = logging.getLogger("elasticlib.checkpoint")


@attrs.frozen
class Restored:
    """What all ranks go on from.

    step: 0 if there was nothing, and then the state is as it was. kind: what this rank's came
    from, `memory`, `disk`, `sharded disk`, or nothing (""). holder: the rank that read it; -1 if
    there was nothing. passed_over: why newer states were not taken, or others' copies not used,
    a sentence each.
    """

    step: int
    kind: str
    holder: int
    passed_over: tuple[str, ...] = ()

    def source_for(self, rank: int) -> str:
        """As a worker's context has it: `memory` of this rank's own node, which all workers there
        read by themselves, that of a `peer`, or `disk`; empty if there was nothing."""
        if self.kind != MEMORY:
            return "disk" if self.kind else ""
        return MEMORY if self.holder == rank else "peer"


def restore_from(
    sources: Sequence[Source],
    state: MutableMapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    node: str = "",
    strict: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
) -> Restored:
    """Bring `state` to the newest state that is whole over all ranks, on all of them.

    A collective: all ranks of `group` call it with the same arguments but `sources`. Whoever
    lacks the state is sent it, in chunks, by one who has it. What turns out to be damaged is
    passed over by all. It takes one pack of memory beside the state, and a rank that serves
    another's part a second one; an object whose `load_state_dict` neither copies nor keeps what
    it is given (modules copy, optimizers keep) that object's share once more.

    What happens to `state`: objects with `load_state_dict` are given theirs, which is their own.
    Tensors are copied into (a DTensor's local one), so their shape, dtype and cut must be the
    same. A dict or list becomes what was saved, in place, key by key, its tensors and objects as
    here; keys that were not saved go. All else is replaced. If something does not fit, nothing is
    changed on any rank; if a `load_state_dict` fails, what stands before it has been.

    Args:
        sources: what this process can reach; the same state from the earlier one first.
        state: names to objects with `state_dict` and `load_state_dict`, or to nested containers,
            tensors and plain values. All ranks give the same names.
        group: by default the default group; without one, this process alone. One that moves no
            CPU tensors (NCCL) will do if it is of all ranks.
        node: the name of this rank's node, for the shortest way; by default the host's.
        strict: whether a name that is only in `state`, or was only saved, is an error on all
            ranks; else such names are left alone.
        chunk_bytes: what is sent at once; where ranks differ, the least.

    Raises:
        ConfigError: `group` is of some ranks and moves no CPU tensors, or is not this rank's;
            `chunk_bytes` is less than 1.
        StateMismatch: what was saved does not fit into `state`.
        CheckpointError: on some rank a source could not say what it holds, an object could not
            load its state, or memory ran out; on all ranks alike, naming the rank.
        RuntimeError: of torch: a peer is gone, or the group's timeout is over, within which the
            slowest rank must have read its pack.
    """
    with peers_of(group, chunk_bytes=chunk_bytes) as peers:
        return restore_over(peers, sources, state, node=node, strict=strict)


def restore_over(
    peers: Peers,
    sources: Sequence[Source],
    state: MutableMapping[str, Any],
    *,
    node: str = "",
    strict: bool = True,
) -> Restored:
    """`restore_from`, over peers of your own."""
    search = Search(peers, sources, node or socket.gethostname())
    search.begin()
    taken = None
    while taken is None and (plan := search.choose()) is not None:
        if _is_taken(search, plan, state, strict=strict):
            taken = plan
    told = (*search.told, *search.left_out(taken.state.step if taken else 0))
    if peers.rank == 0:
        for sentence in told:
            log.warning("passed over: %s", sentence)
        log.info(
            "restored step %s", taken.state.step if taken else "0: there is nothing to restore"
        )
    if taken is None:
        return Restored(0, "", -1, told)
    kind, holder = taken.origin(peers.rank)
    return Restored(taken.state.step, kind, holder, told)


def _is_taken(search: Search, plan: Plan, state: MutableMapping[str, Any], *, strict: bool) -> bool:
    if plan.state.sharded_disk is not None:
        if not search.check(plan):
            return False
        search.load(plan, state, strict=strict)
        return True
    pack = search.fetch(plan)
    return pack is not None and search.place(plan, pack, state, strict=strict)
