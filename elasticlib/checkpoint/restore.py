"""All ranks come to one state: the newest that is whole over all of them, whoever holds it.

Before each phase all say whether they are able to go on, and what was said is all that decides. So
they go on, turn to an older state, or raise together; nobody is left waiting for one that raised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

import attrs
import torch
import torch.distributed as dist

from ..errors import CheckpointCorrupt, CheckpointError, ConfigError, Unreadable, present
from .folder import CheckpointFolder, Health, Manifest
from .pack import unpack
from .peers import (
    DISK,
    SHARDED_DISK,
    Agreed,
    Held,
    Plan,
    Search,
    Source,
    Trouble,
    givers,
    origin,
    peers_of,
    raise_any,
    tried,
)
from .place import LocalPlace
from .restore_plan import plan_restore
from .safetensors_header import read_header
from .sharded import fetch_parts

log = logging.getLogger("elasticlib.checkpoint")


IfUnusable: TypeAlias = Literal["raise", "start_over"]
"""What `restore` does if there are checkpoints and none of them can be used."""
_SHOWN_REASONS = 3

_FROM = {
    "memory": "from this node's memory",
    "peer": "from another node's memory",
    "disk": "from the disk",
}


@attrs.frozen(repr=False)
class Restored:
    """What `CheckpointManager.restore` has brought the state to; true if there was anything.

    step: after which that state was taken; 0 if there was none. source: where this rank's came
    from: `memory` of this node, that of a `peer`, or a `disk`; empty if there was none.
    passed_over: why newer states, or other copies of this one, were not taken: a sentence each.

    It is no number: whoever takes it for its step gets a TypeError that says so.
    """

    step: int = 0
    source: str = ""
    passed_over: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether there was a state to go on from. If not, nothing was changed."""
        return bool(self.source)

    def __bool__(self) -> bool:
        return self.found

    def __str__(self) -> str:
        said = f"step {self.step} {_FROM[self.source]}" if self.found else "nothing to restore"
        return "; ".join([said, *(f"skipped: {why}" for why in self.passed_over)])

    def __repr__(self) -> str:
        return f"<Restored: {self}>"

    if not TYPE_CHECKING:  # a type checker is to find these before they are run

        def _is_no_number(self, *_: object) -> NoReturn:
            raise TypeError(
                "restore() returns a Restored, not a number: use its .step, and .found, which "
                "says whether there was any"
            )

        def __eq__(self, other: object) -> bool:
            if isinstance(other, Number):
                self._is_no_number()
            if not isinstance(other, Restored):
                return NotImplemented
            return attrs.astuple(self) == attrs.astuple(other)

        def __hash__(self) -> int:
            return hash(attrs.astuple(self))

        __lt__ = __le__ = __gt__ = __ge__ = _is_no_number
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _is_no_number
        __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = (
            _is_no_number
        )
        __int__ = __index__ = __float__ = _is_no_number


class DiskSource(Source):
    """A folder of checkpoints. before: called before anything is listed, such as to keep others
    from changing it."""

    def __init__(
        self, folder: CheckpointFolder, before: Callable[[], object] = lambda: None
    ) -> None:
        self._folder, self._before = folder, before
        self._troubles: list[Trouble] = []
        self._manifests: dict[Held, Manifest] = {}
        self._read: tuple[tuple[Held, int], memoryview] | None = None

    def held(self) -> Sequence[Held]:
        """What manifests and sizes say is whole, newest first."""
        self._before()
        found, self._troubles = [], []
        for one in self._folder.found():
            if one.manifest and self._folder.health(one.manifest) is not Health.BAD:
                found.append(_held(one.manifest))
                continue
            trouble = one.trouble if one.flaw else "is damaged: it was found so before"
            why = f"{self._folder.describe(one.step)} {trouble}"
            self._troubles.append(Trouble(one.step, why, one.unread))
        return found

    def troubles(self) -> Sequence[Trouble]:
        return self._troubles

    def view(self, held: Held, part: int = 0) -> memoryview:
        """A part of a sharded one in a folder of this machine's is mapped; all else is read, one
        pack at a time, and checked by that."""
        if self._read is None or self._read[0] != (held, part):
            self._read = None  # first, so that there is never a second pack beside it
            read = self._folder.mapped if self._maps(held) else self._folder.read
            self._read = (held, part), memoryview(read(self._manifest(held), part))
        return self._read[1]

    def check(self, held: Held, part: int = 0) -> None:
        if self._maps(held):
            self._folder.check_file(self._manifest(held), part)
        else:
            self.view(held, part)

    def head(self, held: Held, part: int = 0) -> bytes:
        return self._folder.head(self._manifest(held), part)

    def release(self) -> None:
        self._read = None
        self._manifests.clear()

    def _maps(self, held: Held) -> bool:
        return held.kind == SHARDED_DISK and isinstance(self._folder.place, LocalPlace)

    def _manifest(self, held: Held) -> Manifest:
        if held not in self._manifests:
            what, found = self._folder.describe(held.step), self._folder.look(held.step)
            if found is not None and found.unread:
                raise Unreadable(f"{what} {found.trouble}")
            manifest = None if found is None else found.manifest
            if manifest is None or _held(manifest) != held:
                raise CheckpointError(f"{what} was replaced or deleted after it was chosen")
            self._manifests[held] = manifest
        return self._manifests[held]


def _held(manifest: Manifest) -> Held:
    return Held(
        step=manifest.step,
        kind=SHARDED_DISK if manifest.parts else DISK,
        name=manifest.files[0].name,
        parts=manifest.parts,
        run=manifest.run,
        generation=manifest.generation,
    )


def restore_from(
    sources: Sequence[Source],
    state: MutableMapping[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    node: str = "",
    step: int | None = None,
    strict: bool = True,
    if_unusable: IfUnusable = "raise",
) -> Agreed:
    """Bring `state` to the newest state that is whole over all ranks, on all of them.

    A collective: all ranks of `group` call it with the same arguments but `sources`. A rank that
    lacks a state that is the same on all ranks is sent it, and needs memory for one pack beside the
    state. Of a sharded one, of any number of ranks, each rank reads what it needs where its sources
    have it, and is sent the rest in small pieces, straight into the tensors that are there. What
    turns out to be damaged is passed over by all.

    What happens to `state`: objects with `load_state_dict` are given theirs, which is their own.
    Tensors are copied into (a DTensor's local one), so their shape and dtype must be the same. A
    dict or list becomes what was saved, in place, key by key, its tensors and objects as here;
    keys that were not saved go. All else is replaced. An object whose `load_state_dict` neither
    copies nor keeps what it is given (modules copy, optimizers keep) takes its share of memory once
    more. If something does not fit, nothing is changed
    on any rank; if a `load_state_dict` or a peer fails, what came before has been.

    Args:
        sources: what this process can reach; the same state from the earlier one first.
        state: names to objects with `state_dict` and `load_state_dict`, or to nested containers,
            tensors and plain values. All ranks give the same names.
        group: by default the default group; without one, this process alone. One that moves no
            CPU tensors (NCCL) will do if it is of all ranks.
        node: the name of this rank's node, for the shortest way; by default the host's.
        step: this one and no other, by default the newest. All ranks ask for the same.
        strict: whether a name that is only in `state`, or was only saved, is an error on all
            ranks; else such names are left alone.
        if_unusable: "raise" raises CheckpointCorrupt if there are checkpoints on a disk and
            neither one of them nor a snapshot can be used; "start_over" changes nothing then.
            Does not matter if `step` is given.

    Raises:
        ConfigError: `group` is of some ranks and moves no CPU tensors, or is not this rank's; or
            `if_unusable` is neither of the two.
        StateMismatch: what was saved does not fit into `state`.
        CheckpointCorrupt: see `if_unusable`; on all ranks.
        CheckpointError: on some rank a source could not say what it holds, an object could not
            load its state, or memory ran out, or ranks ask for different steps; on all ranks
            alike, naming the rank.
        RuntimeError: of torch: a peer is gone, or the group's timeout is over, within which the
            slowest rank must have read its pack.
    """
    if if_unusable not in get_args(IfUnusable):
        raise ConfigError(f'if_unusable must be "raise" or "start_over", got {if_unusable!r}')
    with peers_of(group) as peers:
        search, taken = Search(peers, sources), None
        try:
            search.begin(node or socket.gethostname(), step)
            while taken is None and (plan := search.choose()) is not None:
                fetch = fetch_parts if plan.state.parts else _fetch_pack
                taken = fetch(search, plan, state, strict=strict)
            if taken is not None:
                put, agreed = taken
                peers.all_do(put, f"failed to restore step {agreed.step}")
            elif step is None and if_unusable == "raise" and search.saw_checkpoints:
                raise _unusable(search.passed_over(0))
            else:
                agreed = Agreed(0, "", -1, peers.rank)
        finally:
            for source in sources:
                source.release()
    passed_over = search.passed_over(agreed.step)
    if agreed.rank == 0:
        for sentence in passed_over:
            log.warning("skipped: %s", sentence)
        log.info("restored step %s", agreed.step if taken else "0: there is nothing to restore")
    return attrs.evolve(agreed, passed_over=passed_over)


def _unusable(reasons: Sequence[str]) -> CheckpointCorrupt:
    shown = "; ".join(reasons[:_SHOWN_REASONS])
    more = len(reasons) - _SHOWN_REASONS
    return CheckpointCorrupt(
        f"there are checkpoints, and none of them can be used: {shown}"
        + (f" (and {more} more)" if more > 0 else "")
        + '. To train from the start instead, call restore(state, if_unusable="start_over"), or '
        "move these checkpoints away"
    )


def _fetch_pack(
    search: Search, plan: Plan, state: MutableMapping[str, Any], *, strict: bool
) -> tuple[Callable[[], None], Agreed] | None:
    """What puts a state that is the same on all ranks into this rank's, where it fits. None, on all
    ranks, if it cannot be had, and the choice is to be made anew."""
    peers, step, holders = search.peers, plan.state.step, plan.holders[0]
    packs: dict[int, memoryview] = {}

    def read(_part: int) -> str:
        packs.clear()
        held = holders[peers.rank]
        source = search.source(held)
        packs[0] = source.view(held)
        source.check(held)
        return _fingerprint(packs[0]) if peers.size > 1 else ""

    said = search.attempt(plan, [0] if peers.rank in holders else [], read)
    if said is None:
        return None
    if _differ(search, holders, {rank: said[rank][0] for rank in sorted(holders)}):
        return None
    route = givers(holders, search.nodes, range(peers.size))
    if route:
        peers.carry(step, {0: route}, packs)

    def fitting() -> Callable[[], None]:
        return plan_restore(state, unpack(packs[0], copy=False), strict=strict)

    put, error = tried(fitting)
    words = peers.words({}, error)
    damaged = [rank for rank, word in enumerate(words) if word.get("kind") == "corrupt"]
    if damaged:
        # An older state, of another format, may still fit.
        why = f"does not fit rank {damaged[0]}: {words[damaged[0]]['error']}"
        search.pass_over(plan.state, f"step {step} ({plan.kind}) {why}")
        return None
    raise_any(words, error, f"cannot restore step {step}")
    holder = origin(route, peers.rank)
    kind, size = holders[holder].kind, len(packs[0])
    return present(put, "what fits"), Agreed(step, kind, holder, peers.rank, size=size)


def _differ(search: Search, holders: Mapping[int, Held], prints: Mapping[int, str]) -> bool:
    """Take out copies that are not the same as most; whether there are such."""
    if len(set(prints.values())) < 2:
        return False
    # The most, and of those the lowest rank's, which was counted first.
    [(most, _)] = Counter(prints.values()).most_common(1)
    first = next(rank for rank, found in prints.items() if found == most)
    for rank, found in prints.items():
        if found != most:
            why = f"it differs from that of rank {first}, which is used"
            search.fail(rank, holders[rank], why)
    return True


def _fingerprint(pack: memoryview) -> str:
    """Return a digest that two packs share if they contain the same state.

    The metadata and the devices may differ. Elements are added up as 64-bit words, as fast as
    memory is read. This tells states apart that were trained differently; bytes that a disk or a
    network changed are found by checksums.
    """
    header = read_header(pack)
    rows = [row[:-1] if isinstance(row, list) else row for row in header.tree["tensors"]]
    digest = hashlib.sha256(
        json.dumps([header.values, header.tree["tree"], rows, header.entries]).encode()
    )
    for entry in header.entries:
        data = pack[header.start + entry.begin : header.start + entry.end]
        num_bytes = len(data) // 8 * 8
        total = 0
        if num_bytes:
            total = int(torch.frombuffer(data[:num_bytes], dtype=torch.int64).sum())
        digest.update(f"{total},{bytes(data[num_bytes:]).hex()};".encode())
    return digest.hexdigest()[:32]
